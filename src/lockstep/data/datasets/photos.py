"""What Pillow is needed for: the formats of photos, their orientation, and 8-bit RGB from any of Pillow's modes.

Transparent pixels become white. Of integers of 12 or 16 bits the upper 8 are kept, as torchvision, OpenCV and libpng
do. Floats, signed integers and integers of 32 bits are rejected: nothing says which value is white.
"""

import math
import re
import warnings
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.core.errors import check_installed

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
ORIENTATION, UPRIGHT = 0x0112, 1
EXIF, SEGMENTS = b"Exif\0\0", 256  # Pillow joins the segments one by one: 1,000 of them, 66 MB, take 27 s
# The orientations in which rows are stored as columns, and those in which columns or rows then run backwards.
TURNED, COLUMNS_BACK, ROWS_BACK = frozenset({5, 6, 7, 8}), frozenset({2, 3, 6, 7}), frozenset({3, 4, 7, 8})
# Tags of TIFF: whether zero is white, the bits of a number, and the sides of a tile.
PHOTOMETRIC, BITS, TILE = 262, 258, (322, 323)
WHITE_IS_ZERO = 0
PHOTO_TO_8_BITS = "Image.fromarray(((x - LOW) / (HIGH - LOW) * 255).clip(0, 255).astype('uint8')).save('NAME.png')"


def opened_by_pillow(data: bytes) -> Any:
    """The image opened by Pillow, which reads only its header. Raises ValueError for any other format."""
    if (segments := data.count(EXIF)) > SEGMENTS:
        raise ValueError(f"it has {segments:,} segments of EXIF, expected at most {SEGMENTS}")
    from PIL import Image, UnidentifiedImageError

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


def orientation_of(image: Any, data: bytes | None = None) -> int:
    """The orientation, 1 to 8, of an image as Pillow decodes it from `data`; None: of one that is in memory."""
    if image.format == "TIFF":
        return UPRIGHT  # Pillow turns it itself
    if data is not None and image.format in NOTES and not any(note in data for note in NOTES[image.format]):
        return UPRIGHT
    try:
        value = image.getexif().get(ORIENTATION, UPRIGHT)
    except Exception:  # Pillow raises all kinds of errors for damaged EXIF; the pixels may still be good
        return UPRIGHT
    return value if value in range(1, 9) else UPRIGHT


def orientation_of_jpeg(data: bytes) -> int:
    """Like `orientation_of`, and without Pillow if the file has neither EXIF nor XMP."""
    if not any(note in data for note in NOTES["JPEG"]):
        return UPRIGHT
    with opened_by_pillow(data) as image:
        return orientation_of(image, data)


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


def upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """The stored `pixels` (rows, columns, channels) the right way up: (height, width, channels)."""
    if orientation == UPRIGHT:
        return pixels
    if orientation in TURNED:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in COLUMNS_BACK:
        pixels = pixels[:, ::-1]
    if orientation in ROWS_BACK:
        pixels = pixels[::-1]
    return pixels.copy()  # for NumPy, a single reversed row is contiguous


def grey(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pillow's "L" of RGB, (height, width, 1): the luminance of ITU-R 601. A grey pixel keeps its value."""
    from PIL import Image

    return np.array(Image.fromarray(pixels).convert("L"))[:, :, None]


def to_rgb(image: Any) -> NDArray[np.uint8]:
    """The current frame of an image as (height, width, 3). Raises ValueError where no format says what is white."""
    from PIL import Image

    if image.mode == "F" or image.mode.startswith("I"):
        return np.repeat(_grey(image)[:, :, None], 3, axis=2)
    if not image.has_transparency_data:
        return np.array(image.convert("RGB"))
    straight = image.convert("LA") if image.mode == "La" else image
    page = Image.new("RGBA", image.size, "white")
    return np.array(Image.alpha_composite(page, straight.convert("RGBA")).convert("RGB"))


def _grey(image: Any) -> NDArray[np.uint8]:
    """An image of numbers wider than 8 bits: (height, width)."""
    # Pillow scales every PGM of more than 8 bits to 16, in its mode of 32.
    if not image.mode.startswith("I;16") and (image.mode, image.format) != ("I", "PPM"):
        kind = "floats" if image.mode == "F" else "signed integers or integers of 32 bits"
        raise ValueError(
            f"its pixels are {kind}, and nothing says which value is white; choose the values LOW and HIGH that are "
            f"to be black and white, and convert it with Pillow: {PHOTO_TO_8_BITS}"
        )
    values, tags = np.asarray(image), getattr(image, "tag_v2", {})
    grey = (values >> tags.get(BITS, (16,))[0] - 8).astype(np.uint8)
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:
        grey = 255 - grey
    return np.where(values == image.info.get("transparency"), np.uint8(255), grey)
