"""What a task sees of the examples of one forward pass."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """The b examples of a micro-batch in training, or of a block of an evaluation.

    Fields:
        images: (b, C, H, W), as the network takes them.
        targets: what the outputs are compared with: classes, int64 (b,), or floats (b, outputs); under Mixup and
            CutMix always floats.
        network: from images to outputs (b, outputs). In training it draws the random numbers of these examples.
        loss: the loss of the job, from outputs and targets to a number for each example, (b,).
        log: logs a figure of each example, (b,), under one of the task's `figures`; log points have its mean.
    """

    images: Tensor
    targets: Tensor
    network: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    log: Callable[[str, Tensor], None]
