"""The losses (`loss=`) that training minimises.

A loss gives one number for each example. The step adds these numbers and divides by the number of examples in the
global batch, so the weight of an example never depends on its shard or its micro-batch. For the same reason class
weights multiply these numbers (see `ExampleLoss`), and nothing is divided by the sum of the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.options import option
from lockstep.core.errors import InputError
from lockstep.core.fields import ranged
from lockstep.core.model import is_broken
from lockstep.core.model_card import CLASSES, LABELS, SIGMOID, VALUES
from lockstep.core.protocols import Loss, Task

MOST_WEIGHT = 1e6


@dataclass(frozen=True, kw_only=True)
class _Loss(Loss):
    """The base class of losses without class weights."""

    def build(self, classes: int, labels: Tensor) -> nn.Module:
        return ExampleLoss(self.losses, self.weights(classes, labels))

    def weights(self, classes: int, labels: Tensor) -> Tensor | None:
        """The weight of each class, float32 (classes,); None if all weigh the same."""
        return None

    def losses(self, logits: Tensor, targets: Tensor, training: bool) -> Tensor:
        """The loss of each example, (b,), of logits (b, classes) and of labels or shares of the classes."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _Weighted(_Loss):
    """The base class of losses with class weights."""

    # a factor for the loss of each class's examples, by label: `loss.class_weights=[1,2,0.5]`
    class_weights: list[float] | None = ranged(None, least=0.0, most=MOST_WEIGHT)
    # weigh each class by N / (classes * n), for n of N training examples (King and Zeng 2001): all classes count
    # alike
    balanced: bool = False

    def weights(self, classes: int, labels: Tensor) -> Tensor | None:
        """See `_Loss`. Raises InputError: there is not one weight for each class, or both fields are set."""
        if self.balanced:
            if self.class_weights is not None:
                raise InputError(
                    "loss.balanced=true and loss.class_weights both weigh the classes; remove one of them"
                )
            counts = torch.bincount(labels[labels >= 0].cpu(), minlength=classes)
            return (counts.sum() / (counts.count_nonzero() * counts.clamp(min=1))).float()
        if self.class_weights is None:
            return None
        if len(self.class_weights) != classes:
            raise InputError(
                f"loss.class_weights has {len(self.class_weights)} numbers, expected {classes}, one for each class "
                "of the data set, or loss.balanced=true"
            )
        return torch.tensor(self.class_weights)


@option("loss")
class CrossEntropy(_Weighted):
    """The cross-entropy of the softmax. `loss/val` has no label smoothing and no class weights."""

    # share of each training target that is spread over all classes (Szegedy et al. 2016)
    label_smoothing: float = ranged(0.0, least=0, below=1)

    targets: ClassVar[tuple[str, ...]] = (CLASSES,)

    def losses(self, logits: Tensor, targets: Tensor, training: bool) -> Tensor:
        smoothing = self.label_smoothing if training else 0.0
        return F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)


@option("loss")
class BCE(_Loss):
    """The binary cross-entropy of each class on its own (Wightman et al. 2021)."""

    # share of each training target that is spread over all classes (Szegedy et al. 2016)
    label_smoothing: float = ranged(0.0, least=0, below=1)
    sum_classes: bool = False  # take the sum over the classes instead of their mean
    # make targets above it 1 and all others 0, after Mixup or CutMix, e.g. 0.2; null: off
    threshold: float | None = ranged(None, least=0.0, below=1)

    probabilities: ClassVar[str] = SIGMOID
    targets: ClassVar[tuple[str, ...]] = (CLASSES, LABELS)

    def losses(self, logits: Tensor, targets: Tensor, training: bool) -> Tensor:
        shares = class_shares(targets, logits)
        if training:
            shares = shares * (1 - self.label_smoothing) + self.label_smoothing / logits.shape[1]
        if self.threshold is not None:
            shares = (shares > self.threshold).to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, shares, reduction="none")
        return losses.sum(1) if self.sum_classes else losses.mean(1)


