"""A loss that takes longer on one rank."""

from __future__ import annotations

import os
import time

from torch import Tensor, nn

import lockstep


@lockstep.option("loss")
class Halting:
    """Cross entropy that takes longer on one rank, as if something else ran on its cores.

    Fields:
        seconds: by so much longer.
        rank: the slow rank.
    """

    seconds: float = 0.0
    rank: int = 1

    def build(self, classes: int, labels: Tensor) -> nn.Module:
        return HaltingLoss(self.seconds if os.environ.get("RANK") == str(self.rank) else 0.0)


class HaltingLoss(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.seconds)
        return nn.functional.cross_entropy(logits, targets, reduction="none")
