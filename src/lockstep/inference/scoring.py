"""The scores of predictions, of one model or of several together: the same for classes, labels and values.

Every example counts once, with the outputs of the evaluation during training.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lockstep.config import components
from lockstep.config.schema import CONF
from lockstep.core import log
from lockstep.core.data_protocols import Split
from lockstep.core.figures import csv_row, digits
from lockstep.core.model import is_broken, log_odds, probabilities
from lockstep.core.model_card import CLASSES, LABELS, VALUES, ModelCard
from lockstep.core.protocols import Task
from lockstep.core.table import Column, show_table
from lockstep.core.tags import CALIBRATION_ERROR, figure_parts, figure_word
from lockstep.core.world import World
from lockstep.data.loading.loaders import read_once
from lockstep.data.loading.shards import EvalLoader
from lockstep.inference.predictor import Predictor
from lockstep.losses import MaskedLoss
from lockstep.scores import EvaluationBlock, EvaluationObserver, Scores
from lockstep.tasks import Multiclass, Multilabel, Regression
from lockstep.telemetry.progress import progress
from lockstep.training.evaluate import evaluate_model
from lockstep.training.predictions import MATRIX_CLASSES, counts_by_class

BY_LABEL = ("precision", "recall")  # only in the table, in addition to the metrics of the run
TASKS: Mapping[str, Task] = {CLASSES: Multiclass(), LABELS: Multilabel(), VALUES: Regression()}
OUTPUT_COLUMN = {CLASSES: "class", LABELS: "label", VALUES: "value"}
MOST_CLASS_ROWS = 10  # the largest number of classes in the table


@dataclass(frozen=True)
class EvaluatedSplit:
    """What a model is evaluated on.

    Fields:
        labels: the targets of the examples; a class has the number that it has in the model.
        metrics: the config nodes of the metrics, by name; None stands for the metrics that every job of the task has.
        place: which of several parts it is: additional columns of `predictions.csv`. Each part has its own figures.
    """

    examples: Split
    labels: Tensor
    metrics: Mapping[str, Any] | None = None
    place: Mapping[str, str] = field(default_factory=dict)


Trial = tuple[Predictor, EvaluatedSplit]


@dataclass(frozen=True)
class Part:
    """The predictions of the model of a step for N examples.

    Fields:
        whole: which images are not broken, bool (N,).
        answers: the predicted classes and their probabilities, (N,) each; or the probabilities of the labels, or the
            values, (N, K). Then the log-odds of the labels, or of at most `MATRIX_CLASSES` classes, (N, K).
        figures: the scores of these examples, by name.
    """

    split: EvaluatedSplit
    step: int
    whole: Tensor
    answers: tuple[Tensor, ...]
    figures: Mapping[str, float]

    @property
    def images(self) -> int:
        return int(self.whole.sum())


@dataclass(frozen=True)
class Evaluation:
    """The predictions of models with equal outputs, and their scores together.

    Fields:
        figures: the loss and the metrics, by name.
        by_output: the metrics of each class, label or value, as `METRIC/NAME`.
    """

    card: ModelCard
    parts: Sequence[Part]
    figures: Mapping[str, float]
    by_output: Mapping[str, float]

    @cached_property
    def by_class(self) -> tuple[Tensor, Tensor]:
        """For a model of classes, `counts_by_class`."""
        pairs = [(part.split.labels[part.whole], part.answers[0][part.whole]) for part in self.parts]
        labels, predicted = map(torch.cat, zip(*pairs, strict=True))
        return counts_by_class(labels, predicted, self.card.classes)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """For each class, label or value: its name, its number of images, and its scores."""
        metrics = dict.fromkeys(name.partition("/")[0] for name in self.by_output)
        if self.card.targets == CLASSES:
            images, _, right = self.by_class[0].tolist()
            own = [{"top1": 100 * hits / count if count else None} for count, hits in zip(images, right, strict=True)]
        else:
            true = torch.cat([part.split.labels[part.whole] for part in self.parts])
            with_labels = self.card.targets == LABELS
            images = (true > 0.5).sum(0).tolist() if with_labels else [len(true)] * self.card.classes
            own = [{} for _ in images]
        return [
            {"name": name, "images": count, **scores, **of_all({m: self.by_output[f"{m}/{name}"] for m in metrics})}
            for name, count, scores in zip(self.card.names, images, own, strict=True)
        ]

    def facts(self) -> dict[str, Any]:
        """All results but the predictions, as plain values. Many classes have no confusion matrix."""
        confusion = {"confusion": self.by_class[1].tolist() or None} if self.card.targets == CLASSES else {}
        return {**counts(self.parts), **of_all(self.figures), self.card.targets: self.rows, **confusion}

    def show(self) -> None:
        """Show the scores by class, label or value: of many classes, those with the lowest top-1."""
        output, rows = OUTPUT_COLUMN[self.card.targets], self.rows
        title = f"each {output}:"
        if self.card.targets == CLASSES:
            rows = sorted((row for row in rows if row["images"]), key=lambda row: row["top1"])
            title = title if len(rows) <= MOST_CLASS_ROWS else f"the {MOST_CLASS_ROWS} classes with the lowest top-1:"
            rows = rows[:MOST_CLASS_ROWS]
        log.show(title)
        show_figures(output, "name", rows, [*self.rows[0]][2:])

    def lines(self) -> Iterator[dict[str, str]]:
        """The cells of each example, by column. A broken image has no prediction."""
        names = self.card.names

        def named(kind: str, values: Any) -> dict[str, str]:
            return {f"{kind} {name}": digits(value) for name, value in zip(names, values, strict=True)}

        for part in self.parts:
            columns = (column.numpy() for column in (part.split.labels, part.whole, *part.answers))
            for index, (label, whole, answer, *others) in enumerate(zip(*columns, strict=True)):
                if self.card.targets == CLASSES:
                    true, predicted = {"label": names[label]}, {"predicted": names[answer]}
                    predicted["probability"] = digits(others.pop(0))
                else:
                    true, predicted = named("true", label), named("predicted", answer)
                for odds in others:
                    predicted |= named("log-odds", odds)
                predicted = predicted if whole else dict.fromkeys(predicted, "")
                yield {"sample": part.split.examples.name(index), **true, **predicted, **part.split.place}


def csv_lines(evaluations: Sequence[Evaluation]) -> Iterator[bytes]:
    """The lines of `predictions.csv`. A column that an evaluation lacks is empty."""
    columns = dict.fromkeys(column for evaluation in evaluations for column in next(evaluation.lines()))
    rows = (line for evaluation in evaluations for line in evaluation.lines())
    for row in itertools.chain([{column: column for column in columns}], rows):
        yield f"{csv_row([row.get(column, '') for column in columns])}\n".encode()


def show_figures(head: str, key: str, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Show a table of rows: what they have at `key`, in the column `head`, their images, and these figures."""
    images = [f"{row['images']:,}" if "images" in row else "" for row in rows]
    figures = [Column(figure_word(name), [text_with_unit(name, row.get(name)) for row in rows]) for name in names]
    show_table([Column(head, [str(row[key]) for row in rows]), Column("images", images), *figures])


