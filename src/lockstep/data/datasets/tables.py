"""Images that a table lists: the lines of a CSV file, or a data set saved by Hugging Face's package `datasets`."""

import csv
import hashlib
import io
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.config.options import option
from lockstep.core.errors import InputError, check_installed
from lockstep.core.fields import TEXT, choice, pathname, ruled
from lockstep.core.model_card import LABELS, TARGETS, VALUES
from lockstep.core.safe_read import opened
from lockstep.data.datasets.files import FileSource
from lockstep.data.datasets.listing import (
    Files,
    as_labels,
    as_names,
    as_numbers,
    as_shares,
    classes_of,
    in_folder,
    in_order,
    option_of,
)

DELIMITERS = ",;\t"
SPLITS_SHOWN = 5


class Row(NamedTuple):
    """A line of the table."""

    line: int
    name: str
    label: tuple[str, ...]
    split: str


@option("dataset")
class CSV(FileSource):
    """Image files that a CSV file lists, with their labels and splits.

    The first line names the columns. Commas, semicolons or tabs separate them. A label is a name, or the number of a
    class: from 0 or 1, without gaps. For a task of labels, an image has several names in one cell, or a 0 or 1 in a
    column for each label; for one of values, a number in each column. An image counts once for each line that names
    it.
    """

    path: str = pathname("???")
    images: str | None = pathname(None)
    path_column: str = ruled("path", TEXT)
    label_column: str = ruled("label", TEXT)
    label_columns: list[str] = ruled([], TEXT)
    label_separator: str = ruled(";", TEXT)
    split_column: str = ruled("split", TEXT)
    train_split: str = ruled("train", TEXT)
    val_split: str = ruled("val", TEXT)
    targets: str = choice("auto", "auto", *TARGETS)

    @property
    def folder(self) -> Path:
        return Path(self.path).parent if self.images is None else Path(self.images)

    def list_files(self) -> tuple[Files, Files]:
        rows, notes = self._checked_rows()
        by_split: dict[str, list[Row]] = {}
        for row in rows:
            by_split.setdefault(row.split, []).append(row)
        where = f"the column {self.split_column!r} of {self.path}"
        train = option_of(by_split, self.train_split, where, key="train_split")
        classes = self._classes(train)
        if self.is_cut:
            whole = self._listing(train, classes, notes)
            return self.cut(whole, whole.keys)
        val = option_of(by_split, self.val_split, where, key="val_split")
        other_splits = Counter(row.split for row in rows if row.split not in (self.train_split, self.val_split))
        shown = ", ".join(f"{number:,} {split!r}" for split, number in other_splits.most_common(SPLITS_SHOWN))
        notes += (f"{self.path}: left out lines of other splits ({shown})",) * bool(other_splits)
        return self._listing(train, classes, notes), self._listing(val, classes)

    @property
    def _columns_of_labels(self) -> list[str]:
        return self.label_columns or [self.label_column]

    def _classes(self, train: list[Row]) -> tuple[str, ...]:
        """The names of the classes, labels or values, by the lines of the training split."""
        if self.targets == VALUES or (self.targets == LABELS and self.label_columns):
            return tuple(self._columns_of_labels)
        if self.targets == LABELS:
            return in_order(sorted({name for row in train for name in self._names(row)}))
        if self.label_columns:
            raise InputError(
                f"dataset.label_columns is [{','.join(self.label_columns)}], and an image of task=multiclass has one "
                "class; use task=multilabel or task=regression, or dataset.label_column=NAME"
            )
        return classes_of([row.label[0] for row in train], lambda index: self._line(train[index]), gaps=False)

    def _names(self, row: Row) -> list[str]:
        return [name.strip() for name in row.label[0].split(self.label_separator) if name.strip()]

    def _listing(self, rows: list[Row], classes: tuple[str, ...], notes: tuple[str, ...] = ()) -> Files:
        def place(index: int) -> str:
            return self._line(rows[index])

        if self.targets not in (LABELS, VALUES):
            labels = as_labels([row.label[0] for row in rows], classes, place)
            by_class = sorted(zip(labels.tolist(), (row.name for row in rows), strict=True))
            names = as_names(name for _, name in by_class)
            return Files(in_folder(self.folder), names, labels.sort().values, classes, notes=notes)
        rows = sorted(rows, key=lambda row: row.name)
        if self.targets == LABELS and not self.label_columns:
            labels = as_shares([self._names(row) for row in rows], classes, place)
        else:
            labels = as_numbers([row.label for row in rows], place, binary=self.targets == LABELS)
        return Files(in_folder(self.folder), as_names(row.name for row in rows), labels, classes, notes=notes)

    def _checked_rows(self) -> tuple[list[Row], tuple[str, ...]]:
        """The lines of the table, checked: each names an image that exists, and no image has two labels or splits."""
        rows_by_file: dict[str, Row] = {}
        rows, renamed = [], []
        for row in self._rows():
            may_lack = self.targets == LABELS and not self.label_columns  # an image without a label
            if not row.name or not (may_lack or all(row.label)):
                empty = dict(zip(row.label, self._columns_of_labels, strict=True)).get("", "")
                column = empty if row.name else self.path_column
                raise self._wrong(row.line, f"has nothing in the column {column!r}")
            file = self.folder / row.name
            # A file may be named in several ways: a.png, ./a.png, /data/a.png.
            earlier = rows_by_file.setdefault(os.path.abspath(file), row)  # noqa: PTH100, which keeps `..`
            if earlier[2:] != row[2:]:
                raise self._wrong(row.line, f"has {row.name!r} with another label or split than line {earlier.line}")
            if earlier is row and not file.is_file():
                remedy = "correct it, or name the folder that its paths start from with dataset.images=FOLDER"
                raise self._wrong(row.line, f"has {row.name!r}, and {file} is no file", "images", remedy)
            if row.name != earlier.name:
                renamed.append(f"{row.name!r} in line {row.line:,} for {earlier.name!r} in line {earlier.line:,}")
            rows.append(row._replace(name=earlier.name))
        if not rows:
            raise InputError(f"dataset.path: {self.path} has no lines below its first, expected one for each image")
        note = f"{self.path}: images repeated under another name (each line counts): {len(renamed):,}, such as "
        return rows, tuple(note + example for example in renamed[:1])

    def _rows(self) -> Iterator[Row]:
        with opened(Path(self.path), links=True) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            try:
                header = text.readline()
                delimiter = max(DELIMITERS, key=header.count)
                names = next(csv.reader([header], delimiter=delimiter, skipinitialspace=True), [])
                columns, width = self._columns(names), len(self._columns_of_labels)
                lines = csv.reader(text, delimiter=delimiter, skipinitialspace=True, strict=True)
                for cells in lines:
                    if not cells:
                        continue
                    if len(cells) != len(names):
                        raise self._wrong(lines.line_num + 1, f"has {len(cells)} columns, expected {len(names)}")
                    name, *texts = (cells[column].strip() for column in columns)
                    label, split = tuple(texts[:width]), texts[width:]
                    yield Row(lines.line_num + 1, name, label, split[0] if split else self.train_split)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"dataset.path: {self.path} is not in UTF-8 ({error.reason}); save it in UTF-8"
                ) from error
            except csv.Error as error:
                raise self._wrong(lines.line_num + 1, f"cannot be read ({error})") from error

    def _columns(self, names: list[str]) -> list[int]:
        """The numbers of the columns of the path, the labels and (without `val_share`) the split."""
        key = "label_columns" if self.label_columns else "label_column"
        columns = [("path_column", self.path_column), *((key, name) for name in self._columns_of_labels)]
        if not self.is_cut:
            columns.append(("split_column", self.split_column))
        elif self.split_column in names:
            self.refuse_val_share(
                f"{self.path} has a column {self.split_column!r}", "name no column with dataset.split_column=none"
            )
        numbers = {name: number for number, name in enumerate(names) if names.count(name) == 1}
        return [option_of(numbers, name, f"the table {self.path}", key=key) for key, name in columns]

    def _line(self, row: Row) -> str:
        return f"line {row.line:,} of {self.path}"

    def _wrong(self, line: int, problem: str, key: str = "path", remedy: str = "correct it") -> InputError:
        return InputError(f"dataset.{key}: line {line:,} of {self.path} {problem}; {remedy}")


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


