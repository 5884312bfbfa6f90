"""The metrics (`metric=`): scores of an evaluation besides accuracy, computed by torchmetrics and scikit-learn.

A score without a value, such as the AUROC of a class without examples, is NaN; files have null in its place.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.config.options import option
from lockstep.core.fields import choice, ranged
from lockstep.core.model_card import CLASSES, LABELS, VALUES
from lockstep.core.protocols import Score

if TYPE_CHECKING:
    import torchmetrics
    from numpy.typing import NDArray


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


Function = Callable[["NDArray[Any]", "NDArray[Any]"], "float | NDArray[Any]"]


class Collected:
    """A score of scikit-learn: `function` of the targets and the predictions (n, k) of all examples."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.reset()

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.batches.append((targets, predictions))

    def compute(self) -> Tensor:
        targets, predictions = (torch.cat(parts).numpy() for parts in zip(*self.batches, strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of scores without a value
            return torch.as_tensor(
                self.function(targets.astype(float), predictions.astype(float)), dtype=torch.float64
            )

    def reset(self) -> None:
        self.batches: list[tuple[Tensor, Tensor]] = []


def over_labels(function: Function, average: str, *, of_decisions: bool, of_ranks: bool = False) -> Function:
    """The average of a binary score over the labels that some image of the split has.

    Args:
        of_decisions: whether the score is of labels that are predicted, and not of their probabilities.
        of_ranks: whether the score also needs an image without the label.
    """

    def score(targets: NDArray[Any], predictions: NDArray[Any]) -> float | NDArray[Any]:
        true = targets > 0.5
        predicted = predictions > 0.5 if of_decisions else predictions
        if average == "micro":
            return function(true.ravel(), predicted.ravel())
        present = true.any(0) & ~(of_ranks & true.all(0))
        scores = np.full(true.shape[1], math.nan)
        scores[present] = [function(true[:, k], predicted[:, k]) for k in np.flatnonzero(present)]
        if average == "none":
            return scores
        weights = true.sum(0) if average == "weighted" else np.ones(len(scores))
        return float(np.average(scores[present], weights=weights[present])) if present.any() else math.nan

    return score


@option("metric")
class Accuracy:
    """The share of examples whose class is among the `top_k` most probable ones, averaged over the classes."""

    average: str = choice("macro", *AVERAGES)
    top_k: int = ranged(1, least=1, most=1_000_000)

    targets: ClassVar[tuple[str, ...]] = (CLASSES,)

    def build(self, classes: int) -> Score:
        return PresentClasses("Accuracy", classes, self.average, top_k=min(self.top_k, classes))


@dataclass(frozen=True, kw_only=True)
class _Averaged:
    """A score of torchmetrics, by the name of the class; for several labels, one of scikit-learn."""

    average: str = choice("macro", *AVERAGES)

    targets: ClassVar[tuple[str, ...]] = (CLASSES, LABELS)
    function: ClassVar[str]

    def build(self, classes: int) -> Score:
        name = "F1Score" if isinstance(self, F1) else type(self).__name__
        return PresentClasses(name, classes, self.average)

    def build_labels(self, classes: int) -> Score:
        """The score for images with several labels."""
        from sklearn import metrics  # takes a second to import

        of_decisions = not isinstance(self, AUROC | AveragePrecision)
        options = {"zero_division": 0.0} if of_decisions else {}
        function = partial(getattr(metrics, self.function), **options)
        of_ranks = isinstance(self, AUROC)
        return Collected(over_labels(function, self.average, of_decisions=of_decisions, of_ranks=of_ranks))


@option("metric")
class Precision(_Averaged):
    """The share of the examples predicted to be of a class that are of it."""

    function: ClassVar[str] = "precision_score"


@option("metric")
class Recall(_Averaged):
    """The share of the examples of a class that are predicted to be of it."""

    function: ClassVar[str] = "recall_score"


@option("metric")
class F1(_Averaged):
    """The harmonic mean of precision and recall."""

    function: ClassVar[str] = "f1_score"


@option("metric")
class AUROC(_Averaged):
    """The area under the ROC curve of each class against the others."""

    average: str = choice("macro", *CLASS_AVERAGES)

    function: ClassVar[str] = "roc_auc_score"


@option("metric")
class AveragePrecision(_Averaged):
    """The area under the curve of precision over recall of each class."""

    average: str = choice("macro", *CLASS_AVERAGES)

    function: ClassVar[str] = "average_precision_score"


@option("metric")
class SubsetAccuracy:
    """The share of images with all their labels predicted, and no others."""

    targets: ClassVar[tuple[str, ...]] = (LABELS,)

    def build(self, classes: int) -> Score:
        return Collected(lambda targets, predictions: ((targets > 0.5) == (predictions > 0.5)).all(1).mean())


@dataclass(frozen=True, kw_only=True)
class _OfValues:
    """A score of scikit-learn for values: the mean over the values of an image, or with `none` one for each."""

    average: str = choice("macro", "macro", "none")

    targets: ClassVar[tuple[str, ...]] = (VALUES,)
    function: ClassVar[str]

    def build(self, classes: int) -> Score:
        from sklearn import metrics  # takes a second to import

        outputs = "raw_values" if self.average == "none" else "uniform_average"
        return Collected(partial(getattr(metrics, self.function), multioutput=outputs))


@option("metric")
class MAE(_OfValues):
    """The mean absolute error."""

    higher_is_better: ClassVar[bool] = False
    function: ClassVar[str] = "mean_absolute_error"


@option("metric")
class RMSE(_OfValues):
    """The root of the mean squared error."""

    higher_is_better: ClassVar[bool] = False
    function: ClassVar[str] = "root_mean_squared_error"


@option("metric")
class R2(_OfValues):
    """The coefficient of determination: the share of the variance of the targets that is predicted."""

    function: ClassVar[str] = "r2_score"


@option("metric")
class Calibration:
    """The difference between the probability of predicted classes and the share that is right (Guo et al. 2017)."""

    bins: int = ranged(15, least=1, most=10_000)
    norm: str = choice("l1", "l1", "l2", "max")

    targets: ClassVar[tuple[str, ...]] = (CLASSES,)
    higher_is_better: ClassVar[bool] = False

    def build(self, classes: int) -> Score:
        return PresentClasses("CalibrationError", classes, n_bins=self.bins, norm=self.norm)


@option("metric")
class Kappa:
    """Cohen's kappa: how much better than chance predictions and labels agree."""

    weights: str = choice("none", "none", "linear", "quadratic")

    targets: ClassVar[tuple[str, ...]] = (CLASSES,)

    def build(self, classes: int) -> Score:
        return PresentClasses("CohenKappa", classes, weights=self.weights)


@option("metric")
class Matthews:
    """The correlation coefficient of Matthews, between predictions and labels."""

    targets: ClassVar[tuple[str, ...]] = (CLASSES,)

    def build(self, classes: int) -> Score:
        return PresentClasses("MatthewsCorrCoef", classes)
