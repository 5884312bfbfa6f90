"""Mean of means with uneven shards: DDP averages over ranks, so an example of a small shard counts more.

The last batch of an epoch has 9 examples: 8 on rank 0 and 1 on rank 1. The right way: each rank takes W/B times the
sum of its losses (W ranks, B examples of all ranks), and DDP's average divides by W.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ranks import examples, on_ranks, relative, show

BATCH, RANKS = 9, 2


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(16, 4, dtype=torch.float64)


def averaged(rank: int) -> list[Tensor]:
    """The gradient that DDP gives, for the mean of the shard and for the scaled sum."""
    inputs, labels = examples(BATCH)
    shard = slice(0, 8) if rank == 0 else slice(8, BATCH)
    gradients = []
    for reduction, scale in (("mean", 1.0), ("sum", RANKS / BATCH)):
        model = network()
        replica = DistributedDataParallel(model)  # without a name, its hooks would be gone before backward
        (scale * F.cross_entropy(replica(inputs[shard]), labels[shard], reduction=reduction)).backward()
        gradients.append(model.weight.grad.clone())  # type: ignore[union-attr]
    return gradients


if __name__ == "__main__":
    of_means, of_sums = on_ranks(averaged)[0]
    whole, (batch_inputs, batch_labels) = network(), examples(BATCH)
    F.cross_entropy(whole(batch_inputs), batch_labels).backward()
    one: Tensor = whole.weight.grad  # type: ignore[assignment]
    show("wrong", "mean of each shard, percent by which the gradient differs", relative(of_means - one, one))
    show("right", "W/B times the sum, percent by which the gradient differs", relative(of_sums - one, one))
