"""The description in the metadata of a weights file, to build the model and prepare images. Imports no torch."""

import dataclasses
import json
import math
import unicodedata
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Self

from lockstep.core.errors import as_unicode, shown
from lockstep.core.fields import INTERPOLATIONS, TEXT, Check, Number, choice, default_of, rule_of, ruled
from lockstep.core.formats import FileFormat, check_format, stamp
from lockstep.core.safe_read import MB, checked
from lockstep.core.tags import Monitor, figure_text

METADATA_KEY = "lockstep"
MOST_CHARACTERS = 16 * MB  # characters of the text, nearly all of which are names of classes
NAMES_LIMIT = 15 * MB  # characters of these names, as JSON
INTERPOLATION = INTERPOLATIONS[0]
# How a file becomes a stored image: its centre, all of it with a frame, or all of it with another aspect ratio.
FITS = ("crop", "pad", "squash")
CROP, PAD, SQUASH = FITS
# How logits become probabilities. With softmax the classes exclude each other, and their probabilities add up to 1;
# with sigmoid each class is judged by itself; the outputs of a regression are the values themselves.
PROBABILITIES = ("softmax", "sigmoid", "values")
SOFTMAX, SIGMOID, VALUES = PROBABILITIES
# What the targets of a task are: one of the classes; a share for each of several labels; or numbers.
CLASSES, LABELS = "classes", "labels"
TARGETS = (CLASSES, LABELS, VALUES)
MOST_CLASSES, MOST_CHANNELS, LONGEST_SIDE = 1_000_000, 1024, 16_384
VIEWS = (1, 2, 6)  # the numbers of views of an image that an evaluation can average


def class_name(text: str) -> str:
    """A name in Unicode's composed form (NFC). Files of macOS have the decomposed form, which looks the same.

    Bytes of a folder's name that are no text are written as such: no file of a run may have them.
    """
    return unicodedata.normalize("NFC", as_unicode(text))


Shape = tuple[int, int, int]
Size = tuple[int, int]  # (height, width)
Node = Mapping[str, Any]


def _class_of(node: Node) -> str:
    return str(node.get("_target_")).rpartition(".")[2]


def _is_shape(value: Any) -> bool:
    most = (MOST_CHANNELS, LONGEST_SIDE, LONGEST_SIDE)
    sizes = [Number(low=1, high=limit, whole=True) for limit in most]
    return isinstance(value, list) and len(value) == 3 and all(map(Number.fits, sizes, value))


def _numbers(low: float) -> Check:
    number = Number(low=low, high=1e6)
    expected = f"a list of numbers{number.expected.removeprefix('a number')}"
    return Check(expected, lambda value: isinstance(value, list) and all(map(number.fits, value)))


_SHAPE = Check(
    f"[channels, height, width] of at most {MOST_CHANNELS:,}, {LONGEST_SIDE:,} and {LONGEST_SIDE:,}", _is_shape
)
_NODE = Check(
    "a class, as _target_, with its fields",
    lambda value: isinstance(value, dict) and isinstance(value.get("_target_"), str),
)
_TEXTS = Check(
    "a list of texts", lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value)
)
_COUNT = Number(low=1, high=MOST_CLASSES, whole=True)  # of classes, and of images of a block
_SCORES = Check(
    "numbers by name",
    lambda value: isinstance(value, dict) and all(map(Number(low=-1e300, high=1e300).fits, value.values())),
)
_HASHES = Check(
    "a sha256 by name", lambda value: isinstance(value, dict) and all(map(TEXT.fits, (*value, *value.values())))
)


