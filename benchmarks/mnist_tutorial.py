"""The MNIST recipe against the tutorial's own plain loop: accuracy and elapsed time, in turns, on the same machine.

    python benchmarks/mnist_tutorial.py --data-root DATA --seeds 0 1 2

DATA holds MNIST/raw. The plain loop is the tutorials' code: torchvision's MNIST through PIL, ToTensor and Normalize,
a DataLoader without workers, AdamW, no logging, one evaluation at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def plain(data_root: str, seed: int) -> float:
    """The tutorial's loop for one epoch; returns test top-1 in percent."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    class BasicNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(1, 32, 3, 1)
            self.conv2 = nn.Conv2d(32, 64, 3, 1)
            self.dropout1 = nn.Dropout(0.25)
            self.dropout2 = nn.Dropout(0.5)
            self.fc1 = nn.Linear(9216, 128)
            self.fc2 = nn.Linear(128, 10)
            self.act = F.relu

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.act(self.conv1(x))
            x = self.act(self.conv2(x))
            x = self.dropout1(F.max_pool2d(x, 2))
            x = self.act(self.fc1(torch.flatten(x, 1)))
            return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)

    torch.manual_seed(seed)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train = DataLoader(datasets.MNIST(data_root, train=True, transform=transform), batch_size=64, shuffle=True)
    test = DataLoader(datasets.MNIST(data_root, train=False, transform=transform), batch_size=64)
    model = BasicNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for images, labels in train:
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        hits = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in test)
    return 100 * hits / len(test.dataset)  # type: ignore[arg-type]


def ours(data_root: str, seed: int, overrides: list[str]) -> float:
    """The recipe through the command line; returns test top-1 in percent."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                sys.executable,
                "train.py",
                "experiment=mnist_tutorial",
                f"seed={seed}",
                f"data_root={data_root}",
                f"hydra.run.dir={folder}/run",
                f"output_root={folder}",
                *overrides,
            ],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return float(json.loads(Path(folder, "run", "summary.json").read_text())["best"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plain-seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="of the recipe, e.g. schedule=cosine")
    arguments = parser.parse_args()
    root = str(Path(arguments.data_root).absolute())
    if arguments.plain_seed is not None:
        print(plain(root, arguments.plain_seed))
        return
    figures: dict[str, list[tuple[float, float]]] = {"lockstep": [], "plain loop": []}
    for seed in arguments.seeds:
        started = time.perf_counter()
        top1 = ours(root, seed, arguments.overrides)
        figures["lockstep"].append((top1, time.perf_counter() - started))
        started = time.perf_counter()
        command = [sys.executable, __file__, "--data-root", root, "--plain-seed", str(seed)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
        figures["plain loop"].append((float(done.stdout), time.perf_counter() - started))
        print(f"seed {seed}:", {name: rows[-1] for name, rows in figures.items()}, flush=True)
    for name, rows in figures.items():
        top1s, seconds = zip(*rows, strict=True)
        print(
            f"{name:>12}: top-1 {statistics.median(top1s):.2f} % ({min(top1s):.2f} to {max(top1s):.2f}), "
            f"process start to end {statistics.median(seconds):.1f} s"
        )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
