"""The sizes of photographs: which are usual, and which suit the weights that a model starts from."""

from dataclasses import dataclass, replace
from typing import Any

from lockstep.core.data_protocols import Source
from lockstep.core.fields import as_pixels, pixels, ranged, sides
from lockstep.core.model_card import CROP, PAD, SQUASH, TrainedInput, stored_side

AUTO = "auto"
SIZES = ("fit", "decode_size", "input_size", "crop")
# As torchvision and timm evaluate: the shorter side is resized to 256 pixels, the central 224 are the input.
USUAL_STORED, USUAL_SEEN = 256, 224
SMALL_SIDE = 64  # in pixels: photographs up to here are augmented like CIFAR's, larger ones like ImageNet's


def keeps_whole(source: Source) -> bool:
    return source.fit in (PAD, SQUASH)


@dataclass(frozen=True, kw_only=True)
class PhotoSource(Source):
    """A data set of photographs, stored at one shape; `auto` is the usual value, or the one of the weights."""

    # size in pixels of the images that the model sees, the side of a square or [height,width]; they are resized on
    # the device. null: the stored size. `auto`: the size of the weights that the model starts from, or else 224 for
    # images stored with 256 pixels, otherwise the stored size
    input_size: Any = pixels(AUTO, AUTO, None)
    # share of the stored side that an evaluation keeps, from the centre. `auto`: the share of the weights that the
    # model starts from, or else 0.875 for an input of 224 from images stored with 256 pixels and, except for
    # `packed`, for a rectangular `input_size`, otherwise 1
    crop: int | float | str = ranged(AUTO, above=0.0, most=1, words=(AUTO,))

    @property
    def input_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.image_shape
        if self.input_size not in (AUTO, None):
            return (channels, *sides(self.input_size))
        if self.input_size == AUTO and height == width == USUAL_STORED and not keeps_whole(self):
            return (channels, USUAL_SEEN, USUAL_SEEN)
        return self.image_shape

    @property
    def eval_crop(self) -> float:
        if self.crop != AUTO:
            return float(self.crop)
        usual = (self.image_shape[1], self.input_shape[1]) == (USUAL_STORED, USUAL_SEEN)
        return USUAL_SEEN / USUAL_STORED if usual else 1.0

    @property
    def usual_augment(self) -> str:
        return "crop_flip" if min(self.image_shape[1:]) <= SMALL_SIDE else "standard"


def with_sizes(source: Source, trained: TrainedInput | None) -> Source:
    """A data set with a number (or null) in place of each `auto`: `trained` has the sizes of the weights."""
    autos = [name for name in SIZES if getattr(source, name, None) == AUTO]
    sized: Any = source
    if "fit" in autos:
        sized = replace(sized, fit=CROP if trained is None else trained.fit)
    if trained is not None:
        crop = 1.0 if keeps_whole(sized) and sized.fit != trained.fit else trained.eval_crop
        of_weights = {"input_size": as_pixels(*trained.input_shape[1:]), "crop": crop}
        sized = replace(sized, **{name: of_weights[name] for name in autos if name in of_weights})
        if "decode_size" in autos and (stored := _stored_size(sized, trained, "input_size" in autos)):
            sized = replace(sized, decode_size=as_pixels(*stored))
    sizes = {
        "fit": sized.fit,
        "decode_size": as_pixels(*sized.image_shape[1:]),
        "crop": sized.eval_crop,
        "input_size": None if sized.input_shape == sized.image_shape else as_pixels(*sized.input_shape[1:]),
    }
    return replace(sized, **{name: sizes[name] for name in autos})


def _stored_size(source: Any, trained: TrainedInput, usual_input: bool) -> tuple[int, int] | None:
    """The size to store images with for weights; None is the one that follows from the size of the input."""
    is_square = not isinstance(source.input_size, list)
    same = usual_input or is_square or tuple(source.input_size) == trained.input_shape[1:]
    if trained.image_shape is not None and source.fit == trained.fit and same:
        return trained.image_shape[1:]
    if keeps_whole(source) or not is_square:
        return None
    # Large enough that the evaluated part need not be enlarged.
    side = max(USUAL_STORED, stored_side(source.input_size or USUAL_STORED, source.crop))
    return side, side
