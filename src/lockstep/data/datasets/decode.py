"""Decodes image files to upright 8-bit RGB, grey or other channels: whole, or no more pixels than are needed.

simplejpeg (libjpeg-turbo, see docs/evidence/benchmarks.md) decodes JPEG, Pillow other photos; their first bytes
decide the format. A whole photo has Pillow's pixels. Grey is Pillow's "L" of the RGB. Sizes and boxes refer to the
upright image. Images of other channels are arrays of NumPy (`.npy`), height x width x channels, and the first pages
of TIFF files, of uint8: nothing says which values of other numbers are to be 0 and 255.
"""

from __future__ import annotations

import errno
import logging
import lzma
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from lockstep.core.errors import check_installed
from lockstep.core.model_card import INTERPOLATION, PAD, Preprocessing, Size, centre_start
from lockstep.core.safe_read import MOST_BYTES, check_size, stored
from lockstep.data.datasets import photos
from lockstep.data.datasets.arrays import ARRAY_TO_8_BITS
from lockstep.data.datasets.listing import Member
from lockstep.data.datasets.preprocess import ORIENTATION, TURNED, UPRIGHT, to_rgb, upright, whole_size

Pixels = NDArray[np.uint8]  # (height, width, channels), from a decoder
Stored = NDArray[np.uint8]  # (channels, height, width), as stored
Box = tuple[int, int, int, int]  # top, left, height, width
Decoder = Callable[[bytes], Pixels]
# Stored rows and columns, how they are decoded, and EXIF orientation.
Header = tuple[int, int, Decoder | None, int]

GREY, RGB = 1, 3  # the numbers of channels of a photo
BANDS_SUFFIXES = frozenset({".tif", ".tiff", ".npy"})  # of files with other numbers of channels
# The first bytes of a file.
JPEG, NPY, TIFF = b"\xff\xd8\xff", b"\x93NUMPY", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
NPY_HEADERS = np.lib.format.read_array_header_1_0, np.lib.format.read_array_header_2_0  # and of later versions
SEGMENT = "a strip or tile of it has"
# The compressions of segments that tifffile decompresses whole, however much there is.
UNBOUNDED: dict[int, Callable[[], Any]] = {
    8: zlib.decompressobj,
    32946: zlib.decompressobj,
    34925: lzma.LZMADecompressor,
}
PIXELS = MOST_BYTES // 8  # the most that an image may have, as no format needs more bytes for a pixel
SCANS, SCANNED = 16, 4 * PIXELS  # a JPEG may have more scans than cameras make, if they go over few pixels: 2 s
# The scales, in eighths, at which a JPEG is decoded. The others, 5 to 7, take longer than the full size.
EIGHTHS = (1, 2, 3, 4)
QUIET = ContextVar("QUIET", default=False)  # whether this thread reads a TIFF


