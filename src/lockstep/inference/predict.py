"""`lockstep predict`: the classes that a model predicts for image files."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.cells import cell_len, set_cell_size
from torch import Tensor

from lockstep.core import console, log
from lockstep.core.errors import InputError, StorageError, escaped, percent
from lockstep.core.figures import digits
from lockstep.core.model_card import CLASSES, LABELS, VALUES
from lockstep.core.safe_write import check_out, write_atomic
from lockstep.core.table import row_lines
from lockstep.data.loading.reading import map_in_order
from lockstep.inference.images import files_in
from lockstep.inference.predictor import THRESHOLD, Predictor, load_predictor, say_which
from lockstep.runtime.host import cores
from lockstep.telemetry.progress import progress
from lockstep.training.trained import find_weights

AT_ONCE = 32  # images in one batch of the model
USUAL_TOP = 3  # classes of an image
OUT_FORMS = ("csv", "json", "jsonl")  # the endings of a file: a table, a list, and an object a line
WIDEST_NAME = 24  # columns for the name of a class
Answer = tuple[Any, ...]  # number and name of a class, its probability and log-odds; or of a value, and it (NumPy's)
Answers = Callable[[Tensor], list[list[Answer]]]  # of uint8 images (B, C, H, W)
Results = Iterator[tuple[Path, list[Answer]]]


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
        StorageError: `out` cannot be written, or the system cannot read a file.
    """
    if top is not None and top < 1:
        raise InputError(f"--top is {top}, expected 1 or more: --top 5")
    if out is not None:
        form = form_of(Path(out), form)
    predictor = load_predictor(file := find_weights(path), device=device)
    say_which(file, predictor.card)
    targets = predictor.card.targets
    if top is not None and targets != CLASSES:
        raise InputError(f"--top is {top}, but this model predicts {targets}; remove it")
    if threshold is not None and targets != LABELS:
        raise InputError(f"--threshold is {threshold:g}, but this model predicts {targets}; remove it")
    if threshold is not None and not 0 <= threshold <= 1:
        raise InputError(f"--threshold is {threshold:g}, expected a probability: --threshold 0.5")

    def answers(images: Tensor) -> list[list[Answer]]:
        labels = range(predictor.card.classes)
        if targets == VALUES:
            return [[*zip(labels, predictor.names, row, strict=True)] for row in predictor.values(images).numpy()]
        least = THRESHOLD if threshold is None else threshold
        return [
            [(*row, float(prediction.log_odds[row[0]])) for row in rows]
            for prediction in predictor.predict(images)
            for rows in [prediction.top(top or USUAL_TOP) if targets == CLASSES else prediction.above(least)]
        ]

    problems: list[str] = []
    paths = list(_images(files, problems, predictor.card.image_shape[0]))
    with progress("predicting", len(paths)) as advance:
        results = _results(predictor, paths, problems, advance, answers)
        lines = (
            _table(paths, results, targets, predictor.names) if form == "table" else _lines(results, targets, form)
        )
        if out is None:
            for line in lines:
                console.terminal.print(line, soft_wrap=True)
        else:
            write_atomic(Path(out), "".join(f"{line}\n" for line in lines))
    if out is not None:
        log.show(f"wrote {out}")
    if problems:
        raise InputError(*problems)


def form_of(out: Path, form: str) -> str:
    """The form of a file by its ending; `form` is of the flags, or `table`. Raises InputError."""
    check_out(out)
    ending = out.suffix.lower().removeprefix(".")
    fitting, flag = (OUT_FORMS, "") if form == "table" else ((form,), f" for --{form}")
    if ending not in fitting:
        endings = [f".{name}" for name in fitting]
        better = out.with_suffix(endings[0])
        raise InputError(f"--out is {out}, expected a file {' or '.join(endings)}{flag}: --out {better}")
    return ending


def _images(files: Sequence[str], problems: list[str], channels: int) -> Iterator[Path]:
    """The files to read: the named files, and all images in the named folders."""
    for name in files:
        try:
            yield from files_in(Path(name), channels)
        except InputError as error:
            problems.append(str(error))


def _results(
    predictor: Predictor, paths: list[Path], problems: list[str], advance: Callable[[int], None], answers: Answers
) -> Results:
    """The answers for each readable file, in order. For any other file, a sentence is added to `problems`."""

    def read(chunk: list[Path]) -> list[tuple[Path, Tensor | InputError]]:
        return [(path, _read(predictor, path)) for path in chunk]

    chunks = (paths[start : start + AT_ONCE] for start in range(0, len(paths), AT_ONCE))
    for chunk in map_in_order(read, chunks, workers=cores(), prefetch=2):
        problems += [str(image) for _, image in chunk if isinstance(image, InputError)]
        whole = [(path, image) for path, image in chunk if isinstance(image, Tensor)]
        if whole:
            images = torch.cat([image for _, image in whole])
            yield from zip((path for path, _ in whole), answers(images), strict=True)
        advance(len(chunk))


def _read(predictor: Predictor, path: Path) -> Tensor | InputError:
    try:
        return predictor.stored(path)
    except StorageError:
        raise
    except InputError as error:
        return error


def _table(paths: Sequence[Path], results: Results, targets: str, names: Sequence[str]) -> Iterator[str]:
    """Lines with the classes or values of each image, and a line with the number of images of each class."""
    width, counts = max((cell_len(_shown(path)) for path in paths), default=0), Counter[str]()
    name_width = min(WIDEST_NAME, max(map(cell_len, names)))
    number = 0
    for path, answers in results:
        cells = [(escaped(name, keep=""), figure) for _, name, figure, *_ in answers]
        if targets == VALUES:
            yield f"{_shown(path)}  {'  '.join(f'{name} {digits(value)}' for name, value in cells)}"
            continue
        number += 1
        classes = "  ".join(f"{set_cell_size(name, name_width)} {percent(share, '5.1f')}" for name, share in cells)
        counts.update([name for name, _ in cells[: 1 if targets == CLASSES else None]] or ["no label"])
        line = f"{set_cell_size(_shown(path), width)}  {classes}"
        # A name that breaks at the edge of the terminal is hard to read, so the classes get a separate line.
        fits = not log.has_terminal() or cell_len(line) <= console.terminal.width
        yield from [line] if fits else [_shown(path), f"  {classes}"]
    if number:
        of_classes = ", ".join(f"{count:,} {name}" for name, count in counts.most_common())
        yield f"{number:,} image{'s' * (number != 1)}: {of_classes}"


def _shown(path: Path) -> str:
    return escaped(str(path), keep="")


def _lines(results: Results, targets: str, form: str) -> list[str]:
    rows: list[dict[str, Any]] = []
    for path, answers in results:
        file = {"file": str(path)}
        if targets == VALUES:
            values = {name: digits(value) if form == "csv" else float(value) for _, name, value in answers}
            rows.append(file | (values if form == "csv" else {"values": values}))
        elif form != "csv":
            keys = ("label", "name", "probability", "log_odds")
            rows.append({**file, "classes": [dict(zip(keys, answer, strict=True)) for answer in answers]})
        else:
            for rank, (label, name, share, odds) in enumerate(answers, start=1):
                row = {**file, "rank": rank, "label": label, "class": name}
                rows.append({**row, "probability": digits(share), "log_odds": digits(odds)})
    if form == "jsonl":
        return [json.dumps(row, allow_nan=False) for row in rows]
    return row_lines(rows, form) or ["file,rank,label,class,probability,log_odds"] * (targets != VALUES)
