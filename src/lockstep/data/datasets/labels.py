"""The classes of data sets whose labels are strings: names or numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lockstep.core.errors import InputError


def classes_of(labels: Iterable[str]) -> tuple[str, ...]:
    """The names of the classes, by label: sorted, as numbers if all of them are."""
    names = set(labels)
    if all(name.isdecimal() and name.isascii() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


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
