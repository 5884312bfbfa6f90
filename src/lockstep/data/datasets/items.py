"""Any map-style `torch.utils.data.Dataset` as a data set: an option that returns one for each split."""

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor

from lockstep.core.data_protocols import SPLIT_NAMES
from lockstep.core.errors import BrokenImage, InputError, shown
from lockstep.core.fields import choice, pixels, ranged
from lockstep.core.model_card import LABELS, MOST_CHANNELS, TARGETS, class_name
from lockstep.data.datasets import photos
from lockstep.data.datasets.composed import called, groups_of, names_in, stored_targets
from lockstep.data.datasets.decode import GREY, RGB, ImageFile, Pixels
from lockstep.data.datasets.files import FileSource, FileSplit
from lockstep.data.datasets.item import BrokenItem, DatasetItem, UnknownTarget, check_map_style, pixels_of
from lockstep.data.datasets.listing import Files, as_names, short_hash
from lockstep.data.datasets.sizes import AUTO
from lockstep.data.datasets.targets import as_targets, names_of, target_of

ANY = 0  # channels that stay as they are
SAMPLED, AGAIN = 32, 8  # items that are hashed, spread over a split, and how many of them are read again


@dataclass(frozen=True)
class ItemSplit(FileSplit):
    """The items of a Dataset, used like files. With `alike` all of them have the height and width `size`."""

    alike: bool = True

    broken: ClassVar[type[BrokenImage]] = BrokenItem

    def read(self, index: int) -> ImageFile:
        item = self.paths[index]
        assert isinstance(item, DatasetItem)
        pixels = item.pixels()
        channels, *size = self.preprocessing.image_shape
        if {channels, pixels.shape[2]} == {GREY, RGB}:  # as of files
            pixels = photos.grey(pixels) if channels == GREY else np.repeat(pixels, RGB, axis=2)
        height, width, own = pixels.shape
        if own != channels or (self.alike and [height, width] != size):
            resize = "; resize it in __getitem__, or all of them with dataset.decode_size=N" * (own == channels)
            raise ValueError(
                f"its image has {own} channels of {height}x{width}, expected {channels} of {size[0]}x{size[1]}, as "
                f"the first one to train on{resize}"
            )
        return ImageFile(b"", height, width, lambda _: pixels, channels=ANY)


