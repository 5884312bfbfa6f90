"""The clock of training, without pauses: seconds at work, seconds of waiting for data, and the time that is left."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.core.plan import Plan

# A forward pass takes about a third of a training step. Only used until the first evaluation was timed.
EVALUATION_COST = 1 / 3


class Seconds(NamedTuple):
    """Seconds of training of this process, and the part of them in which the loop waited for the loader."""

    busy: float
    waited: float


NO_TIME = Seconds(0.0, 0.0)


class TrainingClock:
    """Measures the training of this process."""

    def __init__(self) -> None:
        self.pausing: float | None = None  # when the pause under way began
        self.paused_for: defaultdict[str, float] = defaultdict(float)  # seconds of all pauses, by what they were for
        self.pauses: Counter[str] = Counter()  # and how many there were
        self.start()

    def start(self) -> None:
        self.began = self.requested = time.perf_counter()
        self.waited = self.waited_before = self.paused = 0.0
        self.loaded = self.prepared = 0.0

    def add_load(self, seconds: float) -> None:
        """Count the seconds in which the loader read the images of the next steps."""
        self.loaded += seconds

    def add_arrival(self, requested: float, received: float) -> None:
        """Count the time from the request of a step's data to its arrival: waiting for the loader, and augmenting."""
        self.requested, self.waited_before = requested, self.waited
        self.prepared += received - requested
        self.waited = min(self.loaded, self.prepared)

    @contextmanager
    def pause(self, purpose: str) -> Iterator[None]:
        """A context whose time does not count as training: an `evaluation` or a `checkpoint`."""
        self.pausing = began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self.paused += seconds
        self.paused_for[purpose] += seconds
        self.pauses[purpose] += 1
        self.pausing = None

    def so_far(self) -> Seconds:
        """All seconds up to now; up to the pause under way, if there is one."""
        now = time.perf_counter() if self.pausing is None else self.pausing
        return Seconds(now - self.began - self.paused, self.waited)

    def before_step(self) -> Seconds:
        """All seconds up to the request of the last step's data, since which no pause has come."""
        return Seconds(self.requested - self.began - self.paused, self.waited_before)


@dataclass
class TimeLeft:
    """Estimates the time that a run still takes.

    Fields:
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
