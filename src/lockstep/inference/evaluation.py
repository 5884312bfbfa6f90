"""Evaluates a trained model on a split: every example once, with the logits of the evaluation during training."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.config import components
from lockstep.core.data_protocols import Source, Split
from lockstep.core.errors import InputError
from lockstep.core.model import probabilities
from lockstep.core.model_card import class_name
from lockstep.core.world import World
from lockstep.data.loading.loaders import Streaming
from lockstep.data.loading.shards import IGNORE_INDEX, EvalLoader
from lockstep.inference.predictor import Predictor
from lockstep.losses import MaskedLoss
from lockstep.metrics import Calibration, build_scores
from lockstep.runtime.limits import cores
from lockstep.training.evaluate import evaluate
from lockstep.training.predictions import NoPredictions, counts_by_class


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


class PredictedClasses(NoPredictions):
    """Keeps the predicted class of each example and its probability, and calls `advance` with the size of a block."""

    def __init__(self, kind: str, advance: Callable[[int], None]) -> None:
        self.kind, self.advance = kind, advance
        self.blocks: list[tuple[Tensor, Tensor]] = []

    def update(
        self, images: Tensor, logits: Tensor, predicted: Tensor, labels: Tensor, losses: Tensor, *, first: int
    ) -> None:
        shares = probabilities(logits, self.kind).gather(1, predicted[:, None])[:, 0]
        self.blocks.append((predicted.cpu(), shares.cpu()))
        self.advance(len(labels))


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
    loss = components.build("loss", card.loss).build(card.classes, labels).to(world.device)
    loader = EvalLoader(
        world=world,
        eval_batch=card.eval_batch,
        eval_labels=labels.to(world.device, copy=True),  # the loader marks broken images in them
        eval_feed=Streaming(workers=cores() if split.images is None else 0).feed(split, world),
        skip=split.skip,
    )
    scores = build_scores({"calibration": Calibration()}, card.classes, card.names, world, card.probabilities)
    predictions = PredictedClasses(card.probabilities, advance)
    figures = evaluate(
        predictor.model,
        loss=MaskedLoss(loss, tolerates_broken=split.skip > 0),
        loader=loader,
        transforms=predictor.transforms,
        precision=predictor.precision,
        world=world,
        views=card.eval_views,
        scores=scores,
        predictions=predictions,
    )
    predicted, shares = (torch.cat(parts) for parts in zip(*predictions.blocks, strict=True))
    return Evaluation(
        names=predictor.names,
        labels=loader.eval_labels.cpu(),
        predicted=predicted,
        probabilities=shares,
        calibration_error=100 * scores.compute()["metric/calibration"],
        **figures,
    )


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
