"""Which samples each rank sees, and when: pure functions of the seed, the step and the world size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.core.plan import Plan
from lockstep.core.rng import permutation


def share(n: int, parts: int, part: int) -> slice:
    """The contiguous share of `part` among `parts` of `n` things; shares differ by one at most."""
    return slice(part * n // parts, (part + 1) * n // parts)


@dataclass(frozen=True)
class Batch:
    """One rank's shard of the global batch of `step`: sample indices (int64), and the global count.

    With partners a shard that is not empty carries one index more, of the sample behind its last one.
    """

    step: int
    epoch: int
    indices: Tensor
    count: int


def batches(
    plan: Plan,
    seed: int,
    *,
    rank: int,
    ranks: int,
    after: int,
    partners: bool = False,
    device: torch.device | None = None,
) -> Iterator[Batch]:
    """The shards of one rank for every step behind `after`, to the end of the run; their indices are on `device`.

    The partner of a sample, where it is mixed with one, is the next sample of the global batch; the last one's
    is the first.
    """
    order, ordered = None, -1
    for step in range(after + 1, plan.total_steps + 1):
        epoch = plan.epoch(step)
        if order is None or epoch != ordered:
            order, ordered = permutation(seed, epoch, plan.examples, device), epoch
        start = plan.position(step) * plan.batch
        together = order[start : start + plan.batch]
        cut, count = share(len(together), ranks, rank), len(together)
        if partners and cut.start < cut.stop:
            cut, together = slice(cut.start, cut.stop + 1), torch.cat([together, together[:1]])
        yield Batch(step, epoch, together[cut], count)


def strides(one_by_one: Iterator[Batch], steps: int) -> Iterator[list[Batch]]:
    """The same batches in groups of up to `steps` of one epoch.

    The first group has one, so that a run does not wait for many before its first step.
    """
    together: list[Batch] = []
    size = 1
    for batch in one_by_one:
        if together and (len(together) == size or together[0].epoch != batch.epoch):
            yield together
            together, size = [], steps
        together.append(batch)
    if together:
        yield together


def blocks(n: int, size: int, *, rank: int, ranks: int) -> list[range]:
    """The blocks of `size` of `n` examples that a rank evaluates.

    The blocks do not depend on the number of ranks, so neither does a single logit.
    """
    return [range(start, min(start + size, n)) for start in range(rank * size, n, ranks * size)]
