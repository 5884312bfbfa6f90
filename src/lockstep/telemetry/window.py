"""The figures of the steps between two log points."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Over all ranks: `loss` is the mean over examples, `top1` in percent.

    `examples` are those that this process trained on: after a resume inside a window, only those since the resume.

    `first_bad_step` is the first step whose loss, on some rank, is not finite or above the limit; null where the mean
    is sound.

    `seconds` are without evaluations and saves; `waited` is the part of them, on main, in which the loop
    waited for data.
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
        """Percent of the time that the loop waited for data."""
        return 100 * self.waited / self.seconds
