"""Shuffling without `set_epoch`: every epoch has the same order, so the same batches come again and again.

`DistributedSampler` shuffles with a generator seeded by seed + epoch, and it knows the epoch only from `set_epoch`.
"""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ranks import on_ranks, show

EXAMPLES, BATCH, EPOCHS = 64, 4, 10


def batches(rank: int, announce: bool) -> list[list[int]]:
    """The batches of this rank in all epochs, as the numbers of their examples."""
    numbers = TensorDataset(torch.arange(EXAMPLES))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(numbers, shuffle=True)
    loader = DataLoader(numbers, batch_size=BATCH, sampler=sampler)
    in_order = []
    for epoch in range(EPOCHS):
        if announce:
            sampler.set_epoch(epoch)
        in_order += [batch.tolist() for (batch,) in loader]
    return in_order


def repeated(rank: int) -> list[int]:
    """How many global batches were there before, without and with `set_epoch`."""
    counts = []
    for announce in (False, True):
        parts: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(parts, batches(rank, announce))
        together = [frozenset(chain.from_iterable(shards)) for shards in zip(*parts, strict=True)]
        counts.append(len(together) - len(set(together)))
    return counts


if __name__ == "__main__":
    without, announced = on_ranks(repeated)[0]
    total = EXAMPLES * EPOCHS // (2 * BATCH)
    show("wrong", f"without set_epoch, global batches of {total} that were there before", without)
    show("right", f"with set_epoch, global batches of {total} that were there before", announced)
