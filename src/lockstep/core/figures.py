"""A run's files of figures: the lines of `metrics.jsonl` (the reference) and `gpu.jsonl`; `validation.json`; CSV."""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from lockstep.core.errors import InputError, escaped, shown
from lockstep.core.model_card import CLASSES, LABELS
from lockstep.core.safe_read import MB, UnreadableFile, is_number, read_json, read_lines
from lockstep.core.safe_write import write_atomic
from lockstep.core.tags import FIGURES, GPU, PAGES, Direction, Monitor

Figures = Sequence[tuple[int, Mapping[str, float]]]

STAMP = "time"  # of a line of `metrics.jsonl`, besides its step and scalars
DELAYS = {figure.tag: figure.delay for figure in FIGURES if figure.delay}
DELAYED_TAGS = tuple(DELAYS)
# The tags of options: not those that begin like ours.
TAG = re.compile(rf"(?!({'|'.join(PAGES)})/)\w[\w-]*(/[\w.-]+)+", re.ASCII)
PREDICTIONS_LIMIT = 64 * MB  # the file of 100 classes has 0.3 MB
CONFIDENCE = 0.95  # of all intervals
BINS = 127  # of a curve of precision and recall: the most that TensorBoard reads
# A spreadsheet computes a cell that begins like this; the last four are the wide forms of the first.
_FORMULA = re.compile(r"[=+\-@\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?(e[+-]?\d+)?")


def place_of(step: int, tags: Iterable[str]) -> float:
    """Where figures are in the order of a run: an evaluation is half a step behind its step, and a test is later."""
    later = [tag for tag in tags if tag.startswith(DELAYED_TAGS)]
    delays = (delay for tag in later for start, delay in DELAYS.items() if tag.startswith(start))
    return step + max(delays, default=0.0)


def is_of_option(tag: str) -> bool:
    """Whether a figure is one that an option logs."""
    return tag.partition("/")[0] not in PAGES


def figures_of(*options: Any) -> dict[str, Direction]:
    """The figures that options log, with their directions: `figures` are written as monitors are."""
    monitors = (Monitor.parse(text) for option in options for text in option.figures)
    return {figure.name: figure.direction for figure in monitors}


