"""The protocols of the data path, from a data set to the images of a step, and the shard of a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from lockstep.core.errors import BrokenImage
from lockstep.core.fields import Component
from lockstep.core.model_card import CLASSES, CROP, Preprocessing
from lockstep.core.plan import share
from lockstep.core.rng import SampleRNG
from lockstep.core.world import World

# The names of splits in words.
SPLIT_NAMES = {"train": "training", "val": "evaluation", "test": "test"}
# The broken images among the images of a read, by index. The read returns a blank image for each.
Broken = Mapping[int, BrokenImage]
# A request for several images: an epoch, and indices (int64, on the CPU). The result: uint8 images.
ReadRequest = tuple[int, Tensor]
ReadResult = tuple[Tensor, Broken]
# Reads batches onto the device, in the order of the requests.
ImageReader = Callable[[Iterable[ReadRequest]], Iterator[ReadResult]]
# `Augment.apply`.
Apply = Callable[[Tensor, SampleRNG, tuple[int, int]], Tensor]


class Split(Protocol):
    """The examples of one split, in a fixed order, each stored at one shape.

    `labels` is int64 of shape (N,), or float32 (N, K) for labels of which an example has several and for values, see
    `Source.targets`. `images` is uint8 of shape (N, C, H, W) if the split is an array, else None.
    `fetch` decodes and returns any of the images.
    """

    @property
    def labels(self) -> Tensor: ...

    @property
    def images(self) -> Tensor | None: ...

    @property
    def skip(self) -> int:
        """The largest number of images that may be broken."""

    def __len__(self) -> int: ...

    def fetch(self, indices: list[int], epoch: int = 0) -> Tensor:
        """uint8 images of shape (len(indices), C, H, W). Raises InputError for an image that cannot be read.

        Only a split that cuts other boxes from its images in each epoch uses `epoch`.
        """

    def name(self, index: int) -> str:
        """The path of an example, or its number if the split has no files."""

    def content(self, index: int) -> bytes:
        """The bytes of an example as stored, by which equal ones are found. Raises OSError or ValueError."""


@dataclass(frozen=True)
class Crop:
    """Chooses the boxes that are cut from whole images while they are read: other boxes in each epoch.

    `boxes` takes the random numbers of n examples and the (height, width) of their images, int64 (n, 2), and returns
    int64 (n, 4): top, left, height and width. A box is resized to `size`, (height, width).
    """

    boxes: Callable[[SampleRNG, Tensor], Tensor]
    seed: int
    size: tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """One of the `pieces` that a global batch of `count` examples is cut into, on the device.

    Fields:
        step, epoch: of the global batch.
        images: (b, C, H, W), augmented and normalised, but not mixed.
        known_labels, indices: (b,) or (b, k), as `Split.labels`; int64 (b,). If examples come several
            times in an epoch, an index also says which time it is (see `balanced_order`).
        count: the number of examples in the global batch.
        number: the number of this piece, from 0.
        mix_partner: whether the three tensors have one more row, the mix partner of the piece's last example. It is
            false for a piece without examples.
        labels: the labels of the piece's own examples.
    """

    step: int
    epoch: int
    images: Tensor
    known_labels: Tensor
    indices: Tensor
    count: int
    number: int
    pieces: int
    mix_partner: bool = False
    labels: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", self.known_labels[:-1] if self.mix_partner else self.known_labels)

    @property
    def _span(self) -> slice:
        """The positions of the piece's own examples in the global batch."""
        return share(self.count, self.pieces, self.number)

    def first(self, examples: int) -> Shard:
        """The first `examples` of the piece's own examples; for all of them, the piece itself."""
        if examples == self.labels.shape[0]:
            return self
        return self._with_rows(slice(examples), mix_partner=False)

    def _with_rows(self, rows: slice, *, mix_partner: bool) -> Shard:
        images, labels, indices = self.images[rows], self.known_labels[rows], self.indices[rows]
        return replace(self, images=images, known_labels=labels, indices=indices, mix_partner=mix_partner)

    def micro_batches(self, parts: int) -> Sequence[tuple[Shard, bool]]:
        """The shard cut into `parts` pieces, which may be empty: each piece, and whether it is the last one.

        The global batch decides the cuts: two ranks with two pieces each have the four pieces of one rank.
        """
        if parts == 1:
            return ((self, True),)
        pieces = []
        for part in range(parts):
            piece = replace(self, number=self.number * parts + part, pieces=self.pieces * parts)
            start, stop = piece._span.start - self._span.start, piece._span.stop - self._span.start
            mix_partner = self.mix_partner and start < stop
            rows = slice(start, stop + mix_partner)
            pieces.append((piece._with_rows(rows, mix_partner=mix_partner), part == parts - 1))
        return pieces


