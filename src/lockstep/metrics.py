"""The metrics (`metric=`): scores of an evaluation besides accuracy, computed by scikit-learn and NumPy.

A score without a value, such as the AUROC of a class without examples, is NaN; files have null in its place.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lockstep.config.options import option, preset
from lockstep.core.errors import InputError
from lockstep.core.fields import TEXT, choice, ranged, ruled
from lockstep.core.model import best_classes
from lockstep.core.model_card import CLASSES, LABELS, VALUES
from lockstep.core.protocols import Metric, Score

if TYPE_CHECKING:
    from numpy.typing import NDArray


# How the scores of the classes are averaged; with `none` each class keeps its own. The second is for scores that are
# defined for one class at a time.
AVERAGES = ("macro", "weighted", "micro", "none")
CLASS_AVERAGES = ("macro", "weighted", "none")
MOST_NAMED = 20  # classes in a sentence

Function = Callable[["NDArray[Any]", "NDArray[Any]"], "float | NDArray[Any]"]


class Collected:
    """A score that `function` computes from the targets and the predictions of all examples.

    `decide` turns the log-odds (or values) of a block into the predictions that are kept, such as predicted classes.
    """

    takes_log_odds: ClassVar[bool] = True

    def __init__(self, function: Function, decide: Callable[[Tensor], Tensor] | None = None) -> None:
        self.function, self.decide = function, decide
        self.reset()

    def update(self, odds: Tensor, targets: Tensor) -> None:
        self.batches.append((targets, odds if self.decide is None else self.decide(odds)))

    def compute(self) -> Tensor:
        targets, predictions = (torch.cat(parts) for parts in zip(*self.batches, strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of scores without a value
            score = self.function(targets.numpy(), predictions.nan_to_num().numpy())
        # scikit-learn rejects predictions that are not finite: the model overflows on an image.
        return torch.as_tensor(score, dtype=torch.float64) * (1 if predictions.isfinite().all() else math.nan)

    def reset(self) -> None:
        self.batches: list[tuple[Tensor, Tensor]] = []


def predicted_classes(odds: Tensor) -> Tensor:
    return best_classes(odds, 1)[:, 0]


def averaged(scores: NDArray[Any], examples: NDArray[Any], average: str) -> float | NDArray[Any]:
    """The average of the scores (k,) of those classes or labels that have examples and a score; NaN if none has.

    `examples` has the number of examples of each, (k,), and `average` is one of `CLASS_AVERAGES`.
    """
    scores = np.where(examples > 0, scores, math.nan)
    if average == "none":
        return scores
    weights, there = examples if average == "weighted" else np.ones(len(scores)), ~np.isnan(scores)
    return float(np.average(scores[there], weights=weights[there])) if there.any() else math.nan


@option("metric")
class Accuracy(Metric):
    """The accuracy averaged over the classes (balanced accuracy); the one over all examples is always reported."""

    average: str = choice("macro", *AVERAGES)  # `macro`: all classes count equally; `none`: one score for each class
    # a prediction is right if the label is among this many most probable classes
    top_k: int = ranged(1, least=1, most=1_000_000)

    targets: ClassVar[tuple[str, ...]] = (CLASSES,)
    higher_is_better: ClassVar[bool] = True

    def build(self, classes: int) -> Score:
        def score(labels: NDArray[Any], best: NDArray[Any]) -> float | NDArray[Any]:
            hits = (best == labels[:, None]).any(1)
            if self.average == "micro":
                return float(hits.mean())
            examples = np.bincount(labels, minlength=classes)
            return averaged(np.bincount(labels, hits, minlength=classes) / examples, examples, self.average)

        return Collected(score, lambda odds: best_classes(odds, self.top_k))


@dataclass(frozen=True, kw_only=True)
class _Averaged(Metric):
    """A score of scikit-learn for each class against the others, or for each label, and their average."""

    # `macro`: all classes or labels count equally; `none`: one score for each
    average: str = choice("macro", *AVERAGES)

    targets: ClassVar[tuple[str, ...]] = (CLASSES, LABELS)
    higher_is_better: ClassVar[bool] = True
    function: ClassVar[str]
    of_ranks: ClassVar[bool] = False
    """Whether the score is of the order of the probabilities, and not of what is predicted."""

    def build(self, classes: int) -> Score:
        def of_odds(labels: NDArray[Any], odds: NDArray[Any]) -> float | NDArray[Any]:
            return self._of_columns(labels[:, None] == np.arange(classes), odds)

        def of_classes(labels: NDArray[Any], predicted: NDArray[Any]) -> float | NDArray[Any]:
            average = "micro" if self.average == "micro" else None
            score: Any = self._function(labels=range(classes), average=average)(labels, predicted)
            return score if average else averaged(score, np.bincount(labels, minlength=classes), self.average)

        return Collected(of_odds) if self.of_ranks else Collected(of_classes, predicted_classes)

    def build_for(self, targets: str, names: Sequence[str]) -> Score:
        if targets != LABELS:
            return self.build(len(names))
        return Collected(
            lambda targets, predictions: self._of_columns(targets > 0.5, predictions),
            None if self.of_ranks else lambda odds: odds > 0,
        )

    def _of_columns(self, true: NDArray[Any], predicted: NDArray[Any]) -> float | NDArray[Any]:
        """The average of the scores of the columns of two matrices (n, k)."""
        function = self._function()
        if self.average == "micro":
            return function(true.ravel(), predicted.ravel())
        # NaN for a column without positive examples, or for AUROC without negative ones.
        scores = [function(*pair) if pair[0].any() else math.nan for pair in zip(true.T, predicted.T, strict=True)]
        return averaged(np.array(scores), true.sum(0), self.average)

    def _function(self, **options: Any) -> Function:
        from sklearn import metrics  # takes a second to import

        options |= {} if self.of_ranks else {"zero_division": 0.0}
        return partial(getattr(metrics, self.function), **options)


@option("metric")
class Precision(_Averaged):
    """Of the examples that are predicted to be of a class, the share that is of it."""

    function: ClassVar[str] = "precision_score"


@option("metric")
class Recall(_Averaged):
    """Of the examples of a class, the share that is predicted to be of it."""

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
    of_ranks: ClassVar[bool] = True


@option("metric")
class AveragePrecision(_Averaged):
    """The area under the curve of precision over recall of each class."""

    average: str = choice("macro", *CLASS_AVERAGES)

    function: ClassVar[str] = "average_precision_score"
    of_ranks: ClassVar[bool] = True


preset(
    "metric",
    "map",
    AveragePrecision(),
    "The mean average precision: the area under the curve of precision over recall, averaged over labels or classes.",
)


@option("metric")
class SubsetAccuracy(Metric):
    """The share of images all of whose labels are predicted, and no others. For `task=multilabel`."""

    targets: ClassVar[tuple[str, ...]] = (LABELS,)
    higher_is_better: ClassVar[bool] = True

    def build(self, classes: int) -> Score:
        return Collected(lambda targets, odds: ((targets > 0.5) == (odds > 0)).all(1).mean())


@dataclass(frozen=True, kw_only=True)
class _OfValues(Metric):
    """A score of scikit-learn for values: the mean over the values of an image, or with `none` one for each."""

    # `macro`: the mean over the values of an image; `none`: one score for each
    average: str = choice("macro", "macro", "none")

    targets: ClassVar[tuple[str, ...]] = (VALUES,)
    higher_is_better: ClassVar[bool] = True
    function: ClassVar[str]

    def build(self, classes: int) -> Score:
        from sklearn import metrics  # takes a second to import

        outputs = "raw_values" if self.average == "none" else "uniform_average"
        return Collected(partial(getattr(metrics, self.function), multioutput=outputs), Tensor.double)


@option("metric")
class MAE(_OfValues):
    """The mean absolute error, of which less is better. For `task=regression`."""

    higher_is_better: ClassVar[bool] = False
    function: ClassVar[str] = "mean_absolute_error"


@option("metric")
class RMSE(_OfValues):
    """The root of the mean squared error, of which less is better. For `task=regression`."""

    higher_is_better: ClassVar[bool] = False
    function: ClassVar[str] = "root_mean_squared_error"


@option("metric")
class R2(_OfValues):
    """The coefficient of determination: how much of the targets' variance is predicted. For `task=regression`."""

    function: ClassVar[str] = "r2_score"


