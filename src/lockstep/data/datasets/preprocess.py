"""The pixels of a photo for a model that `lockstep export` wrote, as in its evaluation. Needs only NumPy and Pillow.

`lockstep export` puts a copy of this file beside the model. The card of a model is the JSON `lockstep` in its file.
Transparent pixels become white. Of integers of 12 or 16 bits the upper 8 are kept, as torchvision, OpenCV and libpng
do. Floats, signed integers and integers of 32 bits are rejected: nothing says which value is white.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

FORMAT = 1  # of the card of a model
ORIENTATION, PHOTOMETRIC, BITS = 0x0112, 262, 258  # tags of EXIF and TIFF; the last is the bits of a number
UPRIGHT, WHITE_IS_ZERO = 1, 0
# The orientations in which rows are stored as columns, and those in which columns or rows then run backwards.
TURNED, COLUMNS_BACK, ROWS_BACK = frozenset({5, 6, 7, 8}), frozenset({2, 3, 6, 7}), frozenset({3, 4, 7, 8})
PHOTO_TO_8_BITS = "Image.fromarray(((x - LOW) / (HIGH - LOW) * 255).clip(0, 255).astype('uint8')).save('NAME.png')"


def preprocess(photo: Any, card: Mapping[str, Any]) -> NDArray[np.uint8]:
    """The model's input for a photo (its path, an open file or a Pillow image): (1, channels, height, width)."""
    if card.get("format", FORMAT) != FORMAT:
        raise ValueError(f"the model has format {card['format']}, expected {FORMAT}; use the preprocess.py beside it")
    if not isinstance(photo, Image.Image):
        with Image.open(photo) as opened:
            return preprocess(opened, card)
    image = Image.fromarray(upright(to_rgb(photo), orientation_of(photo)))
    image = image.convert("L" if len(card["mean"]) == 1 else "RGB")
    (_, *stored), (_, *seen), share = card["image_shape"], card["input_shape"], card["eval_crop"]
    pairs = zip(stored, seen, strict=True)
    centre = [size if int(size / share) == side else max(1, round(side * share)) for side, size in pairs]
    # A model that enlarges its images takes them as they are stored.
    part, size = (centre, seen) if max(seen) < max(stored) else (stored, stored)
    height, width = whole_size((image.height, image.width), stored, card["fit"])
    top = centre_start(height, centre[0]) - centre_start(part[0], centre[0])
    left = centre_start(width, centre[1]) - centre_start(part[1], centre[1])
    resample = Image.Resampling[card["interpolation"].upper()]
    # Columns before rows: Pillow alone orders them by the sizes, and bicubic pixels depend on it.
    resized = image.resize((width, image.height), resample).resize((width, height), resample)
    fill = tuple(min(max(round(255 * mean), 0), 255) for mean in card["mean"])
    framed = Image.new(image.mode, (part[1], part[0]), fill)
    framed.paste(resized, (-left, -top))
    channels = [channel.convert("F").resize((size[1], size[0]), resample) for channel in framed.split()]
    return np.stack([*map(np.asarray, channels)])[None].round().clip(0, 255).astype(np.uint8)


def whole_size(sides: Sequence[int], stored: Sequence[int], fit: str) -> tuple[int, int]:
    """The height and width before the cut or the frame, rounded as torchvision does (a square) or timm."""
    height, width = sides
    if fit == "squash":
        return stored[0], stored[1]
    if fit != "pad" and stored[0] == stored[1]:
        return height * stored[0] // min(sides), width * stored[0] // min(sides)
    ratios = height / stored[0], width / stored[1]
    ratio = max(ratios) if fit == "pad" else min(ratios)
    return max(1, round(height / ratio)), max(1, round(width / ratio))


def centre_start(side: int, part: int) -> int:
    """Where the central `part` of a side begins; negative if it is the longer one, as in a frame."""
    return round((side - part) / 2) if side > part else -((part - side) // 2)


def orientation_of(image: Any) -> int:
    """The EXIF orientation, 1 to 8, of an image that Pillow has opened."""
    if image.format == "TIFF":
        return UPRIGHT  # Pillow turns it itself
    try:
        value = image.getexif().get(ORIENTATION, UPRIGHT)
    except Exception:  # Pillow raises all kinds of errors for damaged EXIF; the pixels may still be good
        return UPRIGHT
    return value if value in range(1, 9) else UPRIGHT


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


def to_rgb(image: Any) -> NDArray[np.uint8]:
    """The current frame of an image as (height, width, 3). Raises ValueError where no format says what is white."""
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