class Source(Component, Protocol):
    """A data set: images and labels. A subclass overrides only the defaults that it changes."""

    path: str = ""
    """The file or folder of the data, as the user knows it."""
    val_share: float | None = None
    """The share of the training images that is evaluated instead; None if there is a split for it."""
    examples: int = 1
    """The number of images, if the data set makes them in memory."""
    part: ClassVar[str] = ""
    """What a split is, if keys name them: `train_PART`, `val_PART` and `test_PART`."""
    reads_files: ClassVar[bool] = False
    """Whether images are decoded from files while a run reads them."""

    @property
    def crops_files(self) -> bool:
        """Whether the boxes of the augmentation are cut from the files of the training split."""
        return False

    @property
    def changes(self) -> bool:
        """Whether reading a training image again can give other pixels."""
        return self.crops_files

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    @abstractmethod
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of a stored image."""

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image that the model gets."""
        return self.image_shape

    @property
    def fit(self) -> str:
        """How a file became a stored image, one of `model_card.FITS`."""
        return CROP

    @property
    def eval_crop(self) -> float:
        """The central part of a stored image that is evaluated, as a share of its side."""
        return 1.0

    @property
    @abstractmethod
    def mean(self) -> tuple[float, ...]:
        """The mean of each channel, for pixels from 0 to 1; `std` is the standard deviation."""

    @property
    @abstractmethod
    def std(self) -> tuple[float, ...]: ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, labels or values, in their order; empty if they have no names."""
        return ()

    @property
    def targets(self) -> str:
        """What labels are, one of `model_card.TARGETS`: a class, a share of each of several labels, or values."""
        return CLASSES

    @property
    def generated_bytes(self) -> int:
        """The size of the images that the data set makes in memory, however many; 0 if it reads them."""
        return 0

    @abstractmethod
    def fingerprint(self) -> Mapping[str, Mapping[str, str]]:
        """Values that identify the examples of each split, wherever the files are: "train", "val" and any "test".

        Each part of a split that can differ has a separate key, so that an error can name the part.
        """

    @property
    def downloads(self) -> bool:
        """Whether `prepare` can fetch data that is missing."""
        return False

    def located(self) -> Self:
        """The data set with the names of the parts that its files have in place of `auto`."""
        return self

    @property
    def usual_augment(self) -> str:
        """The option of `augment` for a job that does not set one."""
        return "none"

    def notes(self) -> list[str]:
        """Sentences for the start of a run: which data is skipped or missing. Raises InputError."""
        return []

    def prepare(self) -> None:
        """Make sure that the data is there; download it under a lock if downloads are allowed. Raises InputError."""
        self.train()
        self.eval()
        self.test()

    @abstractmethod
    def train(self) -> Split: ...

    @abstractmethod
    def eval(self) -> Split: ...

    def test(self) -> Split | None:
        """The examples that a run scores once, with its best weights; None if there is no such split."""
        return None

    @property
    def preprocessing(self) -> Preprocessing:
        """The facts above as one value; a job has its own mean, standard deviation and interpolation."""
        return Preprocessing(
            image_shape=self.image_shape,
            input_shape=self.input_shape,
            eval_crop=self.eval_crop,
            mean=self.mean,
            std=self.std,
            fit=self.fit,
        )

    def read_as(self, split: Split, preprocessing: Preprocessing, crop: Crop | None = None) -> Split:
        """One of the splits; where it decodes files, it does it as described, and cuts these boxes from them."""
        return split


def splits_of(source: Source) -> dict[str, Split]:
    """The splits of a data set, by the keys of `SPLIT_NAMES`."""
    splits = zip(SPLIT_NAMES, (source.train(), source.eval(), source.test()), strict=True)
    return {name: split for name, split in splits if split is not None}


@dataclass(frozen=True, kw_only=True)
class LoaderContext:
    """The facts about a run, on one rank, from which a loader chooses its settings.

    Fields:
        world: the place of this rank.
        splits: the training split and the evaluation split.
        gigabytes: the size of both splits as uint8.
        reads: the images that this machine's ranks read in the whole run, including evaluations.
        changes: whether each epoch reads other pixels of an image, see `Source.changes`.
        training_rate: measures how many images per second the model trains on; returns None if the measurement takes
            too long.
    """

    world: World
    splits: tuple[Split, Split]
    gigabytes: float
    reads: int
    changes: bool
    training_rate: Callable[[], float | None]


class ImageLoader(Component, Protocol):
    """How images reach the device: decides when images are read and moved, not which images.

    A subclass overrides only the defaults that it changes.
    """

    @property
    def decodes_once(self) -> bool:
        """Whether each image is decoded once for all epochs."""
        return False

    workers: int | str = 0
    """The threads of each rank that read."""
    prefetch: int = 0
    """The batches that each worker keeps ready."""

    def check(self) -> None:
        """Raise InputError for a key that has no effect because of another key of the loader."""
        return

    def choose(self, context: LoaderContext) -> tuple[ImageLoader, str]:
        """The loader to use, with a value for each `auto`, and the reason for the choice."""
        return self, "as configured"

    def held_gb(self, context: LoaderContext) -> float:
        """The device memory, in GB, that a rank will still allocate for images and hold until the run ends."""
        return 0.0

    def order_device(self, world: World) -> torch.device:
        """The device on which the order of the examples is computed."""
        return torch.device("cpu")

    def stride(self, shard: int, values: int, world: World) -> int:
        """The number of steps to read together, for shards of `shard` images with `values` pixels times channels."""
        return 1  # enough for a loader that reads ahead

    @abstractmethod
    def feed(self, split: Split, world: World) -> ImageReader:
        """The reader of a split's images. Collective."""


class Augment(Component, Protocol):
    """Random changes of training images, a pure function of (seed, epoch, sample index)."""

    def for_data(self, source: Source) -> Augment:
        """The augmentation of these images, with a value for each `auto`."""
        return self

    def check_channels(self, channels: int) -> None:
        """Raise InputError if images of so many channels cannot have it."""
        return

    def on_device(self, interpolation: str, *, cropped: bool) -> Apply:
        """What changes a batch on the device: `apply`, or what is left of it where files were `cropped`."""
        return self.apply

    @abstractmethod
    def apply(self, images: Tensor, draws: SampleRNG, size: tuple[int, int]) -> Tensor:
        """Change a batch.

        Args:
            images: uint8 (B, C, H, W).
            draws: the random numbers of its examples.
            size: the (height, width) of the model's input. An augmentation that resamples may return this size.
        """