@dataclass(frozen=True)
class Items:
    """A Dataset as a split, and what a sample of its items says.

    Fields:
        sampled: the targets of the sample, by index.
        shape: (height, width, channels) of the first image that can be used.
        alike: whether the images of the sample have one size.
        digest: a hash of the sample's pixels; empty if reading them again gave others.
        lock: what is held while an item is read.
    """

    dataset: Any
    split: str
    sampled: Mapping[int, Any]
    shape: tuple[int, int, int]
    alike: bool
    digest: str
    lock: AbstractContextManager[Any]

    @classmethod
    def of(cls, dataset: Any, split: str, lock: AbstractContextManager[Any]) -> Self:
        """Read the sample. Raises InputError: this is no map-style Dataset, or no item can be used."""
        check_map_style(dataset, split)
        number = min(SAMPLED, len(dataset))
        images, sampled, broken = dict[int, Pixels](), dict[int, Any](), list[BrokenItem]()
        for index in (n * len(dataset) // number for n in range(number)):
            item = DatasetItem(dataset, index, split)
            try:
                image, sampled[index] = item.read()
                images[index] = pixels_of(image)
            except ValueError as error:
                broken.append(BrokenItem(index, str(item), str(error)))
        if not images:
            raise broken[0]
        again = {at: DatasetItem(dataset, at, split).pixels() for at in list(images)[:AGAIN]}
        same = all(np.array_equal(image, images[at]) for at, image in again.items())
        digest = short_hash(b"".join(image.tobytes() for image in images.values()))
        height, width, channels = next(iter(images.values())).shape
        alike = len({image.shape[:2] for image in images.values()}) == 1
        return cls(dataset, split, sampled, (height, width, channels), alike, digest if same else "", lock)

    def place(self, index: int) -> str:
        return str(DatasetItem(self.dataset, index, self.split))

    def targets(self, targets: str, names: Sequence[str]) -> list[Any]:
        """The targets of all items as `as_targets` takes them, from the Dataset or else from its items."""
        stored = stored_targets(self.dataset)
        if stored is None or any(_plain(stored[at]) != _plain(target) for at, target in self.sampled.items()):
            stored = [self._target(index) for index in range(len(self.dataset))]
        return [_as_stored(target, targets, names, self.place(index)) for index, target in enumerate(stored)]

    def _target(self, index: int) -> Any:
        item = DatasetItem(self.dataset, index, self.split)
        try:
            return item.read()[1]
        except ValueError as error:
            raise UnknownTarget(index, str(item), str(error)) from error

    def files(self, targets: Sequence[Any], kind: str, names: tuple[str, ...]) -> Files:
        """The split as it is cut and read, for `targets` of this kind."""
        random = (
            f"the Dataset of the {SPLIT_NAMES[self.split]} split draws random numbers of its own, so a run is only "
            "the same up to them; the option augment draws the same ones everywhere",
        )
        number, groups = len(self.dataset), groups_of(self.dataset)
        return Files(
            lambda index: DatasetItem(self.dataset, int(index), self.split, self.lock),
            np.arange(number),
            as_targets(targets, kind, names, self.place, ""),
            names,
            identity=f"{self.split}, {number:,} items, {self.digest or 'random'}",
            notes=() if self.digest else random,
            member_names=as_names(map(str, range(number))),
            groups=None if groups is None else as_names(groups),
        )


DATASETS: dict[Hashable, dict[str, Items]] = {}  # by `FileSource.place` without targets, as `LISTINGS`


@dataclass(frozen=True, kw_only=True)
class DatasetOption(FileSource):
    """A data set of Datasets of torch, one for each split, with items (image, target) that are read by index.

    An image is uint8, or floats from 0 to 1: a tensor (C, H, W), an array of NumPy (H, W, C), either one also
    (H, W), or an image of Pillow. A target is the number or the name of a class; with `task=multilabel` a tensor or
    an array with a 0 or 1 for each label, or a list of names; with `task=regression` a number or several. An item
    may also be a mapping with `image` and `label`.

    All targets are read once at the start: from an attribute `targets` or `labels` of the Dataset if it agrees with
    its items, or else from all items. A method `group(index)` of the Dataset names what has to stay in one split,
    such as a patient. A Dataset that draws random numbers is named in a note: a run is the same up to them.
    """

    # size in pixels of a stored image, the side of a square or [height,width]; see `fit`. null: the items have one
    # size, and keep it. `auto`: null if the items of a sample have one size, or else the size for files
    decode_size: Any = pixels(AUTO, AUTO, None)
    # channels of an image; grey ones become RGB with 3, and colours grey with 1. null: those of the first item
    channels: Any = ranged(None, least=1, most=MOST_CHANNELS)
    targets: str = choice(AUTO, AUTO, *TARGETS)  # `classes`, `labels` or `values`; `auto`: the task's

    thread_safe: ClassVar[bool] = True
    """Whether several threads may read items of a Dataset at once."""
    part: ClassVar[str] = "split"
    val_remedy: ClassVar[str] = (
        "return one in val_dataset(), or evaluate a share of each class with dataset.val_share=0.1"
    )
    test_split: ClassVar[None] = None  # see `FileSource`

    @abstractmethod
    def train_dataset(self) -> Any:
        """The Dataset to train on. Each process calls it, and gets the same items at each call."""

    def val_dataset(self) -> Any:
        """The Dataset to evaluate. With `val_share` or `folds` it is the test, if there is no other."""
        return None

    def test_dataset(self) -> Any:
        """The Dataset to test the best weights on, once; None for no test."""
        return None

    @property
    def names(self) -> Sequence[str]:
        """The names of the classes, labels or values; without them, the Dataset's, or else names by the targets."""
        return ()

    @property
    def changes(self) -> bool:
        return self.crops_files or not self._items()["train"].digest

    @property
    def image_shape(self) -> tuple[int, int, int]:
        height, width, channels = self._items()["train"].shape
        if self.decode_size is not None:
            _, height, width = super().image_shape
        return (self.channels or channels, height, width)

    def located(self) -> Self:
        splits = self._items().values() if self.decode_size == AUTO else ()
        one_size = all(items.alike for items in splits) and len({items.shape[:2] for items in splits}) == 1
        return replace(self, decode_size=None) if one_size else self

    def _items(self) -> dict[str, Items]:
        """The Datasets of the splits, made and sampled once in a process. Raises InputError."""
        place = replace(self, targets=AUTO).place
        if place not in DATASETS:
            DATASETS[place] = self._sampled()
        return DATASETS[place]

    def _sampled(self) -> dict[str, Items]:
        train, val, test = (called(self, f"{name}_dataset") for name in SPLIT_NAMES)
        if self.is_cut:
            val, test = None, val if test is None else test
        elif val is None:
            raise InputError(f"dataset: there is no Dataset to evaluate; {self.val_remedy}")
        datasets = zip(SPLIT_NAMES, (train, val, test), strict=True)
        lock = nullcontext() if self.thread_safe else Lock()
        return {name: Items.of(items, name, lock) for name, items in datasets if name == "train" or items is not None}

    def list_files(self) -> dict[str, Files]:
        splits = self._items()
        names = tuple(class_name(str(name)) for name in self.names) or names_in(splits["train"].dataset)
        _check_different(names)
        targets = {name: items.targets(self.targets, names) for name, items in splits.items()}
        if not names:
            column = self.targets.removesuffix("s")
            names = names_of(targets["train"], self.targets, splits["train"].place, column, gaps=False)
        return {name: items.files(targets[name], self.targets, names) for name, items in splits.items()}

    def _split(self, files: Files) -> ItemSplit:
        return ItemSplit(files, files.labels, self.preprocessing, self.skip, alike=self.decode_size is None)


def _check_different(names: Sequence[str]) -> None:
    """Raise InputError if two classes, labels or values share a name: their examples would be mixed up."""
    first = {name: number for number, name in reversed([*enumerate(names)])}
    for number, name in enumerate(names):
        if first[name] != number:
            raise InputError(
                f"dataset: {shown(name)} is the name of number {first[name]} and of number {number}; give each a "
                "name of its own"
            )


def _plain(target: Any) -> Any:
    """A target as Python's numbers, texts and lists of them."""
    if isinstance(target, Tensor | np.ndarray | np.generic):
        return target.tolist()
    return [_plain(cell) for cell in target] if isinstance(target, list | tuple | set) else target


def _as_stored(target: Any, targets: str, names: Sequence[str], place: str) -> Any:
    """A target as `as_targets` takes it."""
    value = _plain(target)
    if targets == LABELS and isinstance(value, list) and isinstance(target, Tensor | np.ndarray):
        value = [float(cell) for cell in value]

    def name(cell: Any) -> str:
        if isinstance(cell, int) and names:
            if not 0 <= cell < len(names):
                raise InputError(f"dataset: {place} has the label {cell}, expected 0 to {len(names) - 1}; correct it")
            return names[cell]
        if not isinstance(cell, str | int):
            raise InputError(
                f"dataset: {place} has a label of type {type(cell).__name__}, expected the number or the name of a "
                "class; correct it"
            )
        return str(cell)

    return target_of(value, targets, place, name)
