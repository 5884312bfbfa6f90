"""Image files to pixels: always RGB of 8 bits, and no more pixels than are needed.

JPEG by simplejpeg (libjpeg-turbo; docs/performance.md has why), PNG and WebP by torchvision, all else by Pillow.
What a file is, its first bytes say and not its name. The orientation that a camera notes is ignored.
"""

from __future__ import annotations

import os
import stat
import threading
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

# Of a JPEG: its first bytes, its last, and the second byte of the markers that its size comes with.
JPEG, END = b"\xff\xd8\xff", b"\xff\xd9"
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# The rows below a box that are decoded too: its lowest colours are interpolated with theirs.
MARGIN = 16
# By the formats' names in Pillow, which reads their headers; only these decoders are ever tried. Those of
# torchvision are faster, but its GIF decoder reads all frames.
TORCHVISION = ("JPEG", "PNG", "WEBP")
PILLOW = ("GIF", "BMP", "DIB", "PPM", "TIFF")
# So much of a file is read at a time, in bytes.
AT_ONCE = 2**17
# The most that a header may say: a file of a few kB can ask for any amount of memory.
PIXELS = 2**27
# A JPEG can be decoded at so many eighths of its size. Of the others, 5 to 7, each takes longer than the whole.
EIGHTHS = (1, 2, 3, 4)
# torchvision's modules import each other: a second thread that imports them meanwhile finds half of them.
_IMPORTING = threading.Lock()


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
        data = _contents(path)
        file = _turbo_header(data) or _pillow_header(data)
        _check_size(file, file.height * file.width)
        return file

    def square(self, size: int) -> Stored:
        """The image with its shorter side resized to `size`, and the centre of it: (3, size, size).

        Raises:
            Exception: whatever a damaged file makes its decoder raise.
        """
        short, long = min(self.height, self.width), max(self.height, self.width)
        # A strip of one pixel would become a field.
        _check_size(self, long * size * size // short, size)
        pixels, _ = self._decoded(size / short, self.height)
        if pixels.shape[:2] == (size, size):
            return pixels.transpose(2, 0, 1)
        height, width = (size * side // short for side in (self.height, self.width))
        resized = _resized(pixels, (height, width))
        top, left = round((height - size) / 2), round((width - size) / 2)
        return resized[:, top : top + size, left : left + size]

    def box(self, box: Box, size: tuple[int, int]) -> Stored:
        """A box of the whole image, resized: (3, *size). Raises as `square` does."""
        top, left, height, width = box
        pixels, eighths = self._decoded(max(size[0] / height, size[1] / width), top + height)
        # In whole pixels of the decoded image, which may be smaller, and never less than the box.
        rows, columns = (
            slice(start * eighths // 8, -(-(start + side) * eighths // 8))
            for start, side in ((top, height), (left, width))
        )
        return _resized(pixels[rows, columns], size)

    def _decoded(self, share: float, bottom: int) -> tuple[Pixels, int]:
        """The image, at least its rows above `bottom`, and in how many eighths of its size.

        A JPEG at the smallest scale that leaves at least `share` of each side, all else whole.
        """
        if self.turbo:
            data, rows = self._above(bottom)
            # The decoder is told the least size, by which scales cannot be told apart where both sides are tiny.
            scaled = share <= 0.5 and max(rows, self.width) >= 8
            eighths = next(each for each in EIGHTHS if each >= 8 * share) if scaled else 8
            height, width = (-(-side * eighths // 8) if scaled else 0 for side in (rows, self.width))
            try:
                whole = rows == self.height
                return simplejpeg.decode_jpeg(data, min_height=height, min_width=width, strict=whole), eighths
            except ValueError:
                # It refuses what is damaged a little, too: torchvision's decoder decides what can be used.
                return _by_torchvision(self.data), 8
        return (_by_torchvision if self.format in TORCHVISION else _by_pillow)(self.data), 8

    def _above(self, bottom: int) -> tuple[bytes, int]:
        """A JPEG whose header ends it below the row `bottom`, where decoding stops then, and how many rows it has.

        One that is cut short, or has not all of a row in one place (progressive), stays whole.
        """
        rows = bottom + MARGIN
        if rows >= self.height:
            return self.data, self.height
        frame = 2  # the place of a marker; all before the frame's are followed by the length of what is theirs
        while frame + 9 < len(self.data) and self.data[frame + 1] not in FRAMES:
            frame += 2 + int.from_bytes(self.data[frame + 2 : frame + 4])
        sequential = self.data[frame : frame + 2] in (b"\xff\xc0", b"\xff\xc1")
        if not sequential or self.data.rfind(END) < frame:
            return self.data, self.height
        return self.data[: frame + 5] + rows.to_bytes(2) + self.data[frame + 7 :], rows


def _contents(path: Path) -> bytes:
    """What is in a file, with half the system calls of `Path.read_bytes`: a small one costs little besides.

    Not of a pipe or a device, which would be waited for.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        parts = [os.read(descriptor, AT_ONCE)]
        while parts[-1]:
            parts.append(os.read(descriptor, AT_ONCE))
    finally:
        os.close(descriptor)
    return parts[0] if len(parts) == 2 else b"".join(parts)


def _check_size(file: ImageFile, pixels: int, resized_to: int = 0) -> None:
    if pixels > PIXELS or 0 in (file.height, file.width):
        how = f", also with its shorter side resized to {resized_to}" if resized_to else ""
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
    with _IMPORTING:
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
