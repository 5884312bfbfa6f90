"""The exponential moving average of a model."""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lockstep.core.model import own_parts


class EMA(AveragedModel):
    """An exponential moving average of a model's parameters and buffers; the first update copies them.

    The average is kept in `copy`, which is cut over the ranks like `model`, or else in a deep copy of `model`. With
    `warmup`, the decay of update n is at most (1 + n) / (10 + n), as in TensorFlow, so that the first weights fade.

    Only the update differs from torch's class: one kernel averages all floats, and one copies all counters. torch's
    class collects the tensors again at each step. It also copies its counter to the device, which waits for the
    device. And it averages buffers that are infinite, such as the bounds of a clamp that limits nothing, to NaN; here
    they are copied.
    """

    def __init__(self, model: nn.Module, decay: float, copy: nn.Module | None = None, warmup: bool = False) -> None:
        super().__init__(model if copy is None else nn.Identity(), use_buffers=True)
        if copy is not None:
            self.module = copy
        self.decay, self.warmup = decay, warmup
        averages, sources = (own_parts((*module.parameters(), *module.buffers())) for module in (self.module, model))
        self.averaged: tuple[list[Tensor], list[Tensor]] = ([], [])
        self.copied: tuple[list[Tensor], list[Tensor]] = ([], [])
        for average, source in zip(averages, sources, strict=True):
            is_averaged = source.is_floating_point() and not source.isinf().any()
            for tensors, tensor in zip(self.averaged if is_averaged else self.copied, (average, source), strict=True):
                tensors.append(tensor)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        step = int(self.n_averaged) + 1
        decay = min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay
        torch._foreach_lerp_(*self.averaged, 1 - decay if step > 1 else 1.0)
        if self.copied[0]:  # torch refuses empty lists
            torch._foreach_copy_(*self.copied)
        self.n_averaged += 1
