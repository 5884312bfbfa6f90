"""The two kinds of split: an array in memory, and image files that are decoded when they are needed."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from lockstep.core.data_protocols import Split
from lockstep.core.errors import BrokenImage, InputError
from lockstep.core.model_card import INTERPOLATION
from lockstep.core.rng import SampleRNG
from lockstep.data.datasets.decode import Box, ImageFile, contents
from lockstep.data.datasets.listing import Files, Member


def check_shapes(images: Tensor, labels: Tensor, shape: tuple[int, int, int], where: str) -> None:
    """Raise InputError if the images do not have the given shape, or if there are not as many labels."""
    if images.shape[1:] != shape or len(images) != len(labels):
        actual = "x".join(str(size) for size in images.shape[1:])
        expected = "x".join(str(size) for size in shape)
        raise InputError(
            f"dataset: {where} has {len(images)} images of {actual} and {len(labels)} labels, "
            f"expected as many of each, and images of {expected}"
        )


def check_labels(labels: Tensor, classes: int, where: str) -> None:
    """Raise InputError for the first label that is not a class."""
    wrong = ((labels < 0) | (labels >= classes)).nonzero()
    if len(wrong):
        index = int(wrong[0])
        raise InputError(
            f"dataset: example {index} of {where} has label {int(labels[index])}, expected 0 to {classes - 1}"
        )


def decoding_failure(error: Exception) -> str:
    """The reason that a decoder's error gives, in one line."""
    # torchvision puts the line of its C++ source before the reason.
    return re.sub(r"^.*\.cpp:\d+, ", "", (str(error).strip() or type(error).__name__).splitlines()[0])


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
        files = []
        for index in indices:
            try:
                files.append(ImageFile.read(self.paths[index]))
            except Exception as error:  # Pillow raises all kinds of errors for a damaged header
                raise self._broken(index, error) from error
        boxes = self.crop.boxes_for(files, indices, epoch) if self.crop is not None else None
        for number, file in enumerate(files):
            try:
                decoded[number] = (
                    file.square(self.size, self.interpolation)
                    if boxes is None
                    else file.box(boxes[number], size, self.interpolation)
                )
            except Exception as error:  # the decoders raise all kinds of errors for a damaged file
                raise self._broken(indices[number], error) from error
        return torch.from_numpy(decoded)

    def name(self, index: int) -> str:
        return str(self.paths[index])

    def content(self, index: int) -> bytes:
        return contents(self.paths[index])

    def _broken(self, index: int, error: Exception) -> BrokenImage:
        return BrokenImage(index, str(self.paths[index]), decoding_failure(error))


def interpolated(split: Split, interpolation: str) -> Split:
    """The split with this interpolation, where its images are resized while they are read."""
    return replace(split, interpolation=interpolation) if isinstance(split, FileSplit) else split
