"""A window that has ended, while its sums are on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.telemetry.clock import Seconds
from lockstep.telemetry.epoch import Epoch
from lockstep.telemetry.window import Window


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
        first, last: the first and the last step of the window.
        seconds: the seconds of the window.
        seconds_so_far: the seconds of all windows of this process, up to the end of this one.
        steps: the number of its steps that this process has done.
        carried: the number of its examples that an earlier process trained on.
        epoch: the epoch of the last step, which adds the sums of the window to its own.
        scalars: the figures of the last step that are Python numbers.
        sums: over all ranks, the summed loss, hits and examples of the window, and the same three of its steps in
            `epoch`; then the figures of the last step that were on the device, in the order of `on_device`.
        on_device: the names of these figures.
        checksums: the checksum of each rank's weights; None if there is nothing to compare.
        micro_batches: the steps, the summed losses (on the device) and the numbers of examples of this rank's
            micro-batches.
    """

    first: int
    last: int
    seconds: Seconds
    seconds_so_far: Seconds
    steps: int
    carried: int
    epoch: Epoch
    scalars: Mapping[str, float]
    sums: PendingNumbers
    on_device: list[str]
    checksums: PendingNumbers | None
    micro_batches: tuple[list[int], Tensor, list[int]]

    def read(self) -> Window:
        """The window. Adds its sums to its epoch, so call it once. Waits for the device."""
        loss, hits, examples, *rest = self.sums.read()
        self.epoch.add(*rest[:3])
        return Window(
            first=self.first,
            last=self.last,
            loss=loss / examples,
            top1=100 * hits / examples,
            examples=int(examples) - self.carried,
            seconds=self.seconds.busy,
            waited=self.seconds.waited,
            scalars={**self.scalars, **dict(zip(self.on_device, rest[3:], strict=True))},
            checksums=[] if self.checksums is None else self.checksums.read(),
        )

    def first_bad_step(self, limit: float) -> int:
        """The first step of this rank whose loss is not finite or above `limit`; the last one if there is none."""
        steps, losses, counts = self.micro_batches
        micro_batches = zip(steps, losses.tolist(), counts, strict=True)
        return next((step for step, loss, n in micro_batches if n and not loss / n <= limit), self.last)
