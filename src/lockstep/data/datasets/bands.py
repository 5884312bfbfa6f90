"""Images of any number of channels, of 8 bits: arrays of NumPy (`.npy`) and TIFF files of several bands.

An array is height x width x channels. The bands of a TIFF are the samples of the pixels of its first page. Other
numbers than uint8 are refused: a band is a measurement, and nothing says which of its values are to be 0 and 255.
"""

import logging
import math
import operator
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from lockstep.core.errors import check_installed
from lockstep.data.datasets.photos import ORIENTATION, UPRIGHT

GREY, RGB = 1, 3  # the numbers of channels of a photo; all others are read here
TIFF_SUFFIXES = frozenset({".tif", ".tiff"})
SUFFIXES = TIFF_SUFFIXES | {".npy"}
TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")  # the first bytes of a file
TO_8_BITS = "((x - LOW) / (HIGH - LOW) * 255).clip(0, 255).astype('uint8')"
# Rows, columns, what decodes the pixels (rows, columns, channels), and the stored orientation.
Opened = tuple[int, int, Callable[[bytes], NDArray[np.uint8]], int]


def opened(data: bytes, channels: int) -> Opened:
    """The header of a file of so many channels, checked. Raises ValueError."""
    if data.startswith(npy.MAGIC_PREFIX):
        return _array(data, channels)
    if data.startswith(TIFF):
        return _tiff(data, channels)
    raise ValueError(f"it is neither .npy nor TIFF, expected one of them for {channels} channels")


def _array(data: bytes, channels: int) -> Opened:
    file = BytesIO(data)
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"its version of .npy is {version[0]}.{version[1]}, expected 1.0 or 2.0")
    read: Any = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, by_columns, dtype = read(file)
    _check(shape, dtype, channels)
    if (size := len(data) - file.tell()) != math.prod(shape):
        raise ValueError(f"it has {size:,} bytes of pixels, expected {math.prod(shape):,}")
    pixels = np.frombuffer(data, np.uint8, offset=file.tell()).reshape(shape, order="F" if by_columns else "C")
    return shape[0], shape[1], lambda _: pixels.copy(order="C"), UPRIGHT


def _tiff(data: bytes, channels: int) -> Opened:
    check_installed("tifffile", "a TIFF of several bands", extra="bands")
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # of damaged tags in each of thousands of files
    page: Any = tifffile.TiffFile(BytesIO(data)).pages.first
    if page.axes not in ("YXS", "SYX"):
        raise ValueError(f"its first page has the shape {page.shape} and one sample per pixel, expected {channels}")
    rows, columns, samples = (page.shape[page.axes.index(axis)] for axis in "YXS")
    _check((rows, columns, samples), page.dtype, channels)

    def decode(data: bytes) -> NDArray[np.uint8]:
        if any(map(len(data).__lt__, map(operator.add, page.dataoffsets, page.databytecounts))):
            raise ValueError("it is cut short")
        pixels: NDArray[np.uint8] = page.asarray(maxworkers=1)
        return np.ascontiguousarray(np.moveaxis(pixels, page.axes.index("S"), 2))

    return rows, columns, decode, page.tags.valueof(ORIENTATION, UPRIGHT)


def _check(shape: tuple[int, ...], dtype: np.dtype[Any], channels: int) -> None:
    if len(shape) != 3 or shape[2] != channels:
        hint = "; save np.moveaxis(x, 0, -1)" * (len(shape) == 3 and shape[0] == channels)
        raise ValueError(f"its shape is {shape}, expected height x width x {channels} channels{hint}")
    if dtype != np.uint8:
        raise ValueError(
            f"its numbers are {dtype}, expected uint8; choose the values LOW and HIGH that are to be 0 and 255 in "
            f"the whole data set, and save {TO_8_BITS}"
        )
