"""The figures of the steps between two log points."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """The figures over all ranks.

    Fields:
        first, last: steps.
        loss: the mean over examples.
        top1: in percent.
        examples: that this process trained on; after a resume inside a window, only those since the resume.
        seconds: without evaluations and saves.
        waited: the part of `seconds` in which main's loop waited for data.
        first_bad_step: the first step whose loss, on some rank, is not finite or above the limit; None if the mean
            is fine.
    """

    first: int
    last: int
    loss: float
    top1: float
    examples: int
    seconds: float
    waited: float
    first_bad_step: int | None = None

    @property
    def rate(self) -> float:
        """Images per second over all ranks."""
        return self.examples / self.seconds

    @property
    def wait_share(self) -> float:
        """The percentage of time that the loop waited for data."""
        return 100 * self.waited / self.seconds
