"""The data sets: each has a training and an evaluation split, of pixels in memory or of files that are decoded."""

from lockstep.data.datasets.builtin import CIFAR10, CIFAR100, MNIST, Digits, Fake, FashionMNIST
from lockstep.data.datasets.folder import Folder, ImageNet
from lockstep.data.datasets.packed import Packed
from lockstep.data.datasets.tables import CSV, HF
from lockstep.data.datasets.webdataset import WebDataset
