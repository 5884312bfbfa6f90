"""Tar shards of images and labels: `dataset=webdataset`, read by offset with the standard library."""

import hashlib
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lockstep.config.options import option
from lockstep.core.errors import InputError
from lockstep.core.fields import TEXT, pathname, ruled
from lockstep.core.safe_read import opened
from lockstep.data.datasets.decode import check_length
from lockstep.data.datasets.files import FileSource
from lockstep.data.datasets.folder import HIDDEN, SUFFIXES, kind_of, left_out_note
from lockstep.data.datasets.listing import Files, as_labels, as_names, classes_of

LABEL_BYTES = 1000


@dataclass(frozen=True)
class TarMember:
    """An image file in a shard. Its label has the same `key`, the name without a suffix."""

    shard: Path
    name: str
    key: str
    offset: int
    size: int

    def contents(self) -> bytes:
        check_length(self.size)
        descriptor = os.open(self.shard, os.O_RDONLY)
        try:
            return os.pread(descriptor, self.size, self.offset)
        finally:
            os.close(descriptor)

    def __str__(self) -> str:
        return f"{self.shard}:{self.name}"


@option("dataset", "webdataset")
class WebDataset(FileSource):
    """Tar shards in which `KEY.jpg` and `KEY.cls` are an image and its label, a number or a name.

    Of several images of a key one is taken: the fewest dots, then the alphabet, decide (jpg, png, mask.png).
    Shards are indexed once per process, so any example can be read by itself: order and resume are exact.
    """

    path: str = pathname("???")
    train_shards: str = pathname("train*.tar")
    val_shards: str = pathname("val*.tar")
    label: str = ruled("cls", TEXT)

    def list_files(self) -> tuple[Files, Files]:
        left_out: Counter[str] = Counter()
        train = self._labels("train_shards", self.train_shards, left_out)
        images = list(train)
        classes = classes_of([*train.values()], lambda index: str(images[index]), gaps=True)
        if self.is_cut:
            if val_shards := self._shards(self.val_shards):
                split = f"there are shards for validation, {val_shards[0]},"
                self.refuse_val_share(split, "name none with dataset.val_shards=none")
            whole = _members(train, classes, left_out_note(Path(self.path), left_out))
            return self.cut(whole, as_names(image.key for image in images))
        val = self._labels("val_shards", self.val_shards, left_out)
        return _members(train, classes, left_out_note(Path(self.path), left_out)), _members(val, classes)

    def _shards(self, pattern: str) -> list[Path]:
        try:
            return sorted(shard for shard in Path(self.path).glob(pattern) if kind_of(shard.name) != HIDDEN)
        except (NotImplementedError, ValueError):  # a whole path, or ** within a name: no name here matches
            return []

    def _labels(self, key: str, pattern: str, left_out: Counter[str]) -> dict[TarMember, str]:
        """The labels of the images in shards, in their order. Counts all other files in `left_out`, by suffix."""
        shards = self._shards(pattern)
        if not shards:
            remedy = ", or hold out a share of the others with dataset.val_share=0.1" * (key == "val_shards")
            raise InputError(
                f"dataset.{key}: there is no {pattern} in {self.path}; name the shards with dataset.{key}=PATTERN "
                f"and their folder with dataset.path=FOLDER{remedy}"
            )
        return {image: label for shard in shards for image, label in self._index(shard, left_out).items()}

    def _index(self, shard: Path, left_out: Counter[str]) -> dict[TarMember, str]:
        images: dict[str, dict[str, TarMember]] = {}
        labels: dict[str, str] = {}
        with opened(shard, links=True) as file:
            try:
                for name, offset, size in stored_files(file):
                    key, suffix = _key_and_suffix(name)
                    if any(kind_of(part) == HIDDEN for part in name.split("/") if part != "."):
                        left_out[HIDDEN] += 1
                    elif f".{suffix.rpartition('.')[2]}" in SUFFIXES:
                        sample = images.setdefault(key, {})
                        if suffix in sample:
                            raise InputError(f"dataset: {shard} has two images {key}.{suffix}, expected one")
                        sample[suffix] = TarMember(shard, name, key, offset, size)
                    elif suffix == self.label.lower().removeprefix("."):
                        file.seek(offset)
                        labels[key] = file.read(min(size, LABEL_BYTES)).decode().strip()
                    else:
                        left_out[f".{suffix}"] += 1
            except ValueError as error:  # also of a label that is no text
                raise InputError(
                    f"dataset: {shard} cannot be indexed ({error}), expected a tar file that is not compressed"
                ) from error
        first = {key: min(sample, key=lambda suffix: (suffix.count("."), suffix)) for key, sample in images.items()}
        for key, sample in images.items():
            left_out.update(f".{suffix}" for suffix in sample if suffix != first[key])
            if not labels.get(key):
                raise InputError(
                    f"dataset: {sample[first[key]]} has no label, expected {key}.{self.label} beside it; name "
                    "another suffix with dataset.label=SUFFIX"
                )
        return {sample[first[key]]: labels[key] for key, sample in images.items()}


def _key_and_suffix(name: str) -> tuple[str, str]:
    """The key of an example and the suffix of its file, which begins at the first dot of the name."""
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return f"{folder}{slash}{stem}", suffix.lower()


def _members(labels: dict[TarMember, str], classes: tuple[str, ...], notes: tuple[str, ...] = ()) -> Files:
    images = list(labels)
    digest = hashlib.sha256("\0".join(f"{image.key} {image.size}" for image in images).encode()).hexdigest()[:16]
    numbers = as_labels([*labels.values()], classes, lambda index: str(images[index]))
    return Files(images.__getitem__, np.arange(len(images)), numbers, classes, digest, notes)


def stored_files(archive: BinaryIO) -> Iterator[tuple[str, int, int]]:
    """The name, the offset and the size of each file in an archive.

    Raises:
        ValueError: it is no tar archive or cut short, or a member is neither a plain file nor a folder.
    """
    try:
        with tarfile.open(fileobj=archive, mode="r:", encoding="utf-8") as tar:
            while member := tar.next():
                if member.size < 0:  # on an older Python, the next member would be this one again
                    raise ValueError(f"its member {member.name!r} has {member.size:,} bytes")
                if member.issparse() or not (member.isreg() or member.isdir()):
                    raise ValueError(
                        f"its member {member.name!r} is a link, a device or sparse; use tar -h --hard-dereference"
                    )
                if member.isreg():
                    yield member.name, member.offset_data, member.size
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep about 1 kB for each
            archive.seek(tar.offset)
            if archive.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes a damaged header for the end
                raise ValueError(f"its header at byte {tar.offset:,} is damaged")
    except (tarfile.TarError, MemoryError, OverflowError) as error:  # memory, for a name of terabytes
        raise ValueError(str(error) or "it asks for too much memory") from error
