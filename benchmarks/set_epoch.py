"""What a forgotten `sampler.set_epoch` costs in accuracy: the network of the MNIST tutorials, with and without it.

    python benchmarks/set_epoch.py --data-root DATA --images 3000 --epochs 5 --seeds 5

One process takes the global batches of two ranks of `DistributedSampler`. The two trainings of a seed have the same
weights at first, the same masks and the same first epoch, and take turns. `lost` is in points of test top-1.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from measure import parser, show, write
from tutorial import BATCH, LR, BasicNet, splits

RANKS = 2


def trained(images: Tensor, labels: Tensor, epochs: int, seed: int, *, announce: bool) -> BasicNet:
    """The network after some epochs, with or without `set_epoch`."""
    torch.manual_seed(seed)
    model = BasicNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    numbers = TensorDataset(labels)
    samplers: list[DistributedSampler[Any]] = [
        DistributedSampler(numbers, num_replicas=RANKS, rank=rank, seed=seed) for rank in range(RANKS)
    ]
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch if announce else 0)
        for batch in torch.tensor([*zip(*samplers, strict=True)]).flatten().split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model


@torch.inference_mode()
def top1(model: BasicNet, images: Tensor, labels: Tensor) -> float:
    hits = [
        model(some).argmax(1) == right for some, right in zip(images.split(1000), labels.split(1000), strict=True)
    ]
    return 100 * float(torch.cat(hits).float().mean())


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--data-root", required=True)
    options.add_argument("--images", type=int, default=3000, help="the first training images")
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument("--seeds", type=int, default=5)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    both = splits(arguments.data_root)
    train, test = ((split.data[:, None] / 255 - 0.1307) / 0.3081 for split in both)
    train = train[: arguments.images]
    rows = {}
    for seed in range(arguments.seeds):
        scores = {}
        for name, announce in (("with set_epoch", True), ("without", False)):
            model = trained(train, both[0].targets[: len(train)], arguments.epochs, seed, announce=announce).eval()
            scores[name] = top1(model, test, both[1].targets)
        rows[f"seed {seed}"] = {**scores, "lost": scores["with set_epoch"] - scores["without"]}
    rows["median"] = {name: statistics.median(row[name] for row in rows.values()) for name in rows["seed 0"]}
    show(f"test top-1 in %, {len(train):,} images, {arguments.epochs} epochs", rows, ratios=False)
    write(arguments.json, {"set_epoch": rows})
