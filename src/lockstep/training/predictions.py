"""Collects what the best evaluation predicts: counts, and the images about which the model is most wrong."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.core.data_protocols import Split
from lockstep.core.errors import as_unicode
from lockstep.core.figures import BINS, Predictions
from lockstep.core.model import is_broken, log_odds, probabilities
from lockstep.core.model_card import CLASSES, LABELS, VALUES, ModelCard
from lockstep.core.observer import Observer
from lockstep.core.world import World
from lockstep.scores import EvaluationBlock, EvaluationObserver
from lockstep.telemetry import pictures

WORST = 12
MATRIX_CLASSES = 100  # the most classes that have a confusion matrix, and labels that have an average precision
CURVE_CLASSES = 20  # the most classes that have curves of precision and recall, and values that have points
SCATTER_POINTS = 500  # of predicted and true values
MOST_SIDE = 128  # the most pixels of a side of an image that is stored


class CollectedPredictions(EvaluationObserver):
    """Collects the predictions of an evaluation on the device. Only `finish` waits for it.

    This class is for tasks of classes; its subclasses are for other targets. Main's `observer` is notified.
    """

    def __init__(self, card: ModelCard, split: Split, world: World, observer: Observer) -> None:
        self.names = [as_unicode(name) for name in card.class_names or map(str, range(card.classes))]
        self.kind, self.split, self.world, self.observer = card.probabilities, split, world, observer
        self.stride = math.ceil(len(split) / SCATTER_POINTS)
        self.start()

    def start(self) -> None:
        self.blocks: list[tuple[Tensor, ...]] = []
        self.worst: tuple[Tensor, ...] = ()

    def update(self, block: EvaluationBlock) -> None:
        self.blocks.append(self._kept(block))
        losses = block.losses.masked_fill(is_broken(block.labels), -math.inf)
        top = _highest(losses)
        worst = (losses[top], top + block.first, block.images[top], block.labels[top], *self._predicted(block, top))
        if self.worst:
            both = [torch.cat(parts) for parts in zip(self.worst, worst, strict=True)]
            top = _highest(both[0])
            worst = tuple(part[top] for part in both)
        self.worst = worst

    def finish(self, step: int) -> None:
        # A rank may have no block.
        gathered = self.world.gather_to_main((self._whole() if self.blocks else None, self._examples()))
        if not gathered:
            return
        parts, examples = zip(*gathered, strict=True)
        # Losses that are not numbers come first, as `topk` orders them.
        rows = sorted(itertools.chain(*examples), key=lambda row: (not math.isnan(row[0]), -row[0]))[:WORST]
        worst = [
            {
                "sample": as_unicode(self.split.name(index)),
                **self._answer(*answer),
                "loss": _number(loss),
                "png": pictures.in_base64(image.numpy()),
            }
            for loss, index, image, *answer in rows
        ]
        fields = self._fields(*map(torch.cat, zip(*filter(None, parts), strict=True)))
        self.observer.predicted(Predictions(step=step, names=self.names, worst=worst, **fields))

    def _kept(self, block: EvaluationBlock) -> tuple[Tensor, ...]:
        """What is kept of a block until `finish`."""
        few = len(self.names) <= CURVE_CLASSES
        return block.labels, block.predicted[:, 0], log_odds(block.logits if few else block.logits[:0], self.kind)

    def _predicted(self, block: EvaluationBlock, top: Tensor) -> tuple[Tensor, ...]:
        predicted = block.predicted[top, 0]
        return predicted, probabilities(block.logits[top], self.kind).gather(1, predicted[:, None])[:, 0]

    def _answer(self, label: Any, predicted: Any, share: float = math.nan) -> dict[str, Any]:
        """The target and the prediction of an example of `worst`, for the file."""
        return {"label": label, "predicted": predicted, "probability": share if math.isfinite(share) else None}

    def _whole(self) -> Sequence[Tensor]:
        """What is kept of the blocks of this rank, without broken images; the labels first."""
        labels, *others = (torch.cat(parts).cpu() for parts in zip(*self.blocks, strict=True))
        valid = ~is_broken(labels)
        return [part[valid] if len(part) else part for part in (labels, *others)]

    def _fields(self, labels: Tensor, predicted: Tensor, odds: Tensor) -> dict[str, Any]:
        """The fields of `Predictions`, from what all ranks have kept."""
        size = len(self.names)
        by_class, confusion = counts_by_class(labels, predicted, size)
        curves = counts_by_recall(labels[:, None] == torch.arange(size), odds) if len(odds) else odds
        return {**_counts(by_class.tolist()), "confusion": confusion.tolist(), "curves": curves.tolist()}

    def _examples(self) -> list[Any]:
        """This rank's examples with the highest losses: loss, number, image, label and what is predicted."""
        if not self.worst:
            return []
        losses, numbers, images, *answers = self.worst
        stride = math.ceil(max(images.shape[-2:]) / MOST_SIDE)
        small, broken = images[..., ::stride, ::stride].cpu(), is_broken(answers[0]).tolist()
        columns = (losses.tolist(), numbers.tolist(), small, *(answer.tolist() for answer in answers))
        return [row for row, is_blank in zip(zip(*columns, strict=True), broken, strict=True) if not is_blank]


