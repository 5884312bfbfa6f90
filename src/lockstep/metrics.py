"""The metrics (`metric=`): scores of an evaluation besides accuracy, computed by torchmetrics.

A score without a value, such as the AUROC of a class without examples, is NaN; files have null in its place.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.config.options import option
from lockstep.core.fields import choice, ranged
from lockstep.core.model import probabilities
from lockstep.core.model_card import SOFTMAX
from lockstep.core.protocols import Metric, Score
from lockstep.core.world import World

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torchmetrics


# How the scores of the classes are averaged; with `none` each class keeps its own. The second is for scores that are
# defined for one class at a time.
AVERAGES = ("macro", "weighted", "micro", "none")
CLASS_AVERAGES = ("macro", "weighted", "none")


class PresentClasses:
    """A score of torchmetrics over the classes with examples in the split, with the values of scikit-learn.

    torchmetrics counts a class without examples as 0, with a warning, and rejects a model of one class. So a small
    model gets columns of zeros, and the scores of the classes are averaged here. `name` is without `Multiclass`.
    """

    def __init__(self, name: str, classes: int, average: str | None = None, **options: Any) -> None:
        from torchmetrics import classification  # takes a second to import

        self.name, self.classes, self.average = name, classes, average
        # Of two classes, torchmetrics' coefficient is 1 or -1 where it is 0/0; of more it is 0, as in scikit-learn.
        self.columns = max(3 if name == "MatthewsCorrCoef" else 2, classes)
        if average is not None:
            options["average"] = "micro" if self.average == "micro" else "none"
        options |= {"num_classes": self.columns, "sync_on_compute": False}  # other ranks have no scores
        self.metric: torchmetrics.Metric = getattr(classification, f"Multiclass{name}")(**options)
        self.examples = torch.zeros(self.columns, dtype=torch.int64)

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        self.metric.update(F.pad(probabilities, (0, self.columns - self.classes)), labels)
        self.examples += torch.bincount(labels, minlength=self.columns)

    def compute(self) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            scores: Tensor = self.metric.compute()
        if scores.ndim == 0:
            return scores
        scores, examples = scores[: self.classes].double(), self.examples[: self.classes]
        absent = (examples == 0) | ((examples == examples.sum()) & (self.name == "AUROC"))
        if self.average == "none":
            return scores.masked_fill(absent, math.nan)
        weights = (examples if self.average == "weighted" else torch.ones_like(examples)).masked_fill(absent, 0)
        return scores.masked_fill(absent, 0) @ weights.double() / weights.sum()

    def reset(self) -> None:
        self.metric.reset()
        self.examples.zero_()


@option("metric")
class Accuracy:
    """The share of examples whose class is among the `top_k` most probable ones, averaged over the classes."""

    average: str = choice("macro", *AVERAGES)
    top_k: int = ranged(1, least=1, most=1_000_000)

    def build(self, classes: int) -> Score:
        return PresentClasses("Accuracy", classes, self.average, top_k=min(self.top_k, classes))


@dataclass(frozen=True, kw_only=True)
class _Averaged:
    """A score of torchmetrics, by the name of the class."""

    average: str = choice("macro", *AVERAGES)

    def build(self, classes: int) -> Score:
        name = "F1Score" if isinstance(self, F1) else type(self).__name__
        return PresentClasses(name, classes, self.average)


@option("metric")
class Precision(_Averaged):
    """The share of the examples predicted to be of a class that are of it."""


@option("metric")
class Recall(_Averaged):
    """The share of the examples of a class that are predicted to be of it."""


@option("metric")
class F1(_Averaged):
    """The harmonic mean of precision and recall."""


@option("metric")
class AUROC(_Averaged):
    """The area under the ROC curve of each class against the others."""

    average: str = choice("macro", *CLASS_AVERAGES)


@option("metric")
class AveragePrecision(_Averaged):
    """The area under the curve of precision over recall of each class."""

    average: str = choice("macro", *CLASS_AVERAGES)


@option("metric")
class Calibration:
    """The difference between the probability of predicted classes and the share that is right (Guo et al. 2017)."""

    bins: int = ranged(15, least=1, most=10_000)
    norm: str = choice("l1", "l1", "l2", "max")

    def build(self, classes: int) -> Score:
        return PresentClasses("CalibrationError", classes, n_bins=self.bins, norm=self.norm)


@option("metric")
class Kappa:
    """Cohen's kappa: how much better than chance predictions and labels agree."""

    weights: str = choice("none", "none", "linear", "quadratic")

    def build(self, classes: int) -> Score:
        return PresentClasses("CohenKappa", classes, weights=self.weights)


@option("metric")
class Matthews:
    """The correlation coefficient of Matthews, between predictions and labels."""

    def build(self, classes: int) -> Score:
        return PresentClasses("MatthewsCorrCoef", classes)


class Block(NamedTuple):
    """A block of an evaluation on one rank. Broken images have negative labels.

    Fields:
        images: uint8 (b, C, H, W).
        logits: (b, classes), with the classes `predicted` and the `labels`, int64 (b,), and the losses (b,).
        first: the number of the first example in the split.
    """

    images: Tensor
    logits: Tensor
    predicted: Tensor
    labels: Tensor
    losses: Tensor
    first: int


class EvaluationObserver:
    """Takes the blocks of an evaluation. The base class ignores them."""

    def start(self) -> None:
        """Forget the evaluation before."""

    def update(self, block: Block) -> None:
        """Take a block of this rank. May be collective."""

    def update_without(self) -> None:
        """Take part in a round in which this rank has no block."""

    def finish(self, step: int) -> None:
        """The evaluation after `step` is the best one so far. Collective."""


class Scores(EvaluationObserver):
    """The metrics of an evaluation, by name. They do not depend on the number of ranks.

    In each round main gathers the ranks' blocks in the order of the split and counts them. So a score has the same
    bits as on one rank, whatever state a metric has, and main holds one round at a time. `kind` is the function from
    logits to probabilities. The name of a class without a name is its label.
    """

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        classes: int,
        class_names: Sequence[str],
        world: World,
        kind: str = SOFTMAX,
    ) -> None:
        self.metrics, self.world, self.kind = metrics, world, kind
        self.class_names = class_names or [str(label) for label in range(classes)]
        self.scores = {name: metric.build(classes) for name, metric in metrics.items()} if world.is_main else {}
        for score in self.scores.values():
            # torchmetrics would wait for the other ranks, which have no metrics.
            score.distributed_available_fn = lambda: False  # type: ignore[attr-defined]

    def update(self, block: Block) -> None:
        if self.metrics:
            valid = block.labels >= 0
            self._count(probabilities(block.logits[valid], self.kind).cpu(), block.labels[valid].cpu())

    def update_without(self) -> None:
        if self.metrics:
            self._count(torch.empty(0, len(self.class_names)), torch.empty(0, dtype=torch.int64))

    def _count(self, probabilities: Tensor, labels: Tensor) -> None:
        for block in self.world.gather_to_main((probabilities, labels)):
            if len(block[1]):
                for score in self.scores.values():
                    score.update(*block)

    def compute(self) -> dict[str, float]:
        """The scores by tag, `metric/NAME` or `metric/NAME/CLASS`, on main; then resets them."""
        figures: dict[str, float] = {}
        for name, score in self.scores.items():
            value = torch.as_tensor(score.compute())
            score.reset()
            if value.ndim == 0:
                figures[f"metric/{name}"] = value.item()
            else:
                pairs = zip(self.class_names, value.tolist(), strict=True)
                figures |= {f"metric/{name}/{class_name}": figure for class_name, figure in pairs}
        return figures
