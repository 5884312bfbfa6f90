"""Evaluates a trained model on a split: every example once, with the logits of the evaluation during training."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.config import components
from lockstep.core import log
from lockstep.core.data_protocols import Source, Split
from lockstep.core.errors import InputError
from lockstep.core.model import probabilities
from lockstep.core.model_card import class_name
from lockstep.core.world import World
from lockstep.data.loading.loaders import Streaming
from lockstep.data.loading.sampler import blocks
from lockstep.data.loading.shards import IGNORE_INDEX
from lockstep.inference.predictor import Predictor
from lockstep.losses import MaskedLoss
from lockstep.runtime.limits import cores
from lockstep.training.evaluate import best_classes
from lockstep.training.predictions import MATRIX_CLASSES

BINS = 15  # of the calibration error, as in Guo et al. 2017


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results for the N examples of a split. Broken images have the label `IGNORE_INDEX`.

    Fields:
        names: the names of the classes, by label.
        labels, predicted: int64 (N,).
        probabilities: the probabilities of the predicted classes, float (N,).
        top5: whether the label is among the five most probable classes, bool (N,).
        loss: the mean of the loss that the model was trained with, in evaluation mode.
    """

    names: tuple[str, ...]
    labels: Tensor
    predicted: Tensor
    probabilities: Tensor
    top5: Tensor
    loss: float

    @property
    def whole(self) -> Tensor:
        """Which images are not broken: bool (N,)."""
        return self.labels != IGNORE_INDEX

    @property
    def count(self) -> int:
        return int(self.whole.sum())

    @property
    def top1_percent(self) -> float:
        """The same arithmetic as in training, so the same bits."""
        return 100 * int((self.predicted == self.labels).sum()) / self.count

    @property
    def top5_percent(self) -> float:
        return 100 * int(self.top5.sum()) / self.count

    @property
    def calibration_error(self) -> float:
        """The expected calibration error in percent (Guo et al. 2017): how far probability and accuracy differ.

        The mean over `BINS` equal intervals of the predicted probability, weighted by their examples.
        """
        probability = self.probabilities[self.whole].double()
        correct = (self.predicted == self.labels)[self.whole].double()
        intervals = (probability * BINS).ceil().long().clamp(1, BINS) - 1
        gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, intervals, probability - correct)
        return 100 * float(gaps.abs().sum()) / self.count

    @property
    def per_class(self) -> list[tuple[str, int, float | None]]:
        """For each class, by label: its name, its number of examples, and the percentage predicted right."""
        examples, hits = self.labels[self.whole], self.labels[self.predicted == self.labels]
        counts, right = (torch.bincount(labels, minlength=len(self.names)).tolist() for labels in (examples, hits))
        return [
            (name, count, 100 * correct / count if count else None)
            for name, count, correct in zip(self.names, counts, right, strict=True)
        ]

    @property
    def confusion(self) -> Tensor | None:
        """Examples by label (rows) and prediction (columns), int64 (C, C); None for many classes."""
        size = len(self.names)
        if size > MATRIX_CLASSES:
            return None
        cells = self.labels[self.whole] * size + self.predicted[self.whole]
        return torch.bincount(cells, minlength=size * size).view(size, size)

    def facts(self) -> dict[str, Any]:
        """All results but the predictions, as plain values."""
        return {
            "images": self.count,
            "skipped": len(self.labels) - self.count,
            "top1": self.top1_percent,
            "top5": self.top5_percent,
            "loss": self.loss,
            "calibration_error": self.calibration_error,
            "classes": [{"name": name, "images": count, "top1": top1} for name, count, top1 in self.per_class],
            "confusion": None if self.confusion is None else self.confusion.tolist(),
        }


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
    labels = split.labels.clone() if model_labels is None else model_labels[split.labels]
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    criterion = components.build("loss", predictor.card.loss).build(predictor.card.classes, labels)
    loss = MaskedLoss(criterion.to(predictor.device).eval(), tolerates_broken=True)
    summed = torch.zeros(1, dtype=torch.float64, device=predictor.device)
    for block, images in _blocks(predictor, split, labels):
        block_labels = labels[block.start : block.stop].to(predictor.device)
        logits = predictor.logits(images)
        summed += loss(logits, block_labels, block_labels).sum()
        best = best_classes(logits)
        shares = probabilities(logits, predictor.card.probabilities).gather(1, best[:, :1])[:, 0]
        advance(len(block))
        parts.append((best[:, 0].cpu(), shares.cpu(), (best == block_labels[:, None]).any(1).cpu()))
    predicted, shares, top5 = (torch.cat(part) for part in zip(*parts, strict=True))
    count = int((labels != IGNORE_INDEX).sum())
    if count == 0:
        raise InputError("dataset: no image of the split can be decoded; see the warnings")
    return Evaluation(
        names=predictor.names,
        labels=labels,
        predicted=predicted,
        probabilities=shares,
        top5=top5,
        loss=summed.item() / count,
    )


def _blocks(predictor: Predictor, split: Split, labels: Tensor) -> Iterator[tuple[range, Tensor]]:
    """The images of each block of a split, on the device. The labels of broken images are overwritten."""
    world = World.solo(predictor.device)
    reader = Streaming(workers=cores() if split.images is None else 0)
    own_blocks = blocks(len(split), predictor.card.eval_batch, rank=0, ranks=1)
    requests = [(0, torch.arange(block.start, block.stop)) for block in own_blocks]
    skipped = 0
    for block, (images, broken) in zip(own_blocks, reader.feed(split, world)(requests), strict=True):
        for index, error in broken.items():
            skipped += 1
            if skipped > split.skip:
                raise error
            log.show_warning(f"{error.failure}: left out, {skipped} of at most {split.skip}")
            labels[index] = IGNORE_INDEX
        yield block, images


def check_data(predictor: Predictor, source: Source) -> Tensor:
    """The model's label of each class of a data set, by name: int64 (classes,). Raises InputError for other data."""
    card = predictor.card
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
