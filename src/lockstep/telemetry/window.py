"""The figures of the steps between two log points, and the state of an open window in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict


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


class RankWindowState(TypedDict):
    """The counts of a rank since the last log point.

    For each micro-batch: its summed loss, its step and its number of examples. For all micro-batches: the hits.
    """

    losses: list[float]
    steps: list[int]
    examples: list[int]
    hits: int


class EpochState(TypedDict):
    """An epoch up to the last log point, over all ranks: its number from 0, summed loss, hits and examples.

    The hits of the previous epoch in the open window are subtracted from `hits`, so it can be negative.
    """

    number: int
    loss: float
    hits: int
    examples: int


class WindowState(TypedDict):
    """The step of the last log point (`flushed`), the counts of each rank since then (`trails`), and the epoch."""

    flushed: int
    trails: list[RankWindowState]
    epoch: EpochState
