"""Image files that a table lists: `dataset=csv`."""

import csv
import io
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lockstep.core.errors import InputError
from lockstep.core.fields import pathname, ruled
from lockstep.core.rules import Text
from lockstep.core.safe_read import opened
from lockstep.data.datasets.files import FileSource
from lockstep.data.datasets.listing import Listing, as_labels, as_names, classes_of, held_out, split_of

DELIMITERS = ",;\t"
SPLITS_SHOWN = 5


class Row(NamedTuple):
    """A line of the table."""

    line: int
    name: str
    label: str
    split: str


@dataclass(frozen=True, kw_only=True)
class CSV(FileSource):
    """Image files that a CSV file lists, with their labels and splits.

    The first line names the columns. Commas, semicolons or tabs separate them. A label is a name, or the number of a
    class: from 0 or 1, without gaps. An image counts once for each line that names it.
    """

    path: str = pathname("???")
    images: str | None = pathname(None)
    path_column: str = ruled("path", Text())
    label_column: str = ruled("label", Text())
    split_column: str = ruled("split", Text())
    train_split: str = ruled("train", Text())
    val_split: str = ruled("val", Text())

    @property
    def folder(self) -> Path:
        return Path(self.path).parent if self.images is None else Path(self.images)

    def list_files(self) -> tuple[Listing, Listing]:
        rows, notes = self._checked_rows()
        by_split: dict[str, list[Row]] = {}
        for row in rows:
            by_split.setdefault(row.split, []).append(row)
        where = f"the column {self.split_column!r} of {self.path}"
        train = split_of(by_split, self.train_split, where, key="train_split")
        classes = classes_of([row.label for row in train], lambda index: self._line(train[index]), gaps=False)
        if self.val_share is not None:
            whole = self._listing(train, classes, notes)
            return held_out(whole, whole.names, self.val_share)
        val = split_of(by_split, self.val_split, where, key="val_split")
        other_splits = Counter(row.split for row in rows if row.split not in (self.train_split, self.val_split))
        shown = ", ".join(f"{number:,} {split!r}" for split, number in other_splits.most_common(SPLITS_SHOWN))
        notes += (f"{self.path}: left out lines of other splits ({shown})",) * bool(other_splits)
        return self._listing(train, classes, notes), self._listing(val, classes)

    def _listing(self, rows: list[Row], classes: tuple[str, ...], notes: tuple[str, ...] = ()) -> Listing:
        labels = as_labels([row.label for row in rows], classes, lambda index: self._line(rows[index]))
        by_class = sorted(zip(labels.tolist(), (row.name for row in rows), strict=True))
        counts = tuple(labels.bincount(minlength=len(classes)).tolist())
        return Listing(self.folder, classes, counts, as_names(name for _, name in by_class), notes)

    def _checked_rows(self) -> tuple[list[Row], tuple[str, ...]]:
        """The lines of the table, checked: each names an image that exists, and no image has two labels or splits."""
        rows_by_file: dict[str, Row] = {}
        rows, renamed = [], []
        for row in self._rows():
            if not row.name or not row.label:
                column = self.label_column if row.name else self.path_column
                raise self._wrong(row.line, f"has nothing in the column {column!r}")
            file = self.folder / row.name
            # A file may be named in several ways: a.png, ./a.png, /data/a.png.
            earlier = rows_by_file.setdefault(os.path.abspath(file), row)  # noqa: PTH100, which keeps `..`
            if earlier[2:] != row[2:]:
                raise self._wrong(row.line, f"has {row.name!r} with another label or split than line {earlier.line}")
            if earlier is row and not file.is_file():
                raise self._wrong(row.line, f"has {row.name!r}, and {file} is no file", "images")
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
                columns = self._columns(names)
                lines = csv.reader(text, delimiter=delimiter, skipinitialspace=True, strict=True)
                for cells in lines:
                    if not cells:
                        continue
                    if len(cells) != len(names):
                        raise self._wrong(lines.line_num + 1, f"has {len(cells)} columns, expected {len(names)}")
                    name, label, *split = (cells[column].strip() for column in columns)
                    yield Row(lines.line_num + 1, name, label, split[0] if split else self.train_split)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"dataset.path: {self.path} is not in UTF-8 ({error.reason}); save it in UTF-8"
                ) from error
            except csv.Error as error:
                raise self._wrong(lines.line_num + 1, f"cannot be read ({error})") from error

    def _columns(self, names: list[str]) -> list[int]:
        """The numbers of the columns of the path, the label and (without `val_share`) the split."""
        columns = {"path_column": self.path_column, "label_column": self.label_column}
        if self.val_share is None:
            columns["split_column"] = self.split_column
        elif self.split_column in names:
            self.refuse_val_share(
                f"{self.path} has a column {self.split_column!r}", "name no column with dataset.split_column=none"
            )
        for key, name in columns.items():
            if names.count(name) != 1:
                remedy = ", or hold out a share of each class with dataset.val_share=0.1" * (key == "split_column")
                raise InputError(
                    f"dataset.{key} is {name!r}, but the columns of {self.path} are {', '.join(names) or 'none'}; "
                    f"name one with dataset.{key}=NAME{remedy}"
                )
        return [names.index(name) for name in columns.values()]

    def _line(self, row: Row) -> str:
        return f"line {row.line:,} of {self.path}"

    def _wrong(self, line: int, problem: str, key: str = "path") -> InputError:
        remedy = "correct it"
        if key == "images":
            remedy += ", or name the folder that its paths start from with dataset.images=FOLDER"
        return InputError(f"dataset.{key}: line {line:,} of {self.path} {problem}; {remedy}")
