"""`lockstep predict`: the classes that a model predicts for image files."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from rich.cells import cell_len, set_cell_size
from torch import Tensor

from lockstep.core import log
from lockstep.core.errors import InputError, escaped
from lockstep.core.model_card import CLASSES, LABELS, VALUES
from lockstep.core.safe_write import check_out, write_atomic
from lockstep.core.table import csv_row
from lockstep.data.loading.reading import in_order
from lockstep.inference.images import files_in
from lockstep.inference.predictor import THRESHOLD, Prediction, Predictor, find_weights, load, say_which
from lockstep.runtime.host import cores
from lockstep.telemetry.progress import progress

AT_ONCE = 32  # images in one batch of the model
USUAL_TOP = 3  # classes of an image
MOST = 24  # columns for the name of a class
Results = Iterator[tuple[Path, Prediction]]
Values = Iterator[tuple[Path, Tensor]]
ResultT = TypeVar("ResultT")


def predict(
    path: str,
    files: Sequence[str],
    *,
    form: str,
    top: int | None,
    device: str | None,
    out: str | None,
    threshold: float | None = None,
) -> None:
    """Print what a model predicts for each image in `files`, images and folders of images, or write it to `out`.

    Of classes these are the `top` ones, of several labels those with a probability above `threshold`.

    Raises:
        InputError: the weights cannot be loaded. Or some files are not images: it is raised after the classes of the
            other files are printed, with a sentence for each.
        StorageError: `out` cannot be written.
    """
    if top is not None and top < 1:
        raise InputError(f"--top is {top}, expected 1 or more: --top 5")
    if out is not None:
        check_out(Path(out))
    predictor = load(file := find_weights(path), device=device)
    say_which(file, predictor.card)
    targets = predictor.card.targets
    if top is not None and targets != CLASSES:
        raise InputError(f"--top is {top}, but this model predicts {targets}; remove it")
    if threshold is not None and targets != LABELS:
        raise InputError(f"--threshold is {threshold:g}, but this model predicts {targets}; remove it")
    if threshold is not None and not 0 <= threshold <= 1:
        raise InputError(f"--threshold is {threshold:g}, expected a probability: --threshold 0.5")
    problems: list[str] = []
    paths = list(_images(files, problems, predictor.card.image_shape[0]))
    with progress("predicting", len(paths)) as advance:
        if targets == VALUES:
            values = _results(predictor, paths, problems, advance, predictor.values)
            shown = {"table": _table_of_values, "csv": _csv_of_values, "json": _json_of_values}
            lines = shown[form](values, predictor.names)
        else:
            results = _results(predictor, paths, problems, advance, predictor.predict)
            rows = _Rows(
                USUAL_TOP if top is None else top,
                None if targets != LABELS else THRESHOLD if threshold is None else threshold,
            )
            if form == "table":
                lines = _table(paths, results, rows, predictor.names)
            else:
                lines = {"csv": _csv, "json": _json}[form](results, rows)
        if out is None:
            for line in lines:
                log.console.print(line, soft_wrap=True)
        else:
            write_atomic(Path(out), "".join(f"{line}\n" for line in lines))
    if out is not None:
        log.show(f"wrote {out}")
    if problems:
        raise InputError(*problems)


def _images(files: Sequence[str], problems: list[str], channels: int) -> Iterator[Path]:
    """The files to read: the named files, and all images in the named folders."""
    for name in files:
        try:
            yield from files_in(Path(name), channels)
        except InputError as error:
            problems.append(str(error))


@dataclass(frozen=True)
class _Rows:
    """Which classes of a prediction are shown: the first `top`, or the labels above `threshold`."""

    top: int
    threshold: float | None

    def __call__(self, prediction: Prediction) -> list[tuple[int, str, float]]:
        return prediction.top(self.top) if self.threshold is None else prediction.above(self.threshold)


def _results(
    predictor: Predictor,
    paths: list[Path],
    problems: list[str],
    advance: Callable[[int], None],
    predict: Callable[[Tensor], Iterable[ResultT]],
) -> Iterator[tuple[Path, ResultT]]:
    """What `predict` makes of each readable file, in order. For any other file, a sentence is added to `problems`."""

    def read(chunk: list[Path]) -> list[tuple[Path, Tensor | InputError]]:
        return [(path, _read(predictor, path)) for path in chunk]

    chunks = (paths[start : start + AT_ONCE] for start in range(0, len(paths), AT_ONCE))
    for chunk in in_order(read, chunks, workers=cores(), prefetch=2):
        problems += [str(image) for _, image in chunk if isinstance(image, InputError)]
        whole = [(path, image) for path, image in chunk if isinstance(image, Tensor)]
        if whole:
            predictions = predict(torch.cat([image for _, image in whole]))
            yield from zip((path for path, _ in whole), predictions, strict=True)
        advance(len(chunk))


def _read(predictor: Predictor, path: Path) -> Tensor | InputError:
    try:
        return predictor.stored(path)
    except InputError as error:
        return error


def _table(paths: Sequence[Path], results: Results, rows: _Rows, names: Sequence[str]) -> Iterator[str]:
    """Lines with the classes of each image, in columns, and a line with the number of images of each class."""
    width, counts = max((cell_len(_shown(path)) for path in paths), default=0), Counter[str]()
    name_width = min(MOST, max(map(cell_len, names)))
    number = 0
    for path, prediction in results:
        number += 1
        cells = [(escaped(name, keep=""), 100 * share) for _, name, share in rows(prediction)]
        classes = "  ".join(f"{set_cell_size(name, name_width)} {share:5.1f} %" for name, share in cells)
        counts.update([name for name, _ in cells[: None if rows.threshold is not None else 1]] or ["no label"])
        line = f"{set_cell_size(_shown(path), width)}  {classes}"
        # A name that breaks at the edge of the terminal is hard to read, so the classes get a separate line.
        fits = not log.has_terminal() or cell_len(line) <= log.console.width
        yield from [line] if fits else [_shown(path), f"  {classes}"]
    if number:
        of_classes = ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
        yield f"{number:,} image{'s' * (number != 1)}: {of_classes}"


def _shown(path: Path) -> str:
    return escaped(str(path), keep="")


def _csv(results: Results, rows: _Rows) -> Iterator[str]:
    yield "file,rank,label,class,probability"
    for path, prediction in results:
        for rank, (label, name, probability) in enumerate(rows(prediction), start=1):
            yield csv_row([str(path), rank, label, name, f"{probability:.6g}"])


def _json(results: Results, rows: _Rows) -> Iterator[str]:
    keys = ("label", "name", "probability")
    records = [
        {"file": str(path), "classes": [dict(zip(keys, values, strict=True)) for values in rows(prediction)]}
        for path, prediction in results
    ]
    yield from json.dumps(records, indent=1).splitlines()


def _table_of_values(results: Values, names: Sequence[str]) -> Iterator[str]:
    for path, values in results:
        cells = (f"{escaped(name, keep='')} {value:.4g}" for name, value in zip(names, values.tolist(), strict=True))
        yield f"{_shown(path)}  {'  '.join(cells)}"


def _csv_of_values(results: Values, names: Sequence[str]) -> Iterator[str]:
    yield csv_row(["file", *names])
    for path, values in results:
        yield csv_row([str(path), *(f"{value:.6g}" for value in values.tolist())])


def _json_of_values(results: Values, names: Sequence[str]) -> Iterator[str]:
    records = [
        {"file": str(path), "values": dict(zip(names, values.tolist(), strict=True))} for path, values in results
    ]
    yield from json.dumps(records, indent=1).splitlines()
