"""Checks of the weights during a run: they are finite, and the same on every rank."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from lockstep.core.errors import LockstepError, NumericalError
from lockstep.core.sharding import has_shards, own_parts
from lockstep.core.world import World

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(model: nn.Module) -> Tensor:
    """The sum of all parameters' bits, read as integers: an int64 scalar on their device. One bit changes it."""
    tensors = own_parts(model.parameters())
    sums = [tensor.view(_WORDS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in tensors]
    return torch.stack(sums).sum()


def check_replicas(model: nn.Module, world: World, step: int) -> None:
    """Compare the weights of all ranks. Collective; every rank gets the same result.

    Weights that are cut over the ranks exist only once, so there is nothing to compare.

    Raises:
        LockstepError: a rank's weights differ from the majority's, or from main's if there is no majority.
    """
    if world.size == 1 or has_shards(model):
        return
    prints = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    prints[world.rank] = checksum(model)
    sums_of_ranks = world.sum(prints).tolist()
    # A Counter keeps the order of insertion, so main wins a tie.
    right = Counter(sums_of_ranks).most_common(1)[0][0]
    wrong = [str(rank) for rank, sums in enumerate(sums_of_ranks) if sums != right]
    if wrong:
        several = len(wrong) > 1
        raise LockstepError(
            f"the weights of rank{'s' * several} {', '.join(wrong)} differ from the others' at step {step}: memory "
            "or a device failed, or code changed one replica alone; resume=latest goes on from the last "
            "checkpoint, which is older"
        )


def check_finite(model: nn.Module, world: World, step: int) -> None:
    """Raise NumericalError, on every rank, if a parameter or a buffer of one is not finite.

    Collective, because running statistics may differ between ranks. Waits for the device.
    """
    tensors = own_parts((*model.parameters(), *model.buffers()))
    broken = torch.stack([~tensor.isfinite().all() for tensor in tensors if tensor.is_floating_point()]).sum()
    if world.sum(broken) > 0:
        raise NumericalError(f"the weights are not finite after step {step}; {REMEDIES}", step=step)


REMEDIES = "a smaller optimizer.lr, train.clip_norm=1 or schedule.warmup=5% are the usual remedies"
