"""Which part of an image an evaluation sees, to the pixel as in timm (`create_transform`)."""

import math

Size = tuple[int, int]  # (height, width)


def stored_side(seen: int, crop: float) -> int:
    """The side of a stored image whose central share `crop` is `seen` pixels long."""
    return math.floor(seen / crop)


def evaluated_size(stored: Size, crop: float, seen: Size) -> Size:
    """The size of the part of a stored image that is evaluated: the input's, `seen`, if `stored` follows from it."""
    height, width = (
        size if stored_side(size, crop) == side else max(1, round(side * crop))
        for side, size in zip(stored, seen, strict=True)
    )
    return height, width


def centre_start(side: int, part: int) -> int:
    """Where the central `part` of a side begins; negative if it is the longer one, as in a frame."""
    return round((side - part) / 2) if side > part else -((part - side) // 2)
