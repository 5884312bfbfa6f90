"""`lockstep evaluate` for models of several labels or of values: the scores of their task, and a table by output."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from torch import Tensor

from lockstep.cli.rows import csv_row
from lockstep.config import components
from lockstep.config.schema import CONF
from lockstep.core import log
from lockstep.core.data_protocols import Source, Split
from lockstep.core.errors import InputError
from lockstep.core.model import is_broken, probabilities
from lockstep.core.model_card import CLASSES, LABELS, VALUES, class_name
from lockstep.core.monitor import figure_text
from lockstep.core.protocols import Task
from lockstep.core.safe_write import write_atomic
from lockstep.core.world import World
from lockstep.data.loading.loaders import Streaming
from lockstep.data.loading.shards import EvalLoader
from lockstep.inference.predictor import Predictor
from lockstep.losses import MaskedLoss
from lockstep.runtime.host import cores
from lockstep.scores import Block, EvaluationObserver, Scores
from lockstep.tasks import Multiclass, Multilabel, Regression
from lockstep.training.evaluate import evaluate

BY_LABEL = ("precision", "recall")  # of the table alone, beside the metrics of the run
TASKS: Mapping[str, Task] = {CLASSES: Multiclass(), LABELS: Multilabel(), VALUES: Regression()}


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The results for the N examples of a split. Broken images have NaN in `labels`.

    Fields:
        labels, predictions: float (N, K): the targets, and the probabilities or the predicted values.
        scores: the loss and the metrics of the task, by name; one for each of the K outputs as `METRIC/NAME`.
    """

    labels: Tensor
    predictions: Tensor
    scores: dict[str, float]


class Collected(EvaluationObserver):
    """Keeps the predictions of each block, and calls `advance` with its size."""

    def __init__(self, kind: str, advance: Callable[[int], None]) -> None:
        self.kind, self.advance, self.blocks = kind, advance, list[Tensor]()

    def update(self, block: Block) -> None:
        self.blocks.append(probabilities(block.logits, self.kind).cpu())
        self.advance(len(block.labels))


def evaluate_blocks(
    predictor: Predictor, split: Split, labels: Tensor, observers: Sequence[EvaluationObserver]
) -> tuple[Tensor, Mapping[str, float]]:
    """Evaluate a model on every example of a split, in the same blocks as during its training.

    Returns the `labels` of the split, where broken images are marked, and the loss and the scores of the task.
    """
    card, world = predictor.card, World.solo(predictor.device)
    loss = components.build("loss", card.loss).build(card.classes, labels).to(world.device)
    loader = EvalLoader(
        world=world,
        eval_batch=card.eval_batch,
        eval_labels=labels.to(world.device, copy=True),  # the loader marks broken images in them
        eval_feed=Streaming(workers=cores() if split.images is None else 0).feed(split, world),
        skip=split.skip,
    )
    figures = evaluate(
        predictor.model,
        task=TASKS[card.targets],
        loss=MaskedLoss(loss, tolerates_broken=split.skip > 0),
        loader=loader,
        transforms=predictor.transforms,
        precision=predictor.precision,
        world=world,
        views=card.eval_views,
        observers=observers,
    )
    return loader.eval_labels.cpu(), figures


def evaluate_outputs(
    predictor: Predictor, split: Split, advance: Callable[[int], None], metrics: Mapping[str, Any] | None = None
) -> Outputs:
    """The scores and predictions of a model for every example of a split.

    `metrics` are the config nodes of the run's metrics, by name; None are those of every job of the task.
    """
    card, world = predictor.card, World.solo(predictor.device)
    nodes = metrics or _nodes(TASKS[card.targets].metrics)
    tabled = {**_nodes(BY_LABEL if card.targets == LABELS else ()), **nodes}
    by_output = {name: {**node, "average": "none"} for name, node in tabled.items() if "average" in node}
    scores, scores_by_output = (
        Scores(
            components.build_many("metric", chosen),
            card.classes,
            card.names,
            world,
            kind=card.probabilities,
            targets=card.targets,
        )
        for chosen in (nodes, by_output)
    )
    predictions = Collected(card.probabilities, advance)
    observers = (scores, scores_by_output, predictions)
    labels, figures = evaluate_blocks(predictor, split, split.labels, observers)
    return Outputs(
        labels=labels,
        predictions=torch.cat(predictions.blocks),
        scores={**figures, **scores.compute(), **scores_by_output.compute()},
    )


