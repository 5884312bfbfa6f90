"""What the scripts of this folder share: the model and the data of the MNIST tutorials, and how a script is called.

    lockstep ladder --script benchmarks/peers/plain.py --script benchmarks/peers/lightning_trainer.py

`lockstep ladder` runs each script as a rung. A script trains for some epochs, evaluates, and prints a line of JSON:
the images per second of the training, and the accuracy.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

BATCH, LR = 64, 1e-3


class BasicNet(nn.Module):
    """The tutorials' network; returns the logits (b, 10) of images (b, 1, 28, 28)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        logits: Tensor = self.fc2(self.dropout2(F.relu(self.fc1(x))))
        return logits


def arguments() -> argparse.Namespace:
    """The arguments with which a ladder calls a script. Sets the seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    return options


def splits(root: str) -> tuple[datasets.MNIST, datasets.MNIST]:
    """The training and the test images, normalised as in the tutorials."""
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train, test = (datasets.MNIST(root, train=train, transform=transform) for train in (True, False))
    return train, test


@torch.inference_mode()
def top1(model: nn.Module, test: datasets.MNIST) -> float:
    """The accuracy of a model in percent."""
    model.eval()
    device = next(model.parameters()).device
    hits = sum(
        int((model(images.to(device)).argmax(1).cpu() == labels).sum())
        for images, labels in DataLoader(test, batch_size=1000)
    )
    return 100 * hits / len(test)


def say(images: int, seconds: float, accuracy: float) -> None:
    """Print the line that a ladder reads."""
    print(json.dumps({"img_per_s": images / seconds, "top1": accuracy}))
