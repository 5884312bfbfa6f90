"""A resume that skips or repeats samples: the job stops in the middle of an epoch and resumes.

A loader that starts again repeats the first part of the epoch. A loader that skips as many batches as were done, but
shuffles again, repeats some samples and skips others. The right order is a function of seed and epoch only.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from ranks import show

EXAMPLES, BATCH, STOPPED_AFTER = 96, 8, 5
Order = list[list[int]]


def shuffled(seed: int) -> Order:
    """The batches of an epoch from a loader that shuffles with a generator seeded by `seed`."""
    numbers = TensorDataset(torch.arange(EXAMPLES))
    sampler = RandomSampler(numbers, generator=torch.Generator().manual_seed(seed))
    return [batch.tolist() for (batch,) in DataLoader(numbers, batch_size=BATCH, sampler=sampler)]


def damage(before: Order, after: Order) -> tuple[int, int]:
    """How many samples of the epoch were repeated, and how many were skipped."""
    counts = Counter(number for batch in before + after for number in batch)
    return sum(times - 1 for times in counts.values()), EXAMPLES - len(counts)


if __name__ == "__main__":
    epoch = 3
    before = shuffled(epoch)[:STOPPED_AFTER]
    restarted = damage(before, shuffled(epoch))
    reshuffled = damage(before, shuffled(12345)[STOPPED_AFTER:])
    exact = damage(before, shuffled(epoch)[STOPPED_AFTER:])
    show("wrong", f"the epoch starts again, samples of {EXAMPLES} repeated", restarted[0])
    show(
        "wrong",
        f"5 batches of a new order are skipped, samples repeated (and {reshuffled[1]} never seen)",
        reshuffled[0],
    )
    show("right", f"the epoch's own order continues, samples repeated (and {exact[1]} never seen)", exact[0])
