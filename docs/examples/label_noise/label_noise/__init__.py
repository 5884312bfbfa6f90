"""Training labels of which a share is wrong, as in section 3.3 of Foret et al. 2021 (SAM, arXiv 2010.01412)."""

import torch
from torch import Tensor

import lockstep
from lockstep.core.fields import ranged
from lockstep.data.datasets.builtin import CIFAR10, Digits


def with_wrong_labels(labels: Tensor, classes: int, share: float) -> Tensor:
    """The labels (n,), about a `share` of which is replaced by another class. The same ones at each call."""
    generator = torch.Generator().manual_seed(0)
    wrong = torch.rand(len(labels), generator=generator) < share
    another = (labels + torch.randint(1, classes, labels.shape, generator=generator)) % classes
    return torch.where(wrong, another, labels)


@lockstep.option("dataset")
class NoisyDigits(Digits):
    """The digits, with wrong labels in the training split."""

    noise: float = ranged(0.4, least=0, most=1)  # share of the training labels that are wrong

    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        images, labels = super().read(train)
        return images, with_wrong_labels(labels, self.classes, self.noise) if train else labels


@lockstep.option("dataset", "noisy_cifar10")
class NoisyCIFAR10(CIFAR10):
    """CIFAR-10, with wrong labels in the training split."""

    noise: float = ranged(0.4, least=0, most=1)  # share of the training labels that are wrong

    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        images, labels = super().read(train)
        return images, with_wrong_labels(labels, self.classes, self.noise) if train else labels
