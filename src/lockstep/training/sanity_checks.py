"""Checks of the weights during a run: they are finite, and the same on every rank."""

from collections import Counter
from collections.abc import Set
from itertools import chain

import torch
from torch import Tensor, nn

from lockstep.core.errors import LockstepError, NumericalError
from lockstep.core.model import has_shards, is_sound, own_part, own_parts
from lockstep.core.world import World

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(model: nn.Module) -> Tensor:
    """The sum of all parameters' bits, read as integers: an int64 scalar on their device. One bit changes it."""
    tensors = own_parts(model.parameters())
    sums = [tensor.view(_WORDS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack(sums).sum()


def checksums(model: nn.Module, world: World) -> Tensor | None:
    """The checksum of each rank's weights, int64 (ranks,); None where there is nothing to compare. Collective.

    Weights that are cut over the ranks exist only once.
    """
    if world.size == 1 or has_shards(model):
        return None
    own = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    own[world.rank] = checksum(model)
    return world.sum(own)


def compare_weights(sums: list[int], step: int) -> None:
    """Compare the `checksums` of the ranks after a step.

    Raises:
        LockstepError: a rank's weights differ from the majority's, or from main's if there is no majority.
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
            "or a device failed, or code changed one replica alone; resume=latest goes on from the last "
            "checkpoint, which is older"
        )


def check_replicas(model: nn.Module, world: World, step: int) -> None:
    """Compare the weights of all ranks now. Collective; waits for the device.

    Raises:
        LockstepError: as in `compare_weights`, on every rank.
    """
    sums = checksums(model, world)
    compare_weights([] if sums is None else sums.tolist(), step)


def check_finite(model: nn.Module, world: World, step: int, infinite: Set[str] = frozenset()) -> None:
    """Raise NumericalError, on every rank, if a parameter or a buffer of one is not finite.

    The buffers named `infinite` may be infinite (see `infinite_buffers`), but must be numbers.

    Collective, because running statistics may differ between ranks. Waits for the device.
    """
    named = chain(model.named_parameters(), model.named_buffers())
    sound = [
        is_sound(own_part(tensor.detach()), infinite=name in infinite)
        for name, tensor in named
        if tensor.is_floating_point() and not tensor.is_meta
    ]
    broken = (~torch.stack(sound)).sum()
    if world.sum(broken) > 0:
        raise NumericalError(f"the weights are not finite after step {step}; {REMEDIES}", step=step)


REMEDIES = "a smaller optimizer.lr, train.clip_norm=1 or schedule.warmup=5% are the usual remedies"
