"""The figures of the epoch under way, kept from log point to log point."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.telemetry.clock import NO_TIME, Seconds
from lockstep.telemetry.window import EpochState, Window


@dataclass
class Epoch:
    """The epoch under way: its sums over all ranks up to the last log point, and the clocks at its start.

    Log points do not depend on where a run was stopped, so the sums have the same order however often it was stopped.

    Fields:
        number: the number of the epoch, from 0; -1 before the first step.
        loss, hits, examples: sums over all ranks, up to the last log point.
        earlier_hits: the hits in this rank's open window that belong to the previous epoch, an int64 scalar on the
            device.
        carried: the examples of the epoch that an earlier process trained on.
        before: the seconds of this process before the epoch's first step.
    """

    number: int = -1
    loss: float = 0.0
    hits: int = 0
    examples: int = 0
    earlier_hits: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    carried: int = 0
    before: Seconds = NO_TIME

    def state(self, earlier_hits: int) -> EpochState:
        """The epoch for a checkpoint. `earlier_hits` is the sum of all ranks' `earlier_hits`."""
        hits = self.hits - earlier_hits
        return {"number": self.number, "loss": self.loss, "hits": hits, "examples": self.examples}

    def add(self, loss: float, hits: float, examples: float) -> None:
        """Add the sums of a finished window, as far as they belong to the epoch."""
        self.loss += loss
        self.hits += int(hits)
        self.examples += int(examples)

    def window(self, first: int, last: int, seconds: Seconds) -> Window | None:
        """The epoch's figures so far, when the clock shows `seconds`; None before its first example."""
        if not self.examples:
            return None
        return Window(
            first=first,
            last=last,
            loss=self.loss / self.examples,
            top1=100 * self.hits / self.examples,
            examples=self.examples - self.carried,
            seconds=max(seconds.busy - self.before.busy, 1e-9),
            waited=seconds.waited - self.before.waited,
        )
