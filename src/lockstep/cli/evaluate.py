"""`lockstep evaluate`: the scores of the weights of a run, on the run's data or on other data."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.table import Column, Table
from torch import Tensor

from lockstep.cli.csv_row import csv_row
from lockstep.config import components, composition, yaml_io
from lockstep.config.invocation import ConfigFiles
from lockstep.config.messages import key_of
from lockstep.core import log
from lockstep.core.data_protocols import Source, Split
from lockstep.core.errors import InputError
from lockstep.core.model_card import TrainedInput
from lockstep.core.run import read_overrides
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import write_atomic
from lockstep.data.datasets.files import interpolated, with_sizes
from lockstep.inference.evaluation import Evaluation, check_data, evaluate_split
from lockstep.inference.load import find_weights, load, run_of, say_which
from lockstep.inference.predictor import Predictor
from lockstep.runtime.limits import cores
from lockstep.telemetry.progress import progress

KEYS = ("dataset", "data_root")  # what an override may change
SHOWN = 10  # the largest number of classes in the table


def evaluate(path: str, overrides: Sequence[str], *, split: str, device: str | None, out: str | None) -> None:
    """Evaluate weights, show the result and write `evaluation.json` and `predictions.csv`.

    Raises:
        InputError: the weights or the data do not exist, or the data does not fit the model.
        StorageError: the files cannot be written.
    """
    file = find_weights(path)
    run = run_of(file)
    predictor = load(file, device=device)
    say_which(file, predictor.card)
    folder = Path(out) if out is not None else run.path if run is not None else Path()
    if not folder.is_dir():
        raise InputError(f"--out is {folder}, expected a folder that exists")
    card = TrainedInput.of_card(predictor.card)
    source = with_sizes(data_of(run, overrides), card)
    labels = check_data(predictor, source)
    examples = interpolated(source.train() if split == "train" else source.eval(), card.interpolation)
    if run is not None:
        take_threads(run)
    with progress("evaluating", len(examples)) as advance:
        evaluation = evaluate_split(predictor, examples, advance, labels)
    _show(evaluation, predictor, split, source)
    facts = {"weights": file.name, "step": predictor.card.step, "dataset": type(source).__name__, "split": split}
    write_atomic(
        folder / "evaluation.json", json.dumps({**facts, **evaluation.facts()}, indent=1, allow_nan=False) + "\n"
    )
    write_atomic(folder / "predictions.csv", _rows(evaluation, examples, labels))
    for name in ("evaluation.json", "predictions.csv"):
        log.show(f"wrote {folder / name}")


def _show(evaluation: Evaluation, predictor: Predictor, split: str, source: Source) -> None:
    name, split_name = type(source).__name__, {"val": "evaluation", "train": "training"}[split]
    lines = [
        f"{evaluation.count:,} images of the {split_name} split of {name}, weights of step {predictor.card.step}",
        f"top-1 {evaluation.top1:.2f} %  top-5 {evaluation.top5:.2f} %  loss {evaluation.loss:.4f}  "
        f"calibration error {evaluation.calibration_error:.2f} %",
    ]
    if split == "val" and predictor.card.top1 is not None:
        lines.append(f"in training it was {predictor.card.top1:.2f} % top-1")
    for line in lines:
        log.show(line)
    rows = [(name, count, top1) for name, count, top1 in evaluation.per_class if top1 is not None]
    worst = sorted(rows, key=lambda row: row[2])[:SHOWN]
    log.show("each class:" if len(rows) <= SHOWN else f"the {SHOWN} classes with the lowest top-1:")
    table = Table("class", Column("images", justify="right"), Column("top-1", justify="right"))
    for name, count, top1 in worst:
        table.add_row(name, f"{count:,}", f"{top1:.2f} %")
    log.show_table(table)


def _rows(evaluation: Evaluation, split: Split, labels: Tensor) -> Iterator[bytes]:
    """The lines of `predictions.csv`. A broken image has no prediction and no probability."""
    yield b"sample,label,predicted,probability\n"
    columns = (labels[split.labels], evaluation.whole, evaluation.predicted, evaluation.probabilities)
    for index, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        label, whole, predicted, probability = row
        result = [evaluation.names[predicted], f"{probability:.6g}"] if whole else ["", ""]
        line = csv_row([split.name(index), evaluation.names[label], *result])
        yield f"{line}\n".encode()


def data_of(run: RunDir | None, overrides: Sequence[str]) -> Source:
    """The data of a run, changed by the overrides; without a run, the data of the overrides.

    A data set that only the run folder names is not downloaded, because somebody else may have written the folder.

    Raises:
        InputError: an override changes another key, or is wrong; or there is neither a run nor `dataset=`.
    """
    for override in overrides:
        if key_of(override).partition(".")[0] not in KEYS:
            raise InputError(
                f"{override}: an evaluation takes other data only, such as dataset.path=FOLDER; leave it out"
            )
    if run is not None and not overrides:
        run_data: Source = components.build("dataset", yaml_io.load(run.config).get("dataset"))
        return run_data
    has_dataset = any(key_of(override) == "dataset" for override in overrides)
    if run is None and not has_dataset:
        raise InputError("a file of weights does not say where data is; name it: dataset=folder dataset.path=FOLDER")
    keys = ("data_root",) if has_dataset else (*KEYS, "experiment")
    stored = read_overrides(run.overrides) if run is not None else []
    stored_data = [override for override in stored if key_of(override).partition(".")[0] in keys]
    with composition.composing():
        values = composition.recompose([*stored_data, "name=evaluate"], tuple(overrides), ConfigFiles())
    source: Source = components.build("dataset", values["dataset"])
    source.prepare()
    return source


def take_threads(run: RunDir) -> None:
    """Compute with the number of threads of the run: the last bits of a sum depend on it."""
    threads = components.build("launcher", yaml_io.load(run.config).get("launcher")).threads
    if isinstance(threads, int):
        torch.set_num_threads(min(threads, cores()))
