"""The work of `lockstep pack`: decode a folder of images once and write the pixels, for `dataset=packed`."""

import glob
import hashlib
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from lockstep.core.data_protocols import ReadResult
from lockstep.core.errors import BrokenImage, InputError, StorageError
from lockstep.core.locks import locked
from lockstep.core.run_dir import MANIFEST
from lockstep.core.safe_read import opened
from lockstep.core.safe_write import sync
from lockstep.data.datasets.folder import Folder
from lockstep.data.datasets.packed import DTYPES, SPLITS, Manifest, invalid_pack, map_split, read_manifest
from lockstep.data.datasets.splits import FileSplit
from lockstep.data.loading.prefetch import in_order, read_images

CHUNK = 64  # images that a thread decodes at a time


def check(folder: Path, advanced: Callable[[int], None]) -> None:
    """Compare all files of a packed data set with their sha256.

    `advanced` is called with the number of bytes after each read.

    Raises:
        InputError: a file is not the one that was packed.
    """
    manifest = read_manifest(folder)
    for split in SPLITS:
        for kind in DTYPES:
            digest = hashlib.sha256()
            with opened(folder / f"{split}.{kind}", links=True) as file:
                while block := file.read(2**22):
                    digest.update(block)
                    advanced(len(block))
            if digest.hexdigest() != manifest.splits[split]["sha256"][kind]:
                raise invalid_pack(folder, f"{split}.{kind} does not match its sha256")
        map_split(folder, split)


def pack(source: Folder, target: Path, *, threads: int, advanced: Callable[[int], None]) -> list[BrokenImage]:
    """Decode all images of `source` to a new folder, and return the broken ones, which are left out.

    Only a few images per thread are in memory at a time. `advanced` is called with the number of images after each
    chunk.

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
        if (free := shutil.disk_usage(target.parent).free) < need:
            raise StorageError(
                f"{target} needs {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; make room there"
            )
        with _temporary_folder(target) as folder:
            facts = {}
            for name, split in splits.items():
                failures: dict[int, BrokenImage] = {}
                images = _whole_images(split, source.skip - len(broken), threads, failures, advanced)
                hashes = {"images": _write_hashed(folder / f"{name}.images", images)}
                labels = split.labels[[index not in failures for index in range(len(split))]]
                if len(labels) == 0:
                    raise InputError(f"{source.path} has no image for {name} that can be decoded")
                hashes["labels"] = _write_hashed(folder / f"{name}.labels", [labels])
                facts[name] = {"count": len(labels), "sha256": hashes}
                broken += failures.values()
            manifest = Manifest(source.class_names, source.image_shape, source.mean, source.std, facts)
            (folder / MANIFEST).write_text(manifest.as_json())
            sync(folder / MANIFEST)
            sync(folder)
            folder.rename(target)
            sync(target.parent)
    except OSError as error:
        raise StorageError(f"{target} cannot be written ({error.strerror}); nothing is left of it") from error
    return broken


def _whole_images(
    split: FileSplit, skip: int, threads: int, failures: dict[int, BrokenImage], advanced: Callable[[int], None]
) -> Iterator[Tensor]:
    """The images that can be decoded, chunk by chunk; adds the errors of the others, at most `skip`."""

    def decode(indices: range) -> tuple[range, ReadResult]:
        return indices, read_images(split, list(indices))

    chunks = (range(start, min(start + CHUNK, len(split))) for start in range(0, len(split), CHUNK))
    for indices, (images, broken) in in_order(decode, chunks, workers=threads, prefetch=2):
        failures |= broken
        if len(failures) > skip:
            raise [*failures.values()][-1]
        yield images[[index not in broken for index in indices]]
        advanced(len(indices))


def _write_hashed(path: Path, tensors: Iterable[Tensor]) -> str:
    """Write tensors one after another to a new file, flushed to the disk; returns the sha256 of the file."""
    sha256 = hashlib.sha256()
    with path.open("xb") as file:
        for tensor in tensors:
            file.write(data := tensor.numpy().data)
            sha256.update(data)
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest()


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, locked while it is filled. First removes the folders of killed packs."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        with suppress(BlockingIOError), locked(leftover):  # another pack fills it
            shutil.rmtree(leftover)
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    folder.mkdir()
    try:
        with locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