@dataclass(frozen=True, kw_only=True)
class TrainedInput:
    """The images that published weights were trained on. A model that starts from them gets images of the same kind.

    Fields:
        image_shape: (channels, height, width) of a stored uint8 image, before it is cropped; None if it is not known.
        input_shape: (channels, height, width) of an image that the model gets.
        eval_crop: the central part of a stored image that is evaluated, as a share of its side.
        mean, std: the mean and standard deviation of each channel, for pixels from 0 to 1.
        interpolation: how images are resized, one of `INTERPOLATIONS`.
        fit: how a file becomes a stored image, one of `FITS`.
    """

    image_shape: Shape | None = None
    input_shape: Shape = ruled(MISSING, _SHAPE)
    eval_crop: float = ruled(MISSING, Number(low=0, high=1, low_open=True))
    mean: tuple[float, ...] = ruled(MISSING, _numbers(-1e6))
    std: tuple[float, ...] = ruled(MISSING, _numbers(1e-6))
    interpolation: str = choice(INTERPOLATION, *INTERPOLATIONS)
    fit: str = choice(CROP, *FITS)

    def normalisation(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation for images with `channels` channels, see `per_channel`."""
        return per_channel(self.mean, channels), per_channel(self.std, channels)


@dataclass(frozen=True, kw_only=True)
class Preprocessing(TrainedInput):
    """How a file becomes a stored image, and a stored image the input of the model in an evaluation."""

    image_shape: Shape = ruled(MISSING, _SHAPE)

    @property
    def centre(self) -> Size:
        """The (height, width) of the part of a stored image that is evaluated."""
        return evaluated_size(self.image_shape[1:], self.eval_crop, self.input_shape[1:])

    @property
    def fill(self) -> tuple[int, ...]:
        """The colour of frames: the pixel value of each channel that is nearest to its mean."""
        return tuple(min(max(round(255 * value), 0), 255) for value in self.mean)


@dataclass(frozen=True, kw_only=True)
class ModelCard(Preprocessing):
    """The description of a model and of the images that it was evaluated on.

    Fields:
        model, precision, loss: the config nodes of these components: `_target_` and the fields of the class.
        class_names: the names, indexed by label; empty if the classes have no names.
        eval_views: the number of views of an image whose logits are averaged.
        eval_batch: the images of one block of the evaluation; the last bits of a logit depend on it.
        trained_on: the config node of the data set, without paths; its examples' sha256, and their number by split.
        lockstep: the version of Lockstep that wrote the file.
        scores: the figures of their evaluation that have a value, by name; empty if they were not evaluated.
        averaged: whether the weights are a moving average.
        probabilities: how logits become probabilities, as in the loss of the training; `values` are none.
        targets: what the outputs are: `classes`, `labels` or `values`.
        monitor: the figure that has chosen the weights.
        packages: the extensions that it was trained with, and the sha256 of their code.
    """

    model: Node = ruled(MISSING, _NODE)
    precision: Node = ruled(MISSING, _NODE)
    loss: Node = ruled(MISSING, _NODE)
    classes: int = ruled(MISSING, _COUNT)
    class_names: tuple[str, ...] = ruled(MISSING, _TEXTS)
    eval_views: int = choice(MISSING, *VIEWS)
    eval_batch: int = ruled(MISSING, _COUNT)
    trained_on: Node = ruled(MISSING, Check("a mapping", lambda value: isinstance(value, dict)))
    lockstep: str = ruled(MISSING, Check("a version", lambda value: isinstance(value, str) and len(value) <= 100))
    step: int = ruled(0, Number(low=0, high=2**62, whole=True))
    scores: Mapping[str, float] = ruled({}, _SCORES)
    averaged: bool = ruled(False, Check("true or false", lambda value: isinstance(value, bool)))
    probabilities: str = choice(SOFTMAX, *PROBABILITIES)
    targets: str = choice(CLASSES, *TARGETS)
    monitor: str = ruled("top1", TEXT)
    packages: Mapping[str, str] = ruled({}, _HASHES)

    @property
    def model_name(self) -> str:
        """The name of the model in its library, or else of its class."""
        return str(self.model.get("name") or _class_of(self.model))

    @property
    def data_name(self) -> str:
        return _class_of(self.trained_on)

    @property
    def score(self) -> str:
        """The score that has chosen the weights, in words; empty if they were not evaluated."""
        monitor = Monitor.parse(self.monitor)
        return figure_text(monitor.name, self.scores[monitor.name]) if monitor.name in self.scores else ""

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each label: the class name, or the label as a text if there are no class names."""
        return tuple(map(class_name, self.class_names or map(str, range(self.classes))))

    def metadata(self) -> dict[str, str]:
        return {METADATA_KEY: json.dumps({**stamp(FileFormat.weights), **vars(self)}, allow_nan=False)}

    @classmethod
    def parse(cls, metadata: Any, file: object = "its description") -> Self:
        """The card in the metadata of a safetensors file. Raises ValueError for anything wrong, NewerFormat."""
        text = metadata.get(METADATA_KEY) if isinstance(metadata, Mapping) else None
        if not isinstance(text, str):
            raise ValueError("it does not say what its model is; init_from= can train from weights of other programs")
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"its description has {len(text):,} characters, expected at most {MOST_CHARACTERS:,}")
        try:
            values = checked(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its description is not JSON ({str(error).partition(chr(10))[0]})") from error
        if not isinstance(values, dict):
            raise ValueError(f"its description is {shown(values)}, expected keys")
        check_format(FileFormat.weights, values, file)
        defaults = {field.name: default_of(field) for field in dataclasses.fields(cls)}
        values = {key: values[key] for key in defaults if key in values}  # a later version may have more
        if missing := sorted(key for key in defaults if defaults[key] is MISSING and key not in values):
            raise ValueError(f"its description lacks {shown(missing[0])}")
        for key in values:
            if (rule := rule_of(cls, key)) is not None and not rule.fits(values[key]):
                raise ValueError(f"its {key} is {shown(values[key])}, expected {rule.expected}")
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        card = cls(**values)
        channels = card.input_shape[0]
        if not card.image_shape[0] == len(card.mean) == len(card.std) == channels:
            raise ValueError(
                f"its image_shape, mean and std have {card.image_shape[0]}, {len(card.mean)} and {len(card.std)} "
                f"channels, expected the {channels} of its input_shape"
            )
        if len(card.class_names) not in (0, card.classes):
            raise ValueError(
                f"it has {len(card.class_names):,} class_names, expected one for each of {card.classes:,}"
            )
        return card


def per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """The values if there is one for each channel, otherwise their average for each, as for grey images."""
    return values if len(values) == channels else (sum(values) / len(values),) * channels


# Which part of an image an evaluation sees, to the pixel as in timm (`create_transform`).


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
