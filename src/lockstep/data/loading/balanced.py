"""An order in which every class comes equally often: a pure function of the seed, the epoch and the labels."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.core.rng import BALANCED, ORDER, draw, key


def balanced_order(seed: int, epoch: int, labels: Tensor) -> Tensor:
    """The order of an epoch of as many examples as there are labels, int64 (n,), on the CPU.

    Every class that has examples comes equally often; the counts differ by one at most. In a small class no example
    is repeated before all have come; of a large class each epoch has other examples.

    A number encodes an example and its repetition in the epoch, counted from 0: example + repetition * n. So each
    repetition is augmented in another way.

    Args:
        labels: int64 (n,), on the CPU.
    """
    n = len(labels)
    keyed = key(seed, BALANCED, epoch)
    counts = torch.bincount(labels)
    classes = counts.nonzero().flatten()
    quotas = torch.zeros_like(counts)
    quotas[classes] = n // len(classes)
    quotas[classes[torch.argsort(draw(keyed, -1 - classes))[: n % len(classes)]]] += 1
    repetitions = torch.ceil(quotas / counts.clamp(min=1)).long()[labels]  # the most repetitions of each example
    examples = torch.repeat_interleave(repetitions)
    repetition = torch.arange(len(examples)) - (repetitions.cumsum(0) - repetitions)[examples]
    numbers = examples + repetition * n
    # Sort by class, then by repetition, then at random. The first numbers of each class are taken.
    order = torch.argsort(draw(keyed, numbers), stable=True)
    order = order[torch.argsort(repetition[order], stable=True)]
    order = order[torch.argsort(labels[examples[order]], stable=True)]
    ordered = labels[examples[order]]
    sizes = torch.bincount(ordered, minlength=len(counts))
    place_in_class = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[ordered]
    chosen = numbers[order[place_in_class < quotas[ordered]]]
    return chosen[torch.argsort(draw(key(seed, ORDER, epoch), chosen), stable=True)]
