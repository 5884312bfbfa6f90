"""The image files of a split, wherever they are stored: in folders, in tar shards, or in the rows of a table."""

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lockstep.core.data_protocols import SPLIT_NAMES
from lockstep.core.errors import InputError, shown
from lockstep.core.model_card import class_name

GROUPS_OF = """import json, re, sys
pattern, texts = json.load(sys.stdin)
expression = re.compile(pattern)
groups = min(1, expression.groups)
json.dump([match and match[groups] for match in map(expression.search, texts)], sys.stdout)"""
MATCHING_S = 30.0  # the longest time for a pattern; ten million names usually take 10 s
OptionT = TypeVar("OptionT")
NUMBER = re.compile(r"[0-9]+")
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
        notes: sentences about the files that are skipped.
        member_names: the names of members by their positions; None for paths.
        groups: (N,): what names the group of each file, if that is not its name.
    """

    place: Callable[[Any], Path | Member]
    keys: NDArray[Any]
    labels: Tensor
    classes: tuple[str, ...]
    identity: str = ""
    notes: tuple[str, ...] = ()
    member_names: NDArray[np.bytes_] | None = None
    groups: NDArray[np.bytes_] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Path | Member:
        return self.place(self.keys[index])

    def fingerprint(self) -> dict[str, str]:
        """For each class with files their number and a hash of their names, or the same for all members together."""
        if self.identity:
            digest = short_hash(self.keys.tobytes() + self.labels.numpy().tobytes())
            return {"examples": f"{len(self):,} of {self.identity} ({digest})"}
        if self.labels.ndim == 2:
            digest = short_hash(b"".join(file + b"\0" for file in self.keys.tolist()))
            return {
                "examples": f"{len(self):,} files ({digest})",
                "labels": f"of {', '.join(self.classes)} ({short_hash(self.labels.numpy().tobytes())})",
            }
        by_class = {}
        ends = self.labels.bincount(minlength=len(self.classes)).cumsum(0).tolist()
        for name, names in zip(self.classes, np.split(self.keys, ends[:-1]), strict=True):
            if count := len(names):
                digest = short_hash(b"".join(file + b"\0" for file in names.tolist()))
                by_class[name] = f"{count:,} file{'s' * (count != 1)} ({digest})"
        return by_class

    @property
    def names(self) -> NDArray[np.bytes_]:
        """(N,): by which files are cut into splits. Several members can have one name."""
        return self.keys if self.member_names is None else self.member_names[self.keys]

    def part(self, chosen: NDArray[np.bool_]) -> Self:
        """The files that are `chosen`, bool (N,)."""
        groups = None if self.groups is None else self.groups[chosen]
        return replace(self, keys=self.keys[chosen], labels=self.labels[chosen], groups=groups)

    def grouped(self, pattern: str) -> Self:
        """The files with the groups that a regular expression names. Raises InputError."""
        texts = [os.fsdecode(text) for text in (self.names if self.groups is None else self.groups).tolist()]
        groups = _first_groups(pattern, texts)
        if None in groups:
            raise InputError(
                f"dataset.group_pattern is {pattern!r}, which names no group in {shown(texts[groups.index(None)])}; "
                "correct it, so that it matches every image"
            )
        return replace(self, groups=as_names(map(str, groups)))

    def without(self, name: str, chosen: NDArray[np.bool_]) -> dict[str, Self]:
        """The training split without the `chosen` files, bool (N,), and the split `name` of these."""
        return {"train": self.part(~chosen), name: self.part(chosen)}


def _first_groups(pattern: str, texts: list[str]) -> list[str | None]:
    """What the first group of a pattern, or all of it, matches in each text. Raises InputError: it takes too long.

    In a process of its own: a few characters of a pattern can take years, and nothing interrupts them in this one.
    """
    words, texts_in = [sys.executable, "-I", "-c", GROUPS_OF], json.dumps([pattern, texts])
    try:
        done = subprocess.run(words, input=texts_in, stdout=-1, timeout=MATCHING_S, text=True, check=True)
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"dataset.group_pattern is {shown(pattern)}, which takes more than {MATCHING_S:.0f} s for {len(texts):,} "
            "names; write it without repetitions inside of repetitions, such as (a+)+"
        ) from error
    return json.loads(done.stdout)


def short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def in_folder(folder: Path) -> Callable[[bytes], Path]:
    """The `place` of files with keys that are relative to a folder, or whole paths."""
    return lambda name: folder / os.fsdecode(name)


def as_names(names: Iterable[str]) -> NDArray[np.bytes_]:
    return np.array([os.fsencode(name) for name in names], dtype=np.bytes_)


def check_groups(splits: Mapping[str, Files]) -> None:
    groups = {name: set(files.groups.tolist()) for name, files in splits.items() if files.groups is not None}
    for one, other in itertools.combinations(groups, 2):
        if both := sorted(groups[one] & groups[other]):
            raise InputError(
                f"dataset: the group {shown(os.fsdecode(both[0]))} has images in the {SPLIT_NAMES[one]} and in the "
                f"{SPLIT_NAMES[other]} split, as {len(both):,} groups have; correct the splits, or remove what "
                "names the groups: dataset.group_column and dataset.group_pattern, or the Dataset's method group"
            )


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """The different names of classes: by number if all of them are whole numbers, otherwise in the given order."""
    classes = tuple(dict.fromkeys(map(class_name, names)))
    if not all(map(NUMBER.fullmatch, classes)):
        return classes
    # Compared as texts: Python refuses to convert a number of thousands of digits.
    return tuple(sorted(classes, key=lambda name: (len(name.lstrip("0")), name.lstrip("0"), len(name))))


def class_names_of(labels: Sequence[str], place: Callable[[int], str], *, gaps: bool) -> tuple[str, ...]:
    """The names of the classes, by label: sorted, as numbers if all of them are.

    `place` says where the label of a training example is, by its position; with `gaps` numbers may be missing, as in
    a part of a data set. Raises InputError for a number that numbers no class, such as -1, 1.0, or 7 among 0 and 1.
    """
    classes = in_order(sorted(set(map(class_name, labels))))
    wrong = next((name for name in labels if NO_CLASS.fullmatch(name)), None)
    if wrong is None and not gaps and all(map(NUMBER.fullmatch, classes)):
        numbers = enumerate(classes, start=int(classes[0].lstrip("0") == "1"))
        wrong = next((name for number, name in numbers if name.lstrip("0") != str(number).lstrip("0")), None)
    if wrong is not None:
        raise InputError(
            f"dataset: {place(labels.index(wrong))} has the label {shown(wrong)}, but numbered classes are whole "
            f"numbers from 0{'' if gaps else ' (or 1) without gaps'}; correct it, remove the example, "
            "write names (class_2), or use task=regression for numbers"
        )
    return classes


def option_of(options: Mapping[str, OptionT], name: str, where: str, *, key: str, share: str = "") -> OptionT:
    """The split or column `name` that the field `key` requests. Raises InputError if `where` does not have it."""
    if name not in options:
        available = ", ".join(sorted(map(repr, options))) or "nothing"
        share = share or {"val_split": "val_share", "test_split": "test_share"}.get(key, "")
        remedy = f", or hold out a share of each class with dataset.{share}=0.1" * bool(share)
        raise InputError(
            f"dataset.{key} is {name!r}, but {where} has {available}; name one with dataset.{key}="
            f"{'[NAME]' if key == 'label_columns' else 'NAME'}{remedy}"
        )
    return options[name]
