"""The data sets: each has a training and an evaluation split, of pixels in memory or of files that are decoded."""

from lockstep.data.datasets.builtin import Digits, Fake
from lockstep.data.datasets.csv_table import CSV
from lockstep.data.datasets.folder import Folder, ImageNet
from lockstep.data.datasets.hf import HF
from lockstep.data.datasets.packed import Packed
from lockstep.data.datasets.published import CIFAR10, CIFAR100, MNIST, FashionMNIST

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "CSV",
    "HF",
    "MNIST",
    "Digits",
    "Fake",
    "FashionMNIST",
    "Folder",
    "ImageNet",
    "Packed",
]
