"""The learning rate range test (Smith 2017, "Cyclical Learning Rates for Training Neural Networks")."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.core.errors import InputError
from lockstep.optim.optimizers import set_learning_rate
from lockstep.training.parts import Parts

SMOOTHING = 0.9  # the share of the earlier losses in the average that is judged
EXPLODED = 4.0  # the test ends at an average of this many times the lowest one
SHARE = 0.1  # the suggestion is this share of the rate with the lowest loss


@dataclass(frozen=True, kw_only=True)
class RangeTest:
    """The loss of each step while the rate rises.

    Fields:
        rates: the learning rate of each step.
        losses: the exponential average of the loss at each step, without the bias towards the start.
    """

    rates: list[float]
    losses: list[float]

    @property
    def lowest(self) -> int:
        """The step with the lowest loss, counted from 0."""
        return min(range(len(self.losses)), key=self.losses.__getitem__)

    @property
    def suggestion(self) -> float:
        """A learning rate to train with, of two digits."""
        return float(f"{SHARE * self.rates[self.lowest]:.1e}")


def range_test(
    parts: Parts, low: float, high: float, advance: Callable[[int], None] = lambda steps: None
) -> RangeTest:
    """Train a job in parts to the end of its plan, while its rate rises from `low` to `high` by a constant factor.

    Ends early if the loss explodes or is not finite. `advance` is called after each step, with 1.

    Raises:
        InputError: the loss falls at no rate, so there is no suggestion.
    """
    total = parts.plan.total_steps
    test, average = RangeTest(rates=[], losses=[]), 0.0
    parts.model.train()
    for shard in parts.pipeline.train(parts.loader.train(after=0)):
        rate = low * (high / low) ** ((shard.step - 1) / max(1, total - 1))
        parts.freezing.freeze_for(shard.step)
        set_learning_rate(parts.optimizer, rate)
        average = SMOOTHING * average + (1 - SMOOTHING) * parts.update(shard)
        smoothed = average / (1 - SMOOTHING**shard.step)
        if not math.isfinite(smoothed) or (test.losses and smoothed > EXPLODED * min(test.losses)):
            break
        test.rates.append(rate)
        test.losses.append(smoothed)
        advance(1)
    if len(test.losses) < 2 or test.lowest == 0:
        raise InputError(
            f"lr-find: the loss falls at no rate from {low:g} to {high:g}; use a lower --low, or more --steps"
        )
    return test
