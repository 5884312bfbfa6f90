"""A window that has ended, while its sums are on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.telemetry.clock import Seconds
from lockstep.telemetry.tally import Tally
from lockstep.telemetry.window import Span, Window


class PendingNumbers:
    """The numbers of a tensor, on their way to host memory. Only `read` waits for the device."""

    def __init__(self, tensor: Tensor) -> None:
        self.arrived: torch.cuda.Event | None = None
        self.host = tensor
        if tensor.is_cuda:
            self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.host.copy_(tensor, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> list[Any]:
        """The numbers of a tensor of one dimension."""
        if self.arrived is not None:
            self.arrived.synchronize()
        numbers: list[Any] = self.host.tolist()
        return numbers


@dataclass(frozen=True, kw_only=True)
class EndedWindow:
    """The figures of a window that need no wait for the device, and the pending numbers for the others.

    Fields:
        window: the steps of the window, which are not added up yet.
        epoch: the epoch of the last step, which adds the sums of the window to its own.
        last: the last step of the window.
        steps: the number of its steps that this process has done.
        now: what the clock showed at its end.
        scalars: the figures of the last step that are Python numbers.
        sums: over all ranks, the summed loss, hits and examples of the window, and the same three of its steps in
            `epoch`; then the figures of the last step that were on the device, in the order of `on_device`.
        on_device: the names of these figures.
        checksums: the checksum of each rank's weights; None if there is nothing to compare.
        tallies: what this rank has counted.
    """

    window: Span
    epoch: Span
    last: int
    steps: int
    now: Seconds
    scalars: Mapping[str, float]
    sums: PendingNumbers
    on_device: list[str]
    checksums: PendingNumbers | None
    tallies: list[Tally]

    def read(self) -> Window:
        """The window. Adds its sums to its epoch, so call it once. Waits for the device."""
        numbers = self.sums.read()
        self.window.add(*numbers[:3])
        self.epoch.add(*numbers[3:6])
        return self.window.window(
            self.last,
            self.now,
            scalars={**self.scalars, **dict(zip(self.on_device, numbers[6:], strict=True))},
            checksums=[] if self.checksums is None else self.checksums.read(),
        )

    def first_bad_step(self, limit: float) -> int:
        """The first step of this rank whose loss is not finite or above `limit`; the last one if there is none."""
        return min((step for tally in self.tallies for step in tally.bad_steps(limit)), default=self.last)
