"""Data sets saved by Hugging Face's package `datasets`: `dataset=hf`. Read from the disk, never from the network."""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.errors import InputError, check_installed
from lockstep.core.fields import pathname, ruled
from lockstep.core.rules import Text
from lockstep.data.datasets.files import FileSource
from lockstep.data.datasets.listing import Members, as_labels, as_names, classes_of, held_out, in_order, split_of


@dataclass(frozen=True)
class TableRow:
    """The image file in a row of a table."""

    table: Any
    where: str
    column: str
    row: int

    def contents(self) -> bytes:
        image = self.table[self.row][self.column]
        if image.get("bytes") is None:
            raise ValueError("the table does not contain its bytes")
        return image["bytes"]

    def __str__(self) -> str:
        return f"row {self.row} of {self.where}"


@dataclass(frozen=True, kw_only=True)
class HF(FileSource):
    """A folder written by `datasets.DatasetDict.save_to_disk`."""

    path: str = pathname("???")
    train_split: str = ruled("train", Text())
    val_split: str = ruled("validation", Text())
    image_column: str = ruled("image", Text())
    label_column: str = ruled("label", Text())

    def list_files(self) -> tuple[Members, Members]:
        splits = self._load()
        table = split_of(splits, self.train_split, self.path, key="train_split")
        names = self._labels(table)
        declared = in_order(getattr(table.features[self.label_column], "names", None) or ())
        classes = declared or classes_of(names, lambda row: f"row {row} of {self.path}", gaps=True)
        train = self._members(table, self.train_split, names, classes)
        if self.val_share is not None:
            if self.val_split in splits:
                split = f"{self.path} has the split {self.val_split!r}"
                self.refuse_val_share(split, "name none with dataset.val_split=none")
            return held_out(train, as_names(map(str, range(len(train)))), self.val_share)
        val = split_of(splits, self.val_split, self.path, key="val_split")
        return train, self._members(val, self.val_split, self._labels(val), classes)

    def _load(self) -> dict[str, Any]:
        check_installed("datasets", "dataset=hf", extra="hf")
        import datasets

        try:
            loaded = datasets.load_from_disk(self.path)
        except Exception as error:  # the library raises all kinds of errors for any other folder
            raise InputError(
                f"dataset.path: {self.path} cannot be read ({' '.join(str(error).split())}), expected a folder that "
                "save_to_disk of the package datasets made"
            ) from error
        splits = dict(loaded) if isinstance(loaded, dict) else {self.train_split: loaded}
        for table in splits.values():
            self._check_columns(table)
        return splits

    def _check_columns(self, table: Any) -> None:
        import datasets

        for key, column in (("image_column", self.image_column), ("label_column", self.label_column)):
            if column not in table.column_names:
                raise InputError(
                    f"dataset.{key} is {column!r}, but the columns of {self.path} are "
                    f"{', '.join(table.column_names)}; name one with dataset.{key}=NAME"
                )
        if not isinstance(table.features[self.image_column], datasets.Image):
            raise InputError(
                f"dataset.image_column is {self.image_column!r}, which holds {table.features[self.image_column]} in "
                f"{self.path}, expected images; name another with dataset.image_column=NAME"
            )

    def _hash_of_sizes(self, table: Any) -> str:
        """A hash of the sizes of all images in bytes, which identifies the images without reading them.

        The library's own hash of a table changes whenever the same table is saved again.
        """
        from pyarrow import compute

        contents = compute.struct_field(table.data.column(self.image_column), "bytes")
        sizes = compute.fill_null(compute.binary_length(contents), -1).to_numpy().astype(np.int64)
        return hashlib.sha256(sizes.tobytes()).hexdigest()[:16]

    def _labels(self, table: Any) -> list[str]:
        labels = table.with_format(None).select_columns([self.label_column])[self.label_column][:]
        feature = table.features[self.label_column]
        for row, label in enumerate(labels):
            if label is None or isinstance(label, float | list | dict) or label == -1:
                raise InputError(f"dataset: row {row} of {self.path} has the label {label!r}, expected a class")
        return [feature.int2str(label) if hasattr(feature, "int2str") else str(label) for label in labels]

    def _members(self, table: Any, split: str, names: list[str], classes: tuple[str, ...]) -> Members:
        import datasets

        where = f"{split} in {Path(self.path)}"
        stored = table.cast_column(self.image_column, datasets.Image(decode=False))  # the bytes of the files
        member = functools.partial(TableRow, stored, where, self.image_column)
        labels = as_labels(names, classes, lambda row: f"row {row} of {where}")
        identity = f"{split}, {len(table):,} rows, {self._hash_of_sizes(table)}"
        return Members(member, np.arange(len(names)), labels, classes, identity)
