"""Which rank the others wait for."""

from __future__ import annotations

import time
from collections import deque
from statistics import median

from torch import nn

STEPS = 10
SHARE, FLOOR_S = 0.3, 0.01


class Stragglers:
    """Names a rank that is busy longer than the others before they all meet.

    A rank's own work of a step goes from asking for its shard to the end of the last forward pass: so far no
    rank waits for another one, and in backward all do. (With synchronised batch norm they meet in the forward pass
    already; then only what comes before it, the data, can be told.) It is the host's time.

    A rank is slow if, in all but one of `STEPS` steps, it is busy longer than the others in the median, by `SHARE` of
    a whole step and by `FLOOR_S` seconds. It is named once.
    """

    def __init__(self) -> None:
        self.busy = 0.0
        self.asked = self.begun = time.perf_counter()
        self.heard: deque[tuple[float, list[float]]] = deque(maxlen=STEPS)
        self.named: set[int] = set()

    def watch(self, replica: nn.Module) -> None:
        """Time the forward passes of `replica`."""
        replica.register_forward_hook(self._forward_done)

    def begin(self) -> None:
        """A step begins: its shard is asked for."""
        self.asked = time.perf_counter()

    def _forward_done(self, *_: object) -> None:
        self.busy = time.perf_counter() - self.asked

    def hear(self, busy: list[float]) -> str:
        """Take what all ranks said of a step, in seconds; the sentence that names a slow one, mostly empty."""
        now = time.perf_counter()
        step, self.begun = now - self.begun, now
        if not busy:
            return ""
        self.heard.append((step, busy))
        if len(self.heard) < STEPS:
            return ""
        times = [median(each) for each in zip(*(said for _, said in self.heard), strict=True)]
        slow = times.index(max(times))
        excess = sorted(said[slow] - median(said[:slow] + said[slow + 1 :]) for _, said in self.heard)
        whole = median(each for each, _ in self.heard)
        if slow in self.named or excess[1] < max(FLOOR_S, SHARE * whole):
            return ""
        self.named.add(slow)
        return (
            f"rank {slow} is slow: at each step the others wait {1000 * median(excess):.0f} of {1000 * whole:.0f} ms "
            "for it; look at what else runs on its cores, and at its data"
        )
