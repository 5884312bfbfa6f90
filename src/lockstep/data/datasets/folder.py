"""Image files in class folders: `PATH/train/CLASS/*.jpg` and `PATH/val/CLASS/*.jpg`, or `PATH/CLASS/*.jpg`."""

import functools
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import torch

from lockstep.config.commands import override, shell_command
from lockstep.config.options import option
from lockstep.core.errors import InputError
from lockstep.core.fields import choice, in_config, pathname
from lockstep.core.model_card import class_name
from lockstep.core.run_dir import near_paths
from lockstep.data.datasets.decode import BANDS_SUFFIXES, GREY, RGB
from lockstep.data.datasets.files import FileSource
from lockstep.data.datasets.listing import Files, as_names, in_folder, in_order
from lockstep.data.datasets.sizes import AUTO

SUFFIXES = frozenset(
    [
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".webp", ".bmp", ".dib"),
        *(".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".tif", ".tiff"),
        *(".avif", ".heic", ".heif", ".hif"),
    ]
)
# Made by storage servers (thumbnails, deleted files) and by macOS in archives.
SYSTEM_FOLDERS = frozenset(["@eaDir", "__MACOSX", "#recycle", "@Recycle", "#snapshot", "$RECYCLE.BIN"])
HIDDEN, NO_SUFFIX, LOOP = "hidden", "without a suffix", "links back to a folder above"
# The usual names of the folders of a split, the likelier ones first, and the parts of others.
TRAIN, VAL = ("train", "training"), ("val", "valid", "validation", "test")
USUAL_SHARE = 0.1  # of each class, evaluated if there is no folder for it
KINDS_SHOWN = 6  # the most kinds of files that the note about skipped files names


@option("dataset")
class Folder(FileSource):
    """Your own images: `PATH/train/CLASS/*.jpg` and `PATH/val/CLASS/*.jpg`, or `PATH/CLASS/*.jpg`, in folders of any
    depth below CLASS. See docs/data.md#photos.
    """

    path: str = pathname("???")  # folder that holds the splits, or the classes
    # name of the training split's folder. `auto`: `train`, or the folder with a name like it; without one, `path`
    # itself
    train_folder: str = pathname(AUTO)
    # name of the evaluation split's folder. `auto`: `val`, `valid`, `validation` or `test`, or the folder with a name
    # like them; without one, `val_share` is 0.1 unless it or `folds` is set
    val_folder: str = pathname(AUTO)
    # name of the folder of images to test the best weights on, once. null: none
    test_folder: str | None = pathname(None)

    part = "folder"

    def located(self) -> Self:
        """The data set with the folders that are there in place of `auto`; by default a share is evaluated."""
        train, val = self.train_folder, self.val_folder
        if AUTO not in (train, val):
            return self
        of_train, of_val = _splits(Path(self.path))
        train = of_train if train == AUTO else train
        if val == AUTO and not self.is_cut:
            others = [name for name in of_val if name not in (train, self.test_folder)] if train != "." else []
            if not others and Path(self.path, train).is_dir():
                return replace(self, train_folder=train, val_folder="none", val_share=USUAL_SHARE)
            val = next(iter(others), VAL[0])
        return replace(self, train_folder=train, val_folder=VAL[0] if val == AUTO else val)

    def listings(self) -> dict[str, Files]:
        located = self.located()
        return super().listings() if located == self else located.listings()

    def list_files(self) -> dict[str, Files]:
        train = Path(self.path, self.train_folder)
        scan_split(train)  # raises if there is no such folder
        splits = {key: Path(self.path, name) for key, name in self.wanted(self._places).items()}
        for key, folder in splits.items():
            if not folder.is_dir():
                others = (
                    name for name in _splits(Path(self.path))[1] if Path(self.path, name) not in splits.values()
                )
                raise InputError(
                    f"dataset.{key}: there is no folder {folder}; name another with dataset.{key}="
                    f"{next(others, 'NAME')}, or hold out a share of {train} with "
                    f"dataset.{key.partition('_')[0]}_share=0.1"
                )
        return {key: list_split(folder, train, suffixes_of(self.channels)) for key, folder in splits.items()}

    def _places(self, name: str) -> set[str]:
        return {str(folder)} if (folder := Path(self.path, name)).exists() else set()


@option("dataset", "imagenet")
class ImageNet(Folder):
    """ImageNet-1k, unpacked to `DATA_ROOT/imagenet/{train,val}/CLASS/*.JPEG`.

    Trained at 224 pixels, evaluated on the central 224 pixels of a square of 256.
    """

    path: str = in_config("${data_root}/imagenet", pathname("???"))  # folder that holds the splits
    train_folder: str = pathname("train")  # name of the training split's folder
    val_folder: str = pathname("val")  # name of the evaluation split's folder
    crop_from: str = choice("file", "square", "file")


def suffixes_of(channels: int) -> frozenset[str]:
    """The suffixes of the files that can hold an image of so many channels."""
    return SUFFIXES if channels in (GREY, RGB) else BANDS_SUFFIXES


