"""What Pillow is needed for: the formats of photos, their orientation, and 8-bit RGB from any of Pillow's modes.

- Transparent pixels become white, the colour of the page that such an image is drawn for.
- Of integers of 12 or 16 bits the upper 8 are kept, as torchvision, OpenCV and libpng do it. The format says how many
  bits there are; the values are not checked.
- Floats, signed integers and integers of 32 bits are rejected: nothing says which value is white.
"""

import functools
import importlib.util
import math
import warnings
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The formats that Pillow alone reads, by its names. It reads the headers of all of them; no other decoder is tried.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "PPM", "TIFF")
TILE_SIDES = (322, 323)  # the tags of TIFF for the width and the height of a tile
BRANDS = 64  # the brands of a file are in its first bytes, up to this offset
# A file without these has no orientation. Searching for them is faster than Pillow, which decodes a whole PNG for it.
# Between the pixels of a JPEG no 0xFF is followed by 0xE1, the marker of EXIF and XMP.
NOTES = {"JPEG": (b"\xff\xe1",), "PNG": (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")}
ORIENTATION, UPRIGHT = 0x0112, 1
# The orientations in which rows are stored as columns, and those in which columns or rows then run backwards.
TURNED, COLUMNS_BACK, ROWS_BACK = frozenset({5, 6, 7, 8}), frozenset({2, 3, 6, 7}), frozenset({3, 4, 7, 8})
# Tags of TIFF: whether zero is white, and the bits of a number.
PHOTOMETRIC, BITS = 262, 258
WHITE_IS_ZERO = 0
TO_8_BITS = "Image.fromarray(((x - LOW) / (HIGH - LOW) * 255).clip(0, 255).astype('uint8')).save('NAME.png')"


@dataclass(frozen=True)
class PhotoFormat:
    """A format that Pillow reads only with another package, or from some version on: the extra `photos`.

    Fields:
        brands: the words at the start of a file that name its format.
    """

    name: str
    pillow: str
    suffixes: frozenset[str]
    brands: tuple[bytes, ...]
    package: str

    @property
    def remedy(self) -> str:
        return f"pip install '{self.package}' (in the extra `photos`), or convert them to JPEG"


AVIF = PhotoFormat("AVIF", "AVIF", frozenset({".avif"}), (b"avif", b"avis"), "pillow>=11.3")
HEIC = PhotoFormat(
    "HEIC",
    "HEIF",
    frozenset({".heic", ".heif", ".hif"}),
    (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"),
    "pillow-heif",
)


@functools.cache
def readable(kind: PhotoFormat) -> bool:
    """Whether Pillow reads this format; registers the package that reads HEIC."""
    if kind is AVIF:
        from PIL import features

        return "avif" in features.modules and bool(features.check("avif"))
    if importlib.util.find_spec("pillow_heif") is None:
        return False
    from pillow_heif import register_heif_opener

    register_heif_opener()
    return True


def opened_by_pillow(data: bytes) -> Any:
    """The image opened by Pillow, which reads only its header. Raises ValueError: its format is not supported."""
    from PIL import Image, UnidentifiedImageError

    warnings.filterwarnings("ignore", module=r"PIL\.")  # of damaged EXIF in each of thousands of files
    formats: tuple[str, ...] = FORMATS
    if data[4:8] == b"ftyp":
        brands = data[8 : min(BRANDS, int.from_bytes(data[:4]))]
        for kind in (AVIF, HEIC):
            if any(brand in brands for brand in kind.brands):
                if not readable(kind):
                    raise ValueError(f"it is {kind.name}, which nothing here reads: {kind.remedy}")
                formats = (kind.pillow,)
                break
    try:
        return Image.open(BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        hint = "; a TIFF of several bands is read with dataset.channels=N" * data.startswith((b"II", b"MM"))
        raise ValueError(f"cannot identify image file, expected one of {', '.join(formats)}{hint}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"its header says too much: {str(error).partition(', could')[0]}") from None


def decoded_pixels(image: Any, data: bytes) -> int:
    """The pixels that Pillow goes through to decode the image that it has opened from `data`.

    The decoders of WebP, AVIF and HEIC have no tiles, and hold the pixels twice. Tiles of a TIFF may be larger than
    the image, and overlap. A pixel that Pillow decodes in Python (up to 140 ns) counts as 8, a comment among the
    numbers of a PPM (a copy of up to 1 MB) as 2^16.
    """
    from PIL import Image

    if not image.tile:
        return 2 * int(image.width * image.height)
    boxes = [tile.extents for tile in image.tile]
    pixels = sum((right - left) * (bottom - top) for left, top, right, bottom in boxes) // len(image.getbands())
    if image.tile[0].codec_name in Image.DECODERS:
        pixels = 8 * pixels + (data.count(b"#") << 16)
    tags, sides = getattr(image, "tag_v2", {}), zip(TILE_SIDES, boxes[0][2:], strict=True)
    return max(pixels, math.prod(-(-side // (tile := tags.get(tag, side))) * tile for tag, side in sides))


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
    return np.ascontiguousarray(pixels)


def grey(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pillow's "L" of RGB, (height, width, 1): the luminance of ITU-R 601. A grey pixel keeps its value."""
    from PIL import Image

    return np.array(Image.fromarray(pixels).convert("L"))[:, :, None]


def to_rgb(image: Any) -> NDArray[np.uint8]:
    """The current frame of an image that Pillow has opened: (height, width, 3).

    Raises:
        ValueError: it has numbers of which no format says what is white.
    """
    from PIL import Image

    if image.mode == "F" or image.mode.startswith("I"):
        return np.repeat(_grey(image)[:, :, None], 3, axis=2)
    if not image.has_transparency_data:
        return np.array(image.convert("RGB"))
    straight = image.convert("LA") if image.mode == "La" else image
    key = image.info.get("transparency")
    if image.mode == "RGB" and max(key) > 255:  # of a PNG of 16 bits, of which Pillow keeps the upper 8
        straight = image.copy()
        straight.info["transparency"] = tuple(value >> 8 for value in key)
    page = Image.new("RGBA", image.size, "white")
    return np.array(Image.alpha_composite(page, straight.convert("RGBA")).convert("RGB"))


def _grey(image: Any) -> NDArray[np.uint8]:
    """An image of numbers wider than 8 bits: (height, width)."""
    # Pillow scales every PGM of more than 8 bits to 16, in its mode of 32.
    if not image.mode.startswith("I;16") and (image.mode, image.format) != ("I", "PPM"):
        kind = "floats" if image.mode == "F" else "signed integers or integers of 32 bits"
        raise ValueError(
            f"its pixels are {kind}, and nothing says which value is white; choose the values LOW and HIGH that are "
            f"to be black and white, and convert it with Pillow: {TO_8_BITS}"
        )
    values, tags = np.asarray(image), getattr(image, "tag_v2", {})
    grey = (values >> tags.get(BITS, (16,))[0] - 8).astype(np.uint8)
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:
        grey = 255 - grey
    return np.where(values == image.info.get("transparency"), np.uint8(255), grey)