@option("metric")
class Calibration(Metric):
    """The expected calibration error: how far the probabilities of the predicted classes are from the accuracy (Guo
    et al. 2017).
    """

    bins: int = ranged(15, least=1, most=10_000)  # bins of probabilities
    # mean (`l1`), root mean square (`l2`) or largest (`max`) difference over the bins
    norm: str = choice("l1", "l1", "l2", "max")

    targets: ClassVar[tuple[str, ...]] = (CLASSES,)
    higher_is_better: ClassVar[bool] = False

    def build(self, classes: int) -> Score:
        def best(odds: Tensor) -> Tensor:
            return torch.stack([odds.amax(1).sigmoid(), predicted_classes(odds).double()], 1)

        def score(labels: NDArray[Any], best: NDArray[Any]) -> float:
            confidences, hits = best[:, 0], best[:, 1] == labels
            # The bin m has the probabilities in ((m - 1) / bins, m / bins].
            bins = np.searchsorted(np.linspace(0, 1, self.bins + 1)[1:-1], confidences)
            counts = np.bincount(bins)
            filled = counts > 0
            shares = counts[filled] / len(labels)
            gaps = np.abs(np.bincount(bins, hits) - np.bincount(bins, confidences))[filled] / counts[filled]
            if self.norm == "max":
                return float(gaps.max())
            power = 1 if self.norm == "l1" else 2
            return float((shares @ gaps**power) ** (1 / power))

        return Collected(score, best)


