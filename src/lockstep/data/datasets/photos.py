"""Files of photos: their formats, their size in memory, and their orientation. `preprocess.py` has their pixels."""

import math
import re
import warnings
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from lockstep.core.errors import check_installed
from lockstep.data.datasets.preprocess import BITS, UPRIGHT, orientation_of

# The formats that Pillow alone reads, by its names. It reads the headers of all of them; no other decoder is tried.
PILLOW_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "PPM", "TIFF", "AVIF")
BRANDS = 64  # a HEIC or AVIF file names its formats up to this byte, the main one first
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
# A file without these has no orientation. Searching for them is faster than Pillow, which decodes a whole PNG for it.
# Between the pixels of a JPEG no 0xFF is followed by 0xE1, the marker of EXIF and XMP.
NOTES = {"JPEG": (b"\xff\xe1",), "PNG": (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")}
# The markers of a JPEG before its segments; within a scan 0xFF is followed by zero or by a restart.
MARKER, SCAN, END = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]"), b"\xff\xda", b"\xff\xd9"
SEQUENTIAL = (b"\xff\xc0", b"\xff\xc1", b"\xff\xc9")  # frames, all of which one scan can hold
EXIF, SEGMENTS = b"Exif\0\0", 256  # Pillow joins the segments one by one: 1,000 of them, 66 MB, take 27 s
TILE = (322, 323)  # the tags of TIFF for the sides of a tile


def opened_by_pillow(data: bytes) -> Any:
    """The image opened by Pillow, which reads only its header. Raises ValueError for any other format."""
    if (segments := data.count(EXIF)) > SEGMENTS:
        raise ValueError(f"it has {segments:,} segments of EXIF, expected at most {SEGMENTS}")
    warnings.filterwarnings("ignore", module=r"PIL\.")  # of damaged EXIF in each of thousands of files
    formats: tuple[str, ...] = PILLOW_FORMATS
    if data[4:8] == b"ftyp" and data[8:12] in HEIC_BRANDS and b"avif" not in data[:BRANDS]:
        check_installed("pillow_heif", "a HEIC photo", extra="photos")
        from pillow_heif import register_heif_opener

        register_heif_opener()
        formats = ("HEIF",)
    try:
        return Image.open(BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        hint = "; a TIFF of several bands is read with dataset.channels=N" * data.startswith((b"II", b"MM"))
        raise ValueError(f"cannot identify image file, expected one of {', '.join(formats)}{hint}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"its header says too much: {str(error).partition(', could')[0]}") from None


def orientation_in(data: bytes, image: Any) -> int:
    """The orientation of an image as Pillow decodes it from `data`."""
    if image.format in NOTES and not any(note in data for note in NOTES[image.format]):
        return UPRIGHT
    return orientation_of(image)


def orientation_of_jpeg(data: bytes) -> int:
    """Like `orientation_in`, and without Pillow if the file has neither EXIF nor XMP."""
    if not any(note in data for note in NOTES["JPEG"]):
        return UPRIGHT
    with opened_by_pillow(data) as image:
        return orientation_in(data, image)


def scans_of_jpeg(data: bytes) -> int:
    """How many scans a JPEG has: passes over its pixels, in as little as ten bytes. Previews are not counted."""
    scans, components, start = 0, b"", len(SCAN)
    while (marker := MARKER.search(data, start)) and marker[0] != END:
        start = marker.end()
        if marker[0] in SEQUENTIAL:
            components = data[start + 7 : start + 8]
        if marker[0] == SCAN and data[start + 2 : start + 3] == components:
            return 1
        scans += marker[0] == SCAN
        start += int.from_bytes(data[start : start + 2])
    return scans


def tile_bytes(image: Any) -> int:
    """The bytes of a tile of a TIFF, which may be larger than the image and is decoded whole; 0 without tiles."""
    tags = getattr(image, "tag_v2", {})
    return math.prod(tags.get(tag, 0) for tag in TILE) * sum(tags.get(BITS, (8,))) // 8


def grey(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pillow's "L" of RGB, (height, width, 1): the luminance of ITU-R 601. A grey pixel keeps its value."""
    return np.array(Image.fromarray(pixels).convert("L"))[:, :, None]
