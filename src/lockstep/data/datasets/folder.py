"""Image files in class folders: `PATH/train/CLASS/*.jpg` and `PATH/val/CLASS/*.jpg`.

A class folder may contain folders to any depth. Hidden files, and files without the suffix of an image, are left out;
a note gives their number.
"""

import functools
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.core.errors import InputError
from lockstep.core.fields import pathname
from lockstep.data.datasets import photos
from lockstep.data.datasets.files import CropFrom, FileSource
from lockstep.data.datasets.listing import Listing, as_names, held_out

SUFFIXES = frozenset(
    [
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".webp", ".bmp", ".dib"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".tif", ".tiff"),
        *photos.HEIC.suffixes,
        *photos.AVIF.suffixes,
    ]
)
HIDDEN, NO_SUFFIX, LOOP = "hidden", "without a suffix", "links back to a folder above"
KINDS_SHOWN = 6  # the most kinds of files that the note about left-out files names


@dataclass(frozen=True, kw_only=True)
class Folder(FileSource):
    """Any data set with one folder per class.

    Fields:
        path: the folder of the splits.
        train_folder: the name of the folder of the training split.
        val_folder: the name of the folder of the evaluation split.
    """

    path: str = pathname("???")
    train_folder: str = pathname("train")
    val_folder: str = pathname("val")

    @property
    def class_names(self) -> tuple[str, ...]:
        return scan_split(Path(self.path, self.train_folder))[0]

    def list_files(self) -> tuple[Listing, Listing]:
        train, val = Path(self.path, self.train_folder), Path(self.path, self.val_folder)
        scan_split(train)  # raises if there is no such folder
        if self.val_share is None:
            if not val.is_dir():
                raise InputError(
                    f"dataset.val_folder: there is no folder {val}; name the one of the validation split with "
                    f"dataset.val_folder=NAME, or hold out a share of {train} with dataset.val_share=0.1"
                )
            return list_split(train, train), list_split(val, train)
        if val.exists():
            self.refuse_val_share(f"there is a validation folder, {val},", "move that folder away")
        whole = list_split(train, train)
        return held_out(whole, whole.names, self.val_share)


@dataclass(frozen=True, kw_only=True)
class ImageNet(Folder):
    """ImageNet-1k in class folders: trained at 224 pixels, evaluated on the central 224 pixels of a square of 256."""

    crop_from: CropFrom = CropFrom.file


def list_split(folder: Path, train: Path) -> Listing:
    """The files of the split in `folder`, with the classes of the split in `train`.

    Raises:
        InputError: `folder` is not a split, or has a class that `train` does not have.
    """
    class_folders, other_kinds = scan_split(folder)
    names = dict.fromkeys(scan_split(train)[0], as_names([]))
    left_out, suffixes = Counter(other_kinds), Counter[str]()
    for name in class_folders:
        if name not in names:
            raise InputError(
                f"dataset.path: {folder / name} is a class that {train} does not have; remove it, or add it there"
            )
        images = sorted(image_files(folder / name, left_out))
        if not images:
            raise InputError(f"dataset.path: {folder / name} has no images ({', '.join(sorted(SUFFIXES))})")
        suffixes.update(map(_kind, images))
        names[name] = as_names(f"{name}/{image}" for image in images)
    for kind in (photos.AVIF, photos.HEIC):
        if (number := sum(suffixes[suffix] for suffix in kind.suffixes)) and not photos.readable(kind):
            raise InputError(
                f"dataset.path: {number:,} file{'s' * (number != 1)} in {folder} {'are' if number != 1 else 'is'} "
                f"{kind.name} ({', '.join(sorted(kind.suffixes))}), which nothing here reads: {kind.remedy}"
            )
    counts, files = tuple(map(len, names.values())), np.concatenate([*names.values()])
    return Listing(folder, tuple(names), counts, files, left_out_note(folder, left_out))


@functools.cache
def scan_split(folder: Path) -> tuple[tuple[str, ...], Counter[str]]:
    """The names of the class folders of a split, sorted, and the number of all other entries by kind.

    Read once per process.

    Raises:
        InputError: there is no such folder, or it has no class folders.
    """
    if not folder.is_dir():
        raise InputError(f"dataset.path: there is no folder {folder}, {_expected(folder)}")
    entries = _entries(folder)
    names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    if not names:
        raise InputError(f"dataset.path: {folder} has no subfolders, expected one per class")
    return tuple(names), Counter(_kind(entry.name) for entry in entries if entry.name not in names)


def _expected(folder: Path) -> str:
    """The end of the error for a missing split: the expected folders, and the override that helps."""
    expected = "expected one subfolder per class in it"
    siblings = [entry.name for entry in _entries(folder.parent) if entry.is_dir()] if folder.parent.is_dir() else []
    if train_like := [name for name in siblings if name.lower().startswith("train")]:
        return f"{expected}; {train_like[0]} is beside it: name that with dataset.train_folder={train_like[0]}"
    if siblings and folder.name == folder.parent.name:
        expected += f"; name the folder above: dataset.path={folder.parents[1]}"
    else:
        expected += "; name another with dataset.path=FOLDER"
    if siblings:
        expected += ", or, if the folders beside it are the classes, use dataset.train_folder=. dataset.val_share=0.1"
    return expected


def image_files(folder: Path, left_out: Counter[str]) -> Iterator[str]:
    """The image files below `folder`, as paths relative to it. Counts all other files in `left_out`, by kind."""
    pending = [("", frozenset(map(_identity, folder.absolute().parents)))]
    while pending:
        relative, ancestors = pending.pop()
        if (identity := _identity(folder / relative)) in ancestors:
            left_out[LOOP] += 1
            continue
        ancestors |= {identity}
        for entry in _entries(folder / relative):
            kind = _kind(entry.name)
            if kind != HIDDEN and entry.is_dir():
                pending.append((f"{relative}{entry.name}/", ancestors))
            elif kind not in SUFFIXES:
                left_out[kind] += 1
            # Refuse a pipe: opening it would wait for its writer. A dangling link counts as a broken image.
            elif not entry.is_file() and Path(entry.path).exists():
                raise InputError(f"dataset.path: {entry.path} is not a regular file, expected an image; remove it")
            else:
                yield relative + entry.name


def _identity(folder: Path) -> tuple[int, int]:
    """Names a folder, also through links."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, sorted by name."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(
            f"dataset.path: {folder} cannot be read ({error.strerror}); give this user access"
        ) from error


def _kind(name: str) -> str:
    """The suffix of a file in lower case, or `HIDDEN`, or `NO_SUFFIX`."""
    if name.startswith("."):
        return HIDDEN
    _, dot, suffix = name.rpartition(".")
    return f".{suffix.lower()}" if dot else NO_SUFFIX


def left_out_note(folder: Path, left_out: Counter[str]) -> tuple[str, ...]:
    """A sentence about the files of a split that are left out; empty if there are none."""
    if not (number := left_out.total()):
        return ()
    kinds = [f"{count:,} {kind}" for kind, count in sorted(left_out.items(), key=lambda item: (-item[1], item[0]))]
    shown = ", ".join(kinds[:KINDS_SHOWN] + ["others"] * (len(kinds) > KINDS_SHOWN))
    files = "file whose name is not that of an image" if number == 1 else "files whose names are not those of images"
    return (f"{folder}: left out {number:,} {files} ({shown})",)
