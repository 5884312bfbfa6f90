"""Agreement among the ranks on requests (to stop, to save) at the same step."""

from typing import Any

import torch
import torch.distributed as dist

from lockstep.core.world import World

# A message to all ranks takes less than a millisecond, which is at most 1 % of a step of this many seconds.
LONG_S = 0.1


class StopConsensus:
    """Requests that any rank can make and that all ranks see at the same step, without a wait in the step.

    The ranks start an all-reduce of their requests at one step and read it at the next, so a request takes effect one
    step later, on all ranks alike. If steps are long, the ranks wait for the result at once. `longest_s` is the
    longest time that any rank was busy in a step, from the last message; None before the first message. The size of a
    message does not depend on the number of ranks.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.longest_s: float | None = None
        self.pending: Any = None
        self.message = torch.zeros(0, dtype=torch.int64)

    def agree(self, *requests: bool, busy: float = 0.0) -> list[bool]:
        """Send this step's requests; returns for each request whether any rank made it at the step before.

        `busy` is the time that this rank worked in the step, in seconds. With one rank, the requests are returned
        unchanged.
        """
        if self.world.size == 1:
            return list(requests)
        agreed = self._read(len(requests))
        self.message = torch.tensor([*requests, int(1e6 * busy)], dtype=torch.int64)
        self.pending = dist.all_reduce(self.message, dist.ReduceOp.MAX, group=self.world.control, async_op=True)
        if self.can_wait or self.longest_s is None:  # wait for the first message: it tells how long steps are
            agreed = [before or now for before, now in zip(agreed, self._read(len(requests)), strict=True)]
        return agreed

    @property
    def can_wait(self) -> bool:
        """Whether waiting for all ranks is cheap: there is one rank, or steps are long. The same on all ranks."""
        return self.world.size == 1 or (self.longest_s or 0.0) > LONG_S

    def _read(self, requests: int) -> list[bool]:
        """The requests in the pending message; all False if no message is pending."""
        if self.pending is None:
            return [False] * requests
        self.close()
        *values, microseconds = self.message.tolist()
        self.longest_s = microseconds / 1e6
        return [bool(value) for value in values]

    def close(self) -> None:
        """Finish the pending message, so that the group can be destroyed."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
