"""R-Drop (Liang et al. 2021, arXiv 2106.14448): two dropout masks of an image have to give the same classes."""

from typing import ClassVar

from torch import Tensor
from torch.nn import functional as F

import lockstep
from lockstep.core.batch import Batch
from lockstep.core.fields import ranged
from lockstep.tasks import Multiclass


@lockstep.option("task", "r_drop")
class RDrop(Multiclass):
    """The class, and the symmetric KL divergence between two forward passes with dropout."""

    weight: float = ranged(1.0, least=0, most=100)  # of the divergence, alpha in the paper

    figures: ClassVar[tuple[str, ...]] = ("-r_drop/kl",)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        # Two rows of an image in one batch draw different masks; two calls of the network draw the same one.
        outputs = batch.network(batch.images.repeat_interleave(2, dim=0))
        first, second = outputs[0::2], outputs[1::2]
        log_p, log_q = first.log_softmax(1), second.log_softmax(1)
        forward = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1)
        backward = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(1)
        divergence = (forward + backward) / 2
        batch.log("r_drop/kl", divergence)
        errors = batch.loss(first, batch.targets) + batch.loss(second, batch.targets)
        return errors + self.weight * divergence, first
