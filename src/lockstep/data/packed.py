"""A packed data set: every image decoded once and kept as raw pixels that any number of ranks map into memory.

`lockstep pack` makes the folder from one of class folders:

    manifest.json                   format, class names, (C, H, W), mean and std; of each split the number of examples
                                    and the sha256 of its two files
    train.images, val.images        uint8 (N, C, H, W), no header
    train.labels, val.labels        int64 (N,), little-endian

It is written under a temporary name and renamed when all of it is on the disk. A run checks the manifest, the sizes
of the files and every label; reading 100 GB of pixels to hash them is left to `lockstep pack --check`.
"""

from __future__ import annotations

import fcntl
import functools
import glob
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.data.folder import LARGEST_SIDE, Folder
from lockstep.data.reading import in_order, read_images
from lockstep.data.splits import ArraySplit, BrokenImage, FileSplit, check_labels
from lockstep.errors import InputError, StorageError
from lockstep.fields import pathname, ranged
from lockstep.files import MB, UnreadableFile, opened, read_json
from lockstep.rundir import MANIFEST
from lockstep.storage import sync

SPLITS = ("train", "val")
CHUNK = 64  # images that a thread decodes at a time
DTYPES = {"images": torch.uint8, "labels": torch.int64}


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A folder that `lockstep pack` made.

    Fields:
        path: that folder.
        input_size: side in pixels of what the model sees; null is that of the stored images.
        crop: the central share of a stored image's side that is evaluated.
    """

    path: str = pathname("???")
    input_size: int | None = ranged(None, least=1, most=LARGEST_SIDE)
    crop: float = ranged(1.0, above=0, most=1)

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def class_names(self) -> tuple[str, ...]:
        return _manifest(Path(self.path)).classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return _manifest(Path(self.path)).shape

    @property
    def input_shape(self) -> tuple[int, int, int]:
        channels, height, width = self.image_shape
        return (channels, self.input_size or height, self.input_size or width)

    @property
    def eval_crop(self) -> float:
        return self.crop

    @property
    def mean(self) -> tuple[float, ...]:
        return _manifest(Path(self.path)).mean

    @property
    def std(self) -> tuple[float, ...]:
        return _manifest(Path(self.path)).std

    def prepare(self) -> None:
        self.train()
        self.eval()

    def train(self) -> ArraySplit:
        return _mapped(Path(self.path), "train")

    def eval(self) -> ArraySplit:
        return _mapped(Path(self.path), "val")

    def fingerprint(self) -> dict[str, dict[str, str]]:
        """The hashes of its manifest, which are not compared with the files here."""
        sha256 = _manifest(Path(self.path)).sha256
        return {split: {kind: sha256[split][kind] for kind in DTYPES} for split in SPLITS}


@dataclass(frozen=True)
class MappedSplit(ArraySplit):
    """A split whose tensors are maps of files: only the rows that are asked for are read, once for all ranks."""


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says; `counts` and `sha256` (of images and labels) are by split."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    counts: dict[str, int]
    sha256: dict[str, dict[str, str]]

    def tensor_shape(self, split: str, kind: str) -> tuple[int, ...]:
        """The shape of a split's `images` or `labels`."""
        return (self.counts[split], *self.shape) if kind == "images" else (self.counts[split],)

    def as_json(self) -> str:
        splits = {name: {"count": self.counts[name], "sha256": self.sha256[name]} for name in SPLITS}
        facts = {"format": 1, "classes": self.classes, "shape": self.shape, "mean": self.mean, "std": self.std}
        return json.dumps({**facts, "splits": splits}, indent=2) + "\n"

    @classmethod
    def of(cls, found: Any) -> Manifest:
        """A manifest from parsed JSON. Raises ValueError where it is not one."""
        match found:
            case {
                "format": 1,
                "classes": [str(), *_] as classes,
                "shape": [int(), int(), int()] as shape,
                "mean": list(mean),
                "std": list(std),
                "splits": {"train": {"count": int(), "sha256": {}}, "val": {"count": int(), "sha256": {}}} as splits,
            } if (
                all(isinstance(each, str) for each in classes)
                and min(*shape, *(splits[name]["count"] for name in SPLITS)) > 0
                and len(mean) == len(std) == shape[0]
                and all(isinstance(each, float) and math.isfinite(each) for each in (*mean, *std))
                and min(std) > 0
                and all(isinstance(splits[name]["sha256"].get(kind), str) for name in SPLITS for kind in DTYPES)
            ):
                return cls(
                    classes=tuple(classes),
                    shape=(shape[0], shape[1], shape[2]),
                    mean=tuple(mean),
                    std=tuple(std),
                    counts={name: splits[name]["count"] for name in SPLITS},
                    sha256={name: dict(splits[name]["sha256"]) for name in SPLITS},
                )
        raise ValueError(f"{MANIFEST} does not say what one of `lockstep pack` says")


def _refused(folder: Path, reason: str) -> InputError:
    return InputError(
        f"dataset.path: {folder} is no whole packed data set ({reason}); make one with lockstep pack SOURCE TARGET"
    )


