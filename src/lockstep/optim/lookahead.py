"""Look-ahead (Zhang et al. 2019), "Lookahead Optimizer: k steps forward, 1 step back", around any optimizer.

timm's class keeps its counter in the parameter groups, and begins its slow weights at the first synchronisation, so
that a checkpoint before it has another form. Here both are in the state of each parameter from its first step on,
where checkpoints and strategies find them, and the slow weights begin at the initial ones, as in the paper.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.core.model import own_parts

SLOW, STEPS = "lookahead_slow", "lookahead_steps"


class _Lookahead(Optimizer):
    """What `with_lookahead` adds to an optimizer."""

    k: int
    alpha: float

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the weights; at every k-th step, set them to slow weights that have moved towards them by `alpha`."""
        stepped = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        # Add them after the step, because an optimizer takes an empty state for a new parameter's.
        begun = {weight: weight.detach().clone() for weight in stepped if SLOW not in self.state.get(weight, ())}
        super().step(closure)
        for weight, slow in begun.items():
            self.state[weight] |= {SLOW: slow, STEPS: 0}
        due = []
        for weight in stepped:
            self.state[weight][STEPS] += 1
            if self.state[weight][STEPS] % self.k == 0:
                due.append(weight)
        if due:
            slow_parts, parts = own_parts(self.state[weight][SLOW] for weight in due), own_parts(due)
            torch._foreach_add_(slow_parts, torch._foreach_sub(parts, slow_parts), alpha=self.alpha)
            torch._foreach_copy_(parts, slow_parts)


def with_lookahead(optimizer: Optimizer, k: int, alpha: float) -> Optimizer:
    """An optimizer before its first step with look-ahead, in place, by changing its class."""
    original = type(optimizer)
    optimizer.__class__ = type(original.__name__, (_Lookahead, original), {"k": k, "alpha": alpha})
    for weight, entries in optimizer.state.items():  # of an optimizer that has state before its first step
        assert isinstance(weight, Tensor)
        entries |= {SLOW: weight.detach().clone(), STEPS: 0}
    return optimizer
