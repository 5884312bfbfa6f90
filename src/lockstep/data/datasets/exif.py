"""Reads the orientation of a photo, which a camera writes to EXIF, or a program to XMP.

For a JPEG the bytes of the header are read, in a few microseconds; for other formats Pillow reads it.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

TAG = 0x0112
UPRIGHT = 1
# The second bytes of the markers before an image's tables: APP0 to APP15, and the comment.
NOTES = frozenset({*range(0xE0, 0xF0), 0xFE})
APP1 = 0xE1
EXIF, XMP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
XMP_ORIENTATION = re.compile(rb"tiff:Orientation(?:=[\"']|>)([1-8])")
# A PNG without these has no orientation. Search for them before calling Pillow, which would decode the whole image.
PNG_NOTES = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
# The orientations in which rows are stored as columns, and those in which columns or rows then run backwards.
TURNED, COLUMNS_BACK, ROWS_BACK = frozenset({5, 6, 7, 8}), frozenset({2, 3, 6, 7}), frozenset({3, 4, 7, 8})


def of_jpeg(data: bytes) -> int:
    """The orientation, 1 to 8, of the JPEG file `data`; 1 (upright) if the file states no valid one."""
    # Go from marker to marker: a search takes longer, because compressed pixels are full of a marker's first byte.
    at, from_xmp, last = 2, UPRIGHT, len(data) - 4
    while at <= last and data[at + 1] in NOTES:
        end = at + 2 + (data[at + 2] << 8 | data[at + 3])
        if data[at + 1] == APP1:
            if data.startswith(EXIF, at + 4):
                return _of_tiff_header(data[at + 4 + len(EXIF) : end]) or from_xmp
            if data.startswith(XMP, at + 4) and (orientation := XMP_ORIENTATION.search(data, at, end)):
                from_xmp = int(orientation[1])
        at = end
    return from_xmp


def of_image(image: Any, data: bytes) -> int:
    """The orientation of an image that Pillow has opened from `data`, as it will decode it."""
    if image.format == "TIFF":
        return UPRIGHT  # Pillow turns it itself
    if image.format == "PNG" and not any(note in data for note in PNG_NOTES):
        return UPRIGHT
    try:
        value = image.getexif().get(TAG, UPRIGHT)
    except Exception:  # Pillow raises all kinds of errors for damaged EXIF; the pixels may still be good
        return UPRIGHT
    return value if value in range(1, 9) else UPRIGHT


def upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """The stored `pixels` (rows, columns, 3) the right way up: (height, width, 3)."""
    if orientation == UPRIGHT:
        return pixels
    if orientation in TURNED:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in COLUMNS_BACK:
        pixels = pixels[:, ::-1]
    if orientation in ROWS_BACK:
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _of_tiff_header(block: bytes) -> int | None:
    """The orientation in the first directory of an EXIF block; None if it is missing or damaged."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(block[:4])
    if order is None:
        return None
    try:
        (start,) = struct.unpack_from(f"{order}I", block, 4)
        (entries,) = struct.unpack_from(f"{order}H", block, start)
        for at in range(start + 2, start + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(f"{order}HH", block, at)
            if tag == TAG:
                (value,) = struct.unpack_from(f"{order}{'I' if kind == 4 else 'H'}", block, at + 8)
                return value if value in range(1, 9) else None
    except struct.error:
        pass
    return None
