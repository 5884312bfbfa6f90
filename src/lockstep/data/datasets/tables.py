"""Images that a table lists: the lines of a CSV file, or a data set saved by Hugging Face's package `datasets`."""

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from lockstep.config.options import option
from lockstep.core.errors import InputError, check_installed, collecting, first_of, shown
from lockstep.core.fields import TEXT, choice, pathname, ruled
from lockstep.core.model_card import LABELS, TARGETS, VALUES
from lockstep.core.safe_read import LINE_LIMIT, open_plain
from lockstep.data.datasets.files import FileSource
from lockstep.data.datasets.listing import Files, as_names, in_folder, in_order, option_of, short_hash
from lockstep.data.datasets.targets import SEPARATOR, as_numbers, as_targets, names_of, split_text, target_of

DELIMITERS = ",;\t"
SPLITS_SHOWN = 5


class TableEntry(NamedTuple):
    line: int
    name: str
    label: tuple[str, ...]
    split: str
    group: str | None


@option("dataset")
class CSV(FileSource):
    """Your own images, listed in a CSV file with their paths, labels (names, or numbers without gaps) and splits.

    Numbers of classes begin at 0 or 1. An image counts once for each line that names it.
    """

    # the CSV file. Its first line names the columns, which are separated by commas, semicolons or tabs
    path: str = pathname("???")
    # folder to which the paths in the file are relative; null: the folder of the file
    images: str | None = pathname(None)
    path_column: str = ruled("path", TEXT)  # name of the column of paths
    label_column: str = ruled("label", TEXT)  # name of the column of labels
    # names of several columns, in place of `label_column`: one for each label, of 0 and 1 (`task=multilabel`), or for
    # each value (`task=regression`)
    label_columns: list[str] = ruled([], TEXT)
    # what separates the labels of an image in `label_column`, for `task=multilabel`
    label_separator: str = ruled(";", SEPARATOR)
    split_column: str = ruled("split", TEXT)  # name of the column of splits
    train_split: str = ruled("train", TEXT)  # value of the split column for examples to train on
    # value of the split column for examples to evaluate; examples with other values are skipped
    val_split: str = ruled("val", TEXT)
    # value of the split column for examples to test the best weights on, once. null: none
    test_split: str | None = ruled(None, TEXT)
    # name of a column that says which images belong together (a patient, a video): they are in one split. null: none
    group_column: str | None = ruled(None, TEXT)
    targets: str = choice("auto", "auto", *TARGETS)  # `classes`, `labels` or `values`; `auto`: the task's

    part = "split"

    def __post_init__(self) -> None:
        super().__post_init__()
        if twice := [name for name in self.label_columns if self.label_columns.count(name) > 1]:
            raise InputError(f"dataset.label_columns has {twice[0]!r} twice; remove one")
        if self.label_columns and self.label_column != type(self).label_column:
            raise InputError("dataset.label_column and dataset.label_columns both name labels; remove one")

    @property
    def folder(self) -> Path:
        return Path(self.path).parent if self.images is None else Path(self.images)

    def list_files(self) -> dict[str, Files]:
        rows = self._checked_rows()
        by_split: dict[str, list[TableEntry]] = {}
        for row in rows:
            by_split.setdefault(row.split, []).append(row)
        names = self.wanted(lambda name: {name} & by_split.keys())
        where = f"the column {self.split_column!r} of {self.path}"
        splits = {key: option_of(by_split, name, where, key=key) for key, name in names.items()}
        other_splits = Counter(row.split for row in rows if row.split not in names.values())
        shown = ", ".join(f"{number:,} {split!r}" for split, number in other_splits.most_common(SPLITS_SHOWN))
        notes = (f"{self.path}: skipped lines of other splits ({shown})",) * bool(other_splits)
        classes = self._classes(splits["train_split"])
        return {key: self._listing(rows, classes, notes) for key, rows in splits.items()}

    @property
    def _columns_of_labels(self) -> list[str]:
        return self.label_columns or [self.label_column]

    def _classes(self, train: list[TableEntry]) -> tuple[str, ...]:
        if self.targets == VALUES or (self.targets == LABELS and self.label_columns):
            return tuple(self._columns_of_labels)
        if self.label_columns:
            raise InputError(
                f"dataset.label_columns is [{','.join(self.label_columns)}], and an image of task=multiclass has one "
                "class; use task=multilabel or task=regression, or dataset.label_column=NAME"
            )
        examples = [self._target(row) for row in train]
        return names_of(examples, self.targets, lambda index: self._line(train[index]), "label", gaps=False)

    def _target(self, row: TableEntry) -> Any:
        if self.targets == LABELS and not self.label_columns:
            return split_text(row.label[0], self.label_separator)
        return row.label if self.targets in (LABELS, VALUES) else row.label[0]

    def _listing(self, rows: list[TableEntry], classes: tuple[str, ...], notes: tuple[str, ...]) -> Files:
        def place(index: int) -> str:
            return self._line(rows[index])

        examples = [self._target(row) for row in rows]
        if self.targets == LABELS and self.label_columns:
            labels = as_numbers(examples, classes, place, binary=True)
        else:
            labels = as_targets(examples, self.targets, classes, place, self.label_separator)
        class_of = labels.tolist() if labels.ndim == 1 else [0] * len(rows)
        order = sorted(range(len(rows)), key=lambda index: (class_of[index], rows[index].name))
        names = as_names(rows[index].name for index in order)
        groups = None if self.group_column is None else as_names(rows[index].group or "" for index in order)
        return Files(in_folder(self.folder), names, labels[order], classes, notes=notes, groups=groups)

    def _checked_rows(self) -> list[TableEntry]:
        """The lines of the table, checked: each names an image that exists, with one label, split and group.

        Raises InputError with a sentence for each wrong line.
        """
        rows_by_file: dict[str, TableEntry] = {}
        rows, problems = [], list[str]()
        for row in self._rows():
            with collecting(problems):
                if isinstance(row, InputError):
                    raise row
                rows.append(self._checked(row, rows_by_file))
        if problems:
            raise InputError(*first_of(problems))
        if not rows:
            raise InputError(f"dataset.path: {self.path} has no lines below its first, expected one for each image")
        return rows

    def _checked(self, row: TableEntry, rows_by_file: dict[str, TableEntry]) -> TableEntry:
        """A line under the name that its file had first, in `rows_by_file`, to which it is added."""
        may_lack = self.targets == LABELS and not self.label_columns  # an image without a label
        labels = [] if may_lack else zip(row.label, self._columns_of_labels, strict=True)
        cells = [(row.name, self.path_column), *labels, (row.group, self.group_column)]
        if empty := [column for cell, column in cells if cell == ""]:
            raise self._wrong(row.line, f"has nothing in the column {empty[0]!r}")
        file = self.folder / row.name
        # A file may be named in several ways: a.png, ./a.png, /data/a.png.
        earlier = rows_by_file.setdefault(os.path.abspath(file), row)  # noqa: PTH100, which keeps `..`
        if earlier[2:] != row[2:]:
            what = "group" if earlier[2:-1] == row[2:-1] else "label or split"
            raise self._wrong(row.line, f"has {row.name!r} with another {what} than line {earlier.line}")
        if earlier is row and not file.is_file():
            remedy = "correct it, or name the folder that its paths start from with dataset.images=FOLDER"
            raise self._wrong(row.line, f"has {row.name!r}, and {file} is not a file", "images", remedy)
        return row._replace(name=earlier.name)

    def _rows(self) -> Iterator[TableEntry | InputError]:
        """The lines of the table, and what is wrong with one that has too few or too many columns."""
        with open_plain(Path(self.path), links=True) as file:
            text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
            try:
                lines_of_text = self._lines(text)
                header = next(lines_of_text, "")
                delimiter = max(DELIMITERS, key=header.count)
                whole = chain([header], lines_of_text)
                lines = csv.reader(whole, delimiter=delimiter, skipinitialspace=True, strict=True)
                names = next(lines, [])
                columns, width = self._columns(names), len(self._columns_of_labels)
                for cells in lines:
                    if not cells:
                        continue
                    if len(cells) != len(names):
                        yield self._wrong(
                            lines.line_num, f"has {len(cells)} column{'s' * (len(cells) != 1)}, expected {len(names)}"
                        )
                        continue
                    name, *texts = (cells[column].strip() for column in columns)
                    group = None if self.group_column is None else texts.pop()
                    label, split = tuple(texts[:width]), texts[width:]
                    yield TableEntry(lines.line_num, name, label, split[0] if split else self.train_split, group)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"dataset.path: {self.path} is not in UTF-8 ({error.reason}); save it in UTF-8"
                ) from error
            except csv.Error as error:
                raise self._wrong(lines.line_num, f"cannot be read ({error})") from error

    def _lines(self, text: TextIO) -> Iterator[str]:
        """The lines of the table. Raises InputError: one is longer than any that names an image."""
        for number, line in enumerate(iter(partial(text.readline, LINE_LIMIT), ""), start=1):
            if len(line) == LINE_LIMIT:
                raise self._wrong(number, f"has {LINE_LIMIT:,} characters or more")
            yield line

    def _columns(self, names: list[str]) -> list[int]:
        """The numbers of the columns of the path, the labels, the split if there is one, and the group."""
        key = "label_columns" if self.label_columns else "label_column"
        columns = [("path_column", self.path_column), *((key, name) for name in self._columns_of_labels)]
        if not self.is_cut or self.test_split is not None or self.split_column in names:
            columns.append(("split_column", self.split_column))
        if self.group_column is not None:
            columns.append(("group_column", self.group_column))
        numbers = {name: number for number, name in enumerate(names) if names.count(name) == 1}
        shares = {"split_column": "test_share" if self.is_cut else "val_share"}
        where = f"the table {self.path}"
        if not any(name in names for _, name in columns):
            line = f"is {shown(','.join(names))}" if names else "is empty"
            expected = ",".join(name for _, name in columns)
            raise InputError(
                f"dataset.path: the first line of {self.path} {line}, expected the names of the columns: {expected}; "
                f"add such a line, or say their names with dataset.path_column=NAME and dataset.{key}=NAME"
            )
        places, problems = list[int](), list[str]()
        for key, name in columns:
            with collecting(problems):
                places.append(option_of(numbers, name, where, key=key, share=shares.get(key, "")))
        if problems:
            raise InputError(*problems)
        return places

    def _line(self, row: TableEntry) -> str:
        return f"line {row.line:,} of {self.path}"

    def _wrong(self, line: int, problem: str, key: str = "path", remedy: str = "correct it") -> InputError:
        return InputError(f"dataset.{key}: line {line:,} of {self.path} {problem}; {remedy}")


