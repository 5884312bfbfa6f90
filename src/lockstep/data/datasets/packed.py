"""A packed data set: every image is decoded once and stored as raw pixels, which all ranks map into memory.

`lockstep pack` makes it from any data set:

    manifest.json                   format, kind and names of the targets, (C, H, W), mean, std, fit; for each split
                                    the number of examples and the sha256 of its two files
    train.images, ...               uint8 (N, C, H, W), no header
    train.labels, ...               int64 (N,); of labels and values float32 (N, K); little-endian

It is written under a temporary name and renamed when all of it is on the disk. A run checks the manifest, the sizes
of the files and every label. Only `lockstep pack --check` also reads and hashes the pixels, which may be 100 GB.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config.options import option
from lockstep.core.data_protocols import SPLIT_NAMES, ReadResult, Source, Split, splits_of
from lockstep.core.errors import BrokenImage, InputError, StorageError
from lockstep.core.fields import pathname
from lockstep.core.formats import FileFormat, check_format, stamp
from lockstep.core.model_card import CLASSES, CROP, FITS, TARGETS
from lockstep.core.run_dir import MANIFEST
from lockstep.core.safe_read import MB, UnreadableFile, open_plain, read_json
from lockstep.core.safe_write import locked, sync
from lockstep.data.datasets.arrays import ArraySplit, check_labels
from lockstep.data.datasets.sizes import PhotoSource, keeps_whole
from lockstep.data.loading.reading import map_in_order, read_images

KINDS = ("images", "labels")
DECODE_CHUNK = 64  # images that a thread decodes at a time
PARTIAL, LOCK = ".partial", ".lock"  # the suffix of a folder that a pack fills, and the file in it that it locks


@option("dataset")
class Packed(PhotoSource):
    """Your images, decoded once by `lockstep pack`: raw pixels, mapped into memory. See docs/data.md#packed-data."""

    path: str = pathname("???")  # folder that `lockstep pack` made

    @property
    def manifest(self) -> Manifest:
        return read_manifest(Path(self.path))

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.manifest.classes

    @property
    def targets(self) -> str:
        return self.manifest.targets

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.manifest.shape

    @property
    def fit(self) -> str:
        return self.manifest.fit

    @property
    def mean(self) -> tuple[float, ...]:
        return self.manifest.mean

    @property
    def std(self) -> tuple[float, ...]:
        return self.manifest.std

    def train(self) -> ArraySplit:
        return map_split(Path(self.path), "train")

    def eval(self) -> ArraySplit:
        return map_split(Path(self.path), "val")

    def test(self) -> ArraySplit | None:
        return map_split(Path(self.path), "test") if "test" in self.manifest.splits else None

    def fingerprint(self) -> dict[str, dict[str, str]]:
        """The hashes from the manifest; they are not compared with the files here."""
        return {name: {kind: facts["sha256"][kind] for kind in KINDS} for name, facts in self.manifest.splits.items()}


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`; `splits` has for each split its `count` and the `sha256` of its two files."""

    targets: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    splits: Mapping[str, Mapping[str, Any]]
    fit: str = CROP

    def tensor_shape(self, split: str, kind: str) -> tuple[int, ...]:
        of_labels = () if self.targets == CLASSES else (len(self.classes),)
        return (self.splits[split]["count"], *(self.shape if kind == "images" else of_labels))

    def dtype(self, kind: str) -> torch.dtype:
        return torch.uint8 if kind == "images" else torch.int64 if self.targets == CLASSES else torch.float32

    @classmethod
    def from_json(cls, parsed: Any) -> Manifest:
        """A manifest from parsed JSON. Raises ValueError if it is not one."""
        match {"targets": CLASSES, **parsed} if isinstance(parsed, dict) else parsed:  # earlier ones have no targets
            case {
                "targets": str(targets),
                "classes": [str(), *_] as classes,
                "shape": [int() as channels, int() as height, int() as width],
                "mean": list(mean),
                "std": list(std),
                "splits": {"train": _, "val": _} as splits,
            } if targets in TARGETS and min(channels, height, width) > 0 and len(mean) == len(std) == channels:
                shape, names, fit = (channels, height, width), tuple(map(str, classes)), parsed.get("fit", CROP)
                if splits.keys() <= {*SPLIT_NAMES} and all(map(_has_facts, splits.values())) and fit in FITS:
                    return cls(targets, names, shape, tuple(mean), tuple(std), splits, fit)
        raise ValueError(f"{MANIFEST} is not a manifest of `lockstep pack`")


def _has_facts(split: Any) -> bool:
    match split:
        case {"count": int(), "sha256": {"images": str(), "labels": str()}}:
            return True
    return False


def _invalid(folder: Path, reason: str) -> InputError:
    return InputError(
        f"dataset.path: {folder} is not a complete packed data set ({reason}); make one with lockstep pack"
    )


@functools.cache
def read_manifest(folder: Path) -> Manifest:
    """The manifest, read once per process and checked against the sizes of the files. Raises InputError."""
    try:
        facts = read_json(folder / MANIFEST, 16 * MB, links=True)
        check_format(FileFormat.packed, facts, folder / MANIFEST)
        manifest = Manifest.from_json(facts)
        for split in manifest.splits:
            for kind in KINDS:
                file = f"{split}.{kind}"
                expected = math.prod(manifest.tensor_shape(split, kind)) * manifest.dtype(kind).itemsize
                with open_plain(folder / file, links=True) as data:  # refuses pipes and devices
                    size = os.fstat(data.fileno()).st_size
                if size != expected:
                    raise ValueError(f"{file} has {size} bytes, expected {expected}")
    except StorageError:
        raise
    except UnreadableFile as error:
        raise _invalid(folder, f"{error.path.name} {error.reason}") from error
    except ValueError as error:
        raise _invalid(folder, str(error)) from error
    return manifest


@functools.cache
def map_split(folder: Path, name: str) -> ArraySplit:
    """The split `name`, mapped once per process. Raises InputError, also for a label that is not a class."""
    manifest = read_manifest(folder)

    def mapped(kind: str) -> Tensor:
        path, shape = folder / f"{name}.{kind}", manifest.tensor_shape(name, kind)
        # A private map: writing to the tensor does not change the file.
        flat = torch.from_file(str(path), shared=False, size=math.prod(shape), dtype=manifest.dtype(kind))
        return flat.view(shape)

    split = ArraySplit(mapped("images"), mapped("labels"), mapped=True)
    check_labels(split.labels, len(manifest.classes), str(folder / f"{name}.labels"), manifest.targets)
    return split


def check(folder: Path, advanced: Callable[[int], None]) -> None:
    """Compare all files with their sha256. Raises InputError. `advanced` gets the number of bytes of each read."""
    manifest = read_manifest(folder)
    for split in manifest.splits:
        for kind in KINDS:
            digest = hashlib.sha256()
            with open_plain(folder / f"{split}.{kind}", links=True) as file:
                while block := file.read(2**22):
                    digest.update(block)
                    advanced(len(block))
            if digest.hexdigest() != manifest.splits[split]["sha256"][kind]:
                raise _invalid(folder, f"{split}.{kind} does not match its sha256")
        map_split(folder, split)


def pack_source(source: Source, target: Path, *, threads: int, advanced: Callable[[int], None]) -> list[BrokenImage]:
    """Decode all images of `source` to a new folder. Returns the broken ones, which are skipped.

    Only a few images per thread are in memory at a time. `advanced` gets the number of images of each chunk. Raises
    InputError if `target` exists or more than `Split.skip` images are broken, and StorageError.
    """
    if target.exists() or target.is_symlink():
        raise InputError(f"{target} exists, and nothing is overwritten; remove it or name another folder to pack to")
    splits = splits_of(source)
    need = sum(len(split) * math.prod(source.image_shape) + split.labels.nbytes for split in splits.values())
    broken: list[BrokenImage] = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(target.parent).free) < need:
            raise StorageError(
                f"{target} needs {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; free disk space there"
            )
        for leftover in target.parent.glob(f".{glob.escape(target.name)}.*{PARTIAL}"):
            with suppress(OSError), locked(leftover / LOCK):  # otherwise another pack fills or removes it
                shutil.rmtree(leftover)
        temporary_folder = tempfile.TemporaryDirectory(PARTIAL, f".{target.name}.", target.parent)
        with temporary_folder as temporary, locked(Path(temporary, LOCK)):
            (folder := Path(temporary, "packed")).mkdir()
            facts = {}
            for name, split in splits.items():
                failures: dict[int, BrokenImage] = {}
                images = _whole_images(split, split.skip - len(broken), threads, failures, advanced)
                hashes = {"images": _write_hashed(folder / f"{name}.images", images)}
                labels = split.labels[[index not in failures for index in range(len(split))]]
                if not len(labels):
                    raise InputError(f"dataset: no image of the {SPLIT_NAMES[name]} split can be decoded")
                hashes["labels"] = _write_hashed(folder / f"{name}.labels", [labels])
                facts[name] = {"count": len(labels), "sha256": hashes}
                broken += failures.values()
            names = source.class_names or tuple(map(str, range(source.classes)))
            fit = source.fit if keeps_whole(source) else CROP
            manifest = Manifest(source.targets, names, source.image_shape, source.mean, source.std, facts, fit)
            values = {**stamp(FileFormat.packed), **vars(manifest)}
            (folder / MANIFEST).write_text(json.dumps(values, indent=2) + "\n")
            sync(folder / MANIFEST)
            sync(folder)
            folder.rename(target)
            sync(target.parent)
    except OSError as error:
        raise StorageError(f"{target} cannot be written ({error.strerror}); nothing is left of it") from error
    return broken


def _whole_images(
    split: Split, skip: int, threads: int, failures: dict[int, BrokenImage], advanced: Callable[[int], None]
) -> Iterator[Tensor]:
    """The images that can be decoded, chunk by chunk; adds the errors of the others, at most `skip`."""

    def decode(indices: range) -> tuple[range, ReadResult]:
        return indices, read_images(split, list(indices))

    chunks = (range(start, min(start + DECODE_CHUNK, len(split))) for start in range(0, len(split), DECODE_CHUNK))
    for indices, (images, broken) in map_in_order(decode, chunks, workers=threads, prefetch=2):
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
