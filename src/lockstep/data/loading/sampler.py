"""The order of the samples, and each rank's samples at each step: pure functions of seed, step and world size."""

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.core.plan import Plan, share
from lockstep.core.rng import BALANCED, ORDER, draw, key, permutation


@dataclass(frozen=True)
class ShardIndices:
    """One rank's shard of a global batch of `count` examples: int64 indices, and one of a mix partner."""

    step: int
    epoch: int
    indices: Tensor
    count: int


def shard_indices(
    plan: Plan,
    seed: int,
    *,
    rank: int,
    ranks: int,
    after: int,
    mix_partners: bool = False,
    device: torch.device | None = None,
    order_of: Callable[[int], Tensor] | None = None,
) -> Iterator[ShardIndices]:
    """The shards of one rank for every step after step `after`, to the end of the run; the indices are on `device`.

    `order_of` gives the order of an epoch, else it is a permutation. The mix partner of a sample is the next one of
    the global batch; the last sample's partner is the first.
    """
    per_epoch = plan.steps_per_epoch
    for epoch in range(plan.epoch(after + 1), plan.epoch(plan.total_steps) + 1):
        order = order_of(epoch).to(device) if order_of else permutation(seed, epoch, plan.examples, device)
        for step in range(max(after, epoch * per_epoch) + 1, min((epoch + 1) * per_epoch, plan.total_steps) + 1):
            start = (step - 1 - epoch * per_epoch) * plan.batch
            global_batch = order[start : start + plan.batch]
            count = global_batch.shape[0]
            own = share(count, ranks, rank)
            if mix_partners and own.start < own.stop:
                own, global_batch = slice(own.start, own.stop + 1), torch.cat([global_batch, global_batch[:1]])
            yield ShardIndices(step, epoch, global_batch[own], count)


def batch_groups(shards: Iterator[ShardIndices], steps: int) -> Iterator[list[ShardIndices]]:
    """Group shards of up to `steps` consecutive steps of one epoch; the first group has one shard."""
    size = 1
    for _, of_epoch in itertools.groupby(shards, key=operator.attrgetter("epoch")):
        while group := list(itertools.islice(of_epoch, size)):
            yield group
            size = steps


def eval_blocks(n: int, size: int, *, rank: int, ranks: int) -> list[range]:
    """The blocks of `size` or less of `n` examples that a rank evaluates; they do not depend on the ranks."""
    return [range(start, min(start + size, n)) for start in range(rank * size, n, ranks * size)]


def repeated_order(seed: int, epoch: int, plan: Plan, repeats: int) -> Tensor:
    """The order of an epoch with repeated augmentation (Hoffer et al. 2020), int64 (examples,), on the CPU.

    A global batch of B holds the next B / `repeats` examples of the permutation, one after another, then the same
    ones again, `repeats` times in all. A short one of r places holds r / `repeats`, rounded up, each as often as any
    other or once less. So an epoch shows a part of the examples. The numbers are as in `balanced_order`.
    """
    place = torch.arange(plan.examples)
    start = place // plan.batch * plan.batch
    different = -((start - plan.examples).clamp(min=-plan.batch) // repeats)  # examples of the global batch
    repetition, number = (place - start) // different, (place - start) % different
    return permutation(seed, epoch, plan.examples)[start // repeats + number] + repetition * plan.examples


def balanced_order(seed: int, epoch: int, labels: Tensor) -> Tensor:
    """The order of an epoch of as many examples as there are `labels`, int64 (n,): int64 (n,), on the CPU.

    Every class that has examples comes equally often; the counts differ by one at most. In a small class no example
    is repeated before all have come; of a large class each epoch has other examples.

    A number encodes an example and its repetition in the epoch, counted from 0: example + repetition * n. So each
    repetition is augmented in another way.
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
