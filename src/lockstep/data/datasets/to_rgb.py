"""From an image of any of Pillow's modes to 8-bit RGB.

- Transparent pixels become white, the colour of the page that such an image is drawn for.
- Of integers with more than 8 bits the upper 8 bits are kept. Their number of bits is that of the format, or that of
  the largest value, if a TIFF states it. A TIFF of 16 bits whose numbers all fit into 12 has 12 bits: cameras write
  such files. Zero is black; negative numbers are black too.
- Floats are scaled: the image's smallest value becomes black, its largest white.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Tags of TIFF: whether zero is white, the largest value, whether numbers are unsigned, and their bits.
PHOTOMETRIC, MAX_VALUE, SAMPLE_FORMAT, BITS = 262, 281, 339, 258
WHITE_IS_ZERO, UNSIGNED = 0, 1
CAMERA_BITS = 12


def to_rgb(image: Any) -> NDArray[np.uint8]:
    """The first frame of an image that Pillow has opened: (height, width, 3)."""
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
    values, tags = np.asarray(image), getattr(image, "tag_v2", {})
    if image.mode == "F":
        grey = _float_to_grey(values)
    else:
        if values.dtype == np.int32 and tags.get(BITS) == (32,) and not _is_signed(tags):
            values = values.view(np.uint32)  # Pillow's widest mode is signed
        grey = (values.clip(0) >> max(0, _bits(values, tags) - 8)).clip(max=255).astype(np.uint8)
    return 255 - grey if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO else grey


def _bits(values: NDArray[Any], tags: Any) -> int:
    """The number of bits of an image of integers. `tags` are those of a TIFF; other images have 16 bits."""
    if stated := tags.get(MAX_VALUE):
        return int(np.max(stated)).bit_length()
    bits = int(tags.get(BITS, (16,))[0]) - _is_signed(tags)
    return CAMERA_BITS if tags and bits == 16 and values.max() < 2**CAMERA_BITS else bits


def _is_signed(tags: Any) -> bool:
    return tags.get(SAMPLE_FORMAT, (UNSIGNED,)) != (UNSIGNED,)


def _float_to_grey(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Scale floats by their own range; NaN and minus infinity become black, infinity becomes white."""
    finite = values[np.isfinite(values)].astype(np.float64)
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    shares = (values.clip(low, high) - low) / (high - low or 1.0)
    return np.nan_to_num(255 * shares).round().astype(np.uint8)
