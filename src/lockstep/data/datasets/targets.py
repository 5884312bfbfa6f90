"""From what a data set stores with an image to its label: a class by name, several labels, or values."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.core.data_protocols import SPLIT_NAMES
from lockstep.core.errors import InputError, first_of, is_one_line, shown
from lockstep.core.fields import Check
from lockstep.core.model_card import CLASSES, LABELS, VALUES, class_name
from lockstep.data.datasets.listing import class_names_of

IN_NO_NAME = ";|"  # separators that names of classes do not have
SEPARATORS = f"{IN_NO_NAME},/+& "  # what may stand between the labels of an image
# Lists of Python, NumPy (without commas) and JSON (with escapes); tuples and sets only around quotes, or empty ones.
LIST = re.compile(r"""\[.*\]|\(\s*['"].*\)|\{(\s*['"][^:]*)?\}|\(\)|set\(\)""", re.DOTALL)
IN_LIST = re.compile(r"""\s*('[^']*'|"(?:[^"\\]|\\.)*"|[^,]+)""")
LARGEST_VALUE = 3e38  # a value in float32
CLASSES_NAMED = 5  # the most classes that a note names
FEW_EVALUATED = 8  # images; with fewer, each is over 12 % of a score
SEPARATOR = Check(
    "from 1 to 10 characters in one line",
    lambda value: isinstance(value, str) and 1 <= len(value) <= 10 and is_one_line(value),
    "a text",
)


def target_of(value: Any, targets: str, place: str, name: Callable[[Any], str] = str) -> Any:
    """A stored value as `as_targets` takes it: a name; a list of names, or of a 0 or 1 for each label; or of numbers.

    `targets` is one of `model_card.TARGETS`, otherwise it is a class; `place` says where it is, for errors; `name`
    turns the number of a class into its name.
    """
    if targets == VALUES:
        return value if isinstance(value, list) else [value]
    if targets == LABELS:
        if not isinstance(value, list) or not all(
            isinstance(cell, str | int | float) and cell != -1 for cell in value
        ):
            raise InputError(
                f"dataset: {place} has the labels {shown(value)}, expected a list of classes, or of a 0 or 1 for "
                "each label as floats; correct it, or use another task"
            )
        return value if are_vectors([value]) else [name(cell) for cell in value]
    if value is None or isinstance(value, float | list | dict) or value == -1:
        many = ", or use task=multilabel or task=regression" * isinstance(value, float | list)
        raise InputError(f"dataset: {place} has the label {shown(value)}, expected a class; correct it{many}")
    return name(value)


def split_text(text: str, separator: str) -> list[str]:
    """The names or numbers in a text, also one like ['a', 'b'], whatever the separator; none in an empty one."""
    if not LIST.fullmatch(text):
        return [name for part in text.split(separator) if (name := part.strip())]
    parts = map(str.strip, IN_LIST.findall(text.removeprefix("set")[1:-1]))
    return [name for part in parts if (name := _unescaped(part) if part[:1] == '"' else part.strip("'"))]


def _unescaped(part: str) -> str:
    try:
        return str(json.loads(part))
    except ValueError:  # a text of Python that is none of JSON
        return part.strip('"')


def lists_note(names: Sequence[str], targets: str, separator: str | None) -> list[str]:
    """A sentence about names of classes or labels that look like lists of fewer names.

    `separator` is that of the data set: empty if no key sets it, None if names are not from texts. Names of several
    words, as ImageNet's and Stanford Cars' are, have more different words than there are names.
    """
    for between in SEPARATORS if separator is not None and targets != VALUES else "":
        parts = [split_text(name, between) for name in names]
        longest, different = max(parts, key=len, default=[]), len({part for own in parts for part in own})
        if len(longest) > 1 and (between in IN_NO_NAME or different < len({*names}) + (between != " ")):
            example = names[parts.index(longest)]
            needed = between != separator and not LIST.fullmatch(example)
            by_key = f"\"dataset.label_separator='{between}'\"" * needed
            task, what = ("", "label") if targets == LABELS else ("task=multilabel ", "class")
            return [
                f"the names of the {len(names):,} {targets}, such as {shown(example)}, look like lists of "
                f"{different:,} names, and each list is one {what}; for several labels of an image, use "
                f"{task}{by_key if separator else 'and lists of names in the column'}".rstrip()
            ]
    return []


def are_vectors(examples: Sequence[Sequence[Any]]) -> bool:
    """Whether the labels of examples have a 0 or 1 for each label, as floats or bools, and not the names of some."""
    return any(isinstance(cell, float | bool) for cells in examples for cell in cells)


def names_of(
    examples: Sequence[Any], targets: str, place: Callable[[int], str], column: str, *, gaps: bool = True
) -> tuple[str, ...]:
    """The names of the classes, labels or values, by the training examples as `target_of` returns them.

    Without names, labels and values are called `column`, with their number if there are several. `gaps` is as for
    `class_names_of`. Raises InputError if no example has a label, or a name may be meant otherwise.
    """
    if targets == VALUES or (targets == LABELS and are_vectors(examples)):
        width = len(examples[0]) if examples else 1
        return (column,) if width <= 1 else tuple(f"{column}_{number}" for number in range(width))
    if targets != LABELS:
        return class_names_of(examples, place, gaps=gaps)
    names, owners = _flattened(examples)
    if not names:
        raise InputError(
            f"dataset: none of the {len(examples):,} training examples has a label, the first is {place(0)}; correct "
            "them, or use another task"
        )
    if {*names} <= {"0", "1"} and 1 not in (widths := {*map(len, examples)}) and len(widths) == 1:
        raise InputError(
            f"dataset: {place(0)} has the labels {', '.join(examples[0])}, expected each class once; for a 0 or 1 "
            "for each label, store floats (0.0, 1.0) or bools, or a column for each label"
        )
    return class_names_of(names, lambda index: place(owners[index]), gaps=True)


def as_targets(
    examples: Sequence[Any], targets: str, names: Sequence[str], place: Callable[[int], str], separator: str
) -> Tensor:
    """The labels of examples, see `Split.labels`, from what `target_of` returns. Raises InputError."""
    if targets == VALUES or (targets == LABELS and are_vectors(examples)):
        return as_numbers(examples, names, place, binary=targets == LABELS)
    cells, owners = _flattened(examples) if targets == LABELS else (examples, range(len(examples)))
    if targets == LABELS and {*map(len, examples)} == {len(names)} and {*cells} <= {*names[:2]}:
        twice = next((at for at, own in enumerate(examples) if len({*own}) < len(own)), None)
        if twice is not None:  # a 0 or 1 for each label, as whole numbers
            raise InputError(
                f"dataset: {place(twice)} has the labels {', '.join(examples[twice])}, expected each label once; for "
                "a 0 or 1 for each label, store floats (0.0, 1.0) or bools"
            )
    numbers_by_name = {name: number for number, name in enumerate(names)}
    numbers = [numbers_by_name.get(class_name(cell), -1) for cell in cells]
    if unknown := {cells[place_]: place_ for place_ in reversed(range(len(numbers))) if numbers[place_] == -1}:
        (remedy,) = lists_note([*names, *unknown], targets, separator) or ["remove it"]
        problems = [
            f"dataset: {place(owners[first])} has the label {label!r}, which no training example has; {remedy}"
            for label, first in reversed(unknown.items())
        ]
        raise InputError(*first_of(problems))
    labels = torch.tensor(numbers, dtype=torch.int64)
    if targets != LABELS:
        return labels
    shares = torch.zeros(len(examples), len(names))
    shares[torch.tensor(owners, dtype=torch.int64), labels] = 1
    return shares


def _flattened(examples: Sequence[Sequence[str]]) -> tuple[Sequence[str], Sequence[int]]:
    pairs = [(name, example) for example, own in enumerate(examples) for name in own]
    return [name for name, _ in pairs], [example for _, example in pairs]


def as_numbers(
    cells: Sequence[Sequence[Any]], names: Sequence[str], place: Callable[[int], str], *, binary: bool
) -> Tensor:
    """The numbers of examples, float32 (N, K), for `names`; with `binary` 0 and 1 only. Raises InputError."""
    expected = "0 or 1 (also true or false) for each label" if binary else "a finite number"
    words = {"true": 1.0, "false": 0.0} if binary else {}
    numbers, problems = torch.empty(len(cells), len(names)), list[str]()
    for example, row in enumerate(cells):
        if len(row) != len(names):
            problems.append(
                f"dataset: {place(example)} has {len(row)} number{'s' * (len(row) != 1)}, expected {len(names)}, as "
                "the first example to train on has; correct it"
            )
            continue
        own = [_number(cell, words) for cell in row]
        problems += [
            f"dataset: {place(example)} has {shown(cell)} for {shown(name)}, expected {expected}; correct it"
            for name, cell, number in zip(names, row, own, strict=True)
            if not abs(number) <= LARGEST_VALUE or (binary and number not in (0, 1))
        ]
        numbers[example] = torch.tensor(own)
    if problems:
        raise InputError(*first_of(problems))
    return numbers


def _number(cell: Any, words: dict[str, float]) -> float:
    try:
        text = str(cell).strip()
        return words[text.lower()] if text.lower() in words else float(text)
    except ValueError:
        return math.nan


def class_notes(names: Sequence[str], splits: Mapping[str, Tensor], targets: str = CLASSES) -> list[str]:
    """Sentences about classes or labels without images and values that never change, by the labels of each split."""
    if targets == VALUES:
        values_of = zip(names, splits["train"].T, strict=True)
        same = [name for name, values in values_of if len(values.unique()) == 1]
        return [f"{name} is the same for all images to train on, so there is nothing to learn" for name in same]
    what = LABELS if targets == LABELS else CLASSES
    alone = len(names) == 1 and what == CLASSES
    notes = [f"all images are of one class, {names[0]}, so there is nothing to learn"] if alone else []
    for name, labels in splits.items():
        split = SPLIT_NAMES[name]
        effect = "the model never sees one" if name == "train" else "no score tells anything about them"
        counts = labels.bincount(minlength=len(names)) if labels.ndim == 1 else labels.sum(0)
        if missing := [name for name, count in zip(names, counts.tolist(), strict=True) if not count]:
            few = ", ".join(missing[:CLASSES_NAMED] + ["..."] * (len(missing) > CLASSES_NAMED))
            notes.append(
                f"{len(missing)} of {len(names)} {what} have no image in the {split} split, so {effect}: {few}"
            )
        if name == "val" and len(labels) < FEW_EVALUATED:
            number = f"{len(labels)} image{'s' * (len(labels) != 1)}"
            notes.append(f"the {split} split has {number}, so a score says little; more to evaluate say more")
        if what == LABELS and (bare := int((labels.sum(1) == 0).sum())):
            notes.append(f"{bare:,} of {len(labels):,} images of the {split} split have no label")
    return notes
