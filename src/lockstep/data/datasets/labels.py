"""The classes of data sets whose labels are strings: names or numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lockstep.core.errors import InputError
from lockstep.core.fields import shown

# Numbers that number no class. A table often has one of them where a label is missing.
_NO_CLASS = re.compile(r"[+-]\d+|[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?|nan|NaN")


def classes_of(labels: Sequence[str], place: Callable[[int], str], *, gaps: bool) -> tuple[str, ...]:
    """The names of the classes, by label: sorted, as numbers if all of them are.

    Args:
        labels: the label of each training example.
        place: says where the label of an example is, by its position.
        gaps: whether numbers may be missing between those of the classes, as in a part of a larger data set.

    Raises:
        InputError: a label is a number that numbers no class, such as -1, 1.0, or 7 among 0 and 1.
    """
    names = set(labels)
    wrong = next((name for name in labels if _NO_CLASS.fullmatch(name)), None)
    if wrong is None and not all(name.isdecimal() and name.isascii() for name in names):
        return tuple(sorted(names))
    # Compared as texts: Python refuses to convert a number of thousands of digits.
    classes = sorted(names, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), len(name)))
    if wrong is None and not gaps:
        numbers = enumerate(classes, start=int(classes[0].lstrip("0") == "1"))
        wrong = next((name for number, name in numbers if name.lstrip("0") != str(number).lstrip("0")), None)
    if wrong is not None:
        raise InputError(
            f"dataset: {place(labels.index(wrong))} has the label {shown(wrong)}, but numbered classes are whole "
            f"numbers from 0{'' if gaps else ' (or 1) without gaps'}; correct it, leave the example out, or write "
            "names: class_2"
        )
    return tuple(classes)


def first_unknown(names: Iterable[str], classes: Iterable[str]) -> int | None:
    """The position of the first name that is no class; None if all are."""
    known_names = frozenset(classes)
    return next((position for position, name in enumerate(names) if name not in known_names), None)


def as_labels(names: Iterable[str], classes: Sequence[str]) -> Tensor:
    """The labels of examples, int64 (N,), by the names of their classes."""
    labels = {name: label for label, name in enumerate(classes)}
    return torch.tensor([labels[name] for name in names], dtype=torch.int64)


def missing_split(key: str, split: str, splits: Iterable[str], where: object) -> InputError:
    """The error for a split without examples; it lists the splits that exist."""
    available = ", ".join(sorted(map(repr, splits))) or "nothing"
    return InputError(f"dataset.{key} is {split!r}, but {where} has {available}; name one with dataset.{key}=NAME")