def list_split(folder: Path, train: Path, suffixes: frozenset[str] = SUFFIXES) -> Files:
    """The files of the split in `folder`, with the classes of the one in `train`. Raises InputError."""
    class_folders, other_kinds = scan_split(folder)
    names = dict.fromkeys(scan_split(train)[0], as_names([]))
    left_out = Counter(other_kinds)
    for name, spellings in class_folders.items():
        if name not in names:
            first = folder / spellings[0]
            other = next((other for other in names if other.casefold() == name.casefold()), None)
            remedy = "remove it, or add it there" if other is None else f"rename it to {other}, as it is there"
            raise InputError(f"dataset.path: {first} is a class that {train} does not have; {remedy}")
        images = [
            f"{of}/{image}" for of in spellings for image in sorted(image_files(folder / of, left_out, suffixes))
        ]
        if not images:
            hint = "; .npy files are read with dataset.channels=N, if N is neither 1 nor 3" * (left_out[".npy"] > 0)
            expected = ", ".join(sorted(suffixes))
            raise InputError(f"dataset.path: {folder / spellings[0]} has no images ({expected}){hint}")
        names[name] = as_names(images)
    labels = torch.arange(len(names)).repeat_interleave(torch.tensor([*map(len, names.values())]))
    keys, notes = np.concatenate([*names.values()]), left_out_note(folder, left_out)
    return Files(in_folder(folder), keys, labels, tuple(names), notes=notes)


@functools.cache
def scan_split(folder: Path) -> tuple[dict[str, list[str]], Counter[str]]:
    """The classes of a split with their folders, and the number of other entries by kind. Raises InputError."""
    if not folder.is_dir():
        near = [override("dataset.path", path) for path in near_paths(folder) if path.is_dir()]
        remedy = f"did you mean {shell_command(near[:1])}?" if near else "name another with dataset.path=FOLDER"
        raise InputError(
            f"dataset.path: there is no folder {folder}, expected one subfolder per class in it; {remedy}"
        )
    entries = _entries(folder)
    names = {entry.name for entry in entries if entry.is_dir() and kind_of(entry.name) != HIDDEN}
    if not names:
        remedy = f"; move its images into folders of their classes, such as {folder / 'cats'}" * _has_images(folder)
        is_class = any(_has_images(path) for path in folder.parent.iterdir() if path != folder)
        if remedy and is_class and folder.name.lower() not in (*TRAIN, *VAL):
            remedy = f"; did you mean {shell_command([override('dataset.path', folder.parent)])}?"
        raise InputError(f"dataset.path: {folder} has no subfolders, expected one per class{remedy}")
    folders: dict[str, list[str]] = {}
    for name in sorted(names):
        folders.setdefault(class_name(name), []).append(name)
    others = Counter(kind_of(entry.name) for entry in entries if entry.name not in names)
    return {name: folders[name] for name in in_order(sorted(folders))}, others


@functools.cache
def _subfolders(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted; empty if there is no folder."""
    entries = _entries(folder) if folder.is_dir() else []
    return [entry.name for entry in entries if entry.is_dir() and kind_of(entry.name) != HIDDEN]


def _innermost(folder: Path) -> Path:
    """`folder`, or what is in it, below folders that hold nothing but one folder of folders."""
    while len(names := _subfolders(folder)) == 1 and _subfolders(folder / names[0]):
        folder /= names[0]
    return folder


@functools.cache
def _splits(path: Path) -> tuple[str, tuple[str, ...]]:
    """The folder to train on, and those that can be evaluated, relative to `path`. Read once per process."""
    top = _innermost(path)
    folders = _subfolders(top)
    of_folders = [name for name in folders if _subfolders(top / name)]

    def like(usual: tuple[str, ...]) -> list[str]:
        named = [name for word in usual for name in folders if name.lower() == word]
        longer = [name for word in usual for name in of_folders if word in name.lower()]
        return [str(_innermost(top / name).relative_to(path)) for name in dict.fromkeys([*named, *longer])]

    of_train, of_val = like(TRAIN), like(VAL)
    if of_train and (of_val or Path(of_train[0]).name.lower() in TRAIN):  # and not a class such as `steam_train`
        return of_train[0], tuple(of_val)
    return str(top.relative_to(path)), ()


def _has_images(folder: Path) -> bool:
    return folder.is_dir() and any(kind_of(entry.name) in SUFFIXES for entry in _entries(folder))


def image_files(folder: Path, left_out: Counter[str], suffixes: frozenset[str] = SUFFIXES) -> Iterator[str]:
    """The files with `suffixes` below `folder`, as paths relative to it. Counts all others in `left_out`, by kind."""
    pending = [("", frozenset(map(_identity, folder.absolute().parents)))]
    while pending:
        relative, ancestors = pending.pop()
        if (identity := _identity(folder / relative)) in ancestors:
            left_out[LOOP] += 1
            continue
        ancestors |= {identity}
        for entry in _entries(folder / relative):
            kind = kind_of(entry.name)
            if kind != HIDDEN and entry.is_dir():
                pending.append((f"{relative}{entry.name}/", ancestors))
            elif kind not in suffixes:
                left_out[kind] += 1
            else:
                yield relative + entry.name


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(
            f"dataset.path: {folder} cannot be read ({error.strerror}); give this user access"
        ) from error


def kind_of(name: str) -> str:
    """The suffix of a file in lower case, or `HIDDEN`, or `NO_SUFFIX`."""
    if name.startswith(".") or name in SYSTEM_FOLDERS:
        return HIDDEN
    _, dot, suffix = name.rpartition(".")
    return f".{suffix.lower()}" if dot else NO_SUFFIX


def left_out_note(folder: Path, left_out: Counter[str]) -> tuple[str, ...]:
    """A sentence about the skipped files of a split; empty if there are none."""
    if not (number := left_out.total()):
        return ()
    kinds = [f"{count:,} {kind}" for kind, count in sorted(left_out.items(), key=lambda item: (-item[1], item[0]))]
    shown = ", ".join(kinds[:KINDS_SHOWN] + ["others"] * (len(kinds) > KINDS_SHOWN))
    return (f"{folder}: skipped {number:,} other file{'s' * (number != 1)} ({shown})",)
