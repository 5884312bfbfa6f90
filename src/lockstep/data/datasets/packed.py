"""A packed data set: every image is decoded once and stored as raw pixels, which all ranks map into memory.

`lockstep pack` makes it from a folder of class folders:

    manifest.json                   format, class names, (C, H, W), mean and std; for each split the number of
                                    examples and the sha256 of its two files
    train.images, val.images        uint8 (N, C, H, W), no header
    train.labels, val.labels        int64 (N,), little-endian

It is written under a temporary name and renamed when all of it is on the disk. A run checks the manifest, the sizes
of the files and every label. Only `lockstep pack --check` also reads and hashes the pixels, which may be 100 GB.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import InputError
from lockstep.core.fields import pathname
from lockstep.core.run_dir import MANIFEST
from lockstep.core.safe_read import MB, UnreadableFile, opened, read_json
from lockstep.data.datasets.files import PhotoSource
from lockstep.data.datasets.splits import ArraySplit, check_labels

SPLITS = ("train", "val")
DTYPES = {"images": torch.uint8, "labels": torch.int64}


@dataclass(frozen=True, kw_only=True)
class Packed(PhotoSource):
    """A folder written by `lockstep pack`."""

    path: str = pathname("???")

    @property
    def class_names(self) -> tuple[str, ...]:
        return read_manifest(Path(self.path)).classes

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return read_manifest(Path(self.path)).shape

    @property
    def mean(self) -> tuple[float, ...]:
        return read_manifest(Path(self.path)).mean

    @property
    def std(self) -> tuple[float, ...]:
        return read_manifest(Path(self.path)).std

    def train(self) -> ArraySplit:
        return map_split(Path(self.path), "train")

    def eval(self) -> ArraySplit:
        return map_split(Path(self.path), "val")

    def fingerprint(self) -> dict[str, dict[str, str]]:
        """The hashes from the manifest; they are not compared with the files here."""
        splits = read_manifest(Path(self.path)).splits
        return {name: {kind: splits[name]["sha256"][kind] for kind in DTYPES} for name in SPLITS}


@dataclass(frozen=True)
class MappedSplit(ArraySplit):
    """A split whose tensors are memory-mapped files: only the rows in use are read, once for all ranks."""


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    `splits` has for each split the number of examples (`count`) and the hashes of `images` and `labels` (`sha256`).
    """

    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    splits: Mapping[str, Mapping[str, Any]]

    def tensor_shape(self, split: str, kind: str) -> tuple[int, ...]:
        return (self.splits[split]["count"], *(self.shape if kind == "images" else ()))

    def as_json(self) -> str:
        return json.dumps({"format": 1, **vars(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, parsed: Any) -> Manifest:
        """A manifest from parsed JSON. Raises ValueError if it is not one."""
        match parsed:
            case {
                "format": 1,
                "classes": [str(), *_] as classes,
                "shape": [int(), int(), int()] as shape,
                "mean": list(mean),
                "std": list(std),
                "splits": {"train": {"count": int(), "sha256": {}}, "val": {"count": int(), "sha256": {}}} as splits,
            } if (
                all(isinstance(name, str) for name in classes)
                and min(*shape, *(splits[name]["count"] for name in SPLITS)) > 0
                and len(mean) == len(std) == shape[0]
                and all(isinstance(value, float) and math.isfinite(value) for value in (*mean, *std))
                and min(std) > 0
                and all(isinstance(splits[name]["sha256"].get(kind), str) for name in SPLITS for kind in DTYPES)
            ):
                return cls(tuple(classes), (shape[0], shape[1], shape[2]), tuple(mean), tuple(std), splits)
        raise ValueError(f"{MANIFEST} is not a manifest of `lockstep pack`")


def invalid_pack(folder: Path, reason: str) -> InputError:
    """The error for a folder that is not a whole packed data set."""
    return InputError(
        f"dataset.path: {folder} is not a whole packed data set ({reason}); make one with lockstep pack SOURCE TARGET"
    )


@functools.cache
def read_manifest(folder: Path) -> Manifest:
    """The manifest of a packed data set, read once per process, and checked against the sizes of its files.

    Raises:
        InputError: it is not a whole packed data set.
    """
    try:
        manifest = Manifest.from_json(read_json(folder / MANIFEST, 16 * MB, links=True))
        for split in SPLITS:
            for kind, dtype in DTYPES.items():
                file, expected = f"{split}.{kind}", math.prod(manifest.tensor_shape(split, kind)) * dtype.itemsize
                with opened(folder / file, links=True) as data:  # refuses pipes and devices
                    size = os.fstat(data.fileno()).st_size
                if size != expected:
                    raise ValueError(f"{file} has {size} bytes, expected {expected}")
    except UnreadableFile as error:
        raise invalid_pack(folder, f"{error.path.name} {error.reason}") from error
    except ValueError as error:
        raise invalid_pack(folder, str(error)) from error
    return manifest


@functools.cache
def map_split(folder: Path, name: str) -> MappedSplit:
    """The split `name`, mapped once per process.

    Raises:
        InputError: it is not a whole packed data set, or a label is not a class.
    """
    manifest = read_manifest(folder)

    def mapped(kind: str) -> Tensor:
        shape = manifest.tensor_shape(name, kind)
        # A private map: writing to the tensor does not change the file.
        flat = torch.from_file(
            str(folder / f"{name}.{kind}"), shared=False, size=math.prod(shape), dtype=DTYPES[kind]
        )
        return flat.view(shape)

    split = MappedSplit(mapped("images"), mapped("labels"))
    check_labels(split.labels, len(manifest.classes), str(folder / f"{name}.labels"))
    return split
