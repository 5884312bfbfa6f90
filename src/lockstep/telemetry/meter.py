"""Counts losses and hits on the device during training, and gives the figures to the observers at log points."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.core.data_protocols import Shard
from lockstep.core.figures import check_declared
from lockstep.core.log import close_all
from lockstep.core.model import is_broken
from lockstep.core.observer import Observer, Outcome
from lockstep.core.plan import Plan
from lockstep.core.tags import EPOCH_LOSS, EPOCH_TOP1, MFU, TIME
from lockstep.core.world import World
from lockstep.telemetry.display import Display
from lockstep.telemetry.sinks import Samples
from lockstep.telemetry.time_spent import Stragglers, TimeSpent
from lockstep.telemetry.window import EpochState, PendingWindow, Span, Tally, Window, WindowState, copied

G = TypeVar("G")

# Finished micro-batches are counted together, once they have so many logits (4 MB as float32) or are so many.
UNCOUNTED, UNCOUNTED_MICRO_BATCHES = 2**20, 32


@dataclass(kw_only=True, eq=False)
class Telemetry:
    """Collects figures without syncing the device, and writes them at log points.

    Every rank has one, because the sums are collective. Only main's has observers and a visible display.

    Fields:
        samples: records the examples that this rank trained on, if requested.
        step: the last step that is already done.
        opened: the window that was open at the checkpoint (`open_window`); None if there was none.
        peak_rate: images per second at the peak rate of all devices; 0 if it is not known.
        loss_limit: a mean loss above it counts as diverged.
        hits: counts the examples that are right, of outputs and labels; None if the task has no such examples.
        comparable: whether all ranks do the same work in a step, so that a slow one can be named.

    `reduced` notes that the gradients of a step are computed and reduced; `pause` is a context for what
    interrupts training.
    """

    world: World
    plan: Plan
    observer: Observer
    display: Display
    samples: Samples | None = None
    times: TimeSpent
    step: int
    opened: WindowState | None = None
    peak_rate: float = 0.0
    loss_limit: float = math.inf
    comparable: bool = True
    hits: Callable[[Tensor, Tensor], Tensor] | None = None
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.outcome: Outcome = "failed"  # until it is known
        self.resumed = step = self.step
        # Micro-batches that are not counted yet: step, summed loss, logits, labels.
        self.uncounted: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self.unlogged: list[tuple[int, int, Tensor]] = []  # step, number of the figure, its sum
        no_epoch: EpochState = {"number": self.plan.epoch(step + 1), "loss": 0.0, "hits": 0, "examples": 0}
        self._restore(self.opened or {"flushed": step, "trails": [], "epoch": no_epoch})
        self.stragglers = Stragglers(self.world, comparable=self.comparable)
        # A GPU may still be computing a window that has ended. It is read at the log point after it.
        self.late = self.world.device.type == "cuda"
        self.pending: deque[PendingWindow] = deque()
        self.clock = self.times.clock
        self.reduced, self.pause = self.times.reduced, self.clock.pause  # as they are: a step has no call more
        self.profile: Callable[[Iterator[Any]], Iterator[Any]] = iter  # or one that profiles some steps
        self.examples = 0

    def open_window(self) -> WindowState:
        """What every rank has counted since the last log point, for main's checkpoint. Collective.

        The files of the observers then have every step before it.
        """
        self.observer.flush()
        self._count()
        gathered = self.world.gather_to_main([tally.state() for tally in self.tallies])
        number, epoch = self.plan.epoch(self.epoch.first), self.epoch
        return {
            "flushed": self.window.first - 1,
            # The previous epoch's states come first, so that each rank gets its own when `_restore` deals them out.
            "trails": [state for states in itertools.zip_longest(*gathered) for state in states if state],
            "epoch": {"number": number, "loss": epoch.loss, "hits": epoch.hits, "examples": epoch.examples},
        }

    def _restore(self, state: WindowState) -> None:
        """Continue a window: each rank takes its own tallies; another number of ranks deals them out."""
        of_epoch, tallies = state["epoch"], []
        number = of_epoch["number"]
        for trail in state["trails"]:
            steps = trail["steps"]
            tallies.append(self._tally(self.plan.epoch(steps[-1]) if steps else number))
            tallies[-1].restore(trail)
        examples = [(tally.epoch, sum(tally.counts) - int(tally.broken)) for tally in tallies]
        carried = sum(count for _, count in examples)
        self.window = self._span(state["flushed"] + 1, carried=carried)
        self.epoch = self._span(
            number * self.plan.steps_per_epoch + 1,
            carried=of_epoch["examples"] + sum(count for epoch, count in examples if epoch == number),
            loss=of_epoch["loss"],
            hits=of_epoch["hits"],
            examples=of_epoch["examples"],
        )
        self.tallies = tallies[self.world.rank :: self.world.size]
        if not self.tallies or self.tallies[-1].epoch != number:
            self.tallies.append(self._tally(number))

    def _tally(self, epoch: int) -> Tally:
        return Tally(epoch, self.world.device, len(self.names))

    def _span(self, first: int, **fields: Any) -> Span:
        return Span(first=first, has_hits=self.hits is not None, **fields)

    def watch(self, groups: Iterable[G], prepare: Callable[[Iterator[G]], Iterator[Shard]]) -> Iterator[Shard]:
        """Pass on the shards that `prepare` makes of a loader's groups of batches, and time the arrival of each."""
        self.clock.start()
        requested = self.stragglers.requested = time.perf_counter()
        for shard in self.profile(prepare(self.times.loading(groups))):
            self.clock.add_arrival(requested, time.perf_counter())
            self.step = shard.step
            if shard.step == self.times.next_step:
                self.times.start()
            yield shard
            if shard.step == self.times.next_step:
                self.times.stop()
            requested = self.stragglers.next_step()
            self.display.advance(shard.step, requested)

    def record(self, loss: Tensor, logits: Tensor, micro: Shard, images: Tensor) -> None:
        """Record the summed loss (a scalar) and the hits of one micro-batch, without a device sync."""
        if self.times.timing:
            self.times.forward_done()
        if logits.is_cuda:
            logits = logits.clone()  # a CUDA graph overwrites its output when it runs again
        if self.world.size > 1:
            self.stragglers.forward_done()
        number = len(self.uncounted)
        many = number * logits.numel() >= UNCOUNTED or number >= UNCOUNTED_MICRO_BATCHES
        if many and self.uncounted[-1][0] < micro.step:  # `forget` may still drop an unfinished step
            self._count()
        if micro.epoch != self.tallies[-1].epoch:
            self._begin_epoch(micro.epoch)
        self.uncounted.append((micro.step, loss, logits, micro.labels))
        if self.samples is not None:
            self.samples.record(micro, images, self.plan.examples)
        if micro.step == 1:
            self.observer.first_batch(micro, images)

    def log(self, name: str, values: Tensor) -> None:
        """Record a figure of the task for each example of a micro-batch, (b,). Raises InputError for another name."""
        check_declared("task", name, self.names)
        self.unlogged.append((self.step, self.names.index(name), values.double().sum()))

    def forget(self, after: int) -> None:
        """Drop what was recorded after step `after`, of a step that was interrupted and will be done again."""
        self.uncounted = [entry for entry in self.uncounted if entry[0] <= after]
        self.unlogged = [entry for entry in self.unlogged if entry[0] <= after]

    def _count(self) -> None:
        """Count all uncounted micro-batches at once: for small batches a call costs more than its arithmetic."""
        if self.uncounted:
            steps, losses, logits, labels = zip(*self.uncounted, strict=True)
            self.uncounted.clear()
            tally = self.tallies[-1]
            tally.steps += steps
            tally.counts += [micro_labels.shape[0] for micro_labels in labels]
            tally.losses = torch.cat([tally.losses, torch.stack(losses).double()])
            all_labels = torch.cat(labels)
            if self.hits is not None:
                tally.hits += self.hits(torch.cat(logits), all_labels)
            tally.broken += is_broken(all_labels).sum()
        for _, number, value in self.unlogged:
            self.tallies[-1].logged[number] += value
        self.unlogged.clear()

    def end_window(self, step: int, scalars: Mapping[str, float | Tensor], checksums: Tensor | None) -> list[Window]:
        """End the window at `step`; write and return the windows whose sums have come from the device. Collective.

        On a CPU that is this window. On a GPU it is the one before, so that nothing waits for the last steps.
        `scalars` are figures of the last step, also on the device. `checksums` are of the weights of each rank, int64
        (ranks,), and are returned with the window.
        """
        self._count()
        values = [self._on_device(value) for value in scalars.values()]
        pending = PendingWindow(
            step=step,
            now=self.clock.so_far(),
            window=self.window,
            epoch=self.epoch,
            tallies=self.tallies,
            sums=copied(self.world.sum(self._sums())),
            names=[*scalars],
            scalars=copied(torch.stack(values) if values else torch.empty(0)),
            checksums=copied(torch.empty(0) if checksums is None else checksums),
        )
        self.pending.append(pending)
        self.window = self._span(step + 1, began=pending.now)
        self.tallies = [self._tally(self.tallies[-1].epoch)]
        return self.write_windows(leave=int(self.late))

    def _write(self, pending: PendingWindow) -> Window:
        """Write the figures of a window that has ended. Waits for the device. Collective."""
        window, epoch, step = pending.window, pending.epoch, pending.step
        (loss, hits, examples, *logged), (epoch_loss, epoch_hits, epoch_examples, *_) = pending.sums()
        window.add(loss, hits, examples)
        epoch.add(epoch_loss, epoch_hits, epoch_examples)
        means = {name: total / (window.examples or math.nan) for name, total in zip(self.names, logged, strict=True)}
        sound = window.loss <= self.loss_limit * max(1, window.examples)  # a NaN is not
        finished = window.window(
            step,
            pending.now,
            first_bad_step=None if sound else self._first_bad_step(pending.tallies, otherwise=step),
            scalars=means | dict(zip(pending.names, pending.scalars(), strict=True)),
            checksums=pending.checksums(),
        )
        self._tell(finished, epoch.window(step, pending.now))
        return finished

    def _on_device(self, value: float | Tensor) -> Tensor:
        """A figure as float64 () on the device, without waiting for it."""
        if isinstance(value, Tensor):
            return value.detach().double()
        return torch.full((), value, dtype=torch.float64, device=self.world.device)

    def write_windows(self, leave: int = 0) -> list[Window]:
        """Write the figures of the ended windows, but not of the last `leave`; returns them. Waits for the device."""
        return [self._write(self.pending.popleft()) for _ in range(len(self.pending) - leave)]

    def _tell(self, window: Window, epoch: Window) -> None:
        """Give the figures of a window, and of the epoch so far, to the observers and the display. Collective."""
        self.examples += window.examples
        figures = window.figures(window.last - max(window.first - 1, self.resumed))
        if self.peak_rate:
            figures[MFU] = self.mfu(window.rate)
        self.observer.write(window.last, figures)
        self.display.window(window, epoch)
        if sentence := self.stragglers.find():
            self.display.warn(sentence)

    def _begin_epoch(self, number: int) -> None:
        """Begin the sums of an epoch, at its first micro-batch. All steps of the one before are finished."""
        self._count()
        self.epoch = self._span(number * self.plan.steps_per_epoch + 1, began=self.clock.before_step())
        self.tallies.append(self._tally(number))

    def _sums(self) -> Tensor:
        """This rank's sums since the last log point (`Tally.sums`), then its sums of the epoch: (2, 3 + n)."""
        sums = torch.stack([tally.sums() for tally in self.tallies])
        of_epoch = [tally.epoch for tally in self.tallies].count(self.tallies[-1].epoch)  # the last ones
        return torch.stack([sums.sum(0), sums[-of_epoch:].sum(0)])

    def _epoch_so_far(self, step: int) -> Window | None:
        """The figures of the epoch, including the open window; None without any. Collective, and a device sync."""
        self._count()
        so_far = replace(self.epoch)
        loss, hits, examples, *_ = self.world.sum(self._sums())[1].tolist()
        so_far.add(loss, hits, examples)
        return so_far.window(step, self.clock.so_far()) if so_far.examples else None

    def _first_bad_step(self, tallies: list[Tally], otherwise: int) -> int:
        """The first step with a diverged loss on any rank; `otherwise` if only the mean is diverged. Collective."""
        first = torch.zeros(self.world.size, dtype=torch.int64, device=self.world.device)
        own = (step for tally in tallies for step in tally.bad_steps(self.loss_limit))
        first[self.world.rank] = min(own, default=otherwise)
        return int(self.world.sum(first).min())

    def evaluating(self, done: int, blocks: int) -> None:
        self.display.advance(self.step, time.perf_counter())
        self.display.evaluating(done, blocks)

    def evaluated(self, step: int, scalars: Mapping[str, float], *, best: bool) -> None:
        """Write the scores of an evaluation at `step`, with the means over the epoch so far. Collective."""
        epoch = self._epoch_so_far(step)
        if epoch is not None:
            accuracy = {} if epoch.top1 is None else {EPOCH_TOP1: epoch.top1}
            scalars = {EPOCH_LOSS: epoch.loss, **accuracy, **scalars}
        spent = {TIME + part: 100 * share for part, share in self.time_shares().items()}
        self.observer.evaluated(step, scalars, best)
        self.observer.write(step, {**scalars, **spent})
        self.display.evaluated(step, scalars, epoch, best=best)

    def mfu(self, rate: float) -> float:
        """Model FLOPs utilisation, in percent, at `rate` images per second; 0 if the peak rate is unknown."""
        return 100 * rate / self.peak_rate if self.peak_rate else 0.0

    def time_shares(self) -> dict[str, float]:
        """The share of each part of the run in the time of this process since its first step."""
        return self.times.shares(self.stragglers.waited_share)

    def trained(self) -> dict[str, float]:
        """The images and seconds of this process up to its last log point, for `spending.rates`."""
        busy, waited = self.window.began
        return {"images": self.examples, "training_seconds": busy, "waiting_seconds": waited}

    def close(self) -> None:
        """Tell the observers how the run ended, and close the samples and the display."""
        closes = [] if self.samples is None else [self.samples.close]
        with close_all(*closes, lambda: self.observer.end(self.outcome)):
            self.display.close()
