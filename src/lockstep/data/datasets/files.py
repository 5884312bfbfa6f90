"""Splits in memory and of image files, and the base classes of data sets of photographs and of image files."""

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.data_protocols import Source, Split
from lockstep.core.errors import BrokenImage, InputError
from lockstep.core.fields import choice, ranged
from lockstep.core.model_card import INTERPOLATION, TrainedInput
from lockstep.core.rng import SampleRNG
from lockstep.data.datasets.decode import Box, ImageFile, contents, decoding_failure
from lockstep.data.datasets.listing import Files, Member, folded, held_out, within
from lockstep.data.datasets.targets import CLASSES_NAMED, class_notes

AUTO = "auto"
SIZES = ("decode_size", "input_size", "crop")
# torchvision and timm evaluate photographs in this way: the shorter side is resized to 256 pixels, the central 224
# pixels are the model's input.
USUAL_STORED, USUAL_SEEN = 256, 224
LARGEST_SIDE = 16_384  # in pixels: one such image is 3 GB of float32
SMALL_SIDE = 64  # in pixels: photographs up to here are augmented like CIFAR's, larger ones like ImageNet's
# The fields that say how files are read, not which.
DECODING = frozenset({*SIZES, "crop_from", "skip"})
# The files of both splits by `FileSource.place`, listed once in a process; a forked rank inherits the command's.
LISTINGS: dict[Hashable, tuple[Files, Files]] = {}
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class ArraySplit:
    """Examples that are in memory: uint8 images (N, C, H, W) and int64 labels (N,)."""

    images: Tensor
    labels: Tensor

    skip: ClassVar[int] = 0

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: list[int], epoch: int = 0) -> Tensor:
        # NumPy gets large pages for a large result: at 256 px 2.5 times as fast as index_select.
        return torch.from_numpy(self.images.numpy().take(torch.tensor(indices, dtype=torch.int64).numpy(), axis=0))

    def name(self, index: int) -> str:
        return str(index)

    def content(self, index: int) -> bytes:
        return self.images[index].numpy().tobytes()


@dataclass(frozen=True)
class MappedSplit(ArraySplit):
    """A split whose tensors are memory-mapped files: only the rows in use are read, once for all ranks."""


@dataclass(frozen=True)
class Crop:
    """Chooses the boxes that are cut from whole images while they are read: other boxes in each epoch.

    Fields:
        boxes: takes the random numbers of n examples and the sizes of their images, int64 (n, 2) as height and
            width; returns int64 (n, 4) as top, left, height and width.
        size: the (height, width) that a box is resized to.
    """

    boxes: Callable[[SampleRNG, Tensor], Tensor]
    seed: int
    size: tuple[int, int]

    def boxes_for(self, files: list[ImageFile], indices: list[int], epoch: int) -> list[Box]:
        """The boxes of the examples `indices`, whose images are `files`."""
        sizes = torch.tensor([(file.height, file.width) for file in files], dtype=torch.int64).view(-1, 2)
        boxes = self.boxes(SampleRNG(self.seed, epoch, torch.tensor(indices, dtype=torch.int64)), sizes)
        return [(top, left, height, width) for top, left, height, width in boxes.tolist()]


