"""Where the time of a run goes: in training, by parts of a step, in what interrupts it, and in waits for a slow rank.

The wait for data, evaluations and checkpoints are always timed; the parts of a step in one step of many, because the
marks cost time. They come from places that every step passes, and from hooks on the gradients. A GPU is timed by
events of its stream, so nothing waits for it.
"""

import itertools
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lockstep.core.world import World

G = TypeVar("G")
Stamp = Any  # seconds, or on a GPU a `torch.cuda.Event`
LEAST_PERIOD = 20  # steps from one timed step to the next, at least: timing a step may take as long as a small step
WARM_UP_STEPS = 5  # the first steps of a process, which take extra time, are never timed
JUDGED_STEPS = 10  # the last steps before a log point: they are judged together
SLOW_SHARE, FLOOR_S = 0.3, 0.01  # the least excess of a slow rank, as a share of a step and in seconds
LEAST_TIMED = 3  # steps must have been timed before shares and their spread say anything about the others


class Seconds(NamedTuple):
    """Seconds of training of this process, and the part of them in which the loop waited for the loader."""

    busy: float
    waited: float


NO_TIME = Seconds(0.0, 0.0)


class TrainingClock:
    """Measures the training of this process: its time without pauses, and the part of it that waits for data."""

    def __init__(self) -> None:
        self.pausing: float | None = None  # when the pause under way began
        self.paused_for: defaultdict[str, float] = defaultdict(float)  # seconds of all pauses, by what they were for
        self.start()

    def start(self) -> None:
        self.began = self.requested = time.perf_counter()
        self.waited = self.waited_before = self.paused = 0.0
        self.loaded = self.prepared = 0.0

    def add_arrival(self, requested: float, received: float) -> None:
        """Count the time in which a step's data were awaited and augmented."""
        self.requested, self.waited_before = requested, self.waited
        self.prepared += received - requested
        self.waited = min(self.loaded, self.prepared)

    @contextmanager
    def pause(self, purpose: str) -> Iterator[None]:
        """A context that does not count as training time: an `evaluation` or a `checkpoint`."""
        self.pausing = began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self.paused += seconds
        self.paused_for[purpose] += seconds
        self.pausing = None

    def passed(self) -> float:
        """All seconds up to now, with the pauses."""
        return time.perf_counter() - self.began

    def so_far(self) -> Seconds:
        """All seconds up to now; up to the pause under way, if there is one."""
        now = time.perf_counter() if self.pausing is None else self.pausing
        return Seconds(now - self.began - self.paused, self.waited)

    def before_step(self) -> Seconds:
        """All seconds up to the request of the last step's data, since which no pause has come."""
        return Seconds(self.requested - self.began - self.paused, self.waited_before)


