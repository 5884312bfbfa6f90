"""The figures of some steps in a row, of those between two log points or of an epoch so far, and their sums."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor

from lockstep.core.tags import RATE, STEP_MS, TRAIN_LOSS, TRAIN_TOP1, WAIT
from lockstep.telemetry.time_spent import NO_TIME, Seconds


class TallyState(TypedDict):
    """A tally in a checkpoint. For each micro-batch: its summed loss, its step and its number of examples."""

    losses: list[float]
    steps: list[int]
    examples: list[int]
    hits: int
    broken: int
    logged: list[float]


class EpochState(TypedDict):
    """An epoch up to the last log point, over all ranks: its number from 0, summed loss, hits and examples."""

    number: int
    loss: float
    hits: int
    examples: int


class WindowState(TypedDict):
    """The step of the last log point (`flushed`), the tallies of all ranks since then (`trails`), and the epoch."""

    flushed: int
    trails: list[TallyState]
    epoch: EpochState


class Tally:
    """The micro-batches of one epoch that a rank has counted since the last log point.

    The losses (float64) stay on the device until the next log point and are summed only there, in a fixed order: a
    resume in the window then gives the same bits.
    """

    def __init__(self, epoch: int, device: torch.device, logged: int = 0) -> None:
        self.epoch = epoch
        self.steps: list[int] = []
        self.counts: list[int] = []  # of examples, also broken ones
        self.losses = torch.zeros(0, dtype=torch.float64, device=device)
        self.logged = self.losses if logged == 0 else self.losses.new_zeros(logged)  # the sums of the task's figures
        self.hits = torch.zeros((), dtype=torch.int64, device=device)
        self.broken = torch.zeros_like(self.hits)

    def restore(self, state: TallyState) -> None:
        self.steps, self.counts = state["steps"][:], state["examples"][:]
        self.losses = self.losses.new_tensor(state["losses"])
        self.hits += state["hits"]
        self.broken += state["broken"]
        self.logged += self.logged.new_tensor(state["logged"])

    def state(self) -> TallyState:
        """The tally for a checkpoint. Waits for the device."""
        return {
            "losses": self.losses.tolist(),
            "steps": self.steps[:],
            "examples": self.counts[:],
            "hits": int(self.hits),
            "broken": int(self.broken),
            "logged": self.logged.tolist(),
        }

    def sums(self) -> Tensor:
        """The summed loss, the hits and the unbroken examples, then the task's figures, float64 (3 + n,)."""
        # `torch.tensor` would wait for the device.
        examples = torch.full((), sum(self.counts), dtype=torch.float64, device=self.hits.device)
        own = torch.stack([self.losses.sum(), self.hits.double(), examples - self.broken])
        return torch.cat([own, self.logged]) if len(self.logged) else own

    def bad_steps(self, limit: float) -> list[int]:
        """The steps with a loss that is not finite or above `limit`. Waits for the device."""
        micro_batches = zip(self.steps, self.losses.tolist(), self.counts, strict=True)
        return [step for step, loss, examples in micro_batches if examples and not loss / examples <= limit]


@dataclass(frozen=True)
class Window:
    """The figures of some steps, over all ranks.

    Fields:
        loss: the mean over examples; NaN if all of them are broken images, which do not count.
        top1: the training accuracy in percent; NaN as `loss` is; None if the task has none.
        examples: the number of examples of this process; after a resume inside a window, only those since the resume.
        seconds: the time without evaluations and saves.
        waited: the part of `seconds` in which main's loop waited for data.
        first_bad_step: the first step with a loss on any rank that is not finite or above the limit; None if the mean
            is fine.
        scalars: additional figures of the last step.
        checksums: of the weights of each rank, if they have to be compared.
    """

    first: int
    last: int
    loss: float
    top1: float | None
    examples: int
    seconds: float
    waited: float
    first_bad_step: int | None = None
    scalars: Mapping[str, float] = field(default_factory=dict)
    checksums: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.examples / self.seconds

    @property
    def wait_share(self) -> float:
        """The percentage of time that the loop waited for data."""
        return 100 * self.waited / self.seconds

    def figures(self, steps: int) -> dict[str, float]:
        """The figures by tag; `steps` is the number of steps in `seconds`."""
        return {
            TRAIN_LOSS: self.loss,
            **({} if self.top1 is None else {TRAIN_TOP1: self.top1}),
            **self.scalars,
            RATE: self.rate,
            WAIT: self.wait_share,
            STEP_MS: 1000 * self.seconds / steps,
        }


@dataclass(kw_only=True)
class Span:
    """Steps in a row that are not over, and their sums over all ranks up to the last log point.

    Log points do not depend on where a run was stopped, so the sums have the same order however often it was stopped.

    Fields:
        began: the seconds of this process before step `first`.
        carried: the examples that an earlier process trained on.
    """

    first: int
    began: Seconds = NO_TIME
    carried: int = 0
    loss: float = 0.0
    hits: int = 0
    examples: int = 0
    has_hits: bool = True

    def add(self, loss: float, hits: float, examples: float) -> None:
        self.loss += loss
        self.hits += int(hits)
        self.examples += int(examples)

    def window(self, last: int, now: Seconds, **further: Any) -> Window:
        """The figures up to step `last`, after which the clock showed `now`; `further` are fields of `Window`."""
        return Window(
            first=self.first,
            last=last,
            loss=self.loss / (self.examples or math.nan),
            top1=100 * self.hits / (self.examples or math.nan) if self.has_hits else None,
            examples=self.examples - self.carried,
            seconds=max(now.busy - self.began.busy, 1e-9),
            waited=now.waited - self.began.waited,
            **further,
        )


@dataclass(frozen=True, kw_only=True)
class PendingWindow:
    """A window that has ended at `step`, and whose figures are still to be written.

    Fields:
        now: the seconds of this process up to its end.
        window, epoch: the steps of the window, and of the epoch so far, up to the window before.
        tallies: what this rank has counted in the window.
        sums: waits for the sums of all ranks, see `Telemetry._sums`.
        scalars: waits for the values of `names`, which are of the last step.
        checksums: waits for the checksums of the weights of each rank.
    """

    step: int
    now: Seconds
    window: Span
    epoch: Span
    tallies: list[Tally]
    sums: Callable[[], list[list[float]]]
    names: Sequence[str]
    scalars: Callable[[], list[float]]
    checksums: Callable[[], list[int]]


def copied(tensor: Tensor) -> Callable[[], list[Any]]:
    """Begin to copy a tensor to host memory; the function waits for it, and returns its numbers as (nested) lists."""
    if not tensor.is_cuda:
        return tensor.tolist
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read() -> list[Any]:
        arrived.synchronize()
        return host.tolist()

    return read