@option("metric")
class Kappa(Metric):
    """Cohen's kappa: how much better than chance predictions and labels agree."""

    # how the weight of a confusion grows with the distance of the two classes
    weights: str = choice("none", "none", "linear", "quadratic")
    # the classes from the first to the last, such as [none,mild,moderate,severe], for `weights`. []: the order of the
    # data set, which is the alphabet's for names of folders and tables
    order: list[str] = ruled([], TEXT)

    targets: ClassVar[tuple[str, ...]] = (CLASSES,)
    higher_is_better: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.order and self.weights == "none":
            raise InputError("metric.kappa.order has no effect without metric.kappa.weights=quadratic (or linear)")

    def notes(self, names: Sequence[str]) -> list[str]:
        """A sentence about an order that is not given. Raises InputError for one that does not name each class."""
        shown = ",".join(names[:MOST_NAMED]) + ",..." * (len(names) > MOST_NAMED)
        if self.order and sorted(self.order) != sorted(names):
            raise InputError(f"metric.kappa.order is [{','.join(self.order)}], expected each class once: [{shown}]")
        matters = self.weights != "none" and len(names) > 2 and not self.order and not all(map(str.isdigit, names))
        by = f"metric.kappa.weights={self.weights} counts the classes in this order: metric.kappa.order=[{shown}]"
        return [f"{by}; if theirs is another one, name it with this key"] * matters

    def build(self, classes: int) -> Score:
        return self.build_for(CLASSES, [*map(str, range(classes))])

    def build_for(self, targets: str, names: Sequence[str]) -> Score:
        from sklearn.metrics import cohen_kappa_score  # takes a second to import

        weights = None if self.weights == "none" else self.weights
        labels = [names.index(name) for name in self.order or names]
        return Collected(partial(cohen_kappa_score, labels=labels, weights=weights), predicted_classes)


@option("metric")
class Matthews(Metric):
    """The Matthews correlation coefficient of predictions and labels."""

    targets: ClassVar[tuple[str, ...]] = (CLASSES,)
    higher_is_better: ClassVar[bool] = True

    def build(self, classes: int) -> Score:
        from sklearn.metrics import matthews_corrcoef  # takes a second to import

        return Collected(matthews_corrcoef, predicted_classes)
