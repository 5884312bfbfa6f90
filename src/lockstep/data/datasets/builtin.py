"""The data sets that fit in memory and need no files: digits and random images. And the base class of array sets."""

import functools
import hashlib
import importlib.util
import math
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.core.data_protocols import Source
from lockstep.core.errors import InputError
from lockstep.core.fields import ranged
from lockstep.data.datasets.files import AUTO, LARGEST_SIDE
from lockstep.data.datasets.splits import ArraySplit, check_labels, check_shapes


@dataclass(frozen=True, kw_only=True)
class ArraySource(Source):
    """A data set that fits in memory."""

    input_size: int | str | None = ranged(AUTO, least=1, most=LARGEST_SIDE, words=(AUTO,))

    classes: ClassVar[int] = 10
    image_shape: ClassVar[tuple[int, int, int]]
    mean: ClassVar[tuple[float, ...]]
    std: ClassVar[tuple[float, ...]]
    class_names: ClassVar[tuple[str, ...]] = ()
    usual_augment: ClassVar[str] = "none"

    @property
    def input_shape(self) -> tuple[int, int, int]:
        channels = self.image_shape[0]
        if isinstance(self.input_size, int):
            return (channels, self.input_size, self.input_size)
        return self.image_shape

    @abstractmethod
    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        """The uint8 images (N, C, H, W) and int64 labels (N,) of the training or the evaluation split."""

    def train(self) -> ArraySplit:
        return _arrays(self, True)

    def eval(self) -> ArraySplit:
        return _arrays(self, False)

    def fingerprint(self) -> dict[str, dict[str, str]]:
        return {"train": _hashes(self, True), "val": _hashes(self, False)}


@functools.cache
def _arrays(source: ArraySource, train: bool) -> ArraySplit:
    """A split, read once per process."""
    images, labels = source.read(train)
    where = "the training split" if train else "the evaluation split"
    check_shapes(images, labels, source.image_shape, where)
    check_labels(labels, source.classes, where)
    return ArraySplit(images, labels)


@functools.cache
def _hashes(source: ArraySource, train: bool) -> dict[str, str]:
    """The sha256 of the images and of the labels of a split, once per process."""
    split = _arrays(source, train)
    parts = {"images": split.images, "labels": split.labels}
    return {name: hashlib.sha256(part.contiguous().numpy().data).hexdigest() for name, part in parts.items()}


@dataclass(frozen=True, kw_only=True)
class Digits(ArraySource):
    """The 1,797 handwritten digits that come with scikit-learn: 8x8 pixels, 17 levels of grey.

    Every fifth example of each class (355 in all) is the evaluation split.
    """

    image_shape = (1, 8, 8)
    mean = (0.3049,)
    std = (0.3754,)
    usual_augment = "shift"

    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(np.loadtxt(_digits_file(), delimiter=",", dtype=np.int64))
        levels, labels = rows[:, :-1].view(-1, 8, 8), rows[:, -1]
        number_in_class = F.one_hot(labels).cumsum(0).gather(1, labels[:, None])[:, 0] - 1
        chosen = (number_in_class % 5 == 4) != train
        return (levels[chosen] * (255 / 16)).to(torch.uint8)[:, None], labels[chosen]


def _digits_file() -> Path:
    """scikit-learn's file of digits. Each line has the 64 levels of a digit, from 0 to 16, and its label.

    `load_digits` reads the same file, but importing scikit-learn takes most of a second.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("dataset=digits comes with scikit-learn, which is not installed: pip install scikit-learn")
    return Path(spec.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")


@dataclass(frozen=True, kw_only=True)
class Fake(Source):
    """Random images and labels in memory, to time the model without reading files."""

    examples: int = ranged(1024, least=1, most=1_000_000_000)
    classes: int = ranged(1000, least=1, most=1_000_000)
    channels: int = ranged(3, least=1, most=1024)
    size: int = ranged(224, least=1, most=LARGEST_SIDE)

    @property
    def mean(self) -> tuple[float, ...]:
        return (0.5,) * self.channels

    @property
    def std(self) -> tuple[float, ...]:
        return (0.25,) * self.channels

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (self.channels, self.size, self.size)

    @property
    def generated_bytes(self) -> int:
        return (self.examples + self.examples // 4) * math.prod(self.image_shape)

    def prepare(self) -> None:
        """There is nothing to fetch."""

    def train(self) -> ArraySplit:
        return _random(self, self.examples, seed=1)

    def eval(self) -> ArraySplit:
        return _random(self, max(1, self.examples // 4), seed=2)

    def fingerprint(self) -> dict[str, dict[str, str]]:
        """Empty: the number and the shape of the examples determine them, and are compared elsewhere."""
        return {"train": {}, "val": {}}


@functools.cache
def _random(source: Fake, n: int, seed: int) -> ArraySplit:
    """A split of `n` random images, made once per process."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (n, *source.image_shape), dtype=torch.uint8, generator=generator)
    return ArraySplit(images, torch.randint(source.classes, (n,), generator=generator))
