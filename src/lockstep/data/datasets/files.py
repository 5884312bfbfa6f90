"""Splits of image files, and the base class of the data sets that have them."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median_low
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from lockstep.config.roles import fields_with
from lockstep.core.data_protocols import SPLIT_NAMES, Crop, Split
from lockstep.core.errors import BrokenImage, InputError, StorageError, out_of_memory, percent, reason_of
from lockstep.core.fields import PATTERN, Role, choice, pixels, ranged, ruled, sides
from lockstep.core.model_card import FITS, MOST_CHANNELS, Preprocessing, per_channel, stored_side
from lockstep.core.rng import SampleRNG
from lockstep.core.safe_read import UnreadableStorage
from lockstep.data.datasets.decode import RGB, ImageFile, contents
from lockstep.data.datasets.listing import Files, Member, check_groups
from lockstep.data.datasets.sizes import AUTO, USUAL_SEEN, USUAL_STORED, PhotoSource, keeps_whole
from lockstep.data.datasets.splitting import CutSource, Examples
from lockstep.data.datasets.targets import class_notes, lists_note

LOOKED_AT = 9  # files by which the usual size is told
SMALLEST_INPUT = 32  # pixels; the networks of the libraries take no smaller input
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# The files of each split by `FileSource.place`, listed once in a process; a forked rank inherits the command's.
LISTINGS: dict[Hashable, dict[str, Files]] = {}
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class FileSplit:
    """Image files, each decoded as its `preprocessing` says (see `ImageFile.stored`).

    With `crop`, a box of the image is decoded instead, a different one in each epoch and each time that an example
    comes in it: index example + n * len is the repetition n of an example. `skip` is the most broken
    images that a run skips. With `scaled` a JPEG is decoded at the smallest scale that is enough: for training.
    """

    paths: Files | Sequence[Path | Member]
    labels: Tensor
    preprocessing: Preprocessing
    skip: int = 0
    crop: Crop | None = None
    scaled: bool = False

    images: ClassVar[None] = None
    broken: ClassVar[type[BrokenImage]] = BrokenImage

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, indices: list[int], epoch: int = 0) -> Tensor:
        how = self.preprocessing
        channels, *stored = how.image_shape
        size = stored if self.crop is None else self.crop.size
        numbers, indices = indices, [index % len(self) for index in indices]
        decoded = np.empty((len(indices), channels, *size), dtype=np.uint8)
        files = [self._attempt(index, self.read, index) for index in indices]
        if self.crop is None:
            for number, (index, file) in enumerate(zip(indices, files, strict=True)):
                decoded[number] = self._attempt(index, file.stored, how, self.scaled)
        else:
            sizes = torch.tensor([(file.height, file.width) for file in files], dtype=torch.int64).view(-1, 2)
            draws = SampleRNG(self.crop.seed, epoch, torch.tensor(numbers, dtype=torch.int64))
            boxes = self.crop.boxes(draws, sizes).tolist()
            for number, (index, file, box) in enumerate(zip(indices, files, boxes, strict=True)):
                decoded[number] = self._attempt(index, file.box, box, self.crop.size, how.interpolation)
        return torch.from_numpy(decoded)

    def read(self, index: int) -> ImageFile:
        """An image that is not decoded yet. Raises any exception."""
        return ImageFile.read(self.paths[index], self.preprocessing.image_shape[0])

    def name(self, index: int) -> str:
        return str(self.paths[index])

    def content(self, index: int) -> bytes:
        return contents(self.paths[index])

    def _attempt(self, index: int, read: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """`read(*arguments)` for the image `index`. Raises BrokenImage, or UnreadableStorage."""
        try:
            return read(*arguments)
        except StorageError:
            raise
        except Exception as error:  # Pillow and the decoders raise all kinds of errors for a damaged file
            name = str(self.paths[index])
            if isinstance(error, OSError) and error.errno is not None:
                raise UnreadableStorage(
                    name, f"is an image of the data set and cannot be read ({error.strerror})"
                ) from error
            if memory := out_of_memory(error, name):
                raise memory from error
            raise self.broken(index, name, reason_of(error)) from error


@dataclass(frozen=True, kw_only=True)
class FileSource(PhotoSource, CutSource):
    """Image files, stored with `decode_size` (see `ImageFile.stored`).

    With `crop_from=file` this holds for evaluation only: in training boxes are cut from the whole images while they
    are read.
    """

    # channels of an image: 3 is RGB and 1 is grey, of photos; any other number is read from `.npy` files (uint8,
    # height x width x channels) and from TIFF files of so many bands. See docs/data.md#grey-images-and-other-channels
    channels: int = ranged(RGB, least=1, most=MOST_CHANNELS)
    # size in pixels of a stored image, the side of a square or [height,width]; see `fit`. `auto`: 256, or the size
    # that suits the weights that the model starts from, a rectangular `input_size`, or another `fit` than `crop`
    decode_size: Any = pixels(AUTO, AUTO)
    # how a file becomes a stored image. `crop`: resized until it covers the size, and the centre kept; `pad`: resized
    # until it fits into the size, with a frame of the mean colour; `squash`: resized to the size, with another aspect
    # ratio. `auto`: as for the weights that the model starts from, or else `crop`. See docs/data.md#sizes
    fit: str = choice(AUTO, AUTO, *FITS)
    # what training cuts its random resized crops from: the stored square image (`square`), or the whole image in its
    # file (`file`)
    crop_from: str = choice("square", "square", "file")
    # corrupt images to skip at most, over both splits; with 0 the first one ends the run
    skip: int = ranged(0, least=0, most=1_000_000_000)
    # share of each class of the training split to test on, taken before `val_share` and `folds` choose what is
    # evaluated. A hash of the names chooses the images
    test_share: float | None = ranged(None, above=0.0, below=1)
    # keeps images that belong together (a patient, a video) in one split: a regular expression, such as `patient\d+`,
    # that matches a part of each image's path, key or file name, or of its `group_column`. The match, or its first
    # group in brackets, names the group
    group_pattern: str | None = ruled(None, PATTERN)

    reads_files = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.test_share is not None and getattr(self, test := f"test_{self.part}") is not None:
            raise InputError(f"dataset.test_share and dataset.{test} both choose the test split; remove one")

    @property
    def place(self) -> Hashable:
        """A key that identifies the files of this data set in this process."""
        of_reading = fields_with("dataset", self, Role.pixels, Role.limit)  # they say how files are read, not which
        names = (field.name for field in fields(self) if field.name not in of_reading)
        return type(self), *(repr(getattr(self, name)) for name in names)

    @abstractmethod
    def list_files(self) -> dict[str, Files]:
        """The files of the splits that `wanted` names, by its keys. Raises InputError."""

    def wanted(self, places: Callable[[str], Set[str]]) -> dict[str, str]:
        """The splits to list, by their fields; `places` has the folders or parts of a name. Raises InputError."""
        train, val, test = keys = [f"{split}_{self.part}" for split in SPLIT_NAMES]
        names = {key: name for key in keys if (name := getattr(self, key)) is not None}
        others = {key: places(name) for key, name in names.items()}
        tested = others.pop(test, set())
        if self.is_cut:
            key, value = ("folds", self.folds) if self.val_share is None else ("val_share", self.val_share)
            if unused := sorted(others.pop(val) - others[train] - tested):
                raise InputError(
                    f"dataset.{key} is {value:g}, but dataset.{val} names {unused[0]} too; remove dataset.{key}, "
                    f"test on it with dataset.{test}={names[val]}, or name none with dataset.{val}=none"
                )
            del names[val]
        for key, parts in others.items():
            if both := sorted(parts & tested):
                cut = ", or evaluate a share of the training split with dataset.val_share=0.1" * (key == val)
                both_keys = f"dataset.{test} and dataset.{key}"
                raise InputError(f"{both_keys} both name {both[0]}; name another, or remove dataset.{test}{cut}")
        return names

    @property
    def crops_files(self) -> bool:
        return self.crop_from == "file"

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.listings()["train"].classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        if self.decode_size != AUTO:
            return (self.channels, *sides(self.decode_size))
        if not (keeps_whole(self) or isinstance(self.input_size, list)):
            return (self.channels, USUAL_STORED, USUAL_STORED)
        seen = USUAL_SEEN if self.input_size in (AUTO, None) else self.input_size
        height, width = (stored_side(side, self.eval_crop) for side in sides(seen))
        return (self.channels, height, width)

    @property
    def eval_crop(self) -> float:
        if self.crop == AUTO and keeps_whole(self):
            return 1.0
        if self.crop == AUTO and self.decode_size == AUTO and isinstance(self.input_size, list):
            return USUAL_SEEN / USUAL_STORED
        return super().eval_crop

    @property
    def mean(self) -> tuple[float, ...]:
        return per_channel(IMAGENET_MEAN, self.image_shape[0])

    @property
    def std(self) -> tuple[float, ...]:
        return per_channel(IMAGENET_STD, self.image_shape[0])

    @property
    def usual_augment(self) -> str:
        return "standard" if self.crop_from == "file" else super().usual_augment

    def prepare(self) -> None:
        self.listings()

    def train(self) -> FileSplit:
        return replace(self._split(self.listings()["train"]), scaled=True)

    def eval(self) -> FileSplit:
        return self._split(self.listings()["val"])

    def test(self) -> FileSplit | None:
        files = self.listings().get("test")
        return None if files is None else self._split(files)

    def read_as(self, split: Split, preprocessing: Preprocessing, crop: Crop | None = None) -> Split:
        if not isinstance(split, FileSplit):  # of an extension
            return split
        return replace(split, preprocessing=preprocessing, crop=crop)

    def listings(self) -> dict[str, Files]:
        """The files of each split, listed and cut once per process. Raises InputError."""
        if self.place not in LISTINGS:
            splits = {key.partition("_")[0]: files for key, files in self.list_files().items()}
            if self.group_pattern is not None:
                splits = {name: files.grouped(self.group_pattern) for name, files in splits.items()}
            check_groups(splits)
            if self.test_share is not None:
                examples = self._examples(splits["train"])
                splits |= splits["train"].without("test", examples.share("test_share", self.test_share))
            if self.is_cut:
                splits |= splits["train"].without("val", self.evaluated(self._examples(splits["train"])))
            if self.limit is not None:
                splits = {
                    name: files.part(self._examples(files).within(self.limit)) for name, files in splits.items()
                }
            LISTINGS[self.place] = splits
        return LISTINGS[self.place]

    def _examples(self, files: Files) -> Examples:
        groups = None if files.groups is None else files.groups.tolist()
        members = files.member_names is not None
        return Examples(files.names.tolist(), files.labels, files.classes, self.targets, groups, apart=members)

    def fingerprint(self) -> dict[str, dict[str, str]]:
        return {name: files.fingerprint() for name, files in self.listings().items()}

    def notes(self) -> list[str]:
        splits = self.listings()
        limit = self.limit or 0.0
        part = percent(limit) if limit <= 1 else f"{limit:,.0f} images"
        limited = [f"dataset.limit leaves {part} of each split: a first try"] if limit else []
        labels = {name: files.labels for name, files in splits.items()}
        return [
            *dict.fromkeys(note for files in splits.values() for note in files.notes),
            *limited,
            *lists_note(self.class_names, self.targets, self.label_separator),
            *class_notes(self.class_names, labels, self.targets),
            *self._enlarged_note(),
        ]

    def enlarged_side(self) -> int | None:
        """The side of the input, in pixels, that suits files that are much smaller than it; None if they are not."""
        split = self.train()
        some, seen = range(0, len(split), max(1, len(split) // LOOKED_AT)), list[int]()
        for index in [*some][:LOOKED_AT]:
            with suppress(Exception):  # a broken file is told where it is read
                file = split.read(index)
                seen.append(min(file.height, file.width))
        side = max(SMALLEST_INPUT, median_low(seen)) if seen else 0
        return side if 0 < side <= min(self.input_shape[1:]) / 2 else None

    def _enlarged_note(self) -> list[str]:
        if (side := self.enlarged_side()) is None:
            return []
        size = min(self.input_shape[1:])
        return [
            f"the files are at most about {side} pixels high or wide, and are enlarged to {size}: "
            f"dataset.input_size={side} dataset.decode_size={side} is {(size / side) ** 2:.0f} times less work"
        ]

    @property
    def label_separator(self) -> str | None:
        """See `lists_note`."""
        return None

    def _split(self, files: Files) -> FileSplit:
        return FileSplit(files, files.labels, self.preprocessing, self.skip)