def text_with_unit(name: str, value: float | None) -> str:
    return "–" if value is None else "".join(figure_parts(name, value))


class Predicted(EvaluationObserver):
    """Keeps the predictions of each example on main, and calls `advance` with the size of a block of any rank.

    `blocks` has, in the order of the split, which images are not broken, the sum of the losses, (1,), and the
    `Part.answers`. In each round main gathers the blocks of the ranks, as for `Scores`.
    """

    def __init__(self, card: ModelCard, world: World, advance: Callable[[int], None]) -> None:
        self.card, self.world, self.advance = card, world, advance
        self.blocks: list[tuple[Tensor, ...]] = []

    def update(self, block: EvaluationBlock) -> None:
        kind, predicted, is_class = self.card.probabilities, block.predicted[:, 0], self.card.targets == CLASSES
        shares = probabilities(block.logits, kind)
        answers = [predicted, shares.gather(1, predicted[:, None])[:, 0]] if is_class else [shares]
        if self.card.targets == LABELS or (is_class and self.card.classes <= MATRIX_CLASSES):
            answers.append(log_odds(block.logits, kind))
        parts = (~is_broken(block.labels), block.losses.sum().view(1), *answers)
        self._keep([tuple(part.cpu() for part in parts)])

    def update_without(self) -> None:
        self._keep([])

    def _keep(self, own: list[tuple[Tensor, ...]]) -> None:
        for block in itertools.chain(*self.world.gather_to_main(own)):
            self.blocks.append(block)
            self.advance(len(block[0]))

    def part(self, split: EvaluatedSplit, step: int, figures: Mapping[str, float]) -> Part:
        """The predictions of the split, with the figures of the ranks; the loss is added up as on one rank."""
        whole, losses, *answers = (torch.cat(blocks) for blocks in zip(*self.blocks, strict=True))
        loss = functools.reduce(operator.add, losses.tolist()) / int(whole.sum())  # `sum` rounds in another way
        return Part(split, step, whole, tuple(answers), {**figures, "loss": loss})


