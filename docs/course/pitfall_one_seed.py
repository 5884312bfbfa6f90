"""One seed for all ranks: every rank draws the same random numbers, for augmentation and for dropout.

The initial weights must be equal on all ranks. What is drawn per example must not be.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ranks import on_ranks, show

EXAMPLES, PIXELS, SHIFT = 32, 3, 9


def shifts(seed: int) -> Tensor:
    """The shift in x and y, and whether to flip, for each example of a rank's shard."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SHIFT, (EXAMPLES, PIXELS), generator=generator)


def noise(seed: int) -> Tensor:
    """What dropout adds to the gradient of a shard, as one number for each of many weights."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(100_000, generator=generator, dtype=torch.float64)


def compare(rank: int) -> tuple[int, float, int, float]:
    """For one seed, and for seeds by rank: equal augmentations, and the variance of the averaged noise in percent."""
    results: list[float] = []
    for seed in (0, 1000 + rank):
        drawn = [torch.empty(EXAMPLES, PIXELS, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(drawn, shifts(seed))
        average = noise(seed) / 2
        dist.all_reduce(average)
        results += [int((drawn[0] == drawn[1]).all(1).sum()), 100 * float(average.var())]
    return int(results[0]), results[1], int(results[2]), results[3]


if __name__ == "__main__":
    equal, variance, by_rank, variance_by_rank = on_ranks(compare)[0]
    show("wrong", f"one seed, pairs of {EXAMPLES} with one augmentation for both ranks", equal)
    show("right", f"a seed by rank, pairs of {EXAMPLES} with one augmentation", by_rank)
    print(f"noise of the averaged gradient, in percent of one rank's: {variance:.0f} and {variance_by_rank:.0f}")
