"""How `lockstep pack` writes a folder of images as pixels, for `dataset=packed`."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lockstep.core.errors import BrokenImage, InputError, StorageError
from lockstep.core.run_dir import MANIFEST
from lockstep.core.safe_read import opened
from lockstep.core.safe_write import sync
from lockstep.data.datasets.folder import Folder
from lockstep.data.datasets.packed import DTYPES, SPLITS, Manifest, _manifest, _mapped, _refused
from lockstep.data.datasets.splits import FileSplit
from lockstep.data.loading.prefetch import in_order, read_images

CHUNK = 64  # images that a thread decodes at a time


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
