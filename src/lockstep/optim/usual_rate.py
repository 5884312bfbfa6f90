"""The usual learning rate of an optimizer for a global batch: `optimizer.lr=auto`."""

from __future__ import annotations

from dataclasses import dataclass

# The factor of `optimizer.lr=auto` for a model that starts from trained weights (Kolesnikov et al. 2020, "Big
# Transfer": 0.03 to train, 0.003 to fine-tune).
FINE_TUNING = 0.1


@dataclass(frozen=True)
class UsualRate:
    """The usual learning rate of an optimizer: `lr` for a global batch of `batch` examples.

    `power` says how the rate grows with the batch: 1 is in proportion, 0.5 with its square root.
    """

    lr: float
    batch: int
    power: float

    def at(self, batch: int) -> float:
        return self.lr * (batch / self.batch) ** self.power


# In proportion to the batch: Goyal et al. 2017, "Accurate, Large Minibatch SGD". With its square root: Malladi et al.
# 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"; 0.001 is the rate of Adam's authors.
OF_SGD, OF_ADAM = UsualRate(0.1, 256, 1), UsualRate(1e-3, 64, 0.5)
