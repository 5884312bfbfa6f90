"""The tasks (`task=`): what a target, a prediction and a score are. The loop and the step do not know which it is.

A task sees the network, the images and the targets of a micro-batch, and gives one loss for each example. What mixes
examples (a contrastive loss) is not a task: the loss of an example would depend on its micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.checkpoint.files import sha256
from lockstep.config.options import option
from lockstep.core.batch import Batch
from lockstep.core.errors import InputError
from lockstep.core.fields import pathname, ranged
from lockstep.core.model import best_classes
from lockstep.core.model_card import LABELS, SIGMOID, VALUES, ModelCard
from lockstep.core.protocols import Task

if TYPE_CHECKING:
    from lockstep.training.trained import Trained


@option("task")
class Multiclass(Task):
    """Each image is of one class. With fewer than five classes, `top5` counts all of them."""

    counted: ClassVar[tuple[str, ...]] = ("top1", "top5")
    monitor: ClassVar[str] = "top1"

    def predict(self, outputs: Tensor) -> Tensor:
        return best_classes(outputs)

    def counts(self, predicted: Tensor, labels: Tensor) -> Tensor:
        right = predicted == labels[:, None]
        return torch.stack([right[:, 0].sum(), right.sum()])


@option("task")
class Multilabel(Task):
    """Each image has any number of labels, and the network judges each by itself. The usual loss is `loss=bce`; the
    scores are `map`, `f1` and `subset_accuracy`.
    """

    targets: ClassVar[str] = LABELS
    probabilities: ClassVar[str | None] = SIGMOID
    metrics: ClassVar[tuple[str, ...]] = ("map", "f1", "subset_accuracy")
    usual_loss: ClassVar[str | None] = "bce"
    monitor: ClassVar[str] = "map"

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs > 0  # as the metrics decide: a probability above a half


@option("task")
class Regression(Task):
    """Each image has one or several numbers. The usual loss is `loss=mse`; the scores are `mae`, `rmse` and `r2`."""

    targets: ClassVar[str] = VALUES
    probabilities: ClassVar[str | None] = VALUES
    metrics: ClassVar[tuple[str, ...]] = ("mae", "rmse", "r2")
    usual_loss: ClassVar[str | None] = "mse"
    monitor: ClassVar[str] = "mae"

    def predict(self, outputs: Tensor) -> Tensor:
        return outputs


@option("task")
class Distill(Multiclass):
    """The classes, learnt from the targets and from the probabilities of a trained network (Hinton et al. 2015).

    The loss of an example is (1 - share) * loss + share * T^2 * KL(teacher || student), with the outputs of both
    divided by the temperature T. The teacher sees the pixels of the student, also when they are augmented and mixed.
    """

    teacher: str = pathname("???")  # a run folder (its best weights), `latest`, a checkpoint, or a weights file
    # what the outputs of both networks are divided by, before their probabilities are compared
    temperature: float = ranged(4.0, above=0.0, most=1000)
    # the part of the teacher in the loss; the rest is the loss of the targets
    share: float = ranged(0.9, least=0, most=1)

    figures: ClassVar[tuple[str, ...]] = ("-distill/kl",)

    def absolute(self) -> Self:
        from lockstep.training.trained import find_weights  # the other tasks need no teacher

        return replace(self, teacher=str(find_weights(self.teacher, "task.teacher").absolute()))

    def identity(self) -> Mapping[str, str]:
        return {"teacher": sha256(Path(self.teacher))[:16]}

    def ready(self, card: ModelCard, device: torch.device) -> Self:
        from lockstep.training.trained import load_trained

        network = load_trained(self.teacher, device=str(device))
        for key in ("classes", "class_names", "input_shape"):
            own, other = getattr(card, key), getattr(network.card, key)
            if own != other:
                raise InputError(
                    f"task.teacher: the {key} of {self.teacher} are {other}, but this job has {own}; "
                    "train the teacher on the same data set, or name another one with task.teacher=RUN"
                )
        trained, sums = network.card, network.precision.sums
        mean, std, own_mean, own_std = (
            torch.tensor(values, device=network.device, dtype=sums).view(1, -1, 1, 1)
            for values in (card.mean, card.std, trained.mean, trained.std)
        )
        scale, shift = std / own_std, (mean - own_mean) / own_std
        return _Distilling(**vars(self), trained=network, scale=scale, shift=shift)  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class _Distilling(Distill):
    """A distillation with its teacher in memory. `scale` and `shift` turn the student's pixels into the teacher's."""

    trained: Trained
    scale: Tensor
    shift: Tensor

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = batch.network(batch.images)
        with torch.no_grad(), self.trained.precision.autocast(self.trained.device):
            pixels = batch.images.to(self.scale.dtype) * self.scale + self.shift
            taught = self.trained.model(pixels.to(self.trained.precision.dtype))
            taught = taught.to(outputs.dtype)[: len(outputs)]
        own, soft = (F.log_softmax(logits / self.temperature, 1) for logits in (outputs, taught))
        distance = F.kl_div(own, soft, reduction="none", log_target=True).sum(1)
        batch.log("distill/kl", distance)
        hard = batch.loss(outputs, batch.targets)
        return (1 - self.share) * hard + self.share * self.temperature**2 * distance, outputs
