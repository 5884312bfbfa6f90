"""The files of a run's figures: `metrics.jsonl` (the reference, append only), `metrics.csv`, `validation.json`.

Each file has every step once, however often a run is killed. When a run resumes, the steps after the checkpoint, and
an evaluation that it does not have, will be done again, so they are removed from the files first.
"""

import csv
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from lockstep.core import log
from lockstep.core.data_protocols import Shard
from lockstep.core.figures import Predictions, csv_row, digits, finite, parsed_figures, place_of
from lockstep.core.observer import Observer, Outcome
from lockstep.core.plan import Plan
from lockstep.core.safe_read import read_lines
from lockstep.core.safe_write import append, storing, write_atomic
from lockstep.core.tags import ACCURACY, FIGURES, METRIC, VAL_LOSS, VAL_TOP1, name_of_tag


class TextFile(Observer):
    """The base class of `JsonLines` and `CsvTable`: a text file that names its path in errors."""

    path: Path
    file: TextIO

    def close(self) -> None:
        with storing(self.path):
            self.file.close()

    def end(self, outcome: Outcome) -> None:
        self.close()


class JsonLines(TextFile):
    """One JSON object per write: `step`, `time` (Unix seconds) and the scalars; values that are not finite are null.

    `after` is where the run resumes from, `RunInfo.after`.
    """

    def __init__(self, path: Path, after: float) -> None:
        self.path = path
        self.file = truncate_after(path, after, lambda line: place_of(*parsed_figures(line)))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        figures = {key: value if math.isfinite(value) else None for key, value in scalars.items()}
        with storing(self.path):
            self.file.write(json.dumps({"step": step, "time": round(time.time(), 3), **figures}) + "\n")


def truncate_after(
    path: Path, after: float, place: Callable[[str], float], header: str = "", adapt: Callable[[str], str] = str
) -> TextIO:
    """Open the file at `path` for appending, with the `header` and only its whole lines up to `after`.

    A line without an end was cut short by a kill; it is dropped, because it may look like a smaller step's line.
    Lines that cannot be read are dropped too, with a warning.

    Args:
        after: where the run resumes from, `RunInfo.after`.
        place: returns the `place_of` of a line; raises ValueError or RecursionError if it has none.
        adapt: gives a line below another header, as the resumed run has it.

    Raises:
        UnreadableFile: it is not a plain file.
        StorageError: it cannot be written.
    """

    def valid_lines() -> Iterator[bytes]:
        yield header.encode()
        for number, line in enumerate(read_lines(path) if path.exists() else (), start=1):
            if number == 1 and header and (line or "").partition(",")[0] == header.partition(",")[0]:
                continue
            try:
                if place(line or "") <= after:
                    yield adapt(line or "").encode()
            except (ValueError, RecursionError):
                log.warn(f"{path} is damaged: line {number} cannot be read, and is skipped")

    write_atomic(path, valid_lines())
    with storing(path):
        return append(path, newline="", buffering=1)


CSV_COLUMNS = {figure.tag: figure.column for figure in FIGURES if figure.column}


class CsvTable(TextFile):
    """`metrics.csv`: a row per evaluation, which also has the last figures of training.

    `latest` are the last figures, by tag, up to `RunInfo.after`, from which the run resumes; `tags` are
    `RunInfo.tags`. Each has a column, or one for each of its classes, and without an accuracy there are none of it.
    """

    def __init__(self, path: Path, plan: Plan, after: float, latest: dict[str, float], tags: Sequence[str]) -> None:
        self.path, self.plan, self.tags, self.latest = path, plan, tags, latest
        self._open(after)

    def _open(self, after: float) -> None:
        """Open the file with a column for each figure. The first scores of a metric show if classes have them."""
        tags: list[str] = []
        for tag in self.tags:
            is_metric = tag.startswith(METRIC)
            of_classes = [other for other in self.latest if is_metric and other.startswith(f"{tag}/")]
            tags += of_classes or [tag]
        usual = {tag: name for tag, name in CSV_COLUMNS.items() if VAL_TOP1 in tags or not tag.startswith(ACCURACY)}
        self.columns = {**usual, **{tag: name_of_tag(tag) for tag in tags if tag not in CSV_COLUMNS}}
        first = (next(iter(read_lines(self.path)), None) or "").rstrip() if self.path.exists() else ""
        before = _cells(first) if first.startswith("step,epoch,") and "\r" not in first else []
        # A resume may have other metrics.
        known = {*self.columns.values(), *(name_of_tag(tag) for tag in self.tags if tag not in self.latest)}
        self.columns |= {f"earlier/{name}": name for name in before[2:] if name not in known}
        names = ["step", "epoch", *self.columns.values()]

        def adapted(line: str) -> str:
            cells = dict(zip(before or names, _cells(line), strict=False))
            return csv_row([cells.get(name, "") for name in names]) + "\n"

        header = csv_row(names) + "\n"
        self.file = truncate_after(
            self.path, after, lambda line: place_of(int(line.partition(",")[0]), CSV_COLUMNS), header, adapted
        )
        self.writer = csv.writer(self.file, lineterminator="\n")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.latest.update(scalars)
        if {VAL_LOSS, VAL_TOP1} & scalars.keys():
            if any(tag.startswith(METRIC) and tag not in self.columns for tag in scalars):
                self.close()
                self._open(math.inf)
            epoch = step / self.plan.steps_per_epoch
            known = finite(self.latest)
            figures = [digits(known[key]) if key in known else "" for key in self.columns]
            with storing(self.path):
                self.writer.writerow([step, f"{epoch:.4g}", *figures])


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line]))
    except csv.Error as error:
        raise ValueError(line) from error


class PredictionsFile(Observer):
    """`validation.json`: what the best model so far predicts for the evaluation split."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def predicted(self, predictions: Predictions) -> None:
        predictions.write(self.path)


class Samples(JsonLines):
    """Records which examples a rank trained on, with a hash of the image that the network got.

    Writes a line per example: step, epoch, index and hash. Waits for the device at each micro-batch.
    """

    def record(self, micro: Shard, images: Tensor, examples: int) -> None:
        indices = (micro.indices % examples).tolist()  # without the number of a repetition
        for index, digest in zip(indices, fingerprints(images).tolist(), strict=False):
            self.write(micro.step, {"epoch": micro.epoch, "index": index, "hash": digest})


def fingerprints(images: Tensor) -> Tensor:
    """Hashes int64 (b,) of the rows of floats (b, ...).

    A hash is the sum of the row's bits as integers, weighted by position, modulo 2^64. The sum of integers does not
    depend on their order, so the hash is the same on every device and in every batch.
    """
    words = images.contiguous().flatten(1).view(torch.int64 if images.dtype == torch.float64 else torch.int32)
    odd = 2 * torch.arange(words.shape[1], device=words.device) + 1
    return (words * odd).sum(1)