@dataclass(frozen=True)
class FileSplit:
    """Image files, each decoded to RGB and a square of `size` pixels: the shorter side resized, the centre kept.

    With `crop`, a box of the image is decoded instead, a different one in each epoch. `skip` is the most broken
    images that a run leaves out, `interpolation` how images are resized.
    """

    paths: Files | Sequence[Path | Member]
    labels: Tensor
    size: int
    skip: int = 0
    crop: Crop | None = None
    interpolation: str = INTERPOLATION

    images: ClassVar[None] = None

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, indices: list[int], epoch: int = 0) -> Tensor:
        size = (self.size, self.size) if self.crop is None else self.crop.size
        decoded = np.empty((len(indices), 3, *size), dtype=np.uint8)
        files = [self._attempt(index, ImageFile.read, self.paths[index]) for index in indices]
        if self.crop is None:
            for number, (index, file) in enumerate(zip(indices, files, strict=True)):
                decoded[number] = self._attempt(index, file.square, self.size, self.interpolation)
        else:
            boxes = self.crop.boxes_for(files, indices, epoch)
            for number, (index, file, box) in enumerate(zip(indices, files, boxes, strict=True)):
                decoded[number] = self._attempt(index, file.box, box, size, self.interpolation)
        return torch.from_numpy(decoded)

    def name(self, index: int) -> str:
        return str(self.paths[index])

    def content(self, index: int) -> bytes:
        return contents(self.paths[index])

    def _attempt(self, index: int, read: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """`read(*arguments)` for the image `index`. Raises BrokenImage."""
        try:
            return read(*arguments)
        except Exception as error:  # Pillow and the decoders raise all kinds of errors for a damaged file
            raise BrokenImage(index, str(self.paths[index]), decoding_failure(error)) from error


def interpolated(split: Split, interpolation: str) -> Split:
    """The split with this interpolation, if its images are resized while they are read."""
    return replace(split, interpolation=interpolation) if isinstance(split, FileSplit) else split


@dataclass(frozen=True, kw_only=True)
class PhotoSource(Source):
    """A data set of photographs, stored at one shape.

    In the fields, `auto` is the value of the weights that a model starts from, or else the usual value for
    photographs.
    """

    input_size: int | str | None = ranged(AUTO, least=1, most=LARGEST_SIDE, words=(AUTO,))
    crop: int | float | str = ranged(AUTO, above=0.0, most=1, words=(AUTO,))

    @property
    def input_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.image_shape
        if isinstance(self.input_size, int):
            return (channels, self.input_size, self.input_size)
        if self.input_size == AUTO and height == width == USUAL_STORED:
            return (channels, USUAL_SEEN, USUAL_SEEN)
        return self.image_shape

    @property
    def eval_crop(self) -> float:
        if self.crop != AUTO:
            return float(self.crop)
        usual = (self.image_shape[1], self.input_shape[1]) == (USUAL_STORED, USUAL_SEEN)
        return USUAL_SEEN / USUAL_STORED if usual else 1.0

    @property
    def usual_augment(self) -> str:
        return "crop_flip" if min(self.image_shape[1:]) <= SMALL_SIDE else "standard"


@dataclass(frozen=True, kw_only=True)
class FileSource(PhotoSource):
    """A data set of image files.

    An image is stored (in memory or on its way to the device) as a square: its shorter side is resized to
    `decode_size`, and the centre is kept. With `crop_from=file` this holds for evaluation only; in training the boxes
    of the augmentation are cut from the whole images while they are read.
    """

    decode_size: int | str = ranged(AUTO, least=1, most=LARGEST_SIDE, words=(AUTO,))
    crop_from: str = choice("square", "square", "file")
    skip: int = ranged(0, least=0, most=1_000_000_000)
    val_share: float | None = ranged(None, above=0.0, below=1)
    folds: int | None = ranged(None, least=2, most=1000)
    fold: int | None = ranged(None, least=0, most=999)
    limit: float | None = ranged(None, above=0.0, most=1e9)

    mean: ClassVar[tuple[float, ...]] = (0.485, 0.456, 0.406)  # ImageNet's
    std: ClassVar[tuple[float, ...]] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        folds = self.folds
        if folds is None and self.fold is not None:
            raise InputError(f"dataset.fold is {self.fold}, but dataset.folds is null; add dataset.folds=5")
        if folds is not None and (self.fold is None or self.fold >= folds):
            every = ",".join(map(str, range(folds))) if folds <= CLASSES_NAMED else f"0,1,...,{folds - 1}"
            raise InputError(
                f"dataset.fold is {'null' if self.fold is None else self.fold}, expected a fold from 0 to "
                f"{folds - 1} to evaluate; all of them: dataset.fold={every} -m"
            )
        if folds is not None and self.val_share is not None:
            raise InputError("dataset.folds and dataset.val_share both choose the evaluation split; leave out one")

    @property
    def is_cut(self) -> bool:
        """Whether the evaluation split is cut from the training split."""
        return self.val_share is not None or self.folds is not None

    def cut(self, whole: Files, names: NDArray[np.bytes_]) -> tuple[Files, Files]:
        """The training and the evaluation split of files with these names. Raises InputError."""
        if self.folds is not None and self.fold is not None:
            return folded(whole, names, self.folds, self.fold)
        assert self.val_share is not None
        return held_out(whole, names, self.val_share)

    @property
    def place(self) -> Hashable:
        """A key that identifies the files of this data set in this process."""
        return type(self), *(repr(getattr(self, field.name)) for field in fields(self) if field.name not in DECODING)

    @abstractmethod
    def list_files(self) -> tuple[Files, Files]:
        """The files of the training and of the evaluation split. Raises InputError."""

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.listings()[0].classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        side = USUAL_STORED if self.decode_size == AUTO else int(self.decode_size)
        return (3, side, side)

    @property
    def usual_augment(self) -> str:
        return "standard" if self.crop_from == "file" else super().usual_augment

    def prepare(self) -> None:
        self.listings()

    def train(self) -> FileSplit:
        return self._split(self.listings()[0])

    def eval(self) -> FileSplit:
        return self._split(self.listings()[1])

    def listings(self) -> tuple[Files, Files]:
        """The files of both splits, listed once per process. Raises InputError."""
        if self.place not in LISTINGS:
            train, val = self.list_files()
            LISTINGS[self.place] = self._limited(train), self._limited(val)
        return LISTINGS[self.place]

    def _limited(self, files: Files) -> Files:
        if self.limit is None:
            return files
        # A member of a shard by its own name: an image that is added moves few others.
        keys = [getattr(files[at], "key", key) for at, key in enumerate(files.keys.tolist())] if files.members else []
        names = [key if isinstance(key, bytes) else str(key).encode() for key in keys or files.keys.tolist()]
        return files.part(within(self.limit, names, files.labels, apart=files.members))

    def fingerprint(self) -> dict[str, dict[str, str]]:
        train, val = self.listings()
        return {"train": train.fingerprint(), "val": val.fingerprint()}

    def notes(self) -> list[str]:
        train, val = self.listings()
        part = "" if self.limit is None else f"{self.limit:.0%}" if self.limit <= 1 else f"{self.limit:,.0f} images"
        limit = [f"dataset.limit leaves {part} of each split: a first try"] if part else []
        return [*train.notes, *val.notes, *limit, *class_notes(val.classes, train.labels, val.labels, self.targets)]

    def refuse_val_share(self, split: str, remedy: str) -> None:
        """Raise InputError if a share is to be held out, although there is a split to evaluate."""
        for key, value in (("val_share", self.val_share), ("folds", self.folds)):
            if value is not None:
                raise InputError(f"dataset.{key} is {value:g}, but {split} too; leave out dataset.{key}, or {remedy}")

    def _split(self, files: Files) -> FileSplit:
        return FileSplit(files, files.labels, self.image_shape[1], self.skip)


def crops_files(source: object) -> bool:
    """Whether the boxes of the augmentation are cut from the files of the training split of `source`."""
    return isinstance(source, FileSource) and source.crop_from == "file"


def with_sizes(source: Source, trained: TrainedInput | None) -> Source:
    """A data set with a number (or null, for the stored size) in place of each `auto`.

    `trained` describes the images of the weights that the model starts from: its sizes replace the usual ones.
    """
    autos = [name for name in SIZES if getattr(source, name, None) == AUTO]
    sized: Any = source
    if trained is not None:
        of_weights = {"input_size": trained.size, "crop": trained.crop}
        sized = replace(sized, **{name: of_weights[name] for name in autos if name in of_weights})
        if "decode_size" in autos:
            # Large enough that the evaluated part need not be enlarged.
            needed = math.ceil((sized.input_size or USUAL_STORED) / sized.crop)
            sized = replace(sized, decode_size=trained.stored or max(USUAL_STORED, needed))
    sizes = {
        "decode_size": sized.image_shape[1],
        "crop": sized.eval_crop,
        # Null where it can be, because stored images may not be square.
        "input_size": None if sized.input_shape == sized.image_shape else sized.input_shape[1],
    }
    return replace(sized, **{name: sizes[name] for name in autos})
