"""The exponential moving average of a model."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lockstep.core.sharding import own_parts


class EMA(AveragedModel):
    """An exponential moving average of a model's parameters and buffers; the first update copies them.

    The average is kept in `copy`, which is cut over the ranks like `model`, or else in a deep copy of `model`.

    Only the update differs from torch's class: one kernel updates all floats, and one all counters. torch's class
    collects the tensors again at each step. It also copies its counter to the device, which waits for the device.
    """

    def __init__(self, model: nn.Module, decay: float, copy: nn.Module | None = None) -> None:
        super().__init__(model if copy is None else nn.Identity(), use_buffers=True)
        if copy is not None:
            self.module = copy
        self.decay = decay
        averages, sources = (own_parts((*module.parameters(), *module.buffers())) for module in (self.module, model))
        pairs = list(zip(averages, sources, strict=True))
        self.floats = [pair for pair in pairs if pair[0].is_floating_point()]
        self.counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        weight = 1 - self.decay if self.n_averaged > 0 else 1.0
        torch._foreach_lerp_([average for average, _ in self.floats], [source for _, source in self.floats], weight)
        if self.counters:  # torch refuses empty lists
            torch._foreach_copy_([average for average, _ in self.counters], [source for _, source in self.counters])
        self.n_averaged += 1
