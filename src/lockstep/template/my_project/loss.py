"""A loss: `loss=poly loss.epsilon=2`."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep.core.fields import ranged


@lockstep.option("loss")
class Poly:
    """The cross-entropy plus `epsilon` times 1 minus the probability of the label (Leng et al. 2022).

    Fields:
        epsilon: weight of the second term.
    """

    epsilon: float = ranged(1.0, least=-1, most=100)

    def build(self, classes: int, labels: Tensor) -> nn.Module:
        return PolyLoss(self.epsilon)


class PolyLoss(nn.Module):
    """Takes logits (b, classes) and labels (b,), and returns the loss of each example (b,)."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(logits, targets, reduction="none")
        return losses + self.epsilon * (1 - torch.exp(-losses))
