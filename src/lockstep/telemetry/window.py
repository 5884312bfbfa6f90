"""The figures of some steps in a row: of those between two log points, or of an epoch so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.telemetry.clock import NO_TIME, Seconds


@dataclass(frozen=True)
class Window:
    """The figures of some steps, over all ranks.

    Fields:
        first, last: the first and the last step.
        loss: the mean over examples.
        top1: the training accuracy in percent.
        examples: the number of examples of this process; after a resume inside a window, only those since the resume.
        seconds: the time without evaluations and saves.
        waited: the part of `seconds` in which main's loop waited for data.
        first_bad_step: the first step whose loss, on some rank, is not finite or above the limit; None if the mean
            is fine.
        scalars: further figures of the last step.
        checksums: of the weights of each rank, if they have to be compared.
    """

    first: int
    last: int
    loss: float
    top1: float
    examples: int
    seconds: float
    waited: float
    first_bad_step: int | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)
    checksums: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Images per second over all ranks."""
        return self.examples / self.seconds

    @property
    def wait_share(self) -> float:
        """The percentage of time that the loop waited for data."""
        return 100 * self.waited / self.seconds

    def figures(self, steps: int) -> dict[str, float]:
        """The figures by tag; `steps` is the number of steps in `seconds`."""
        return {
            "loss/train": self.loss,
            "acc/train_top1": self.top1,
            **self.scalars,
            "perf/img_per_s": self.rate,
            "perf/data_wait_pct": self.wait_share,
            "perf/step_ms": 1000 * self.seconds / steps,
        }


@dataclass(kw_only=True)
class Span:
    """Steps in a row that are not over, and their sums over all ranks up to the last log point.

    Log points do not depend on where a run was stopped, so the sums have the same order however often it was stopped.

    Fields:
        first: the first step.
        began: the seconds of this process before that step.
        carried: the examples that an earlier process trained on.
    """

    first: int
    began: Seconds = NO_TIME
    carried: int = 0
    loss: float = 0.0
    hits: int = 0
    examples: int = 0

    def add(self, loss: float, hits: float, examples: float) -> None:
        """Add the sums of a window that has ended."""
        self.loss += loss
        self.hits += int(hits)
        self.examples += int(examples)

    def window(self, last: int, now: Seconds, **further: Any) -> Window:
        """The figures up to step `last`, after which the clock showed `now`; `further` are fields of `Window`."""
        return Window(
            first=self.first,
            last=last,
            loss=self.loss / self.examples,
            top1=100 * self.hits / self.examples,
            examples=self.examples - self.carried,
            seconds=max(now.busy - self.began.busy, 1e-9),
            waited=now.waited - self.began.waited,
            **further,
        )
