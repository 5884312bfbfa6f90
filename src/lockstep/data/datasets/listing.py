"""The image files of a split in class folders, stored in one byte tensor that all ranks of a machine can share.

A Path object takes about 280 bytes in each rank: 355 MB for the training files of ImageNet. Here a file takes the
bytes of its name and two numbers.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import overload

import numpy as np
import torch
from torch import Tensor

from lockstep.core.errors import InputError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff"})
WORD = 8  # bytes of an int64


@dataclass(frozen=True, eq=False)
class Listing(Sequence[Path]):
    """The image files of a split, by class and then by name.

    Fields:
        folder: of the split.
        classes: the names of the class folders, by label.
        table: uint8, in three parts: the offset of each name's end, int64 (N,); the labels, int64 (N,); and the
            names, each with a zero byte behind it.
        files: the number of files, N.
    """

    folder: Path
    classes: tuple[str, ...]
    table: Tensor
    files: int

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

    @overload
    def __getitem__(self, index: int) -> Path: ...

    @overload
    def __getitem__(self, index: slice) -> list[Path]: ...

    def __getitem__(self, index: int | slice) -> Path | list[Path]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self.files))]
        index = range(self.files)[index]
        name = self._names[self._start(index) : self._ends[index] - 1].tobytes()
        # A path from one string: joining its parts takes twice as long.
        return Path(f"{self.folder}/{self.classes[self._labels[index]]}/{os.fsdecode(name)}")

    def _start(self, index: int) -> int:
        """The offset of a file's name; for `index` N, the end of the last name."""
        return int(self._ends[index - 1]) if index else 0

    def fingerprint(self) -> dict[str, str]:
        """For each class that has files: their number and a hash of their names, whatever the folder's path."""
        firsts = np.searchsorted(self._labels, np.arange(len(self.classes) + 1)).tolist()
        by_class = {}
        for name, first, last in zip(self.classes, firsts, firsts[1:], strict=False):
            if last > first:
                names = self._names[self._start(first) : self._start(last)]
                files = f"{last - first:,} file{'s' * (last - first != 1)}"
                by_class[name] = f"{files} ({hashlib.sha256(names.data).hexdigest()[:16]})"
        return by_class


# The listings of this process, by their folder and that of the training split. A forked rank inherits those of the
# command; other ranks get those that `share_listings` of `lockstep.data.loading.shared_memory` puts here.
LISTINGS: dict[tuple[Path, Path], Listing] = {}


def listing(folder: Path, train: Path) -> Listing:
    """The files of the split in `folder`, whose classes are those of the split in `train`; listed once per process.

    Raises:
        InputError: `folder` is not a split, or has a class that `train` does not have.
    """
    if (folder, train) not in LISTINGS:
        LISTINGS[folder, train] = _list_files(folder, train)
    return LISTINGS[folder, train]


def _list_files(folder: Path, train: Path) -> Listing:
    classes = class_names(train)
    numbers = {name: label for label, name in enumerate(classes)}
    names, lengths, counts = [], [], np.zeros(len(classes), dtype=np.int64)
    for name in class_names(folder):
        if name not in numbers:
            raise InputError(f"dataset.path: {folder / name} is a class that {train} does not have")
        files = [os.fsencode(file) + b"\0" for file in sorted(_image_files(folder / name))]
        if not files:
            raise InputError(f"dataset.path: {folder / name} has no images ({', '.join(sorted(SUFFIXES))})")
        # Converted to bytes class by class, so that objects for only one class are in memory.
        names.append(b"".join(files))
        lengths.append(np.fromiter(map(len, files), dtype=np.int64, count=len(files)))
        counts[numbers[name]] = len(files)
    ends, labels = np.cumsum(np.concatenate(lengths)), np.repeat(np.arange(len(classes)), counts)
    parts = [ends.view(np.uint8), labels.view(np.uint8), *(np.frombuffer(text, dtype=np.uint8) for text in names)]
    return Listing(folder, classes, torch.from_numpy(np.concatenate(parts)), len(ends))


@functools.cache
def class_names(folder: Path) -> tuple[str, ...]:
    """The names of the class folders of a split, sorted; read once per process.

    Raises:
        InputError: there is no such folder, or none in it.
    """
    if not folder.is_dir():
        raise InputError(
            f"dataset.path: there is no folder {folder}, expected one subfolder per class in it; "
            "name another with dataset.path=FOLDER"
        )
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise InputError(f"dataset.path: {folder} has no subfolders, expected one per class")
    return tuple(names)


def _image_files(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            stem, _, suffix = entry.name.rpartition(".")
            if not stem or f".{suffix.lower()}" not in SUFFIXES:
                continue
            # Refuse a pipe: opening it would wait for its writer. A dangling link counts as a broken image.
            if not entry.is_file() and Path(entry.path).exists():
                raise InputError(f"dataset.path: {entry.path} is not a regular file, expected an image; remove it")
            yield entry.name