@functools.cache
def _manifest(folder: Path) -> Manifest:
    """The manifest of a packed data set, read once per process, and checked against the sizes of its files."""
    try:
        manifest = Manifest.of(read_json(folder / MANIFEST, 16 * MB, links=True))
        for split in SPLITS:
            for kind, dtype in DTYPES.items():
                file, expected = f"{split}.{kind}", math.prod(manifest.tensor_shape(split, kind)) * dtype.itemsize
                with opened(folder / file, links=True) as data:  # a pipe or a device has a size, too
                    size = os.fstat(data.fileno()).st_size
                if size != expected:
                    raise ValueError(f"{file} has {size} bytes, expected {expected}")
    except UnreadableFile as error:
        raise _refused(folder, f"{error.path.name} {error.reason}") from error
    except ValueError as error:
        raise _refused(folder, str(error)) from error
    return manifest


@functools.cache
def _mapped(folder: Path, name: str) -> MappedSplit:
    """A split, mapped once per process."""
    manifest = _manifest(folder)

    def mapped(kind: str) -> Tensor:
        shape = manifest.tensor_shape(name, kind)
        # A private map: nothing that is done to the tensor reaches the file.
        flat = torch.from_file(
            str(folder / f"{name}.{kind}"), shared=False, size=math.prod(shape), dtype=DTYPES[kind]
        )
        return flat.view(shape)

    split = MappedSplit(mapped("images"), mapped("labels"))
    check_labels(split.labels, len(manifest.classes), str(folder / f"{name}.labels"))
    return split


def check(folder: Path, advanced: Callable[[int], None]) -> None:
    """Read a packed data set whole; `advanced` is called with each number of bytes that was read.

    Raises:
        InputError: a file is not the one that was packed.
    """
    manifest = _manifest(folder)
    for split in SPLITS:
        for kind in DTYPES:
            digest = hashlib.sha256()
            with opened(folder / f"{split}.{kind}", links=True) as file:
                while block := file.read(2**22):
                    digest.update(block)
                    advanced(len(block))
            if digest.hexdigest() != manifest.sha256[split][kind]:
                raise _refused(folder, f"{split}.{kind} does not match its sha256")
        _mapped(folder, split)


def pack(source: Folder, target: Path, *, threads: int, advanced: Callable[[int], None]) -> list[BrokenImage]:
    """Decode all images of `source` to a new folder, and return the broken ones, which are left out.

    In memory are a few images per thread. `advanced` is called with each number of images that was read.

    Raises:
        InputError: `target` exists, or more than `source.skip` images are broken.
        StorageError: it cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} exists, and nothing is overwritten; remove it or name another folder to pack to")
    splits = {"train": source.train(), "val": source.eval()}
    need = sum(map(len, splits.values())) * (math.prod(source.image_shape) + DTYPES["labels"].itemsize)
    broken: list[BrokenImage] = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if (room := shutil.disk_usage(target.parent).free) < need:
            raise StorageError(
                f"{target} needs {need / 1e9:.1f} GB, and {room / 1e9:.1f} GB are free; make room there"
            )
        with _partial(target) as folder:
            counts, sha256 = {}, {}
            for name, split in splits.items():
                labels: list[Tensor] = []
                with _Hashed(folder / f"{name}.images") as images:
                    chunks = (range(at, min(at + CHUNK, len(split))) for at in range(0, len(split), CHUNK))
                    for decoded, known, failed in in_order(
                        partial(_read, split), chunks, workers=threads, prefetch=2
                    ):
                        broken += failed
                        if len(broken) > source.skip:
                            raise broken[-1]
                        images.write(decoded)
                        labels.append(known)
                        advanced(len(known) + len(failed))
                kept_labels = torch.cat(labels)
                if len(kept_labels) == 0:
                    raise InputError(f"{source.path} has no image for {name} that can be decoded")
                with _Hashed(folder / f"{name}.labels") as file:
                    file.write(kept_labels)
                counts[name], sha256[name] = len(kept_labels), {"images": images.hexdigest, "labels": file.hexdigest}
            manifest = Manifest(source.class_names, source.image_shape, source.mean, source.std, counts, sha256)
            (folder / MANIFEST).write_text(manifest.as_json())
            for each in (folder / MANIFEST, folder):
                sync(each)
            folder.rename(target)
            sync(target.parent)
    except OSError as error:
        raise StorageError(f"{target} cannot be written ({error.strerror}); nothing is left of it") from error
    return broken


def _read(split: FileSplit, indices: range) -> tuple[Tensor, Tensor, list[BrokenImage]]:
    """The images that can be decoded, their labels, and the broken ones."""
    images, broken = read_images(split, list(indices))
    kept = [index not in broken for index in indices]
    return images[kept], split.labels[indices.start : indices.stop][kept], [*broken.values()]


class _Hashed:
    """A new file that is hashed as it is written, and is on the disk when the context ends."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("xb")
        self.sha256 = hashlib.sha256()

    def write(self, tensor: Tensor) -> None:
        data = tensor.numpy().data
        self.file.write(data)
        self.sha256.update(data)

    @property
    def hexdigest(self) -> str:
        return self.sha256.hexdigest()

    def __enter__(self) -> _Hashed:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self.file:
            if kind is None:
                self.file.flush()
                os.fsync(self.file.fileno())


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, locked while it is filled; those of packs that were killed are removed."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        with _locked(left) as ours:
            if ours:
                shutil.rmtree(left)
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    folder.mkdir()
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether this process has the lock on a folder, which the kernel frees with the process that holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)
