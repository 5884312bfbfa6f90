"""The clock of training: seconds at work and seconds of waiting for data, without pauses."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Seconds(NamedTuple):
    """Seconds of training of this process, and the part of them in which the loop waited for data."""

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
        """Start to count now."""
        self.began = self.requested = time.perf_counter()
        self.waited = self.waited_before = self.paused = 0.0

    def add_wait(self, requested: float, received: float) -> None:
        """Count the time from the request of a step's data to its arrival as waiting."""
        self.requested, self.waited_before = requested, self.waited
        self.waited += received - requested

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
