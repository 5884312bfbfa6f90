"""The two kinds of split: an array in memory, and image files that are decoded when asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lockstep.errors import InputError


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

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: list[int]) -> Tensor:
        return self.images[torch.tensor(indices, dtype=torch.int64)]


@dataclass(frozen=True)
class FileSplit:
    """Image files, each decoded to a square of `size` pixels: the shorter side resized, the centre kept.

    JPEG, PNG, GIF and WebP by torchvision's decoders, anything else by Pillow; always RGB.
    """

    paths: Sequence[Path]
    labels: Tensor
    size: int
    images: None = None

    def __len__(self) -> int:
        return len(self.paths)

    def fetch(self, indices: list[int]) -> Tensor:
        decoded = torch.empty((len(indices), 3, self.size, self.size), dtype=torch.uint8)
        for place, index in enumerate(indices):
            decoded[place] = self._decode(index)
        return decoded

    def _decode(self, index: int) -> Tensor:
        from torchvision.io import ImageReadMode, decode_image
        from torchvision.transforms.v2 import functional as T

        path = self.paths[index]
        try:
            if path.suffix.lower() in NATIVE:
                image = decode_image(str(path), mode=ImageReadMode.RGB)
            else:
                image = _pillow(path)
        except (RuntimeError, OSError, ValueError) as error:
            # torchvision puts the place in its C++ sources before its reason.
            reason = re.sub(r"^.*\.cpp:\d+, ", "", (str(error).strip() or type(error).__name__).splitlines()[0])
            raise InputError(
                f"dataset: image {index}, {path}, cannot be decoded ({reason}); remove or replace the file"
            ) from error
        if image.dim() == 4:  # an animation: its first frame
            image = image[0]
        image = T.to_dtype(image, torch.uint8, scale=True)  # PNG has 16 bits too
        if image.shape[-2:] != (self.size, self.size):
            image = T.center_crop(T.resize(image, [self.size], antialias=True), [self.size])
        return image


NATIVE = {".jpg", ".jpeg", ".png", ".gif", ".webp"}
SUFFIXES = NATIVE | {".bmp", ".ppm", ".pgm", ".tif", ".tiff"}


def _pillow(path: Path) -> Tensor:
    import numpy as np
    from PIL import Image
    from torchvision.transforms.v2 import functional as T

    with Image.open(path) as image:
        if image.mode.startswith("I;16"):  # whose own conversion to RGB clips at 255
            eight = (np.asarray(image) // 256).astype(np.uint8)
            return T.pil_to_tensor(Image.fromarray(eight).convert("RGB"))
        return T.pil_to_tensor(image.convert("RGB"))
