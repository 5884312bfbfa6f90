"""The callbacks (`callback=`) take part in training. Any number of them may be chosen; most are the user's own."""

from typing import ClassVar

import torch
from torch import Tensor

from lockstep.config.options import option
from lockstep.core.fields import ranged
from lockstep.core.model import head_parameters
from lockstep.core.observer import Callback, TrainingRun

LEAST_NORM = 1e-3  # of the weights of a unit, so that one at zero can begin to grow


@option("callback")
class AGC(Callback):
    """Adaptive gradient clipping (Brock et al. 2021), for networks without batch norm: but for the head, the gradient
    of each unit (a row, a filter, a bias) has at most a share of the norm of its weights; timm's `clip_mode=agc`.
    """

    every_rank: ClassVar[bool] = True

    # largest L2 norm of the gradient of a unit, as a share of the norm of its weights
    clipping: float = ranged(0.01, above=0.0, most=1e6)

    @torch.no_grad()
    def after_backward(self, run: TrainingRun) -> None:
        head = head_parameters(run.model)
        for name, parameter in run.model.named_parameters():
            if parameter.grad is not None and name not in head:
                most, norms = self.clipping * unit_norms(parameter).clamp(min=LEAST_NORM), unit_norms(parameter.grad)
                parameter.grad.mul_(torch.where(norms > most, most / norms.clamp(min=1e-6), 1.0))


def unit_norms(tensor: Tensor) -> Tensor:
    """The L2 norm of each unit of a weight or its gradient, in a shape that multiplies it; a vector is one unit."""
    dims = tuple(range(int(tensor.ndim > 1), tensor.ndim))
    return torch.linalg.vector_norm(tensor, dim=dims, keepdim=True)
