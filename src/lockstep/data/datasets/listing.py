"""The image files of a split, wherever they are stored: in folders, in tar shards, or in the rows of a table."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.errors import InputError, shown
from lockstep.core.model_card import class_name

OptionT = TypeVar("OptionT")
NUMBER = re.compile(r"[0-9]+")
# The keys of the hashes that decide which files are held out, which fold they are of, and which a limit leaves.
SHARE_KEY, FOLD_KEY, LIMIT_KEY = b"lockstep val_share", b"lockstep folds", b"lockstep limit"
# Numbers that number no class. A table often has one of them where a label is missing.
NO_CLASS = re.compile(r"[+-]\d+|[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?|nan|NaN")


class Member(Protocol):
    """An image file inside another file. `str` gives its name for errors."""

    def contents(self) -> bytes:
        """Its bytes. Raises OSError or ValueError."""


@dataclass(frozen=True, eq=False)
class Files:
    """The image files of a split, wherever they are stored.

    A Path object takes about 280 bytes: 355 MB for the training files of ImageNet. Here a file takes as many bytes as
    the longest name.

    Fields:
        place: takes a key and returns a path, or a member of another file.
        keys: (N,): the paths of files, by class and then by name; or the positions of members, int64.
        labels: int64 (N,), or float32 (N, K), see `Split`.
        classes: the names of the classes, labels or values.
        identity: identifies what the members are stored in, whatever its path; empty for paths.
        notes: sentences about the files that are left out.
    """

    place: Callable[[Any], Path | Member]
    keys: NDArray[Any]
    labels: Tensor
    classes: tuple[str, ...]
    identity: str = ""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Path | Member:
        return self.place(self.keys[index])

    def fingerprint(self) -> dict[str, str]:
        """For each class with files their number and a hash of their names, or the same for all members together."""
        if self.identity:
            digest = _digest(self.keys.tobytes() + self.labels.numpy().tobytes())
            return {"examples": f"{len(self):,} of {self.identity} ({digest})"}
        if self.labels.ndim == 2:
            digest = _digest(b"".join(file + b"\0" for file in self.keys.tolist()))
            labels = _digest(self.labels.numpy().tobytes())
            return {
                "examples": f"{len(self):,} files ({digest})",
                "labels": f"of {', '.join(self.classes)} ({labels})",
            }
        by_class = {}
        ends = self.labels.bincount(minlength=len(self.classes)).cumsum(0).tolist()
        for name, names in zip(self.classes, np.split(self.keys, ends[:-1]), strict=True):
            if count := len(names):
                digest = _digest(b"".join(file + b"\0" for file in names.tolist()))
                by_class[name] = f"{count:,} file{'s' * (count != 1)} ({digest})"
        return by_class

    @property
    def members(self) -> bool:
        """Whether these are members of other files, of which several can have one name."""
        return bool(self.identity)

    def part(self, chosen: NDArray[np.bool_]) -> Files:
        """Those of the files that are `chosen`, bool (N,)."""
        return replace(self, keys=self.keys[chosen], labels=self.labels[chosen])


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def in_folder(folder: Path) -> Callable[[bytes], Path]:
    """The `place` of files whose keys are relative to a folder, or whole paths."""
    return lambda name: folder / os.fsdecode(name)


def as_names(names: Iterable[str]) -> NDArray[np.bytes_]:
    return np.array([os.fsencode(name) for name in names], dtype=np.bytes_)


def held_out(files: Files, names: NDArray[np.bytes_], share: float) -> tuple[Files, Files]:
    """Divide files into those to train on and those to evaluate, by their names and labels.

    Of each class, the `share` of the files whose names have the smallest hashes is evaluated: at least one of two or
    more files, and never all. If a file is added to the class, at most one other file changes sides. A file that is
    listed several times is on one side. The notes are those of the training split.

    Raises:
        InputError: every class has one file.
    """
    rank, count = ranked(names.tolist(), files.labels, SHARE_KEY, apart=files.members)
    evaluated = rank < np.minimum(np.maximum(1, np.rint(share * count)), count - 1)
    if not evaluated.any():
        raise InputError(f"dataset.val_share is {share:g}, but every class has one image, expected two or more")
    return files.part(~evaluated), replace(files.part(evaluated), notes=())


def ranked(
    names: Sequence[bytes], labels: Tensor, key: bytes, *, apart: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rank of each example among those of its stratum, by a hash of its name, and their number: (N,) each.

    The rank follows from the names alone, so an example that is added moves the others by one at most. Examples of
    one name have one rank, or follow each other if they are `apart`.
    """
    digests = (hashlib.blake2b(name, digest_size=16, key=key).digest() for name in names)
    places = (at.to_bytes(8, "big") if apart else b"" for at in range(len(names)))
    # Numbered in their order.
    hashes, hash_of = np.unique(np.array([*map(bytes.__add__, digests, places)], dtype="S24"), return_inverse=True)
    units, unit_of = np.unique(strata_of(labels).numpy() * len(hashes) + hash_of, return_inverse=True)
    stratum_of = units // max(1, len(hashes))
    first, end = (np.searchsorted(stratum_of, stratum_of, side) for side in ("left", "right"))
    return (np.arange(len(units)) - first)[unit_of], (end - first)[unit_of]


