"""Tar shards of images and labels: `dataset=webdataset`, read by offset with the standard library."""

import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np

from lockstep.config.options import option
from lockstep.core.errors import InputError, reason_of, shown
from lockstep.core.fields import TEXT, choice, pathname, ruled
from lockstep.core.model_card import LABELS, TARGETS, VALUES
from lockstep.core.safe_read import check_size, open_plain
from lockstep.data.datasets.decode import read_part
from lockstep.data.datasets.files import FileSource
from lockstep.data.datasets.folder import HIDDEN, kind_of, left_out_note, suffixes_of
from lockstep.data.datasets.listing import Files, as_names, short_hash
from lockstep.data.datasets.targets import SEPARATOR, as_targets, names_of, split_text, target_of


@dataclass(frozen=True)
class TarMember:
    """An image file in a shard. Its label has the same `key`, the name without a suffix."""

    shard: Path
    name: str
    key: str
    offset: int
    size: int

    def contents(self) -> bytes:
        return read_part(self.shard, self.offset, self.size)

    def __str__(self) -> str:
        return f"{self.shard}:{self.name}"


@option("dataset", "webdataset")
class WebDataset(FileSource):
    """Uncompressed tar shards of images and labels (WebDataset): `KEY.jpg`, and `KEY.cls` with a number or a name.

    Of several images of a key one is taken: the fewest dots, then the alphabet, decide (jpg, png, mask.png). Shards
    are indexed once per process, so any example can be read by itself: order and resume are exact.
    """

    path: str = pathname("???")  # folder of the shards
    train_shards: str = pathname("train*.tar")  # pattern of the names of the training split's shards
    val_shards: str = pathname("val*.tar")  # pattern of the names of the evaluation split's shards
    # pattern of the names of shards to test the best weights on, once. null: none
    test_shards: str | None = pathname(None)
    # suffix of the label files, in lower or upper case: a text (also of several labels or values), `json`, or `npy`
    # with a number for each label or value
    label: str = ruled("cls", TEXT)
    # names of fields in KEY.json: one with the label or a list of labels or values, or one for each label or value;
    # empty is all of it
    label_keys: list[str] = ruled([], TEXT)
    # what separates the labels of an image in a text (`task=multilabel`), or its values
    label_separator: str = ruled(";", SEPARATOR)
    targets: str = choice("auto", "auto", *TARGETS)  # `classes`, `labels` or `values`; `auto`: the task's

    part = "shards"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_keys and self._kind != "json":
            raise InputError(
                f"dataset.label_keys names fields of JSON, but dataset.label is {self.label}; use dataset.label=json"
            )

    @property
    def _kind(self) -> str:
        return self.label.lower().rpartition(".")[2]

    def list_files(self) -> dict[str, Files]:
        left_out: Counter[str] = Counter()
        names = self.wanted(lambda pattern: {*map(str, self._shards(pattern))})
        splits = {key: self._labels(key, pattern, left_out) for key, pattern in names.items()}
        train = splits["train_shards"]
        images = list(train)
        classes = tuple(self.label_keys)
        if len(classes) < 2:
            column = "".join(classes) or self.targets.removesuffix("s")
            classes = names_of([*train.values()], self.targets, lambda index: str(images[index]), column)
        notes = left_out_note(Path(self.path), left_out)
        return {key: self._members(labels, classes, notes) for key, labels in splits.items()}

    def _shards(self, pattern: str) -> list[Path]:
        try:
            return sorted(shard for shard in Path(self.path).glob(pattern) if kind_of(shard.name) != HIDDEN)
        except (NotImplementedError, ValueError):  # a whole path, or ** within a name: no name here matches
            return []

    def _labels(self, key: str, pattern: str, left_out: Counter[str]) -> dict[TarMember, Any]:
        """The labels of the images in shards, as `as_targets` takes them. Counts all other files, by suffix."""
        shards = self._shards(pattern)
        if not shards:
            share = f"dataset.{key.partition('_')[0]}_share=0.1"
            remedy = f", or hold out a share of the others with {share}" * (key != "train_shards")
            raise InputError(
                f"dataset.{key}: there is no {pattern} in {self.path}; name the shards with dataset.{key}=PATTERN "
                f"and their folder with dataset.path=FOLDER{remedy}"
            )
        return {image: label for shard in shards for image, label in self._index(shard, left_out).items()}

    def _index(self, shard: Path, left_out: Counter[str]) -> dict[TarMember, Any]:
        images: dict[str, dict[str, TarMember]] = {}
        labels: dict[str, Any] = {}
        labels_size = 0
        with open_plain(shard, links=True) as file:
            try:
                for name, offset, size in stored_files(file):
                    key, suffix = _key_and_suffix(name)
                    if any(kind_of(part) == HIDDEN for part in name.split("/") if part != "."):
                        left_out[HIDDEN] += 1
                    elif suffix == self.label.lower().removeprefix("."):
                        check_size(labels_size := labels_size + size, f"with {name!r} its labels have")
                        file.seek(offset)
                        labels[key] = self._target(file.read(size), f"{shard}:{name}")
                    elif f".{suffix.rpartition('.')[2]}" in suffixes_of(self.channels):
                        sample = images.setdefault(key, {})
                        if suffix in sample:
                            raise InputError(f"dataset: {shard} has two images {key}.{suffix}, expected one")
                        sample[suffix] = TarMember(shard, name, key, offset, size)
                    else:
                        left_out[f".{suffix}"] += 1
            except ValueError as error:
                raise InputError(
                    f"dataset: {shard} cannot be indexed ({error}), expected a tar file that is not compressed"
                ) from error
        first = {key: min(sample, key=lambda suffix: (suffix.count("."), suffix)) for key, sample in images.items()}
        for key, sample in images.items():
            left_out.update(f".{suffix}" for suffix in sample if suffix != first[key])
            if labels.get(key) in ("", None):
                raise InputError(
                    f"dataset: {sample[first[key]]} has no label, expected {key}.{self.label} next to it; name "
                    "another suffix with dataset.label=SUFFIX"
                )
        return {sample[first[key]]: labels[key] for key, sample in images.items()}

    def _target(self, content: bytes, place: str) -> Any:
        try:
            if self._kind == "npy":
                array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
                return target_of(array.astype(float, casting="same_kind").tolist(), self.targets, place)
            text = content.decode().strip()
            if self._kind == "json":
                return target_of(self._field(json.loads(text), place), self.targets, place)
        except InputError:
            raise
        except Exception as error:  # NumPy raises all kinds of errors for a damaged header
            raise InputError(
                f"dataset: {place} is not a label ({reason_of(error)}); name another suffix with dataset.label=SUFFIX"
            ) from error
        return split_text(text, self.label_separator) if self.targets in (LABELS, VALUES) else text

    def _field(self, value: Any, place: str) -> Any:
        for key in self.label_keys:
            if not isinstance(value, dict) or key not in value:
                raise InputError(
                    f"dataset.label_keys: {place} has no {shown(key)}; name a field that every label has with "
                    "dataset.label_keys=[NAME]"
                )
        cells = [value[key] for key in self.label_keys]
        if len(cells) < 2:
            return cells[0] if cells else value
        return [float(cell) if isinstance(cell, int) else cell for cell in cells]

    def _members(self, labels: dict[TarMember, Any], classes: tuple[str, ...], notes: tuple[str, ...]) -> Files:
        images = list(labels)
        digest = short_hash("\0".join(f"{image.key} {image.size}" for image in images).encode())
        targets = as_targets(
            [*labels.values()], self.targets, classes, lambda index: str(images[index]), self.label_separator
        )
        names = as_names(image.key for image in images)
        return Files(images.__getitem__, np.arange(len(images)), targets, classes, digest, notes, names)


def _key_and_suffix(name: str) -> tuple[str, str]:
    """The key of an example and the suffix of its file, which begins at the first dot of the name."""
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return f"{folder}{slash}{stem}", suffix.lower()


def stored_files(archive: BinaryIO) -> Iterator[tuple[str, int, int]]:
    """The name, the offset and the size of each file. Raises ValueError for a damaged archive, links or devices."""

    def read(size: int) -> bytes:  # a long name or a description, which are read at once
        check_size(size, "a header of it has")
        return archive.read(size)

    headers: Any = SimpleNamespace(read=read, seek=archive.seek, tell=archive.tell)
    try:
        with tarfile.open(fileobj=headers, mode="r:", encoding="utf-8") as tar:
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
            block = archive.read(tarfile.BLOCKSIZE)  # tarfile takes a damaged header, or none, for the end
            if not block:
                raise ValueError("it ends without a block of zeros: it was cut short, or not closed by its writer")
            if block.strip(b"\0"):
                raise ValueError(f"its header at byte {tar.offset:,} is damaged")
    except (tarfile.TarError, OverflowError) as error:
        raise ValueError(str(error)) from error
