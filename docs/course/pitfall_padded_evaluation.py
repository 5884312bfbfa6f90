"""Padded evaluation: `DistributedSampler` repeats examples until all ranks have equally many, and they count twice.

The model is right about the first class only, and the examples are sorted by class. So the repeated ones, which are
the first ones, are all right, and the score is too high.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from ranks import examples, on_ranks, show

RANKS, EXAMPLES = 4, 41


def score(rank: int) -> tuple[int, float, int, float]:
    """Examples counted and accuracy in percent, with the sampler's shards and with shards that are cut."""
    _, labels = examples(EXAMPLES)
    hits = labels == 0
    padded = torch.tensor(list(DistributedSampler(range(EXAMPLES), shuffle=False)))  # type: ignore[arg-type]
    cut = torch.arange(rank * EXAMPLES // RANKS, (rank + 1) * EXAMPLES // RANKS)
    scores: list[float] = []
    for shard in (padded, cut):
        counts = torch.tensor([int(hits[shard].sum()), len(shard)])
        dist.all_reduce(counts)
        scores += [int(counts[1]), 100 * float(counts[0] / counts[1])]
    return int(scores[0]), scores[1], int(scores[2]), scores[3]


if __name__ == "__main__":
    padded_number, padded_score, number, cut_score = on_ranks(score, RANKS)[0]
    true = 100 * float((examples(EXAMPLES)[1] == 0).double().mean())
    show("wrong", f"{padded_number} examples scored {padded_score:.2f} %, points too many", padded_score - true)
    show("right", f"{number} examples scored {cut_score:.2f} %, points too many", abs(round(cut_score - true, 3)))
