"""One item of a map-style Dataset of torch: its image and its target, or what is wrong with it."""

import errno
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lockstep.core.data_protocols import SPLIT_NAMES
from lockstep.core.errors import BrokenImage, InputError, StorageError, escaped
from lockstep.core.model_card import MOST_CHANNELS
from lockstep.core.safe_read import UnreadableStorage
from lockstep.data.datasets.arrays import as_bytes
from lockstep.data.datasets.composed import TARGET_NAMES, called, line_of
from lockstep.data.datasets.decode import GREY, RGB, Pixels
from lockstep.data.datasets.preprocess import to_rgb

IMAGE_NAMES = ("image", "img", "pixel_values")  # of an image, in items that are mappings
USUAL = (GREY, RGB, 4)  # the numbers of channels by which an image with the wrong order of axes is told


class BrokenItem(BrokenImage):
    """An item of a Dataset cannot be used. The arguments are as for BrokenImage."""

    @property
    def failure(self) -> str:
        _, item, reason = self.args
        return escaped(f"{item}: {reason}", keep="")

    def told(self, skip: str) -> str:
        return f"dataset: {self.failure}; correct it, or skip up to N such items with {skip}"


class UnknownTarget(BrokenItem):
    """An item cannot be used, and no attribute has its target, so that it cannot be skipped."""

    def told(self, skip: str) -> str:
        return f"dataset: {self.failure}; correct it, or leave it out with torch.utils.data.Subset"


@dataclass(frozen=True)
class DatasetItem:
    items: Any
    index: int
    split: str
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def read(self) -> tuple[Any, Any]:
        """Its image and its target. Raises ValueError with the line of the Dataset's own code that raised.

        Raises UnreadableStorage, MemoryError: the item may be sound.
        """
        try:
            with self.lock:
                item = self.items[self.index]
        except (StorageError, MemoryError):
            raise
        except Exception as error:  # the code is not ours
            place = line_of(error, self.items)
            if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
                raise UnreadableStorage(str(self), f"cannot be read ({error.strerror}, {place})") from error
            raise ValueError(f"{type(error).__name__}: {error} ({place})") from error
        if isinstance(item, Mapping):
            keys = [next((key for key in names if key in item), None) for names in (IMAGE_NAMES, TARGET_NAMES)]
            if None in keys:
                raise ValueError(f"it has {', '.join(map(str, item)) or 'nothing'}, expected image and label")
            item = tuple(item[key] for key in keys)
        if not isinstance(item, tuple | list) or len(item) != 2:
            number = f" and length {len(item)}" if isinstance(item, tuple | list) else ""
            raise ValueError(f"it is of type {type(item).__name__}{number}, expected (image, target)")
        return item[0], item[1]

    def pixels(self) -> Pixels:
        """Its image, uint8 (height, width, channels). Raises ValueError."""
        return pixels_of(self.read()[0])

    def contents(self) -> bytes:
        return self.pixels().tobytes()

    def __str__(self) -> str:
        return f"item {self.index} of the {SPLIT_NAMES[self.split]} split"


def pixels_of(image: Any) -> Pixels:
    """An image of an item, uint8 (height, width, channels). Raises ValueError with the line that converts it."""
    if isinstance(image, Image.Image):
        return np.array(image.convert("L"))[..., None] if image.mode in ("1", "L") else to_rgb(image)
    is_tensor = isinstance(image, Tensor)
    array = image.detach().cpu().numpy() if is_tensor else np.asarray(image)
    channels, other = (0, -1) if is_tensor else (-1, 0)
    if array.ndim == 2:
        array = array[..., None]
    elif array.ndim == 3 and array.shape[other] in USUAL and array.shape[channels] not in USUAL:
        array = array[:0]
    elif array.ndim == 3 and is_tensor:
        array = np.moveaxis(array, 0, 2)
    if 0 in array.shape or array.ndim != 3 or array.shape[2] > MOST_CHANNELS:
        expected = "(channels, height, width)" if is_tensor else "(height, width, channels)"
        raise ValueError(
            f"its image is of type {type(image).__name__} and of shape {(*np.shape(image),)}, expected {expected}"
        )
    return as_bytes(array, "its image")


def check_map_style(dataset: Any, split: str) -> None:
    lacks = [name for name in ("__getitem__", "__len__") if not hasattr(type(dataset), name)]
    if isinstance(dataset, IterableDataset):
        lacks = ["__getitem__"]
    where = f"dataset: the Dataset of the {SPLIT_NAMES[split]} split, of type {type(dataset).__name__},"
    if isinstance(dataset, DataLoader):
        raise InputError(f"{where} makes batches, expected the Dataset that it takes them from: give its .dataset")
    if lacks:
        raise InputError(
            f"{where} has no {' and no '.join(lacks)}, so no example can be read by its index, as an exact order and "
            "resume need; define both"
        )
    if not called(dataset, "__len__"):
        raise InputError(f"{where} has no items; correct it")