def evaluated(trials: Iterable[Trial], world: World) -> Evaluation | None:
    """Evaluate models of equal outputs, each on all of its examples, and score all predictions together.

    Collective; main has the result. It is the same to the bit on any number of ranks. Raises InputError: more images
    are broken than a split allows, or all of them.
    """
    parts: list[Part] = []
    for number, (predictor, split) in enumerate(trials):
        if number == 0:
            card = predictor.card
            nodes, by_output = _metrics(card.targets, split.metrics)
            together, together_by_output = _scores(card, nodes, world), _scores(card, by_output, world)
        words = ["evaluating", *(f"{key}={value}" for key, value in split.place.items())]
        with progress(" ".join(words), len(split.examples)) as advance:
            own, predicted = _scores(card, nodes if split.place else {}, world), Predicted(card, world, advance)
            figures = evaluate_blocks(predictor, split, world, (own, together, together_by_output, predicted))
        if predicted.blocks:
            parts.append(predicted.part(split, predictor.card.step, {**figures, **_computed(own)}))
    if not parts:  # main has them
        return None
    images = sum(part.images for part in parts)
    means = {
        name: math.fsum(part.figures[name] * (part.images / images) for part in parts)
        for name in ("loss", *TASKS[card.targets].counted)
    }
    return Evaluation(card, parts, {**means, **_computed(together)}, together_by_output.compute())


def evaluate_blocks(
    predictor: Predictor, split: EvaluatedSplit, world: World, observers: Sequence[EvaluationObserver]
) -> Mapping[str, float]:
    """Evaluate a model on every example of a split, in the same blocks as during its training.

    Returns the loss and the scores of the task. Collective.
    """
    examples, labels = split.examples, split.labels
    card, world = predictor.card, replace(world, device=predictor.device)
    loss = components.build_stored("loss", card.loss).build(card.classes, labels).to(world.device)
    loader = EvalLoader(
        world=world,
        eval_batch=card.eval_batch,
        eval_labels=labels.to(world.device, copy=True),  # the loader marks broken images in them
        eval_feed=read_once(examples, world),
        skip=examples.skip,
    )
    figures = evaluate_model(
        predictor.model,
        task=TASKS[card.targets],
        loss=MaskedLoss(loss, tolerates_broken=examples.skip > 0),
        loader=loader,
        transforms=predictor.transforms,
        precision=predictor.precision,
        world=world,
        views=card.eval_views,
        observers=observers,
    )
    if more := loader.count_skipped() - len(loader.broken_seen):
        log.warn(f"{more} more image{'s' * (more != 1)}, which other ranks have read, cannot be decoded: skipped")
    return figures


def _metrics(targets: str, metrics: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config nodes of the metrics of all examples, and of the metrics of each class, label or value."""
    nodes = {**(metrics or _nodes(TASKS[targets].metrics))}
    tabled = {**_nodes(BY_LABEL if targets == LABELS else ()), **nodes}
    if targets == CLASSES:
        nodes[CALIBRATION_ERROR] = _nodes(["calibration"])["calibration"]
    return nodes, {name: {**node, "average": "none"} for name, node in tabled.items() if "average" in node}


def _nodes(names: Iterable[str]) -> dict[str, Any]:
    return {name: components.read_config(CONF / "metric" / f"{name}.yaml")[name] for name in names}


def _scores(card: ModelCard, nodes: Mapping[str, Any], world: World) -> Scores:
    metrics = components.build_many("metric", nodes)
    return Scores(metrics, card.classes, card.names, world, kind=card.probabilities, targets=card.targets)


def _computed(scores: Scores) -> dict[str, float]:  # the calibration error in percent
    return {name: value * (100 if name == CALIBRATION_ERROR else 1) for name, value in scores.compute().items()}


def counts(parts: Sequence[Part]) -> dict[str, int]:
    images = sum(part.images for part in parts)
    return {"images": images, "skipped": sum(len(part.whole) for part in parts) - images}


def of_all(figures: Mapping[str, float]) -> dict[str, float | None]:
    """The figures that are not of one class, label or value; None for one without a value."""
    return {name: value if math.isfinite(value) else None for name, value in figures.items() if "/" not in name}