class CollectedLabels(CollectedPredictions):
    """For tasks of labels. A label is true if its share is above a half."""

    def _kept(self, block: EvaluationBlock) -> tuple[Tensor, ...]:
        few = len(self.names) <= MATRIX_CLASSES
        return block.labels, block.predicted, log_odds(block.logits if few else block.logits[:0], self.kind)

    def _predicted(self, block: EvaluationBlock, top: Tensor) -> tuple[Tensor, ...]:
        return (block.predicted[top],)

    def _answer(self, label: Any, predicted: Any, share: float = math.nan) -> dict[str, Any]:
        true, chosen = ([at for at, value in enumerate(values) if value > 0.5] for values in (label, predicted))
        return super()._answer(true, chosen, share)

    def _fields(self, labels: Tensor, predicted: Tensor, odds: Tensor) -> dict[str, Any]:
        true, predicted = labels > 0.5, predicted > 0.5
        by_label = [part.sum(0).tolist() for part in (true, predicted, true & predicted)]
        fields = _counts(by_label) | {"targets": LABELS, "confusion": [], "curves": []}
        if len(odds):
            from lockstep.metrics import AveragePrecision  # imported late: other tasks need no metric

            score = AveragePrecision(average="none").build_for(LABELS, self.names)
            score.update(odds, true)
            fields["average_precision"] = [*map(_number, score.compute().tolist())]
            if len(self.names) <= CURVE_CLASSES:
                fields["curves"] = counts_by_recall(true, odds).tolist()
        return fields


class CollectedValues(CollectedPredictions):
    """For tasks of values. Of a large split, every n-th example is kept."""

    def _kept(self, block: EvaluationBlock) -> tuple[Tensor, ...]:
        numbers = torch.arange(block.first, block.first + len(block.labels))
        chosen = slice(-block.first % self.stride, None, self.stride)
        return block.labels[chosen], block.predicted[chosen], numbers[chosen]

    def _predicted(self, block: EvaluationBlock, top: Tensor) -> tuple[Tensor, ...]:
        return (block.predicted[top],)

    def _answer(self, label: Any, predicted: Any, share: float = math.nan) -> dict[str, Any]:
        return super()._answer([*map(_number, label)], [*map(_number, predicted)], share)

    def _fields(self, labels: Tensor, predicted: Tensor, numbers: Tensor) -> dict[str, Any]:
        pairs = torch.stack([labels, predicted.to(labels)])[:, numbers.argsort(), :CURVE_CLASSES]
        points = [[[*map(_number, values)] for values in pair] for pair in pairs.permute(2, 0, 1).tolist()]
        return {**_counts([[], [], []]), "targets": VALUES, "confusion": [], "curves": [], "points": points}


COLLECTED = {CLASSES: CollectedPredictions, LABELS: CollectedLabels, VALUES: CollectedValues}  # by the task's targets


def counts_by_class(labels: Tensor, predicted: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """How many examples have each class, are predicted to have it, and both, int64 (3, C); and the confusion matrix.

    It has the examples by label (rows) and prediction (columns), int64 (C, C); (0,) for many classes.
    """
    sets = (labels, predicted, labels[labels == predicted])
    by_class = torch.stack([torch.bincount(classes_of, minlength=classes) for classes_of in sets])
    confusion = torch.zeros(0)
    if classes <= MATRIX_CLASSES:
        confusion = torch.bincount(labels * classes + predicted, minlength=classes**2).view(classes, classes)
    return by_class, confusion


def counts_by_recall(true: Tensor, odds: Tensor) -> Tensor:
    """The `Predictions.curves`, int64 (C, 2, BINS), of which classes are true and their log-odds, (n, C)."""
    size, columns = true.shape[1], zip(true.T, odds.nan_to_num(-math.inf).T.contiguous(), strict=True)
    # Of the examples of the class, how many have at most the log-odds of each example.
    ranks = torch.stack([torch.searchsorted(column[own].sort()[0], column, right=True) for own, column in columns], 1)
    intervals = ranks * (BINS - 1) // true.sum(0).clamp(min=1)
    cells = (2 * torch.arange(size) + ~true) * BINS + intervals
    return torch.bincount(cells.flatten(), minlength=2 * size * BINS).view(size, 2, BINS)


def _counts(by_class: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(("examples", "predicted", "hits"), by_class, strict=True))


def _highest(losses: Tensor) -> Tensor:
    return losses.topk(min(WORST, len(losses))).indices


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
