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


class HostCopy:
    """A copy of a tensor in host memory. Making it does not wait for the device; reading it does."""

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
    """What is known of a window without waiting for the device, and copies of the rest.

    Fields:
        first, last: steps.
        seconds: of the window; `seconds_so_far` are those of all windows of this process up to its end.
        steps: how many of them this process has done.
        carried: examples that an earlier process trained on.
        epoch: the epoch of the last step.
        scalars: figures of the last step.
        sums: over all ranks: summed loss, hits and examples, then the same of the epoch's part; last the figures of
            the last step that are on the device, in the order of `on_device`.
        on_device: the names of those figures.
        checksums: of the weights of each rank, if they have to be compared.
        micro_batches: step, summed losses (on the device) and examples of each micro-batch of this rank.
    """

    first: int
    last: int
    seconds: Seconds
    seconds_so_far: Seconds
    steps: int
    carried: int
    epoch: Epoch
    scalars: Mapping[str, float]
    sums: HostCopy
    on_device: list[str]
    checksums: HostCopy | None
    micro_batches: tuple[list[int], Tensor, list[int]]

    def read(self) -> Window:
        """The window, whose sums its epoch takes. Waits for the device; to be called once."""
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
