"""`lockstep evaluate`: the scores of a trained model, on every example of the run's data or of other data.

Every example counts once, with the logits of the evaluation during training.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from torch import Tensor

from lockstep.cli.evaluate_others import check_outputs, evaluate_blocks, evaluate_outputs, report_outputs
from lockstep.cli.rows import csv_row
from lockstep.config import components, composition
from lockstep.config.commands import key_of
from lockstep.config.composition import ConfigFiles
from lockstep.core import log
from lockstep.core.data_protocols import Source, Split
from lockstep.core.errors import InputError
from lockstep.core.model import probabilities
from lockstep.core.model_card import CLASSES, TrainedInput, class_name
from lockstep.core.run import read_overrides
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import write_atomic
from lockstep.core.world import World
from lockstep.data.datasets.files import interpolated, with_sizes
from lockstep.data.loading.shards import IGNORE_INDEX
from lockstep.inference.predictor import Predictor, find_weights, load, run_of, say_which
from lockstep.job.resolve import with_targets
from lockstep.metrics import Calibration
from lockstep.runtime.host import cores
from lockstep.scores import Block, EvaluationObserver, Scores
from lockstep.telemetry.progress import progress
from lockstep.training.predictions import counts_by_class

KEYS = ("dataset", "data_root")  # what an override may change
SHOWN = 10  # the largest number of classes in the table


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results for the N examples of a split. Broken images have the label `IGNORE_INDEX`.

    Fields:
        names: the names of the classes, by label.
        labels, predicted: int64 (N,).
        probabilities: the probabilities of the predicted classes, float (N,).
        top1, top5: the accuracies in percent.
        loss: the mean of the loss that the model was trained with, in evaluation mode.
        calibration_error: in percent; see `lockstep.metrics.Calibration`.
    """

    names: tuple[str, ...]
    labels: Tensor
    predicted: Tensor
    probabilities: Tensor
    top1: float
    top5: float
    loss: float
    calibration_error: float

    @property
    def whole(self) -> Tensor:
        """Which images are not broken: bool (N,)."""
        return self.labels != IGNORE_INDEX

    @property
    def count(self) -> int:
        return int(self.whole.sum())

    @property
    def per_class(self) -> list[tuple[str, int, float | None]]:
        """For each class, by label: its name, its number of examples, and the percentage predicted right."""
        (counts, _, right), _ = self._counts()
        return [
            (name, count, 100 * correct / count if count else None)
            for name, count, correct in zip(self.names, counts.tolist(), right.tolist(), strict=True)
        ]

    def _counts(self) -> tuple[Tensor, Tensor]:
        return counts_by_class(self.labels[self.whole], self.predicted[self.whole], len(self.names))

    def facts(self) -> dict[str, Any]:
        """All results but the predictions, as plain values. Many classes have no confusion matrix."""
        return {
            "images": self.count,
            "skipped": len(self.labels) - self.count,
            "top1": self.top1,
            "top5": self.top5,
            "loss": self.loss,
            "calibration_error": self.calibration_error,
            "classes": [{"name": name, "images": count, "top1": top1} for name, count, top1 in self.per_class],
            "confusion": self._counts()[1].tolist() or None,
        }


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
    has_classes = predictor.card.targets == CLASSES
    source = source if has_classes else with_targets(source, predictor.card.targets)
    labels = check_data(predictor, source)
    examples = interpolated(source.train() if split == "train" else source.eval(), card.interpolation)
    if run is not None:
        take_threads(run)
    if not has_classes:
        with progress("evaluating", len(examples)) as advance:
            metrics = components.load(run.config).get("metric") if run is not None else None
            outputs = evaluate_outputs(predictor, examples, advance, metrics)
        facts = {"weights": file.name, "step": predictor.card.step, "dataset": type(source).__name__, "split": split}
        report_outputs(outputs, predictor, examples, folder, facts)
        return
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
    if split == "val" and predictor.card.score:
        lines.append(f"in training it was {predictor.card.score}")
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
        run_data: Source = components.build("dataset", components.load(run.config).get("dataset"))
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
    threads = components.build("launcher", components.load(run.config).get("launcher")).threads
    if isinstance(threads, int):
        torch.set_num_threads(min(threads, cores()))


class PredictedClasses(EvaluationObserver):
    """Keeps the predicted class of each example and its probability, and calls `advance` with the size of a block."""

    def __init__(self, kind: str, advance: Callable[[int], None]) -> None:
        self.kind, self.advance = kind, advance
        self.blocks: list[tuple[Tensor, Tensor]] = []

    def update(self, block: Block) -> None:
        predicted = block.predicted[:, 0]
        shares = probabilities(block.logits, self.kind).gather(1, predicted[:, None])[:, 0]
        self.blocks.append((predicted.cpu(), shares.cpu()))
        self.advance(len(block.labels))


def evaluate_split(
    predictor: Predictor,
    split: Split,
    advance: Callable[[int], None] = lambda examples: None,
    model_labels: Tensor | None = None,
) -> Evaluation:
    """Evaluate a model on every example of a split, in the same blocks as during its training.

    `advance` is called after each block, with the number of its examples. `model_labels` is from `check_data`; None
    if the split has the labels of the model.

    Raises:
        InputError: more images are broken than the split allows, or all of them.
    """
    card, world = predictor.card, World.solo(predictor.device)
    labels = split.labels if model_labels is None else model_labels[split.labels]
    scores = Scores({"calibration": Calibration()}, card.classes, card.names, world, card.probabilities)
    predictions = PredictedClasses(card.probabilities, advance)
    marked, figures = evaluate_blocks(predictor, split, labels, (scores, predictions))
    predicted, shares = (torch.cat(parts) for parts in zip(*predictions.blocks, strict=True))
    return Evaluation(
        names=predictor.names,
        labels=marked,
        predicted=predicted,
        probabilities=shares,
        calibration_error=100 * scores.compute()["calibration"],
        **figures,
    )


def check_data(predictor: Predictor, source: Source) -> Tensor:
    """The model's label of each class of a data set, by name: int64 (classes,). Raises InputError for other data."""
    card = predictor.card
    if card.targets != CLASSES:
        check_outputs(predictor, source)
    labels = {name: label for label, name in enumerate(card.names)}
    names = [*map(class_name, source.class_names or map(str, range(source.classes)))]
    unknown = next((f" ({name!r} is none of them)" for name in names if name not in labels), "")
    if unknown or (not source.class_names and source.classes != card.classes):
        raise InputError(
            f"dataset: it has {source.classes:,} classes, which are not the {card.classes:,} of the model{unknown}; "
            "name data of these classes, or of some of them"
        )
    here = {"image_shape": source.image_shape, "input_shape": source.input_shape, "eval_crop": source.eval_crop}
    for name, size in here.items():
        if (expected := getattr(card, name)) != size:
            raise InputError(
                f"dataset: its {name} is {size}, but that of the model is {expected}; give the data set the sizes "
                "of the training: dataset.decode_size, dataset.input_size, dataset.crop"
            )
    return torch.tensor([labels[name] for name in names])
