"""`train.patience`: ends a run whose scores have not become better for long enough."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.core.errors import InputError
from lockstep.core.fields import parse_duration
from lockstep.core.monitor import Monitor, figure_name, figure_parts
from lockstep.core.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Decides from the scores alone, which a checkpoint has: kills, ranks and resumes cannot change where a run ends.

    Fields:
        limit: a number of evaluations, or a duration such as `5ep`; None never ends a run.
        min_delta: by how much a score must be better than the best one before to count as better.
    """

    limit: int | str | None = None
    min_delta: float = 0.0

    def check(self, plan: Plan) -> None:
        """Raise InputError if a run of this plan is over before its patience can be."""
        if self.limit is None:
            return
        evaluations = math.ceil(plan.total_steps / plan.eval_every)
        if self._left(evaluations - 1, plan.total_steps - plan.eval_every, plan) > 0:
            raise InputError(
                f"train.patience is {self.limit}, but the run has {evaluations} evaluation{'s' * (evaluations != 1)} "
                f"(one every {plan.eval_every:,} of {plan.total_steps:,} steps), so it never ends early; use a "
                "smaller one, more epochs, or a smaller train.eval_every"
            )

    def ended(
        self, scores: Sequence[tuple[int, float | None]], monitor: Monitor, plan: Plan, *, averaged: bool = False
    ) -> str:
        """Why a run with these scores, of the averaged weights or not, ends, in a sentence; empty if it continues."""
        if self.limit is None or not scores:
            return ""
        position, step, value = list(self._improvements(scores, monitor))[-1]
        last, since = scores[-1][0], len(scores) - 1 - position
        if self._left(since, last - step, plan) > 0:
            return ""
        number_text, unit = ("", "") if value is None else figure_parts(monitor.name, value)
        best = f"has not been better than {number_text}{unit}" if number_text else "has had no value"
        name = figure_name(monitor.name) + " of the averaged weights" * averaged
        number = f"{since} evaluation{'s' * (since != 1)}"
        return f"{name} {best} (step {step:,}) for {number}; train.patience={self.limit} ends the run"

    def _left(self, evaluations: int, steps: int, plan: Plan) -> int:
        """How many evaluations or steps are left, after so many without a better score."""
        assert self.limit is not None
        parsed = parse_duration(self.limit)
        if parsed is not None and not parsed[1]:
            return int(parsed[0]) - evaluations
        return plan.in_steps("train.patience", self.limit) - steps

    def _improvements(
        self, scores: Sequence[tuple[int, float | None]], monitor: Monitor
    ) -> Iterator[tuple[int, int, float | None]]:
        """The evaluations that were better than all before: number, step and score. The first one counts as one."""
        best = None
        for number, (step, value) in enumerate(scores):
            gain = monitor.gain(value)
            if (gain is not None and (best is None or gain > best + self.min_delta)) or number == 0:
                best = gain
                yield number, step, value