@option("dataset")
class HF(FileSource):
    """A folder written by `datasets.DatasetDict.save_to_disk`."""

    path: str = pathname("???")
    train_split: str = ruled("train", TEXT)
    val_split: str = ruled("validation", TEXT)
    image_column: str = ruled("image", TEXT)
    label_column: str = ruled("label", TEXT)
    targets: str = choice("auto", "auto", *TARGETS)

    def list_files(self) -> tuple[Files, Files]:
        splits = self._load()
        table = option_of(splits, self.train_split, self.path, key="train_split")
        names = self._labels(table)
        classes = self._classes(table, names)
        train = self._members(table, self.train_split, names, classes)
        if self.is_cut:
            if self.val_split in splits:
                split = f"{self.path} has the split {self.val_split!r}"
                self.refuse_val_share(split, "name none with dataset.val_split=none")
            return self.cut(train, as_names(map(str, range(len(train)))))
        val = option_of(splits, self.val_split, self.path, key="val_split")
        return train, self._members(val, self.val_split, self._labels(val), classes)

    def _classes(self, table: Any, names: list[Any]) -> tuple[str, ...]:
        """The names of the classes, labels or values, by the rows of the training split."""
        feature = table.features[self.label_column]
        if self.targets == VALUES:
            width = len(names[0]) if names else 1
            return tuple([self.label_column] if width == 1 else (f"{self.label_column}_{at}" for at in range(width)))
        declared = in_order(getattr(getattr(feature, "feature", feature), "names", None) or ())
        if self.targets == LABELS:
            return declared or in_order(sorted({name for row in names for name in row}))
        return declared or classes_of(names, lambda row: f"row {row} of {self.path}", gaps=True)

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
            option_of(table.features, column, f"the table {self.path}", key=key)
        if not isinstance(table.features[self.image_column], datasets.Image):
            raise InputError(
                f"dataset.image_column is {self.image_column!r}, which holds {table.features[self.image_column]} in "
                f"{self.path}, expected images; name another with dataset.image_column=NAME"
            )

    def _hash_of_sizes(self, table: Any) -> str:
        # It identifies the images without reading them. The library's own hash changes with each save of a table.
        from pyarrow import compute

        contents = compute.struct_field(table.data.column(self.image_column), "bytes")
        sizes = compute.fill_null(compute.binary_length(contents), -1).to_numpy().astype(np.int64)
        return hashlib.sha256(sizes.tobytes()).hexdigest()[:16]

    def _labels(self, table: Any) -> list[Any]:
        """The class of each row by name; for labels a list of their names, for values a list of numbers."""
        labels = table.with_format(None).select_columns([self.label_column])[self.label_column][:]
        feature = table.features[self.label_column]
        if self.targets == VALUES:
            return [label if isinstance(label, list) else [label] for label in labels]
        if self.targets == LABELS:
            return [
                self._names_of(row, label, getattr(feature, "feature", feature)) for row, label in enumerate(labels)
            ]
        for row, label in enumerate(labels):
            if label is None or isinstance(label, float | list | dict) or label == -1:
                raise InputError(f"dataset: row {row} of {self.path} has the label {label!r}, expected a class")
        return [feature.int2str(label) if hasattr(feature, "int2str") else str(label) for label in labels]

    def _names_of(self, row: int, labels: Any, feature: Any) -> list[str]:
        """The names of the labels in a row of the table."""
        if not isinstance(labels, list) or any(label is None or isinstance(label, float | list) for label in labels):
            raise InputError(
                f"dataset: row {row} of {self.path} has the labels {labels!r}, expected a list of classes; use "
                "another task, or dataset.label_column=NAME"
            )
        return [feature.int2str(label) if hasattr(feature, "int2str") else str(label) for label in labels]

    def _members(self, table: Any, split: str, names: list[Any], classes: tuple[str, ...]) -> Files:
        import datasets

        where = f"{split} in {Path(self.path)}"
        stored = table.cast_column(self.image_column, datasets.Image(decode=False))  # the bytes of the files
        place = f"row {{}} of {where}".format
        if self.targets == VALUES:
            labels = as_numbers(names, place, binary=False)
        else:
            labels = (as_shares if self.targets == LABELS else as_labels)(names, classes, place)
        identity = f"{split}, {len(table):,} rows, {self._hash_of_sizes(table)}"
        return Files(
            lambda row: TableRow(stored, where, self.image_column, int(row)),
            np.arange(len(names)),
            labels,
            classes,
            identity,
        )
