"""The image files of a split, stored in one byte tensor that all ranks of a machine can share.

A Path object takes about 280 bytes in each rank: 355 MB for the training files of ImageNet. Here a file takes the
bytes of its name and two numbers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

WORD = 8  # bytes of an int64
SHARE_KEY = b"lockstep val_share"  # the key of the hash that decides which files are held out


@dataclass(frozen=True, eq=False)
class Listing:
    """The image files of a split, by class and then by name.

    Fields:
        folder: the folder that the names are relative to.
        classes: the names of the classes, by label.
        table: uint8, in three parts: the offset of each name's end, int64 (N,); the labels, int64 (N,); and the
            names, each with a zero byte behind it.
        files: the number of files, N.
        in_class_folders: whether a name is relative to the folder of its class in `folder`.
        notes: sentences about the files that are left out.
    """

    folder: Path
    classes: tuple[str, ...]
    table: Tensor
    files: int
    in_class_folders: bool = True
    notes: tuple[str, ...] = ()

    @cached_property
    def labels(self) -> Tensor:
        """int64 (N,)."""
        return self.table[WORD * self.files : 2 * WORD * self.files].view(torch.int64)

    @cached_property
    def _labels(self) -> np.ndarray:
        return self.labels.numpy()

    @cached_property
    def _ends(self) -> np.ndarray:
        return self.table[: WORD * self.files].view(torch.int64).numpy()

    @cached_property
    def _names(self) -> np.ndarray:
        return self.table[2 * WORD * self.files :].numpy()

    def __len__(self) -> int:
        return self.files

    def __getitem__(self, index: int) -> Path:
        index = range(self.files)[index]
        name = os.fsdecode(self._names[self._start(index) : self._ends[index] - 1].tobytes())
        if not self.in_class_folders:
            return self.folder / name  # a name may be a whole path
        # A path from one string: joining its parts takes twice as long.
        return Path(f"{self.folder}/{self.classes[self._labels[index]]}/{name}")

    def _start(self, index: int) -> int:
        """The offset of a file's name; for `index` N, the end of the last name."""
        return int(self._ends[index - 1]) if index else 0

    def fingerprint(self) -> dict[str, str]:
        """For each class with files: their number and a hash of their names. Does not depend on the folder's path."""
        firsts = np.searchsorted(self._labels, np.arange(len(self.classes) + 1)).tolist()
        by_class = {}
        for name, first, last in zip(self.classes, firsts, firsts[1:], strict=False):
            if last > first:
                names = self._names[self._start(first) : self._start(last)]
                files = f"{last - first:,} file{'s' * (last - first != 1)}"
                by_class[name] = f"{files} ({hashlib.sha256(names.data).hexdigest()[:16]})"
        return by_class

    def without_table(self) -> Listing:
        """A copy without the table, small enough to be sent to other ranks."""
        return replace(self, table=torch.empty(0, dtype=torch.uint8))


class ListingBuilder:
    """Collects the files of a split class by class, so that only one class at a time needs Python objects."""

    def __init__(self, folder: Path, classes: tuple[str, ...], *, in_class_folders: bool = True) -> None:
        self.folder, self.classes, self.in_class_folders = folder, classes, in_class_folders
        self.names: list[bytes] = []
        self.lengths: list[np.ndarray] = []
        self.counts = np.zeros(len(classes), dtype=np.int64)

    def add(self, label: int, names: Iterable[str]) -> None:
        """Add the sorted names of a class's files. The classes must be added in the order of their labels."""
        encoded_names = [os.fsencode(name) + b"\0" for name in names]
        self.names.append(b"".join(encoded_names))
        self.lengths.append(np.fromiter(map(len, encoded_names), dtype=np.int64, count=len(encoded_names)))
        self.counts[label] = len(encoded_names)

    def listing(self, notes: tuple[str, ...] = ()) -> Listing:
        ends = np.cumsum(np.concatenate(self.lengths))
        labels = np.repeat(np.arange(len(self.classes)), self.counts)
        names = (np.frombuffer(text, dtype=np.uint8) for text in self.names)
        table = torch.from_numpy(np.concatenate([ends.view(np.uint8), labels.view(np.uint8), *names]))
        return Listing(self.folder, self.classes, table, len(ends), self.in_class_folders, notes)


def hold_out(names: Sequence[str], share: float, prefix: str = "") -> tuple[list[str], list[str]]:
    """Divide the names of a class's files into those for training and those for evaluation, both in their order.

    The `share` of the names with the smallest hashes (of `prefix` and name) is evaluated: at least one of two or more
    names, and never all. If a file is added to the class, at most one other file changes sides.
    """
    number = min(max(1, round(share * len(names))), len(names) - 1)
    by_hash = sorted(range(len(names)), key=lambda index: _hash(prefix + names[index]))
    evaluated = set(by_hash[:number])
    train = [name for index, name in enumerate(names) if index not in evaluated]
    return train, [names[index] for index in sorted(evaluated)]


def _hash(name: str) -> bytes:
    return hashlib.blake2b(os.fsencode(name), digest_size=16, key=SHARE_KEY).digest()


# The cache of `FileSource.listings` in this process: the files of the training and of the evaluation split, by
# `FileSource.place`. A forked rank inherits the cache of the command. For other ranks, `share_listings` of
# `lockstep.data.loading.shared_memory` fills it, or they list the files themselves.
LISTINGS: dict[Hashable, tuple[Any, Any]] = {}
