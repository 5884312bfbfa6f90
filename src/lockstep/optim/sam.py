"""Sharpness-aware minimisation (Foret et al. 2021): the gradient at the worst weights near the present ones."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.config.options import option
from lockstep.core.fields import ranged
from lockstep.core.model import UpdateScope
from lockstep.optim.optimizers import SGD, ParamGroups


class _Sharpness(Optimizer):
    """What SAM adds to an optimizer, which steps with the gradient at `w + rho * g / |g|`."""

    rho: float

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the second of two gradients; without a closure, with the one that is there."""
        if closure is None:
            return super().step()
        loss = closure()
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        gradients = [weight.grad for weight in weights]
        scale = self.rho / (nn.utils.get_total_norm(gradients) + 1e-12)
        before = [weight.clone() for weight in weights]
        torch._foreach_add_(weights, torch._foreach_mul(gradients, scale))
        closure()
        torch._foreach_copy_(weights, before)
        super().step()
        return loss


@option("optimizer")
class SAM(SGD):
    """SGD with sharpness-aware minimisation (Foret et al. 2021): two forward and backward passes a step, the second
    at the worst weights nearby.
    """

    # distance of these weights, in the direction of the gradient
    rho: float = ranged(0.05, above=0.0, most=1e3)
    scope: ClassVar[UpdateScope] = UpdateScope.model
    recordable: ClassVar[bool] = False
    needs_closure: ClassVar[bool] = True

    def make(self, groups: ParamGroups) -> Optimizer:
        optimizer = super().make(groups)
        original = type(optimizer)
        optimizer.__class__ = type(original.__name__, (_Sharpness, original), {"rho": self.rho})
        return optimizer