def _nodes(names: Iterable[str]) -> dict[str, Any]:
    """The config nodes of metrics, by name."""
    return {name: components.load(CONF / "metric" / f"{name}.yaml")[name] for name in names}


def check_outputs(predictor: Predictor, source: Source) -> None:
    """Raise InputError if a data set has other labels or values than a model."""
    card = predictor.card
    names = tuple(map(class_name, source.class_names or map(str, range(source.classes))))
    if source.targets != card.targets or names != card.names:
        raise InputError(
            f"dataset: it has the {source.targets} {', '.join(names)}, expected the {card.targets} "
            f"of the model, {', '.join(card.names)}; name data of these, such as that of its run"
        )


def report_outputs(outputs: Outputs, predictor: Predictor, split: Split, folder: Path, facts: dict[str, Any]) -> None:
    """Show the result and write `evaluation.json` and `predictions.csv`."""
    card, whole = predictor.card, ~is_broken(outputs.labels)
    of_all = {name: value for name, value in outputs.scores.items() if "/" not in name}
    split_name = {"val": "evaluation", "train": "training"}[facts["split"]]
    log.show(
        f"{int(whole.sum()):,} images of the {split_name} split of {facts['dataset']}, weights of step {card.step}"
    )
    log.show("  ".join(figure_text(name, value) for name, value in of_all.items()))
    if facts["split"] == "val" and card.score:
        log.show(f"in training it was {card.score}")
    metrics = list(dict.fromkeys(name.partition("/")[0] for name in outputs.scores if "/" in name))
    with_labels = card.targets == LABELS
    counts = (outputs.labels[whole] > 0.5).sum(0).tolist() if with_labels else [int(whole.sum())] * card.classes
    head = "label" if with_labels else "value"
    table = Table(head, Column("images", justify="right"), *(Column(name, justify="right") for name in metrics))
    rows: list[dict[str, Any]] = []
    for name, count in zip(card.names, counts, strict=True):
        own = {metric: outputs.scores[f"{metric}/{name}"] for metric in metrics}
        finite = {metric: value if value == value else None for metric, value in own.items()}
        rows.append({"name": name, "images": count, **finite})
        table.add_row(name, f"{count:,}", *("–" if value is None else f"{value:.4g}" for value in finite.values()))
    log.show_table(table)
    scores = {name: value if value == value else None for name, value in of_all.items()}
    content = {**facts, "images": int(whole.sum()), "skipped": int((~whole).sum()), **scores, f"{head}s": rows}
    write_atomic(folder / "evaluation.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_atomic(folder / "predictions.csv", _rows(outputs, split, predictor))
    for name in ("evaluation.json", "predictions.csv"):
        log.show(f"wrote {folder / name}")


def _rows(outputs: Outputs, split: Split, predictor: Predictor) -> Iterator[bytes]:
    """The lines of `predictions.csv`: the target and the prediction of each output; none for a broken image."""
    names = predictor.card.names
    yield (
        csv_row(["sample", *(f"true {name}" for name in names), *(f"predicted {name}" for name in names)]) + "\n"
    ).encode()
    broken = is_broken(outputs.labels).tolist()
    for index, (labels, predicted) in enumerate(
        zip(split.labels.tolist(), outputs.predictions.tolist(), strict=True)
    ):
        cells = [""] * len(predicted) if broken[index] else [f"{value:.6g}" for value in predicted]
        yield (csv_row([split.name(index), *(f"{value:.6g}" for value in labels), *cells]) + "\n").encode()
