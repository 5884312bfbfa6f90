"""Collects what the best evaluation predicts: counts by class, and the images about which the model is most wrong."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.core.figures import BINS, Predictions
from lockstep.core.model import probabilities
from lockstep.core.observer import Observer
from lockstep.core.world import World
from lockstep.scores import Block, EvaluationObserver
from lockstep.telemetry import pictures

WORST = 12
MATRIX_CLASSES = 100  # the most classes that have a confusion matrix
CURVE_CLASSES = 20  # the most classes that have curves of precision and recall
SIDE = 128  # the most pixels of a side of an image that is stored


class CollectedPredictions(EvaluationObserver):
    """Collects the predictions of an evaluation on the device. Only `finish` waits for it.

    Args:
        names: the names of the classes; empty if they have none.
        kind: the function from logits to probabilities.
        sample_name: names an example by its number.
        observer: main's, which is told.
    """

    def __init__(
        self,
        names: Sequence[str],
        classes: int,
        world: World,
        *,
        kind: str,
        sample_name: Callable[[int], str],
        observer: Observer,
    ) -> None:
        self.names = [_unicode(name) for name in names] or [str(label) for label in range(classes)]
        self.world, self.kind, self.sample_name, self.observer = world, kind, sample_name, observer
        self.start()

    def start(self) -> None:
        # A rank may have no block, and the first stages of a model have no logits.
        labels = torch.zeros(0, dtype=torch.int64, device=self.world.device)
        self.blocks = [(labels, labels, torch.zeros((0, len(self.names)), device=self.world.device))]
        self.worst: tuple[Tensor, ...] = ()

    def update(self, block: Block) -> None:
        logits, predicted, labels = block.logits, block.predicted[:, 0], block.labels
        few = len(self.names) <= CURVE_CLASSES
        self.blocks.append((labels, predicted, probabilities(logits, self.kind) if few else logits[:0]))
        losses = block.losses.masked_fill(labels < 0, -math.inf)
        top = _highest(losses)
        shares = probabilities(logits[top], self.kind).gather(1, predicted[top, None])[:, 0]
        worst = (losses[top], labels[top], predicted[top], shares, top + block.first, block.images[top])
        if self.worst:
            both = [torch.cat(parts) for parts in zip(self.worst, worst, strict=True)]
            top = _highest(both[0])
            self.worst = tuple(part[top] for part in both)
        else:
            self.worst = worst

    def finish(self, step: int) -> None:
        gathered = self.world.gather_to_main((self._counts(), self._examples()))
        if not gathered:
            return
        counts, examples = zip(*gathered, strict=True)
        by_class, confusion, curves = (sum(parts[1:], parts[0]).tolist() for parts in zip(*counts, strict=True))
        # Losses that are not numbers come first, as `topk` orders them.
        rows = sorted(itertools.chain(*examples), key=lambda row: (not math.isnan(row[0]), -row[0]))[:WORST]
        worst = [
            {
                "sample": _unicode(self.sample_name(index)),
                "label": label,
                "predicted": predicted,
                "probability": share if math.isfinite(share) else None,
                "loss": loss if math.isfinite(loss) else None,
                "png": pictures.in_base64(image.numpy()),
            }
            for loss, label, predicted, share, index, image in rows
        ]
        fields = dict(zip(("examples", "predicted", "hits"), by_class, strict=True))
        self.observer.predicted(
            Predictions(step=step, names=self.names, confusion=confusion, curves=curves, worst=worst, **fields)
        )

    def _counts(self) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's part of the counts of `Predictions`: (3, C), (C, C) or (0,), (C, 2, BINS) or (0,)."""
        labels, predicted, shares = (torch.cat(parts).cpu() for parts in zip(*self.blocks, strict=True))
        valid, size = labels >= 0, len(self.names)
        labels, predicted = labels[valid], predicted[valid]
        curves = torch.zeros(0)
        if size <= CURVE_CLASSES:
            intervals = (shares[valid].float().nan_to_num(0) * (BINS - 1)).long().clamp(0, BINS - 1)
            classes = torch.arange(size)
            cells = (2 * classes + (labels[:, None] != classes)) * BINS + intervals
            curves = torch.bincount(cells.flatten(), minlength=2 * size * BINS).view(size, 2, BINS)
        return *counts_by_class(labels, predicted, size), curves

    def _examples(self) -> list[Any]:
        """This rank's examples with the highest losses: loss, label, prediction, probability, number, image."""
        if not self.worst:
            return []
        *columns, images = self.worst
        stride = math.ceil(max(images.shape[-2:]) / SIDE)
        rows = zip(*(column.tolist() for column in columns), images[..., ::stride, ::stride].cpu(), strict=True)
        return [row for row in rows if row[1] >= 0]


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


def _highest(losses: Tensor) -> Tensor:
    return losses.topk(min(WORST, len(losses))).indices


def _unicode(text: str) -> str:
    """A text without the bytes of a file's name that are no text."""
    return text.encode(errors="backslashreplace").decode()
