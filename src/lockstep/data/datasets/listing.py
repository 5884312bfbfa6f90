"""The image files of a split, wherever they are stored: in folders, in tar shards, or in the rows of a table."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.errors import InputError, shown
from lockstep.core.model_card import class_name

Names = NDArray[np.bytes_]
SplitT = TypeVar("SplitT")
NUMBER = re.compile(r"[0-9]+")
SHARE_KEY = b"lockstep val_share"  # the key of the hash that decides which files are held out
# Numbers that number no class. A table often has one of them where a label is missing.
NO_CLASS = re.compile(r"[+-]\d+|[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?|nan|NaN")


@dataclass(frozen=True, eq=False)
class Listing:
    """Image files in folders, by class and then by name.

    A Path object takes about 280 bytes in each rank: 355 MB for the training files of ImageNet. Here a file takes as
    many bytes as the longest name, in one array that all ranks of a machine can share.

    Fields:
        folder: the folder that the names are relative to.
        classes: the names of the classes, by label.
        counts: the number of files of each class.
        names: the paths of the files, (N,).
        notes: sentences about the files that are left out.
    """

    folder: Path
    classes: tuple[str, ...]
    counts: tuple[int, ...]
    names: Names
    notes: tuple[str, ...] = ()

    @cached_property
    def labels(self) -> Tensor:
        """int64 (N,)."""
        return torch.arange(len(self.counts)).repeat_interleave(torch.tensor(self.counts))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Path:
        return self.folder / os.fsdecode(self.names[index])  # a name may be a whole path

    def fingerprint(self) -> dict[str, str]:
        """For each class with files: their number and a hash of their names. Does not depend on the folder's path."""
        by_class = {}
        for name, names in zip(self.classes, np.split(self.names, np.cumsum(self.counts)[:-1]), strict=True):
            if count := len(names):
                digest = hashlib.sha256(b"".join(file + b"\0" for file in names.tolist())).hexdigest()[:16]
                by_class[name] = f"{count:,} file{'s' * (count != 1)} ({digest})"
        return by_class

    def part(self, chosen: NDArray[np.bool_]) -> Listing:
        """Those of the files that are `chosen`, bool (N,)."""
        counts = tuple(self.labels[chosen].bincount(minlength=len(self.classes)).tolist())
        return replace(self, counts=counts, names=self.names[chosen])


def as_names(names: Iterable[str]) -> Names:
    return np.array([os.fsencode(name) for name in names], dtype=np.bytes_)


class Member(Protocol):
    """An image file inside another file. `str` gives its name for errors."""

    def contents(self) -> bytes:
        """Its bytes. Raises OSError or ValueError."""


@dataclass(frozen=True, eq=False)
class Members:
    """Image files inside other files, in the order in which they are stored.

    Fields:
        member: returns the member at a position.
        positions: the positions of the split's examples, int64 (N,).
        labels: int64 (N,).
        classes: the names of the classes, by label.
        identity: identifies the stored data, whatever its path.
        notes: sentences about the files that are left out.
    """

    member: Callable[[int], Member]
    positions: NDArray[np.int64]
    labels: Tensor
    classes: tuple[str, ...]
    identity: str
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> Member:
        return self.member(int(self.positions[index]))

    def fingerprint(self) -> dict[str, str]:
        """The number of examples, the identity of the stored data, and a hash of positions and labels."""
        digest = hashlib.sha256(self.positions.tobytes() + self.labels.numpy().tobytes()).hexdigest()[:16]
        return {"examples": f"{len(self):,} of {self.identity} ({digest})"}

    def part(self, chosen: NDArray[np.bool_]) -> Members:
        """Those of the files that are `chosen`, bool (N,)."""
        return replace(self, positions=self.positions[chosen], labels=self.labels[chosen])


Files = Listing | Members  # the image files of a split, with their labels
FilesT = TypeVar("FilesT", Listing, Members)


def held_out(files: FilesT, names: Names, share: float) -> tuple[FilesT, FilesT]:
    """Divide files into those to train on and those to evaluate, by their names and labels.

    Of each class, the `share` of the files whose names have the smallest hashes is evaluated: at least one of two or
    more files, and never all. If a file is added to the class, at most one other file changes sides. A file that is
    listed several times is on one side. The notes are those of the training split.

    Raises:
        InputError: every class has one file.
    """
    evaluated = np.zeros(len(names), dtype=np.bool_)
    hashes = [  # other files can have the same name in other shards, but not in a listing
        (hashlib.blake2b(name, digest_size=16, key=SHARE_KEY).digest(), position * isinstance(files, Members))
        for position, name in enumerate(names.tolist())
    ]
    for of_class in files.labels.argsort(stable=True).split(files.labels.bincount().tolist()):
        positions = of_class.tolist()
        ranked = sorted({hashes[position] for position in positions})
        chosen = set(ranked[: max(0, min(max(1, round(share * len(ranked))), len(ranked) - 1))])
        evaluated[positions] = [hashes[position] in chosen for position in positions]
    if not evaluated.any():
        raise InputError(f"dataset.val_share is {share:g}, but every class has one image, expected two or more")
    return files.part(~evaluated), replace(files.part(evaluated), notes=())


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
        gaps: whether numbers may be missing between those of the classes, as in a part of a larger data set.

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


def split_of(splits: Mapping[str, SplitT], name: str, where: str, *, key: str) -> SplitT:
    """The split `name`, as the field `key` of a data set asks for.

    Raises:
        InputError: `where` does not have it.
    """
    if name not in splits:
        available = ", ".join(sorted(map(repr, splits))) or "nothing"
        share = ", or hold out a share of the training split with dataset.val_share=0.1" * (key == "val_split")
        raise InputError(
            f"dataset.{key} is {name!r}, but {where} has {available}; name one with dataset.{key}=NAME{share}"
        )
    return splits[name]


# The cache of `FileSource.listings` in this process: the files of the training and of the evaluation split, by
# `FileSource.place`. A forked rank inherits the cache of the command. For other ranks, `share_listings` of
# `lockstep.data.loading.shared_memory` fills it, or they list the files themselves.
LISTINGS: dict[Hashable, tuple[Any, Any]] = {}
