"""What an evaluation gives to its observers, and the scores of its metrics, exact on any number of ranks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.errors import InputError
from lockstep.core.model import is_broken, log_odds, probabilities
from lockstep.core.model_card import CLASSES, SOFTMAX
from lockstep.core.protocols import Metric, Score
from lockstep.core.world import World


class EvaluationBlock(NamedTuple):
    """A block of an evaluation on one rank. For broken images see `is_broken`.

    It has uint8 images (b, C, H, W), logits (b, classes), what the task has `predicted`, the labels of the split, the
    losses (b,), and the number of its first example in the split.
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

    def update(self, block: EvaluationBlock) -> None:
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
        targets: str = CLASSES,
    ) -> None:
        self.metrics, self.world, self.kind, self.targets = metrics, world, kind, targets
        self.class_names = class_names or [str(label) for label in range(classes)]
        self.scores: dict[str, Score] = {}
        for name, metric in metrics.items() if world.is_main else ():
            self.scores[name] = metric.build_for(targets, self.class_names)

    def update(self, block: EvaluationBlock) -> None:
        if self.metrics:
            valid = ~is_broken(block.labels)
            self._count(block.logits[valid].cpu(), block.labels[valid].cpu())

    def update_without(self) -> None:
        if self.metrics:
            none = torch.empty(0, len(self.class_names))
            self._count(none, none[:, 0].long() if self.targets == CLASSES else none)

    def _count(self, logits: Tensor, labels: Tensor) -> None:
        for outputs, targets in self.world.gather_to_main((logits, labels)):
            if len(targets):
                predictions = probabilities(outputs, self.kind), log_odds(outputs, self.kind)
                for score in self.scores.values():
                    score.update(predictions[getattr(score, "takes_log_odds", False)], targets)

    def compute(self) -> dict[str, float]:
        """The scores by name, `NAME` or `NAME/CLASS`, on main; then resets them."""
        figures: dict[str, float] = {}
        for name, score in self.scores.items():
            with without_other_ranks():
                value = self._as_numbers(name, score.compute())
            score.reset()
            if value.ndim == 0:
                figures[name] = value.item()
            else:
                pairs = zip(self.class_names, value.tolist(), strict=True)
                figures |= {f"{name}/{class_name}": figure for class_name, figure in pairs}
        return figures

    def _as_numbers(self, name: str, value: object) -> Tensor:
        try:
            numbers = torch.as_tensor(value, dtype=torch.float64)
        except (RuntimeError, TypeError, ValueError):
            shown = f"a {type(value).__name__}"
        else:
            if numbers.shape in ((), (len(self.class_names),)):
                return numbers
            shown = f"numbers of shape {tuple(numbers.shape)}"
        expected = f"one number, or one for each of the {len(self.class_names)} classes"
        raise InputError(f"metric={name} computes {shown}, expected {expected}")


@contextmanager
def without_other_ranks() -> Iterator[None]:
    """torchmetrics would wait for the other ranks, which have no metrics. A score may hold its metrics anywhere."""
    is_initialized = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        dist.is_initialized = is_initialized
