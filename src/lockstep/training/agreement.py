"""What the ranks agree on: a stop and a save at the same step, and finite weights that are the same everywhere."""

from collections import Counter
from collections.abc import Set
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.errors import LockstepError, NumericalError
from lockstep.core.model import has_shards, is_sound, own_parts
from lockstep.core.world import World

# A message to all ranks takes less than a millisecond, which is at most 1 % of a step of this many seconds.
LONG_STEP_S = 0.1
REMEDIES = "a smaller optimizer.lr, train.clip_norm=1 or schedule.warmup=5% are the usual remedies"
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StopConsensus:
    """Requests that any rank can make and that all ranks see at the same step, without a wait in the step.

    The ranks start an all-reduce of their requests at one step and read it at the next, so a request takes effect one
    step later, on all ranks alike. If steps are long, the ranks wait for the result at once. `longest_s` is the
    longest time that any rank was busy in a step, from the last message; None before the first message.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.longest_s: float | None = None
        self.pending: Any = None
        self.message = torch.zeros(0, dtype=torch.int64)

    def agree(self, *requests: bool, busy: float = 0.0) -> list[bool]:
        """Send this step's requests and busy seconds; returns for each request whether any rank made it before."""
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
        return self.world.size == 1 or (self.longest_s or 0.0) > LONG_STEP_S

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


def checksum(model: nn.Module) -> Tensor:
    """The sum of all parameters' bits, read as integers: an int64 scalar on their device. One bit changes it."""
    tensors = own_parts(model.parameters())
    sums = [tensor.view(WORDS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack(sums).sum()


def checksums(model: nn.Module, world: World) -> Tensor | None:
    """The checksum of each rank's weights, int64 (ranks,); None where weights exist only once. Collective."""
    if world.size == 1 or has_shards(model):
        return None
    own = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    own[world.rank] = checksum(model)
    return world.sum(own)


def compare_weights(sums: list[int], step: int) -> None:
    """Compare the `checksums` of the ranks after a step.

    Raises LockstepError: a rank's weights differ from the majority's, or from main's if there is no majority.
    """
    if not sums:
        return
    # A Counter keeps the order of insertion, so main wins a tie.
    right = Counter(sums).most_common(1)[0][0]
    wrong = [str(rank) for rank, own in enumerate(sums) if own != right]
    if wrong:
        several = len(wrong) > 1
        raise LockstepError(
            f"the weights of rank{'s' * several} {', '.join(wrong)} differ from the others' at step {step}: memory "
            "or a device failed, or code changed one replica alone; resume=latest continues from the last "
            "checkpoint, which is older"
        )


def check_replicas(model: nn.Module, world: World, step: int) -> None:
    """Compare the weights of all ranks now, see `compare_weights`. Collective; waits for the device."""
    sums = checksums(model, world)
    compare_weights([] if sums is None else sums.tolist(), step)


def check_finite(model: nn.Module, world: World, step: int, infinite: Set[str] = frozenset()) -> None:
    """Raise NumericalError, on every rank, if a parameter or a buffer of one is not finite.

    The buffers named `infinite` may be infinite (see `infinite_buffers`), but must be numbers. Collective, because
    running statistics may differ between ranks. Waits for the device.
    """
    named = chain(model.named_parameters(), model.named_buffers())
    sound = [
        is_sound(part, infinite=name in infinite)
        for name, tensor in named
        for part in own_parts([tensor])
        if part.is_floating_point()
    ]
    broken = (~torch.stack(sound)).sum()
    if world.sum(broken) > 0:
        raise NumericalError(f"the weights are not finite after step {step}; {REMEDIES}", step=step)
