"""Finds a slow rank that the others wait for."""

import time
from collections import deque

import torch
from torch import Tensor

from lockstep.core.world import World

STEPS = 10  # the last steps before a log point: they are judged together
SHARE, FLOOR_S = 0.3, 0.01  # the least excess of a slow rank, as a share of a step and in seconds


class Stragglers:
    """Names a rank that is busy longer than the others before the ranks wait for each other.

    A rank's busy time in a step goes from requesting its shard to the end of the last forward pass. Until then no
    rank waits for another one; in backward all do. (With synchronised batch norm they wait in the forward pass
    already, so only slow data can be found; the stages of a pipeline wait there by design, and are not `comparable`.)

    A rank is slow if, in all but one of `STEPS` steps, it is busy longer than the median of the others, by `SHARE` of
    a whole step and by `FLOOR_S` seconds. It is named once. The ranks compare their times at log points only.
    """

    def __init__(self, world: World, *, comparable: bool = True) -> None:
        self.world = world
        self.comparable = comparable and world.size > 1
        self.busy = 0.0
        self.requested = time.perf_counter()
        self.history: deque[tuple[float, float]] = deque(maxlen=STEPS)
        self.named: set[int] = set()
        self.behind, self.judged = 0.0, 0.0  # seconds of the judged steps: waiting for other ranks, and all

    def forward_done(self) -> float:
        """Note the end of a forward pass; returns the busy time of the step so far."""
        self.busy = time.perf_counter() - self.requested
        return self.busy

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
        if not self.comparable or len(self.history) < STEPS:
            return ""
        times = torch.zeros(self.world.size, STEPS, 2, dtype=torch.float64, device=self.world.device)
        times[self.world.rank] = times.new_tensor(list(self.history))
        return self.judge(self.world.sum(times).cpu())

    def judge(self, times: Tensor) -> str:
        """A sentence that names a slow rank, or "".

        Args:
            times: float64 (ranks, STEPS, 2), on the CPU: the seconds of each step, and the busy seconds in it.
        """
        whole, busy = times.unbind(2)
        own = self.world.rank
        self.behind += float((busy.max(dim=0).values - busy[own]).sum())
        self.judged += float(whole[own].sum())
        slowest = int(busy.quantile(0.5, dim=1).argmax())
        other_ranks = torch.cat([busy[:slowest], busy[slowest + 1 :]])
        excess = (busy[slowest] - other_ranks.quantile(0.5, dim=0)).sort().values
        typical_s = float(whole[slowest].quantile(0.5))
        if slowest in self.named or float(excess[1]) < max(FLOOR_S, SHARE * typical_s):
            return ""
        self.named.add(slowest)
        return (
            f"rank {slowest} is slow: at each step the others wait {1000 * float(excess.quantile(0.5)):.0f} of "
            f"{1000 * typical_s:.0f} ms for it; look at what else runs on its cores, and at its data"
        )
