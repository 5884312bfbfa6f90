"""The data sets: each gives the examples of two splits, as pixels in memory or as files that are decoded."""

from lockstep.data.datasets.builtin import CIFAR10, CIFAR100, MNIST, Digits, Fake, FashionMNIST
from lockstep.data.datasets.folder import Folder, ImageNet
from lockstep.data.datasets.packed import Packed

__all__ = ["CIFAR10", "CIFAR100", "MNIST", "Digits", "Fake", "FashionMNIST", "Folder", "ImageNet", "Packed"]