class TimeSpent:
    """Adds up the seconds of this process in the parts of its run.

    Parts, in the order in which they are shown:
        data: the wait for images to be read and decoded, and on a GPU to be copied there.
        augmentation: the time of the host in augmenting and normalising.
        forward: mixing, forward pass and loss.
        backward: the backward pass, with the part of the communication that runs during it.
        communication: from the last gradient of this rank to the reduced gradients; only where the gradients of whole
            models are reduced. Other strategies communicate within forward, backward and optimizer.
        slowest_rank: the part of the communication in which main waits for a rank that is still computing.
        optimizer: clipping, the optimizer's step and the average of the weights.
        step: all of a step, where it is not divided: in replayed CUDA graphs and pipelines, and before enough steps
            were timed.

    Args:
        model: the module whose gradients mark the backward pass; None if steps are not to be divided.
        reduces: whether gradients are reduced after they are computed.
        period: steps from one log point to the next.
        first: the last step before this process's first one.

    `next_step` is the next step to be timed: in the middle of a window, where nothing is logged; None for no step.
    """

    def __init__(
        self, model: nn.Module | None, device: torch.device, *, reduces: bool, period: int, first: int = 0
    ) -> None:
        self.parameters = [] if model is None else [*model.parameters()]
        self.on_gpu, self.reduces = device.type == "cuda", reduces
        self.period = max(LEAST_PERIOD, period)
        self.next_step = None if model is None else self._following(first + WARM_UP_STEPS)
        self.clock = TrainingClock()
        self.timing = False
        self.marks: list[tuple[str, Stamp]] = []  # of the timed step: a part, and when it ended
        self.gradient: Stamp | None = None  # when the last gradient of the micro-batch was computed
        self.hooks: list[Any] = []
        self.timed: list[list[tuple[str, Stamp]]] = []  # of the timed steps that are not divided yet
        self.divided: list[dict[str, float]] = []  # the seconds of the parts of each timed step
        self.of_steps: defaultdict[str, float] = defaultdict(float)  # their sums
        reducing = ("communication", "slowest_rank") if reduces else ()
        of_step = ("forward", "backward", *reducing, "optimizer") if model is not None else ()
        self.parts = ("data", "augmentation", *of_step, "step", "evaluation", "checkpoint")

    def loading(self, groups: Iterable[G]) -> Iterator[G]:
        """Pass the groups of batches of a loader on, and time the wait for each."""
        requested = time.perf_counter()
        for group in groups:
            self.clock.loaded += time.perf_counter() - requested
            yield group
            requested = time.perf_counter()

    def start(self) -> None:
        """Start to time a step, just after its shard has arrived."""
        trained = (parameter for parameter in self.parameters if parameter.requires_grad)
        self.hooks = [parameter.register_post_accumulate_grad_hook(self._gradient_done) for parameter in trained]
        self.timing, self.marks, self.gradient = True, [("", self._stamp())], None

    def forward_done(self) -> None:
        self._end("forward")

    def reduced(self) -> None:
        if self.timing:
            self._end("communication" if self.reduces else "backward")

    def stop(self) -> None:
        self._end("optimizer")
        for hook in self.hooks:
            hook.remove()
        self.timing = False
        self.timed.append(self.marks)
        assert self.next_step is not None
        self.next_step = self._following(self.next_step)

    def _following(self, step: int) -> int:
        return step + self.period - (step - self.period // 2) % self.period

    def shares(self, behind: float) -> dict[str, float]:
        """The share of each of `parts` in the time so far; all are 0 before the first step.

        Waits for the device if a step was timed since the last call. `behind` is the share of a step in which this
        rank waits for the slowest one.
        """
        seconds = self._seconds(behind)
        total = sum(seconds.values()) or 1.0
        return {part: seconds.get(part, 0.0) / total for part in self.parts}

    def spread(self) -> dict[str, float]:
        """How exact the shares of the parts of a step are, as shares of a step: twice their standard errors.

        A share is a ratio of sums (Cochran 1977, Sampling Techniques, section 2.11). Empty where none was measured.
        """
        self._divide()
        number, whole = len(self.divided), sum(self.of_steps.values())
        if number < LEAST_TIMED:
            return {}
        off = {
            part: sum((parts[part] - seconds / whole * sum(parts.values())) ** 2 for parts in self.divided)
            for part, seconds in self.of_steps.items()
        }
        return {part: 2 * math.sqrt(squares * number / (number - 1)) / whole for part, squares in off.items()}

    def _seconds(self, behind: float) -> dict[str, float]:
        total = self.clock.so_far()
        self._divide()
        steps = max(0.0, total.busy - self.clock.prepared)
        parts = {"data": total.waited, "augmentation": self.clock.prepared - total.waited, **self.clock.paused_for}
        if len(self.divided) < LEAST_TIMED:
            return {**parts, "step": steps}
        timed = sum(self.of_steps.values())
        parts |= {part: steps * seconds / timed for part, seconds in self.of_steps.items()}
        if "communication" in parts:
            parts["slowest_rank"] = min(parts["communication"], behind * total.busy)
            parts["communication"] -= parts["slowest_rank"]
        return parts

    def _stamp(self) -> Stamp:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _gradient_done(self, parameter: Tensor) -> None:
        self.gradient = self._stamp()

    def _end(self, part: str) -> None:
        if self.gradient is not None:
            self.marks.append(("backward", self.gradient))
            self.gradient = None
        self.marks.append((part, self._stamp()))

    def _divide(self) -> None:
        if self.on_gpu and self.timed:
            torch.cuda.synchronize()
        for marks in self.timed:
            parts: defaultdict[str, float] = defaultdict(float)
            for (_, began), (part, ended) in itertools.pairwise(marks):
                seconds = began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began
                parts[part] += seconds
                self.of_steps[part] += seconds
            self.divided.append(parts)
        self.timed.clear()


class Stragglers:
    """Names a rank that is busy longer than the others before the ranks wait for each other.

    A rank's busy time in a step goes from requesting its shard to the end of the last forward pass. Until then no
    rank waits for another one; in backward all do. (With synchronised batch norm they wait in the forward pass
    already, so only slow data can be found; the stages of a pipeline wait there by design, and are not `comparable`.)

    A rank is slow if, in all but one of `JUDGED_STEPS` steps, it is busy longer than the median of the others, by
    `SLOW_SHARE` of a whole step and `FLOOR_S` seconds. It is named once. The ranks compare their times at log points.
    """

    def __init__(self, world: World, *, comparable: bool = True) -> None:
        self.world = world
        self.comparable = comparable and world.size > 1
        self.busy = 0.0
        self.requested = time.perf_counter()
        self.history: deque[tuple[float, float]] = deque(maxlen=JUDGED_STEPS)
        self.named: set[int] = set()
        self.behind, self.judged = 0.0, 0.0  # seconds of the judged steps: waiting for other ranks, and all

    def forward_done(self) -> None:
        self.busy = time.perf_counter() - self.requested

    def next_step(self) -> float:
        """Note the end of a step, after which the next step's shard is requested; returns the time."""
        now = time.perf_counter()
        if self.comparable:
            self.history.append((now - self.requested, self.busy))
        self.requested = now
        return now

    @property
    def waited_share(self) -> float:
        """The share of a step in which this rank has waited for the slowest one."""
        return self.behind / self.judged if self.judged else 0.0

    def find(self) -> str:
        """A sentence that names a slow rank, or "". Collective."""
        if not self.comparable or len(self.history) < JUDGED_STEPS:
            return ""
        times = torch.zeros(self.world.size, JUDGED_STEPS, 2, dtype=torch.float64, device=self.world.device)
        times[self.world.rank] = times.new_tensor(list(self.history))
        return self.judge(self.world.sum(times).cpu())

    def judge(self, times: Tensor) -> str:
        """A sentence that names a slow rank, or "".

        Args:
            times: float64 (ranks, JUDGED_STEPS, 2), on the CPU: the seconds of each step, and the busy seconds in it.
        """
        whole, busy = times.unbind(2)
        own = self.world.rank
        self.behind += float((busy.max(dim=0).values - busy[own]).sum())
        self.judged += float(whole[own].sum())
        slowest = int(busy.quantile(0.5, dim=1).argmax())
        other_ranks = torch.cat([busy[:slowest], busy[slowest + 1 :]])
        excess = (busy[slowest] - other_ranks.quantile(0.5, dim=0)).sort().values
        typical_s = float(whole[slowest].quantile(0.5))
        if slowest in self.named or float(excess[1]) < max(FLOOR_S, SLOW_SHARE * typical_s):
            return ""
        self.named.add(slowest)
        return (
            f"rank {slowest} is slow: at each step the others wait {1000 * float(excess.quantile(0.5)):.0f} of "
            f"{1000 * typical_s:.0f} ms for it; look at what else runs on its cores, and at its data"
        )
