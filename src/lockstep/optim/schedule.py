"""The learning rate as a pure function of the step and of the scores so far: a checkpoint need not save it."""

import math
from collections.abc import Sequence

from lockstep.config.options import option
from lockstep.core.errors import InputError
from lockstep.core.fields import duration, ranged
from lockstep.core.plan import Plan

Evaluations = Sequence[tuple[int, float]]  # step and gain, as `Schedule` in core/protocols.py describes them

MOST_MILESTONES = 100  # so that the highest power of `gamma` does not overflow


@option("schedule")
class Constant:
    """A constant learning rate after a linear warm-up.

    `warmup` is a duration (steps, `2ep`, `5%`): the rate climbs linearly and reaches its base value at the
    last warm-up step (Goyal et al. 2017).
    """

    warmup: int | str = duration(0, zero=True)

    def factor(self, step: int, plan: Plan, scores: Evaluations) -> float:
        warmup = plan.in_steps("schedule.warmup", self.warmup)
        if step <= warmup:
            return step / warmup
        return self.after(step - warmup, plan.total_steps - warmup, plan)

    def after(self, step: int, total: int, plan: Plan) -> float:
        """The factor at `step` (from 1) of the `total` steps after the warm-up."""
        return 1.0


@option("schedule")
class Cosine(Constant):
    """Half a cosine from the base rate to `final` times it (Loshchilov and Hutter 2017, without restarts)."""

    final: float = ranged(0.0, least=0, most=1e3)

    def after(self, step: int, total: int, plan: Plan) -> float:
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * (step - 1) / total))


@option("schedule")
class Linear(Constant):
    """A straight line from the base rate to `final` times it."""

    final: float = ranged(0.0, least=0, most=1e3)

    def after(self, step: int, total: int, plan: Plan) -> float:
        return self.final + (1 - self.final) * (1 - (step - 1) / total)


@option("schedule")
class Step(Constant):
    """Multiplied by `gamma` at each milestone; milestones are durations from the start of the run."""

    milestones: list[str] = duration(["33%", "66%"], zero=True)
    gamma: float = ranged(0.1, least=0, most=10)

    def __post_init__(self) -> None:
        if not self.milestones:
            raise InputError("schedule.milestones is empty; use schedule=constant for a constant rate")
        if len(self.milestones) > MOST_MILESTONES:
            raise InputError(
                f"schedule.milestones has {len(self.milestones)} milestones, expected at most {MOST_MILESTONES}"
            )

    def after(self, step: int, total: int, plan: Plan) -> float:
        run_step = plan.total_steps - total + step
        passed = sum(run_step > plan.in_steps("schedule.milestones", milestone) for milestone in self.milestones)
        return float(self.gamma**passed)
