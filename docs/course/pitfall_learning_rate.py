"""Learning rate and batch: with the batch of one device on each of two, an epoch has half of the steps.

With the same learning rate the model then learns about half as much in the same epochs. Here all gradients are exact,
so the usual rule repairs it: twice the batch, twice the learning rate. Keeping the global batch needs no repair.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from ranks import examples, on_ranks, show

EXAMPLES, BATCH, EPOCHS, RATE = 512, 16, 2, 0.002


def trained(batch: int, rate: float, rank: int = 0, ranks: int = 1) -> float:
    """The loss over all examples after the epochs; `batch` is the batch of each rank."""
    inputs, labels = examples(EXAMPLES)
    model = nn.Linear(16, 4, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    network = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for epoch in range(EPOCHS):
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(epoch))
        for step in order.split(batch * ranks):
            shard = step[rank::ranks]
            F.cross_entropy(network(inputs[shard]), labels[shard]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return float(F.cross_entropy(model(inputs), labels).detach())


def on_two(rank: int) -> list[float]:
    """The same rate with twice the global batch; twice the rate; the same global batch with the same rate."""
    return [trained(size, rate, rank, 2) for size, rate in ((BATCH, RATE), (BATCH, 2 * RATE), (BATCH // 2, RATE))]


if __name__ == "__main__":
    one = trained(BATCH, RATE)
    same_rate, twice_the_rate, same_batch = on_ranks(on_two)[0]
    show(
        "wrong",
        f"twice the batch, same rate, percent of loss above one device's {one:.3f}",
        100 * (same_rate / one - 1),
    )
    show("  and", "twice the batch, twice the rate, percent of loss above", 100 * (twice_the_rate / one - 1))
    show("right", "same global batch, same rate, percent of loss above", round(100 * (same_batch / one - 1), 6) + 0.0)
