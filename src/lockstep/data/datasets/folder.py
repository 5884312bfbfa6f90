"""Image files in class folders: `PATH/train/CLASS/*.jpg` and `PATH/val/CLASS/*.jpg`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lockstep.core.data_protocols import Source
from lockstep.core.fields import pathname, ranged
from lockstep.data.datasets.listing import Listing, class_names, listing
from lockstep.data.datasets.splits import FileSplit

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
LARGEST_SIDE = 16_384  # in pixels: one such image is 3 GB of float32


class CropFrom(enum.StrEnum):
    """Crop from the stored square, or from the whole image of a file."""

    square = "square"
    file = "file"


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Any data set with one folder per class.

    An image is stored (in memory or on its way to the device) as a square of `decode_size`: its shorter side is
    resized to that and the centre is kept. With `crop_from=file` this holds for evaluation only; in training the
    boxes of the augmentation are cut from the whole images while they are read.

    Fields:
        path: the folder that holds the splits.
        train_folder, val_folder: the names of the splits in it.
        decode_size: side in pixels of a stored image.
        input_size: side in pixels of what the model sees; null is `decode_size`.
        crop: the central share of a stored image's side that is evaluated.
        crop_from: what an augmentation that cuts boxes cuts them from in training.
        skip: the most broken images that a run leaves out; with 0 the first one ends the run.
    """

    path: str = pathname("???")
    train_folder: str = pathname("train")
    val_folder: str = pathname("val")
    decode_size: int = ranged(256, least=1, most=LARGEST_SIDE)
    input_size: int | None = ranged(None, least=1, most=LARGEST_SIDE)
    crop: float = ranged(1.0, above=0, most=1)
    crop_from: CropFrom = CropFrom.square
    skip: int = ranged(0, least=0, most=1_000_000_000)

    mean: ClassVar[tuple[float, ...]] = IMAGENET_MEAN
    std: ClassVar[tuple[float, ...]] = IMAGENET_STD

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (3, self.decode_size, self.decode_size)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        size = self.input_size or self.decode_size
        return (3, size, size)

    @property
    def eval_crop(self) -> float:
        return self.crop

    def prepare(self) -> None:
        self.train()
        self.eval()

    def train(self) -> FileSplit:
        return self._split(self.train_folder)

    def eval(self) -> FileSplit:
        return self._split(self.val_folder)

    @property
    def class_names(self) -> tuple[str, ...]:
        return class_names(Path(self.path, self.train_folder))

    def fingerprint(self) -> dict[str, dict[str, str]]:
        return {
            "train": self.listing(self.train_folder).fingerprint(),
            "val": self.listing(self.val_folder).fingerprint(),
        }

    def listing(self, name: str) -> Listing:
        """The files of the split that lies in the folder `name`."""
        return listing(Path(self.path, name), Path(self.path, self.train_folder))

    def _split(self, name: str) -> FileSplit:
        files = self.listing(name)
        return FileSplit(files, files.labels, self.decode_size, self.skip)


@dataclass(frozen=True, kw_only=True)
class ImageNet(Folder):
    """ImageNet-1k in class folders: trained at 224 pixels, evaluated on the central 224 pixels of a square of 256."""

    input_size: int | None = 224
    crop: float = 0.875
    crop_from: CropFrom = CropFrom.file


def crops_files(source: Source) -> bool:
    """Whether the boxes of the augmentation are cut from the files of the training split of `source`."""
    return isinstance(source, Folder) and source.crop_from is CropFrom.file
