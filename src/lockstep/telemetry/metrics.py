"""Counting on the device while training, and handing the figures to the sinks at log points."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from lockstep.core.closing import closing
from lockstep.core.data_protocols import MicroBatch, Stepped
from lockstep.core.plan import Plan
from lockstep.core.protocols import Sink
from lockstep.core.world import World
from lockstep.telemetry.display import Display
from lockstep.telemetry.samples import NoSamples
from lockstep.telemetry.straggler import Stragglers
from lockstep.telemetry.window import Window

S = TypeVar("S", bound=Stepped)


# So many logits (as float32 4 MB) or micro-batches of finished steps wait to be counted together.
UNCOUNTED, UNCOUNTED_MICRO_BATCHES = 2**20, 32


class RankWindowState(TypedDict):
    """What a rank has behind the last log point: the summed loss of each micro-batch, its step and its examples,
    and the hits of all."""

    losses: list[float]
    steps: list[int]
    examples: list[int]
    hits: int


class WindowState(TypedDict):
    """The last log point, and what each rank has gathered since."""

    flushed: int
    trails: list[RankWindowState]


class Telemetry:
    """Gathers figures without syncing the device, and spreads them at log points.

    Every rank has one, because the sums are collective; only main's has sinks and a display that shows.

    Args:
        world, plan: of the run.
        sinks: where scalars go.
        display: what the user watches.
        samples: keeps what this rank trained on, or nothing.
        step: the last step that is already done.
        window: what a checkpoint kept of the window that was open then (`open_window`); null for none.
        flops: of one example's forward and backward pass; 0 where no figure is wanted.
        peak: floating-point operations per second of all devices; 0 where it is not known.
        loss_limit: a mean loss above it is not one of training any more.
    """

    def __init__(
        self,
        *,
        world: World,
        plan: Plan,
        sinks: list[Sink],
        display: Display,
        samples: NoSamples,
        step: int,
        window: WindowState | None = None,
        flops: float,
        peak: float,
        loss_limit: float = math.inf,
    ) -> None:
        self.world, self.plan, self.sinks, self.display, self.samples = world, plan, sinks, display, samples
        self.step = self.flushed = self.resumed = step
        self.flops, self.peak, self.loss_limit = flops, peak, loss_limit
        # Micro-batches that are not counted yet: step, summed loss, logits, labels.
        self.uncounted: list[tuple[int, Tensor, Tensor, Tensor]] = []
        # Of each since the last log point; the losses (float64) stay on the device until then. They are kept one by
        # one, because in a fixed order their sum has the same bits whether the window was resumed or not.
        self.losses = torch.zeros(0, dtype=torch.float64, device=world.device)
        self.steps: list[int] = []
        self.counts: list[int] = []
        self.hits = torch.zeros((), dtype=torch.int64, device=world.device)
        self.carried = 0
        if window is not None:
            self._reopen(window)
        self.stragglers = Stragglers()
        self.mark = time.perf_counter()
        self.waited = self.paused = 0.0
        self.examples = 0
        self.busy = self.waited_in_all = 0.0
        self.last: Window | None = None

    def open_window(self) -> WindowState:
        """What has gathered since the last log point, of every rank, for a checkpoint. Collective."""
        return {"flushed": self.flushed, "trails": self.world.gather(self._trail())}

    def _trail(self) -> RankWindowState:
        self._count()
        return {
            "losses": self.losses.tolist(),
            "steps": self.steps[:],
            "examples": self.counts[:],
            "hits": int(self.hits),
        }

    def _reopen(self, window: WindowState) -> None:
        """Go on with a window: each rank with its own trail; another number of ranks shares them out."""
        self.flushed = window["flushed"]
        self.carried = sum(sum(trail["examples"]) for trail in window["trails"])
        for trail in window["trails"][self.world.rank :: self.world.size]:
            self.losses = torch.cat([self.losses, self.losses.new_tensor(trail["losses"])])
            self.steps += trail["steps"]
            self.counts += trail["examples"]
            self.hits += trail["hits"]

    def watch(self, shards: Iterator[S]) -> Iterator[S]:
        """Pass the shards on, timing how long each is waited for."""
        self.mark = time.perf_counter()
        while True:
            self.stragglers.begin()
            asked = time.perf_counter()
            shard = next(shards, None)
            if shard is None:
                return
            self.waited += time.perf_counter() - asked
            self.step = shard.step
            yield shard
            self.display.advance(shard.step)

    def record(self, loss: Tensor, logits: Tensor, micro: MicroBatch, images: Tensor) -> None:
        """Count one micro-batch: its summed loss (a scalar) and its hits. Stays on the device."""
        if logits.is_cuda:
            logits = logits.clone()  # a CUDA graph writes over its output when it runs again
        many = len(self.uncounted) * logits.numel() >= UNCOUNTED or len(self.uncounted) >= UNCOUNTED_MICRO_BATCHES
        if many and self.uncounted[-1][0] < micro.step:  # an unfinished step may still be forgotten
            self._count()
        self.uncounted.append((micro.step, loss, logits, micro.labels))
        self.samples.record(micro, images)

    def forget(self, after: int) -> None:
        """Drop what was recorded after step `after`: of a step that is not finished, and is done again."""
        self.uncounted = [each for each in self.uncounted if each[0] <= after]

    def _count(self) -> None:
        """Count what waits, all at once: for small batches the calls cost more than the numbers."""
        if self.uncounted:
            steps, losses, logits, labels = zip(*self.uncounted, strict=True)
            self.uncounted.clear()
            self.steps += steps
            self.counts += [each.shape[0] for each in labels]
            self.losses = torch.cat([self.losses, torch.stack(losses).double()])
            self.hits += (torch.cat(logits).argmax(1) == torch.cat(labels)).sum()

    def flush(self, step: int, scalars: Mapping[str, Any]) -> Window:
        """Close the window at `step`: sum over the ranks and write. Collective, and a device sync."""
        self._count()
        summed = self.losses.sum()
        counted = torch.tensor(sum(self.counts), dtype=torch.float64, device=self.world.device)
        loss, hits, examples = self.world.sum(torch.stack([summed, self.hits.double(), counted])).tolist()
        now = time.perf_counter()
        seconds = max(now - self.mark - self.paused, 1e-9)
        steps = step - max(self.flushed, self.resumed)
        window = Window(
            first=self.flushed + 1,
            last=step,
            loss=loss / examples,
            top1=100 * hits / examples,
            examples=int(examples) - self.carried,
            seconds=seconds,
            waited=self.waited,
            first_bad_step=None if loss / examples <= self.loss_limit else self._suspect(step),
        )
        self.losses = self.losses[:0]
        self.steps.clear()
        self.counts.clear()
        self.hits.zero_()
        self.carried = 0
        self.examples += window.examples
        self.busy += seconds
        self.waited_in_all += self.waited
        self.mark, self.waited, self.paused, self.flushed, self.last = now, 0.0, 0.0, step, window
        figures = {
            "loss/train": window.loss,
            "acc/train_top1": window.top1,
            **{key: float(value) for key, value in scalars.items()},
            "perf/img_per_s": window.rate,
            "perf/data_wait_pct": window.wait_share,
            "perf/step_ms": 1000 * seconds / steps,
        }
        if self.peak:
            figures["perf/mfu_pct"] = 100 * window.rate * self.flops / self.peak
        self.write(step, figures)
        self.display.window(window)
        return window

    def _suspect(self, step: int) -> int:
        """The first step of the window with an unsound loss on any rank; `step` if only their mean is. Collective."""
        trail = self._trail()
        each = zip(trail["steps"], trail["losses"], trail["examples"], strict=True)
        bad = (at for at, loss, examples in each if examples and not loss / examples <= self.loss_limit)
        first = torch.full((self.world.size,), step, device=self.world.device)
        first[self.world.rank] = next(bad, step)
        others = torch.arange(self.world.size, device=self.world.device) != self.world.rank
        return int(self.world.sum(first.masked_fill(others, 0)).min())

    def evaluated(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scores of an evaluation at `step`."""
        self.write(step, scalars)
        self.display.evaluated(step, scalars, self.last)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Hand scalars to every sink."""
        for sink in self.sinks:
            sink.write(step, scalars)

    def sync(self) -> None:
        """Have the files hold everything up to this step: a checkpoint of it must not know more than they do."""
        for sink in self.sinks:
            sink.flush()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep the time of what is not training out of the rates."""
        started = time.perf_counter()
        yield
        self.paused += time.perf_counter() - started

    def time_forward(self, replica: nn.Module) -> None:
        """Time the forward passes, where other ranks may wait for them. (A compiled model is better off without.)"""
        if self.world.size > 1:
            self.stragglers.watch(replica)

    def heard(self, busy: list[float]) -> None:
        """Take the time that each rank was busy in a step, and say which one the others wait for."""
        if sentence := self.stragglers.hear(busy):
            self.display.warn(sentence)

    def totals_of_run(self) -> dict[str, float]:
        """Images per second and data-wait share (percent) over this process's part of the run."""
        busy = max(self.busy, 1e-9)
        return {"img_per_s": self.examples / busy, "data_wait_pct": 100 * self.waited_in_all / busy}

    def close(self) -> None:
        """Flush and close the sinks, the samples and the display."""
        with closing(self.samples.close, *(sink.close for sink in self.sinks)):
            self.display.close()
