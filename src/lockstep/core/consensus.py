"""Agreement among the ranks on requests (to stop, to save) at the same step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lockstep.core.world import World

# A sum over the ranks takes less than a millisecond: at most a hundredth of a step of this many seconds.
LONG_S = 0.1


class StopConsensus:
    """Requests that any rank can make and all ranks see at the same step, without a wait in the step.

    An asynchronous sum is started at one step and read at the next, so a request takes effect one step later, on all
    ranks alike. Where steps are long the sum is waited for at once. Each rank also sends how long it was busy in the
    step: `busy` has these times of all ranks in seconds, and is empty before the first sum and in a world of one.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.busy: list[float] = []
        self.pending: Any = None
        self.sums = torch.zeros(0, dtype=torch.int64)

    def agree(self, *requests: bool, busy: float = 0.0) -> list[bool]:
        """Send this step's requests; returns for each whether any rank had it at the step before.

        In a world of one they are returned at once.
        """
        if self.world.size == 1:
            return list(requests)
        heard = self._read(len(requests))
        own = [int(1e6 * busy) if rank == self.world.rank else 0 for rank in range(self.world.size)]
        self.sums = torch.tensor([*requests, *own], dtype=torch.int64)
        self.pending = dist.all_reduce(self.sums, group=self.world.control, async_op=True)
        if self.can_wait or not self.busy:  # wait for the first sum: it tells how long steps are
            heard = [before or now for before, now in zip(heard, self._read(len(requests)), strict=True)]
        return heard

    @property
    def can_wait(self) -> bool:
        """Whether waiting for a sum is cheap: in a world of one, or where steps are long. The same on all ranks."""
        return self.world.size == 1 or max(self.busy, default=0.0) > LONG_S

    def _read(self, requests: int) -> list[bool]:
        """The requests in the pending sum, if there is one."""
        if self.pending is None:
            return [False] * requests
        self.close()
        values = self.sums.tolist()
        self.busy = [microseconds / 1e6 for microseconds in values[requests:]]
        return [bool(value) for value in values[:requests]]

    def close(self) -> None:
        """Finish the pending sum, so that the group can be destroyed."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
