"""The two kinds of split: an array in memory, and image files that are decoded when asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.errors import InputError

# By the formats' names in Pillow, which reads the headers; only these decoders are ever tried. Those of
# torchvision are faster, but its GIF decoder reads all frames.
TORCHVISION = ("JPEG", "PNG", "WEBP")
PILLOW = ("GIF", "BMP", "DIB", "PPM", "TIFF")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff"})
# The most that a header may say: a file of a few kB can ask for any amount of memory.
PIXELS = 2**27


class BrokenImage(InputError):
    """An image that cannot be decoded. Its arguments: index, path, reason."""

    @property
    def what(self) -> str:
        index, path, reason = self.args
        return f"image {index}, {path}, cannot be decoded ({reason})"

    def __str__(self) -> str:
        return f"dataset: {self.what}; remove or replace the file, or leave out up to N of them with dataset.skip=N"


def check_shapes(images: Tensor, labels: Tensor, shape: tuple[int, int, int], where: str) -> None:
    """Raise InputError for images of another shape than they should have, or as many labels as there are not."""
    if images.shape[1:] != shape or len(images) != len(labels):
        found = "x".join(str(size) for size in images.shape[1:])
        expected = "x".join(str(size) for size in shape)
        raise InputError(
            f"dataset: {where} has {len(images)} images of {found} and {len(labels)} labels, "
            f"expected as many of each, and images of {expected}"
        )


def check_labels(labels: Tensor, classes: int, where: str) -> None:
    """Raise InputError for the first label that is not a class."""
    wrong = ((labels < 0) | (labels >= classes)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise InputError(f"dataset: example {at} of {where} has label {int(labels[at])}, expected 0 to {classes - 1}")


@dataclass(frozen=True)
class ArraySplit:
    """Examples that are in memory: uint8 images (N, C, H, W) and int64 labels (N,)."""

    images: Tensor
    labels: Tensor

    skip: ClassVar[int] = 0

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: list[int]) -> Tensor:
        # NumPy gets large pages for a large result: at 256 px 2.5 times as fast as index_select.
        return torch.from_numpy(self.images.numpy().take(torch.tensor(indices, dtype=torch.int64).numpy(), axis=0))


@dataclass(frozen=True)
class FileSplit:
    """Image files, each decoded to a square of `size` pixels: the shorter side resized, the centre kept.

    JPEG, PNG and WebP by torchvision's decoders, anything else by Pillow; always RGB. `skip` is the most broken
    images that a run leaves out.
    """

    paths: Sequence[Path]
    labels: Tensor
    size: int
    skip: int = 0

    images: ClassVar[None] = None

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, indices: list[int]) -> Tensor:
        decoded = torch.empty((len(indices), 3, self.size, self.size), dtype=torch.uint8)
        for place, index in enumerate(indices):
            decoded[place] = self._decode(index)
        return decoded

    def _decode(self, index: int) -> Tensor:
        from torchvision.transforms.v2 import functional as T

        path = self.paths[index]
        try:
            image = _read_rgb(path, self.size)
        except Exception as error:  # the decoders pass on whatever a damaged file makes them raise
            # torchvision puts the place in its C++ sources before its reason.
            reason = re.sub(r"^.*\.cpp:\d+, ", "", (str(error).strip() or type(error).__name__).splitlines()[0])
            raise BrokenImage(index, path, reason) from error
        image = T.to_dtype(image, torch.uint8, scale=True)  # PNG has 16 bits too
        if image.shape[-2:] != (self.size, self.size):
            image = T.center_crop(T.resize(image, [self.size], antialias=True), [self.size])
        return image


def _read_rgb(path: Path, size: int) -> Tensor:
    """The first frame of an image file, (3, H, W), of 8 or 16 bits. A header that asks for too much is refused.

    `size` is what the shorter side will be resized to.
    """
    import numpy as np
    from PIL import Image
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms.v2 import functional as T

    Image.MAX_IMAGE_PIXELS = None  # it would warn and raise at numbers of its own
    with Image.open(path, formats=TORCHVISION + PILLOW) as image:
        # Also once its shorter side has been resized: a strip of one pixel would become a field.
        short, long = sorted(image.size)
        if short * long > PIXELS or short == 0 or long / short * size * size > PIXELS:
            raise ValueError(
                f"its header says {image.width}x{image.height}, expected at most {PIXELS} pixels, also with its "
                f"shorter side resized to {size}"
            )
        if image.format not in PILLOW:
            return decode_image(str(path), mode=ImageReadMode.RGB)
        if image.mode.startswith("I;16"):  # whose own conversion to RGB clips at 255
            eight = (np.asarray(image) // 256).astype(np.uint8)
            return T.pil_to_tensor(Image.fromarray(eight).convert("RGB"))
        return T.pil_to_tensor(image.convert("RGB"))
