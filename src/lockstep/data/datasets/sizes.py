"""Replaces `auto` in the sizes of a data set: those of stored images, of the model's input, and of the crop."""

from __future__ import annotations

import math
from dataclasses import fields, replace

from lockstep.core.data_protocols import Source
from lockstep.core.trained_input import TrainedInput

AUTO = "auto"
SIZES = ("decode_size", "input_size", "crop")
# torchvision and timm evaluate photographs in this way: the shorter side is resized to 256 pixels, the central 224
# pixels are the model's input.
USUAL_STORED, USUAL_SEEN = 256, 224


def stored_side(decode_size: int | str) -> int:
    """The side of a stored image, by `dataset.decode_size`."""
    return USUAL_STORED if decode_size == AUTO else int(decode_size)


def seen_side(input_size: int | str | None, stored: int) -> int:
    """The side of the model's input, by `dataset.input_size`, for stored photographs with a side of `stored`."""
    if input_size == AUTO:
        return USUAL_SEEN if stored == USUAL_STORED else stored
    return stored if input_size is None else int(input_size)


def central_share(crop: float | str, stored: int, seen: int) -> float:
    """The central share of a stored side that is evaluated, by `dataset.crop`."""
    if crop == AUTO:
        return seen / stored if (stored, seen) == (USUAL_STORED, USUAL_SEEN) else 1.0
    return float(crop)


def with_sizes(source: Source, trained: TrainedInput | None) -> Source:
    """A data set with a number (or null, for the stored size) in place of each `auto`.

    `trained` describes the images of the weights that the model starts from: its sizes replace the usual ones.
    """
    names = {field.name for field in fields(source)} & set(SIZES)
    values = {name: getattr(source, name) for name in names}
    if trained is not None:
        if values.get("input_size") == AUTO:
            values["input_size"] = trained.size
        if values.get("crop") == AUTO:
            values["crop"] = trained.crop
        if values.get("decode_size") == AUTO:
            # Large enough that the evaluated part need not be enlarged.
            seen, share = values["input_size"], values["crop"]
            values["decode_size"] = trained.stored or max(USUAL_STORED, math.ceil((seen or USUAL_STORED) / share))
    sized = replace(source, **values)
    frozen: dict[str, float | None] = {
        "decode_size": sized.image_shape[1],
        "crop": sized.eval_crop,
        "input_size": sized.input_shape[1],
    }
    if sized.input_shape == sized.image_shape:
        frozen["input_size"] = None  # not a number, because the images may not be square
    return replace(sized, **{name: frozen[name] for name in names if getattr(source, name) == AUTO})
