"""What any rank asks for, heard by all at the same step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lockstep.core.world import World

# A word between the ranks takes less than a millisecond: a hundredth of a step that is busy for so long.
LONG_S = 0.1


class StopConsensus:
    """Words that any rank can say and all hear at the same step, without making the step wait.

    The sum that is started at one step is read at the next, so a word takes effect one step later and the
    ranks agree on the step. Where steps are long it is waited for and read at once. With its wishes each rank says
    how long it was busy; `busy` is what was heard of all ranks, in seconds, and is empty where there is nothing to
    hear.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.busy: list[float] = []
        self.pending: Any = None
        self.ballot = torch.zeros(0, dtype=torch.int64)

    def __call__(self, *wishes: bool, busy: float = 0.0) -> list[bool]:
        """Cast this step's wishes; each is heard if any rank had it at the step before.

        In a world of one it is heard at once.
        """
        if self.world.size == 1:
            return list(wishes)
        heard = self._read(len(wishes))
        own = [int(1e6 * busy) if rank == self.world.rank else 0 for rank in range(self.world.size)]
        self.ballot = torch.tensor([*wishes, *own], dtype=torch.int64)
        self.pending = dist.all_reduce(self.ballot, group=self.world.control, async_op=True)
        if self.can_wait or not self.busy:  # the first is waited for: it tells how long steps are
            heard = [before or now for before, now in zip(heard, self._read(len(wishes)), strict=True)]
        return heard

    @property
    def can_wait(self) -> bool:
        """Whether waiting for a word costs next to nothing: alone, or where steps are long. On all ranks alike."""
        return self.world.size == 1 or max(self.busy, default=0.0) > LONG_S

    def _read(self, wishes: int) -> list[bool]:
        """What was wished in the sum that is under way, if one is."""
        if self.pending is None:
            return [False] * wishes
        self.close()
        votes = self.ballot.tolist()
        self.busy = [microseconds / 1e6 for microseconds in votes[wishes:]]
        return [bool(vote) for vote in votes[:wishes]]

    def close(self) -> None:
        """Finish the sum that is under way, so that the group can be destroyed."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
