"""The time until the end of a run, from its own pace: steps, evaluations and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.core.plan import Plan
from lockstep.telemetry.clock import TrainingClock

# A forward pass takes about a third of a training step. Only used until the first evaluation was timed.
EVALUATION_COST = 1 / 3


@dataclass
class TimeLeft:
    """Estimates the time that a run still takes.

    Fields:
        plan: the plan of the run.
        clock: has timed this process so far.
        first: the step from which this process goes on.
        evaluated: the examples of an evaluation.
        warm: the step after the first window of this process, and the seconds of training up to it. Later steps are
            the measure then: the first ones load libraries, and may compile the model.
    """

    plan: Plan
    clock: TrainingClock
    first: int
    evaluated: int
    warm: tuple[int, float] | None = field(default=None, init=False)

    def window_ended(self, step: int) -> None:
        """Note that a window has ended at `step`."""
        if self.warm is None:
            self.warm = step, self.clock.so_far().busy

    def seconds(self, step: int) -> float | None:
        """The seconds from the end of `step` to the end of the run; None if nothing is known of its pace."""
        begun, before = self.first, 0.0
        if self.warm is not None and step - self.warm[0] > self.warm[0] - self.first:
            begun, before = self.warm
        if step <= begun:
            return None if step < self.plan.total_steps else 0.0
        pace = (self.clock.so_far().busy - before) / (step - begun)
        evaluation = self.evaluated / self.plan.batch * pace * EVALUATION_COST
        return (
            pace * (self.plan.total_steps - step)
            + self._pauses_left("evaluation", self.plan.eval_every, unknown=evaluation)
            + self._pauses_left("checkpoint", self.plan.save_every, unknown=0.0)
        )

    def _pauses_left(self, purpose: str, every: int, *, unknown: float) -> float:
        """The seconds of the pauses to come, as long as those so far were; as long as `unknown` without any."""
        total = self.plan.total_steps
        planned = total // every - self.first // every + bool(total % every)
        done = self.clock.pauses[purpose]
        mean = self.clock.paused_for[purpose] / done if done else unknown
        return max(0, planned - done) * mean
