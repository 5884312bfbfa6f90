"""What the parts of the data path promise each other, from a data set to the images of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lockstep.core.component import Component
from lockstep.core.errors import BrokenImage
from lockstep.core.world import World

# The broken images among those that were read (blank there), by their indices.
Broken = Mapping[int, BrokenImage]
# A request for several images: an epoch, and indices (int64, on the CPU). The result: uint8 images.
ReadRequest = tuple[int, Tensor]
ReadResult = tuple[Tensor, Broken]
# Reads many batches, in order, onto the device.
ImageReader = Callable[[Iterable[ReadRequest]], Iterator[ReadResult]]


class Split(Protocol):
    """The examples of one split, in a fixed order, each stored at one shape.

    `labels` is int64 of shape (N,). `images` is uint8 of shape (N, C, H, W) where the split is an array,
    else None; `fetch` gives any of its images, decoded on the spot.
    """

    @property
    def labels(self) -> Tensor: ...

    @property
    def images(self) -> Tensor | None: ...

    @property
    def skip(self) -> int:
        """The most images that may be broken."""

    def __len__(self) -> int: ...

    def fetch(self, indices: list[int], epoch: int = 0) -> Tensor:
        """uint8 images of shape (len(indices), C, H, W). Raises InputError for one that cannot be read.

        `epoch` is for a split that cuts other boxes from its images in each.
        """


class Stepped(Protocol):
    """What belongs to one step of a run."""

    @property
    def step(self) -> int: ...


class MicroBatch(Stepped, Protocol):
    """The examples of one forward pass: labels (b,), and sample indices of which the first b are theirs."""

    @property
    def epoch(self) -> int: ...

    @property
    def number(self) -> int:
        """Which piece of its global batch it is, from 0."""

    @property
    def labels(self) -> Tensor: ...

    @property
    def indices(self) -> Tensor: ...


class Source(Component, Protocol):
    """Where images and labels come from. A subclass states only what differs from the usual data set here."""

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of a stored image."""

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """The same of what the model sees."""
        return self.image_shape

    @property
    def eval_crop(self) -> float:
        """The central share of a stored image's side that is evaluated."""
        return 1.0

    @property
    def mean(self) -> tuple[float, ...]:
        """Per channel, of pixels from 0 to 1; `std` likewise."""

    @property
    def std(self) -> tuple[float, ...]: ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """By label; empty where they have none."""
        return ()

    def fingerprint(self) -> Mapping[str, Mapping[str, str]]:
        """What identifies the examples of each split, "train" and "val", wherever they are kept.

        Each part of a split that can differ has a key of its own, so that an error can name it.
        """

    @property
    def usual_augment(self) -> str:
        """The option of `augment` for a job that chooses none."""
        return "none"

    def notes(self) -> list[str]:
        """Sentences for the start of a run: which data is left out or missing. Raises InputError."""
        return []

    def prepare(self) -> None:
        """Make sure that the data is there; download it under a lock where that is allowed. Raises InputError."""
        self.train()
        self.eval()

    def train(self) -> Split: ...

    def eval(self) -> Split: ...


@dataclass(frozen=True, kw_only=True)
class LoaderContext:
    """What a loader that chooses is told of a run, for one rank.

    Fields:
        splits: to train on and to evaluate.
        gigabytes: that both need as uint8.
        reads: images that this machine's ranks read in the whole run, those of evaluation too.
        boxes: whether each epoch cuts other boxes from the files.
        training_rate: tries how many images per second the model trains on; None where that takes too long.
    """

    world: World
    splits: tuple[Split, Split]
    gigabytes: float
    reads: int
    boxes: bool
    training_rate: Callable[[], float | None]


class ImageLoader(Component, Protocol):
    """How images reach the device: it decides when they are read and moved, not which."""

    def choose(self, context: LoaderContext) -> tuple[ImageLoader, str]:
        """The loader to use, all of its `auto` chosen, and why."""

    def held_gb(self, context: LoaderContext) -> float:
        """The device memory (in GB) that images will take from a rank for good, beyond what they have already."""

    def order_device(self, world: World) -> torch.device:
        """The device on which the order of the examples is computed."""

    def stride(self, shard: int, values: int, world: World) -> int:
        """The steps to read together, for shards of so many images of so many values (pixels times channels)."""

    def feed(self, split: Split, world: World) -> ImageReader:
        """What reads the images of a split. Collective."""


class SampleRNG(Protocol):
    """The random numbers of a batch of examples, each float32 (b,) in [0, 1)."""

    @property
    def epoch(self) -> int:
        """Counted from 0."""

    def uniform(self, n: int) -> Tensor:
        """Number `n` of each example in this epoch."""

    def epoch_invariant(self, n: int) -> Tensor:
        """Number `n` of each example, the same in all epochs."""


class Augment(Component, Protocol):
    """Random changes of training images, a pure function of (seed, epoch, sample index)."""

    def apply(self, images: Tensor, draws: SampleRNG, size: tuple[int, int]) -> Tensor:
        """Change a batch.

        Args:
            images: uint8 (B, C, H, W).
            draws: the random numbers of its examples.
            size: the (height, width) the model wants; an augmentation that resamples may go there at once.
        """


@runtime_checkable
class BoxAugment(Augment, Protocol):
    """An augmentation that begins with a box of each image, which the reader of the files can cut instead."""

    def boxes(self, draws: SampleRNG, sizes: Tensor) -> Tensor:
        """The boxes, int64 (b, 4) as top, left, height and width, in images of `sizes`, int64 (b, 2)."""

    @property
    def after_crop(self) -> Augment:
        """What is left to do after the boxes have been cut and resized."""