def check_figures(figures: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Refuse `figures` of options, those of an option with its group, that are no tags, or that two options have."""
    named = [(group, name) for group, names in figures for name in names]
    for number, (group, name) in enumerate(named):
        if not isinstance(name, str) or not TAG.fullmatch(name.removeprefix("-")):
            raise InputError(
                f"{group}: the class has the figure {shown(name)}, expected names such as my/scalar, which do not "
                f"begin with {'/, '.join(PAGES)}/; correct its `figures`"
            )
        if name.removeprefix("-") in [str(other).removeprefix("-") for _, other in named[:number]]:
            raise InputError(f"{group}: another option has the figure {shown(name)}, too; rename it in `figures`")


def check_declared(group: str, name: str, names: Sequence[str]) -> None:
    """Refuse a figure that is not among the `figures` of its option."""
    if name not in names:
        raise InputError(
            f"{group}: the figure {shown(name)} is not declared, expected one of {', '.join(names) or 'none'}; name "
            "it in the class, as `figures: ClassVar[tuple[str, ...]]`"
        )


def finite(scalars: Mapping[str, float]) -> dict[str, float]:
    """The scalars that have a value, for what has no other way to say that there is none."""
    return {tag: value for tag, value in scalars.items() if math.isfinite(value)}


def digits(number: Any) -> str:
    """A float of Python or NumPy with the digits that tell it from all others of its dtype."""
    return str(number).removesuffix(".0")


def csv_row(values: Sequence[object]) -> str:
    """One line without its end, as usual; a text that a spreadsheet would compute begins with an apostrophe."""
    cells = ["'" * bool(_FORMULA.match(cell) and not _NUMBER.fullmatch(cell)) + cell for cell in map(str, values)]
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(escaped(cell, keep="") for cell in cells)
    return text.getvalue()


def number_or_text(value: str) -> str | float:
    """A value of a config as a finite number, or else as it is."""
    with suppress(ValueError):
        return float(value) if math.isfinite(float(value)) else value
    return value


def parsed_figures(line: str) -> tuple[int, dict[Any, Any]]:
    """The step and the scalars of a line of `metrics.jsonl`. Raises ValueError or RecursionError for another line."""
    match json.loads(line):
        case {"step": int(step), **scalars} if is_number(step):
            if all(value is None or is_number(value) for value in scalars.values()):
                return step, scalars
    raise ValueError("not a line of figures")


def read_figures(path: Path, after: float = math.inf, nulls: bool = False) -> Iterator[tuple[int, dict[str, float]]]:
    """The steps up to `RunInfo.after` in a `metrics.jsonl`, if there is one: finite scalars, and NaN for `nulls`."""
    for line in read_lines(path) if path.exists() else ():
        with suppress(ValueError, RecursionError):
            step, scalars = parsed_figures(line or "")
            if place_of(step, scalars) <= after:
                named = {tag: math.nan if value is None else value for tag, value in scalars.items() if tag != STAMP}
                yield step, named if nulls else finite(named)


def parsed_samples(line: str) -> tuple[int, dict[str, Any]]:
    """The step and the figures by tag of a line of `gpu.jsonl`. Raises ValueError or RecursionError."""
    match json.loads(line):
        case {"time": _, "step": int(step), "local_rank": rank, "uuid": _, **figures}:
            return step, {f"{GPU}{name}/{rank}": value for name, value in figures.items() if is_number(value)}
    raise ValueError("not a line of GPU figures")


def read_samples(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """The steps in a `gpu.jsonl`, if there is one, with the figures of a GPU by tag."""
    for line in read_lines(path) if path.exists() else ():
        with suppress(ValueError, RecursionError):
            yield parsed_samples(line or "")


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """What a model predicts for a split of C classes, labels or values. Broken images do not count.

    Fields:
        step: the step after which the model was evaluated.
        names: the names of the classes, labels or values, by number.
        examples, predicted, hits: by class, how many examples have it, how many are predicted to have it, and both;
            empty for values.
        confusion: examples by label (C rows) and prediction (C columns); empty for many classes.
        curves: (C, 2, BINS): how many examples of each class, and how many others, are in each interval of the
            probability of the class. Of the class itself, all intervals have as many; empty for many classes.
        worst: the examples with the highest losses, the highest first: `sample` is the file or the number of the
            example, `label` and `predicted` are classes, lists of labels, or values, `probability` (of the predicted
            class) and `loss` are None if they are not finite, and `png` is the image in base64, with at most 128
            pixels a side.
        targets: what the task predicts, one of `model_card.TARGETS`.
        average_precision: of each of a few labels, None without an image that has it.
        points: (C, 2, n): the true and the predicted values of some examples, in the order of the split; None is a
            value that is not finite.
    """

    step: int
    names: Sequence[str]
    examples: Sequence[int]
    predicted: Sequence[int]
    hits: Sequence[int]
    confusion: Sequence[Sequence[int]]
    curves: Sequence[Sequence[Sequence[int]]]
    worst: Sequence[Mapping[str, Any]]
    targets: str = CLASSES
    average_precision: Sequence[float | None] = ()
    points: Sequence[Sequence[Sequence[float | None]]] = ()

    def write(self, path: Path) -> None:
        """Write the file, without the fields that have their default. Raises StorageError."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        own = {field.name: values[field.name] for field in fields(self) if values[field.name] != field.default}
        write_atomic(path, json.dumps(own, allow_nan=False, separators=(",", ":")) + "\n")

    def in_words(self, answer: Any, names: Sequence[str] | None = None) -> str:
        """A target or a prediction of `worst`, with `names` instead of its own names if given."""
        names = names or self.names
        if self.targets == CLASSES:
            return names[answer]
        if self.targets == LABELS:
            return ", ".join(names[label] for label in answer) or "none"
        from numpy import float32  # takes 0.1 s

        values = ["not a number" if value is None else digits(float32(value)) for value in answer]
        return values[0] if len(values) == 1 else ", ".join(map(str.strip, map("{} {}".format, names, values)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file, whose fields can have other types. Raises UnreadableFile for a missing or another file."""
        try:
            values = read_json(path, PREDICTIONS_LIMIT)
            return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})
        except TypeError as error:
            raise UnreadableFile(path, "is not a file of predictions") from error