@dataclass(frozen=True)
class TableRow:
    table: Any
    where: str
    column: str
    row: int

    def contents(self) -> bytes:
        image = self.table[self.row][self.column] or {}  # a row may have no image
        if image.get("bytes") is None:
            raise ValueError("the table does not contain its bytes")
        return image["bytes"]

    def __str__(self) -> str:
        return f"row {self.row} of {self.where}"


@option("dataset")
class HF(FileSource):
    """A folder made by `save_to_disk` of Hugging Face's `datasets`. Needs that package (the extra `hf`), and no
    network.
    """

    path: str = pathname("???")  # the folder made by `save_to_disk`
    train_split: str = ruled("train", TEXT)  # name of the training split
    val_split: str = ruled("validation", TEXT)  # name of the evaluation split
    test_split: str | None = ruled(None, TEXT)  # name of the split to test the best weights on, once. null: none
    image_column: str = ruled("image", TEXT)  # name of the column of images
    # name of the column of labels, which are numbers or names; lists of them, or of a 0 or 1 for each label as
    # floats, bools or a list of a fixed length (`task=multilabel`); or numbers, also lists of them
    # (`task=regression`)
    label_column: str = ruled("label", TEXT)
    # name of a column that says which images belong together (a patient, a video): they are in one split. null: none
    group_column: str | None = ruled(None, TEXT)
    targets: str = choice("auto", "auto", *TARGETS)  # `classes`, `labels` or `values`; `auto`: the task's

    part = "split"
    label_separator: ClassVar[str] = ""  # a column has lists

    def list_files(self) -> dict[str, Files]:
        splits = self._load()
        names = self.wanted(lambda name: {name} & splits.keys())
        tables = {key: option_of(splits, name, self.path, key=key) for key, name in names.items()}
        labels = {key: self._labels(table) for key, table in tables.items()}
        classes = self._classes(tables["train_split"], labels["train_split"])
        return {key: self._members(table, names[key], labels[key], classes) for key, table in tables.items()}

    def _classes(self, table: Any, examples: list[Any]) -> tuple[str, ...]:
        feature = table.features[self.label_column]
        if self.targets != VALUES and (names := getattr(getattr(feature, "feature", feature), "names", None)):
            return in_order(names)
        return names_of(examples, self.targets, lambda row: f"row {row} of {self.path}", self.label_column)

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

        groups = [("group_column", self.group_column)] if self.group_column is not None else []
        for key, column in (("image_column", self.image_column), ("label_column", self.label_column), *groups):
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
        return short_hash(sizes.tobytes())

    def _labels(self, table: Any) -> list[Any]:
        values = table.with_format(None).select_columns([self.label_column])[self.label_column][:]
        feature = table.features[self.label_column]
        cell = getattr(feature, "feature", feature)
        name = getattr(cell, "int2str", str)
        if getattr(feature, "length", -1) > 0 and name is str:  # a list of fixed length is not a list of labels
            values = [[float(cell) if isinstance(cell, int) else cell for cell in row or ()] for row in values]
        return [target_of(value, self.targets, f"row {row} of {self.path}", name) for row, value in enumerate(values)]

    def _members(self, table: Any, split: str, names: list[Any], classes: tuple[str, ...]) -> Files:
        import datasets

        where = f"{split} in {Path(self.path)}"
        stored = table.cast_column(self.image_column, datasets.Image(decode=False))  # the bytes of the files
        labels = as_targets(names, self.targets, classes, f"row {{}} of {where}".format, self.label_separator)
        return Files(
            lambda row: TableRow(stored, where, self.image_column, int(row)),
            np.arange(len(names)),
            labels,
            classes,
            identity=f"{split}, {len(table):,} rows, {self._hash_of_sizes(table)}",
            member_names=as_names(map(str, range(len(names)))),
            groups=self._groups(table, where),
        )

    def _groups(self, table: Any, where: str) -> NDArray[np.bytes_] | None:
        """The groups of a column, or the names of files for `group_pattern`."""
        if self.group_column is not None:
            cells = table.with_format(None).select_columns([self.group_column])[self.group_column][:]
        elif self.group_pattern is None:
            return None
        else:
            from pyarrow import compute

            cells = compute.struct_field(table.data.column(self.image_column), "path").to_pylist()
        if None in cells:
            what = "no group" if self.group_column else "an image without the name of a file"
            raise InputError(f"dataset: row {cells.index(None)} of {where} has {what}; use dataset.group_column=NAME")
        return as_names(map(str, cells))
