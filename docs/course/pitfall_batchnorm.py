"""BatchNorm statistics: each rank normalises with the mean and variance of its own shard.

The gradient of two ranks then differs from the gradient of one device with the whole batch. The right way adds up the
sums of all ranks in the forward pass, and their gradients in the backward pass, as `nn.SyncBatchNorm` does on GPUs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ranks import examples, on_ranks, relative, show

BATCH, RANKS = 16, 2


class Sum(torch.autograd.Function):
    """The sum over all ranks; its gradient is the sum of the gradients of all ranks."""

    @staticmethod
    def forward(ctx: object, part: Tensor) -> Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class SyncedNorm(nn.Module):
    """Batch norm over the shards of all ranks, without running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        number = Sum.apply(x.new_tensor([len(x)]))
        mean = Sum.apply(x.sum(0)) / number
        variance = Sum.apply((x - mean).square().sum(0)) / number
        return (x - mean) / (variance + 1e-5).sqrt()


def gradient(norm: nn.Module, shard: slice, ranks: int) -> Tensor:
    """The gradient of the first layer for the loss over the whole batch."""
    inputs, labels = examples(BATCH)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), norm, nn.Linear(8, 4)).double()
    (F.cross_entropy(model(inputs[shard]), labels[shard], reduction="sum") / BATCH).backward()
    first: Tensor = model[0].weight.grad  # type: ignore[assignment]
    if ranks > 1:
        dist.all_reduce(first)
    return first


def both(rank: int) -> list[Tensor]:
    shard = slice(rank * BATCH // RANKS, (rank + 1) * BATCH // RANKS)
    return [gradient(norm, shard, RANKS) for norm in (nn.BatchNorm1d(8, affine=False), SyncedNorm())]


if __name__ == "__main__":
    own, synced = on_ranks(both)[0]
    one = gradient(nn.BatchNorm1d(8, affine=False), slice(BATCH), 1)
    show("wrong", "own statistics, percent by which the gradient differs from one device's", relative(own - one, one))
    show("right", "statistics of all ranks, percent by which it differs", relative(synced - one, one))