class ImageFile(NamedTuple):
    """The bytes of an image file, the size of the upright image, and how it is decoded.

    `decoder` decodes the file; None is simplejpeg. `orientation` is the EXIF orientation of the stored pixels, and
    `channels` is how many channels the image is to have.
    """

    data: bytes
    height: int
    width: int
    decoder: Decoder | None
    orientation: int = UPRIGHT
    channels: int = RGB

    @classmethod
    def read(cls, place: Path | Member, channels: int = RGB) -> ImageFile:
        """Read the file at `place`, without decoding it. Raises OSError, or ValueError if it is not supported."""
        return cls.of(contents(place), channels)

    @classmethod
    def of(cls, data: bytes, channels: int = RGB) -> ImageFile:
        """Like `read`, for the content of a file."""
        if channels in (GREY, RGB):
            header = _turbo_header(data)
            if header is None:
                with photos.opened_by_pillow(data) as image:
                    check_size(photos.tile_bytes(image), SEGMENT)
                    header = image.height, image.width, _by_pillow, photos.orientation_in(data, image)
        else:
            header = _bands_header(data, channels)
        rows, columns, decoder, orientation = header
        height, width = (columns, rows) if orientation in TURNED else (rows, columns)
        file = cls(data, height, width, decoder, orientation, channels)
        _check_size(file, -(-height * width * max(channels, RGB) // RGB))  # the RGB pixels that take as many bytes
        most = max(SCANS, SCANNED // (height * width))
        if data.startswith(JPEG) and (scans := photos.scans_of_jpeg(data)) > most:
            raise ValueError(f"it has {scans:,} scans, expected at most {most:,}")
        return file

    def stored(self, how: Preprocessing, scaled: bool = False) -> Stored:
        """The image as a data set stores it: `how.image_shape`. Raises any exception of the decoder.

        `fit=crop` keeps the centre of the smallest image with this aspect ratio that covers the size, `pad` adds a
        frame of the colour `fill` to the largest one that fits into it, `squash` changes the aspect ratio. The
        `centre` of the result (its size; None for all) is in the middle of the image to the pixel, as in timm.
        With `scaled` a JPEG is decoded at the smallest scale that is enough, which is faster and less exact.
        """
        size = how.image_shape[1:]
        height, width = whole_size((self.height, self.width), size, how.fit)
        # An image that is one pixel wide would become a huge one.
        _check_size(self, height * width, f", also resized to {width}x{height}")
        pixels, _ = self._decoded(max(height / self.height, width / self.width) if scaled else None)
        if pixels.shape[:2] == (height, width):
            resized = pixels.transpose(2, 0, 1)
        else:
            resized = _resized(pixels, (height, width), how.interpolation)
        top, left = (
            centre_start(whole, part) - centre_start(side, part)
            for whole, side, part in zip((height, width), size, how.centre or size, strict=True)
        )
        if how.fit == PAD:
            framed = np.empty((len(resized), *size), dtype=np.uint8)
            framed[:] = np.reshape(how.fill, (-1, 1, 1))
            framed[:, -top : height - top, -left : width - left] = resized
            return framed
        return resized[:, top : top + size[0], left : left + size[1]]

    def box(self, box: Box, size: Size, interpolation: str = INTERPOLATION) -> Stored:
        """A box of the whole image, resized: (channels, *size). Raises like `stored`."""
        top, left, height, width = box
        pixels, eighths = self._decoded(max(size[0] / height, size[1] / width))
        # The box in pixels of the decoded image, which may be smaller; rounded outwards.
        rows, columns = (
            slice(start * eighths // 8, -(-(start + side) * eighths // 8))
            for start, side in ((top, height), (left, width))
        )
        return _resized(pixels[rows, columns], size, interpolation)

    def _decoded(self, share: float | None) -> tuple[Pixels, int]:
        """The upright image, and its scale in eighths: of a JPEG the least that keeps `share` of a side; None: 8."""
        pixels, eighths = self._scaled_jpeg(share) if self.decoder is None else (self.decoder(self.data), 8)
        pixels = upright(pixels, self.orientation)
        return (photos.grey(pixels) if self.channels == GREY else pixels), eighths

    def _scaled_jpeg(self, share: float | None) -> tuple[Pixels, int]:
        if share is None and simplejpeg.decode_jpeg_header(self.data)[2] == "CMYK":
            return _by_pillow(self.data), 8  # simplejpeg rounds it otherwise
        share = 1.0 if share is None else share
        turned = self.orientation in TURNED
        rows, columns = (self.width, self.height) if turned else (self.height, self.width)
        # simplejpeg takes a minimum size, which does not determine the scale if both sides are tiny.
        scaled = share <= 0.5 and max(rows, columns) >= 8
        eighths = next(scale for scale in EIGHTHS if scale >= 8 * share) if scaled else 8
        height, width = (-(-side * eighths // 8) if scaled else 0 for side in (rows, columns))
        try:
            return simplejpeg.decode_jpeg(self.data, min_height=height, min_width=width), eighths
        except ValueError:
            # simplejpeg also refuses slightly damaged files: Pillow decides what is usable.
            return _by_pillow(self.data), 8


def contents(place: Path | Member) -> bytes:
    """The bytes of an image file. Raises OSError, UnreadableStorage, or ValueError for a pipe or a device."""
    return stored(partial(read_part, place) if isinstance(place, Path) else place.contents, place)


def read_part(path: Path, offset: int = 0, size: int | None = None) -> bytes:
    """`size` bytes of a file, or all, in few system calls. Raises OSError, or ValueError for a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if size is None:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is not a regular file")
            size = status.st_size
        check_size(size)
        data = b""
        while len(data) < size:  # a network file system may return less than is asked for
            if not (rest := os.pread(descriptor, size - len(data), offset + len(data))):
                raise OSError(errno.EIO, f"it ends after {len(data):,} of {size:,} bytes")
            data += rest
        return data
    finally:
        os.close(descriptor)


def _check_size(file: ImageFile, pixels: int, how: str = "") -> None:
    if pixels > PIXELS or 0 in (file.height, file.width):
        raise ValueError(f"its header says {file.width}x{file.height}, expected at most {PIXELS} pixels{how}")


def _turbo_header(data: bytes) -> Header | None:
    """The header of a JPEG, read by simplejpeg; None for another format, or if simplejpeg cannot read it."""
    if not data.startswith(JPEG):
        return None
    try:
        rows, columns, _, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    return int(rows), int(columns), None, photos.orientation_of_jpeg(data)


def _by_pillow(data: bytes) -> Pixels:
    with photos.opened_by_pillow(data) as image:
        image.load()
        return to_rgb(image)


def _bands_header(data: bytes, channels: int) -> Header:
    """The header of an array or a TIFF of so many channels, checked. Raises ValueError."""
    if data.startswith(TIFF):
        return _tiff(data, channels)
    if not data.startswith(NPY):
        raise ValueError(f"it is neither .npy nor TIFF, expected one of them for {channels} channels")
    file = BytesIO(data)
    shape, _, dtype = NPY_HEADERS[np.lib.format.read_magic(file)[0] > 1](file)
    check_size(math.prod(shape) * dtype.itemsize, "its pixels have")
    pixels = np.load(BytesIO(data), allow_pickle=False)
    _check_bands(pixels.shape, pixels.dtype, channels)
    return pixels.shape[0], pixels.shape[1], lambda _: np.ascontiguousarray(pixels), UPRIGHT


def _tiff(data: bytes, channels: int) -> Header:
    check_installed("tifffile", "a TIFF of several bands", extra="bands")
    import tifffile

    with _quiet():
        page: Any = tifffile.TiffFile(BytesIO(data)).pages.first
    if page.axes not in ("YXS", "SYX"):
        raise ValueError(f"its first page has the shape {page.shape} and one sample per pixel, expected {channels}")
    rows, columns, samples = (page.shape[page.axes.index(axis)] for axis in "YXS")
    _check_bands((rows, columns, samples), page.dtype, channels)
    size = math.prod(page.chunks)
    check_size(size, SEGMENT)

    def decode(data: bytes) -> Pixels:
        parts = [*zip(page.dataoffsets, page.databytecounts, strict=True)]
        if max(map(sum, parts)) > len(data):
            raise ValueError("it is cut short")
        for offset, count in parts if page.compression in UNBOUNDED else ():
            part = UNBOUNDED[page.compression]().decompress(data[offset : offset + count], 2 * size + 1)
            check_size(len(part), SEGMENT, 2 * size)
        with _quiet():
            pixels: Pixels = page.asarray(maxworkers=1)
        return np.ascontiguousarray(np.moveaxis(pixels, page.axes.index("S"), 2))

    return rows, columns, decode, page.tags.valueof(ORIENTATION, UPRIGHT)


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what tifffile logs in this thread: damaged tags in each of thousands of files."""
    logging.getLogger("tifffile").addFilter(_is_heard)
    token = QUIET.set(True)
    try:
        yield
    finally:
        QUIET.reset(token)


def _is_heard(record: logging.LogRecord) -> bool:
    return not QUIET.get()


def _check_bands(shape: tuple[int, ...], dtype: np.dtype[Any], channels: int) -> None:
    if len(shape) != 3 or shape[2] != channels:
        hint = "; save np.moveaxis(x, 0, -1)" * (len(shape) == 3 and shape[0] == channels)
        raise ValueError(f"its shape is {shape}, expected height x width x {channels} channels{hint}")
    if dtype != np.uint8:
        raise ValueError(
            f"its numbers are {dtype}, expected uint8; choose the values LOW and HIGH that are to be 0 and 255 in "
            f"the whole data set, and save {ARRAY_TO_8_BITS}"
        )


def _resized(pixels: Pixels, size: Size, interpolation: str) -> Stored:
    """Resize, with antialiasing, in integers: on a CPU three times as fast as Pillow."""
    image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    return F.interpolate(image, size, mode=interpolation, antialias=True)[0].numpy()
