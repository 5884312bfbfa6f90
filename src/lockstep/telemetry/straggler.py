"""Finds a slow rank that the others wait for."""

from __future__ import annotations

import time
from collections import deque
from statistics import median

from torch import nn

STEPS = 10  # that are looked at together
SHARE, FLOOR_S = 0.3, 0.01  # the least excess of a slow rank, as a share of a step and in seconds


class Stragglers:
    """Names a rank that is busy longer than the others before the ranks wait for each other.

    A rank's busy time in a step goes from requesting its shard to the end of the last forward pass. Until then no
    rank waits for another one; in backward all do. (With synchronised batch norm they wait in the forward pass
    already, so only slow data can be found.) Times are those of the host.

    A rank is slow if, in all but one of `STEPS` steps, it is busy longer than the median of the others, by `SHARE` of
    a whole step and by `FLOOR_S` seconds. It is named once.
    """

    def __init__(self) -> None:
        self.busy = 0.0
        self.requested = self.step_began = time.perf_counter()
        self.history: deque[tuple[float, list[float]]] = deque(maxlen=STEPS)
        self.named: set[int] = set()

    def watch(self, replica: nn.Module) -> None:
        """Time the forward passes of `replica`."""
        replica.register_forward_hook(self._forward_done)

    def begin(self) -> None:
        """Note the start of a step, when its shard is requested."""
        self.requested = time.perf_counter()

    def _forward_done(self, *_: object) -> None:
        self.busy = time.perf_counter() - self.requested

    def record(self, busy: list[float]) -> str:
        """Take the busy seconds of all ranks in a step; returns a sentence that names a slow rank, or ""."""
        now = time.perf_counter()
        step_s, self.step_began = now - self.step_began, now
        if not busy:
            return ""
        self.history.append((step_s, busy))
        if len(self.history) < STEPS:
            return ""
        rank_times = [median(times) for times in zip(*(ranks for _, ranks in self.history), strict=True)]
        slow = rank_times.index(max(rank_times))
        excess = sorted(ranks[slow] - median(ranks[:slow] + ranks[slow + 1 :]) for _, ranks in self.history)
        typical_s = median(seconds for seconds, _ in self.history)
        if slow in self.named or excess[1] < max(FLOOR_S, SHARE * typical_s):
            return ""
        self.named.add(slow)
        return (
            f"rank {slow} is slow: at each step the others wait {1000 * median(excess):.0f} of "
            f"{1000 * typical_s:.0f} ms for it; look at what else runs on its cores, and at its data"
        )