@option("loss")
class Focal(_Weighted):
    """The focal loss of the softmax (Lin et al. 2017): well-classified examples count less, by (1 - p) ** gamma."""

    # how much less well-classified examples count; 0 is the cross-entropy
    gamma: float = ranged(2.0, least=0, most=100)

    targets: ClassVar[tuple[str, ...]] = (CLASSES,)

    def losses(self, logits: Tensor, targets: Tensor, training: bool) -> Tensor:
        shares = class_shares(targets, logits)
        log_probs = F.log_softmax(logits, 1)
        error = (1 - log_probs.exp()).clamp(min=torch.finfo(logits.dtype).eps)  # a root has no derivative at 0
        return -(shares * error**self.gamma * log_probs).sum(1)


@option("loss")
class MSE(_Loss):
    """The squared error, as a mean over the values of an image."""

    targets: ClassVar[tuple[str, ...]] = (VALUES,)

    def losses(self, logits: Tensor, targets: Tensor, training: bool) -> Tensor:
        return F.mse_loss(logits, targets.to(logits.dtype), reduction="none").mean(1)


@option("loss")
class Huber(MSE):
    """The Huber loss: squared for small errors, linear for large ones. A mean over the values of an image.

    Half the squared error up to `delta`, and linear beyond it.
    """

    delta: float = ranged(1.0, above=0.0, most=1e12)  # the error from which it is linear

    def losses(self, logits: Tensor, targets: Tensor, training: bool) -> Tensor:
        return F.huber_loss(logits, targets.to(logits.dtype), reduction="none", delta=self.delta).mean(1)


def probabilities_of(task: Task, loss: Loss) -> str:
    """The function from outputs to probabilities: as the task says, else the loss."""
    return task.probabilities or loss.probabilities


class ExampleLoss(nn.Module):
    """The loss of each example: `losses` of an option, times the weight of its class; without weights in evaluation.

    A weight multiplies the whole loss of an example, also the part that label smoothing gives to the other classes.
    The loss of a mixed image is a sum over its classes: share times weight times the loss of that class. So balanced
    classes stay balanced under label smoothing, Mixup and CutMix.
    """

    weights: Tensor | None

    def __init__(self, losses: Callable[[Tensor, Tensor, bool], Tensor], weights: Tensor | None) -> None:
        super().__init__()
        self.losses = losses
        self.register_buffer("weights", weights)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.weights is None or not self.training:
            return self.losses(logits, targets, self.training)
        weighted = class_shares(targets, logits) * self.weights.to(logits.dtype)
        total = weighted.sum(1)
        # The losses are linear in the shares, so the weights may be applied to them and to their sum.
        shares = weighted / total.clamp(min=torch.finfo(logits.dtype).tiny)[:, None]
        return total * self.losses(logits, shares, self.training)


def class_shares(targets: Tensor, logits: Tensor) -> Tensor:
    """Targets as shares of the classes, like `logits` (b, classes). A label becomes one-hot, a negative one zeros."""
    labels = torch.arange(logits.shape[1], device=targets.device)
    return (targets[:, None] == labels if targets.ndim == 1 else targets).to(logits.dtype)


def check_losses(what: str, losses: Tensor, examples: int) -> None:
    """Raise InputError if there is not a loss for each of so many examples."""
    if losses.shape != (examples,):
        raise InputError(
            f"{what} gives a tensor of shape {(*losses.shape,)} for {examples} examples, expected ({examples},), a "
            'number for each; a loss of torch.nn does so with reduction="none"'
        )


@dataclass(frozen=True)
class MaskedLoss:
    """The loss of each example of a micro-batch, where broken images (see `is_broken`) do not count.

    `loss` takes logits (b, classes) and targets to losses (b,); `tolerates_broken` says whether there may be some.
    """

    loss: nn.Module
    tolerates_broken: bool

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The losses (b,) of logits (b, classes) and targets (n,) or (n, classes); also finite for broken images.

        There may be fewer logits: of a model that is cut into stages, only the last one has them.
        """
        if logits.shape[0] < targets.shape[0]:
            targets = targets[: logits.shape[0]]
        if self.tolerates_broken:
            # A loss of the user need not support negative labels, and no gradient may become NaN.
            targets = targets.clamp(min=0) if targets.ndim == 1 else targets.nan_to_num(0)
        return self.loss(logits, targets)

    def counted(self, losses: Tensor, labels: Tensor) -> Tensor:
        """The losses (b,), zero for the broken images among `labels` (n,) or (n, classes)."""
        return losses.masked_fill(is_broken(labels[: len(losses)]), 0)