def folded(files: Files, names: NDArray[np.bytes_], folds: int, fold: int) -> tuple[Files, Files]:
    """Divide files for cross-validation: those of the other folds, and those of `fold`.

    Each stratum (see `strata_of`) is cut in the order of the hashes of its names, so the folds have as many of it,
    within one, and a file that is added moves at most one other over each of the cuts.

    Raises:
        InputError: a fold would have no file of a class.
    """
    rank, count = ranked(names.tolist(), files.labels, FOLD_KEY, apart=files.members)
    if files.labels.ndim == 1 and (count < folds).any():
        label = int(files.labels[int(count.argmin())])
        raise InputError(
            f"dataset.folds is {folds}, but the class {files.classes[label]} has {count.min()} images, so a fold "
            f"would have none; use dataset.folds={max(2, count.min())} or fewer, or leave out the class"
        )
    chosen = ((rank + 1) * folds - 1) // count == fold
    return files.part(~chosen), replace(files.part(chosen), notes=())


def within(limit: float, names: Sequence[bytes], labels: Tensor, *, apart: bool = False) -> NDArray[np.bool_]:
    """Which examples a limit leaves, bool (N,): a share up to 1, or a number; at least one of each stratum."""
    rank, count = ranked(names, labels, LIMIT_KEY, apart=apart)
    share = limit if limit <= 1 else limit / max(1, len(names))
    chosen: NDArray[np.bool_] = rank < np.maximum(1, np.floor(share * count + 0.5))
    return chosen


def strata_of(labels: Tensor) -> Tensor:
    """The group of similar examples that each is of, int64 (N,): its class, or its labels; one for all values."""
    if labels.ndim == 1:
        return labels
    if ((labels == 0) | (labels == 1)).all():
        return labels.unique(dim=0, return_inverse=True)[1]
    return torch.zeros(len(labels), dtype=torch.int64)


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """The different names of classes: by number if all of them are whole numbers, otherwise in the given order."""
    classes = tuple(dict.fromkeys(map(class_name, names)))
    if not all(map(NUMBER.fullmatch, classes)):
        return classes
    # Compared as texts: Python refuses to convert a number of thousands of digits.
    return tuple(sorted(classes, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), len(name))))


def classes_of(labels: Sequence[str], place: Callable[[int], str], *, gaps: bool) -> tuple[str, ...]:
    """The names of the classes, by label: sorted, as numbers if all of them are.

    Args:
        labels: the label of each training example.
        place: says where the label of an example is, by its position.
        gaps: whether numbers may be missing, as in a part of a larger data set.

    Raises:
        InputError: a label is a number that numbers no class, such as -1, 1.0, or 7 among 0 and 1.
    """
    classes = in_order(sorted(set(map(class_name, labels))))
    wrong = next((name for name in labels if NO_CLASS.fullmatch(name)), None)
    if wrong is None and not gaps and all(map(NUMBER.fullmatch, classes)):
        numbers = enumerate(classes, start=int(classes[0].lstrip("0") == "1"))
        wrong = next((name for number, name in numbers if name.lstrip("0") != str(number).lstrip("0")), None)
    if wrong is not None:
        raise InputError(
            f"dataset: {place(labels.index(wrong))} has the label {shown(wrong)}, but numbered classes are whole "
            f"numbers from 0{'' if gaps else ' (or 1) without gaps'}; correct it, leave the example out, or write "
            "names: class_2"
        )
    return classes


def as_labels(names: Sequence[str], classes: Sequence[str], place: Callable[[int], str]) -> Tensor:
    """The labels of examples, int64 (N,), by the names of their classes.

    Raises:
        InputError: a name is no class; `place` says where it is.
    """
    numbers = {name: label for label, name in enumerate(classes)}
    labels = [numbers.get(class_name(name), -1) for name in names]
    if -1 in labels:
        unknown = labels.index(-1)
        raise InputError(
            f"dataset: {place(unknown)} has the label {names[unknown]!r}, which no training example has; leave it out"
        )
    return torch.tensor(labels, dtype=torch.int64)


def option_of(options: Mapping[str, OptionT], name: str, where: str, *, key: str) -> OptionT:
    """The split or the column `name`, as the field `key` of a data set asks for.

    Raises:
        InputError: `where` does not have it.
    """
    if name not in options:
        available = ", ".join(sorted(map(repr, options))) or "nothing"
        share = ", or hold out a share of each class with dataset.val_share=0.1"
        raise InputError(
            f"dataset.{key} is {name!r}, but {where} has {available}; name one with dataset.{key}=NAME"
            f"{share if key in ('val_split', 'split_column') else ''}"
        )
    return options[name]
