"""Image files to pixels: always RGB of 8 bits, and no more pixels than are needed.

JPEG by simplejpeg (libjpeg-turbo; docs/performance.md has why), PNG and WebP by torchvision, all else by Pillow.
What a file is, its first bytes say and not its name. The orientation that a camera notes is ignored.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Pixels = NDArray[np.uint8]  # (height, width, 3), as decoders give them
Stored = NDArray[np.uint8]  # (3, height, width), as it is stored
Box = tuple[int, int, int, int]  # top, left, height, width

JPEG = b"\xff\xd8\xff"
# By the formats' names in Pillow, which reads their headers; only these decoders are ever tried. Those of
# torchvision are faster, but its GIF decoder reads all frames.
TORCHVISION = ("JPEG", "PNG", "WEBP")
PILLOW = ("GIF", "BMP", "DIB", "PPM", "TIFF")
# The most that a header may say: a file of a few kB can ask for any amount of memory.
PIXELS = 2**27
# A JPEG can be decoded at so many eighths of its size. Of the others, 5 to 7, each takes longer than the whole.
EIGHTHS = (1, 2, 3, 4)


class ImageFile(NamedTuple):
    """The bytes of an image file, and what its header says."""

    data: bytes
    height: int
    width: int
    turbo: bool
    format: str

    @classmethod
    def read(cls, path: Path) -> ImageFile:
        """The file at `path`, not decoded yet.

        Raises:
            OSError: it cannot be read.
            ValueError: it is of no format that is known here, or its header asks for too much.
        """
        with open(path, "rb", buffering=0) as raw:  # noqa: PTH123, half the time of read_bytes
            data = raw.read()
        file = _turbo_header(data) or _pillow_header(data)
        _check_size(file, file.height * file.width, "")
        return file

    def square(self, size: int) -> Stored:
        """The image with its shorter side resized to `size`, and the centre of it: (3, size, size).

        Raises:
            Exception: whatever a damaged file makes its decoder raise.
        """
        short, long = sorted((self.height, self.width))
        # A strip of one pixel would become a field.
        _check_size(self, long * size * size // short, f", also with its shorter side resized to {size}")
        pixels = self._decoded(size / short)
        if pixels.shape[:2] == (size, size):
            return pixels.transpose(2, 0, 1)
        height, width = (size * side // short for side in (self.height, self.width))
        resized = _resized(pixels, (height, width))
        top, left = round((height - size) / 2), round((width - size) / 2)
        return resized[:, top : top + size, left : left + size]

    def box(self, box: Box, size: tuple[int, int]) -> Stored:
        """A box of the whole image, resized: (3, *size). Raises as `square` does."""
        top, left, height, width = box
        pixels = self._decoded(max(size[0] / height, size[1] / width))
        # In whole pixels of the decoded image, which may be smaller, and never less than the box.
        top, bottom = top * len(pixels) // self.height, -(-(top + height) * len(pixels) // self.height)
        across = pixels.shape[1]
        left, right = left * across // self.width, -(-(left + width) * across // self.width)
        return _resized(pixels[top:bottom, left:right], size)

    def _decoded(self, share: float) -> Pixels:
        """All of the image, a JPEG at the smallest scale that leaves at least `share` of each side."""
        if self.turbo:
            eighths = next((each for each in EIGHTHS if each >= 8 * share), 8) if share <= 0.5 else 8
            height, width = -(-self.height * eighths // 8), -(-self.width * eighths // 8)
            try:
                return simplejpeg.decode_jpeg(self.data, min_height=height, min_width=width)
            except ValueError:
                # It refuses what is damaged a little, too: torchvision's decoder decides what can be used.
                return _by_torchvision(self.data)
        return _by_torchvision(self.data) if self.format in TORCHVISION else _by_pillow(self.data)


def _check_size(file: ImageFile, pixels: int, how: str) -> None:
    if pixels > PIXELS or 0 in (file.height, file.width):
        raise ValueError(f"its header says {file.width}x{file.height}, expected at most {PIXELS} pixels{how}")


def _turbo_header(data: bytes) -> ImageFile | None:
    """What simplejpeg makes of a header; None if it is that of another format, or one that it cannot read."""
    if not data.startswith(JPEG):
        return None
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return ImageFile(data, int(height), int(width), turbo=True, format="JPEG")


def _pillow_header(data: bytes) -> ImageFile:
    with _pillow(data) as image:
        return ImageFile(data, image.height, image.width, turbo=False, format=image.format)


def _pillow(data: bytes) -> Any:
    """A file, opened by Pillow: its header is read."""
    from PIL import Image, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # it would warn and raise at numbers of its own
    try:
        return Image.open(BytesIO(data), formats=TORCHVISION + PILLOW)
    except UnidentifiedImageError:
        known = ", ".join(TORCHVISION + PILLOW)
        raise ValueError(f"cannot identify image file, expected one of {known}") from None


def _by_torchvision(data: bytes) -> Pixels:
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms.v2 import functional as T

    image = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)
    eight: Tensor = T.to_dtype(image, torch.uint8, scale=True)  # PNG has 16 bits too
    return eight.permute(1, 2, 0).numpy()


def _by_pillow(data: bytes) -> Pixels:
    """The first frame."""
    with _pillow(data) as image:
        if image.mode.startswith("I;16"):  # whose own conversion to RGB clips at 255
            upper = np.asarray(image) // 256
            return np.repeat(upper.astype(np.uint8)[:, :, None], 3, axis=2)
        return np.array(image.convert("RGB"))


def _resized(pixels: Pixels, size: tuple[int, int]) -> Stored:
    """Bilinear with antialiasing, in integers: on a CPU three times as fast as Pillow's."""
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    return F.interpolate(image, size, mode="bilinear", antialias=True)[0].numpy()
