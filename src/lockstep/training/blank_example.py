"""Lets a network that takes no empty input have empty micro-batches, and refuses one that takes no single example.

The last global batch of an epoch may have fewer examples than all ranks have micro-batches. Many networks with
attention then ask torch for a size that it cannot infer from a tensor without elements.
"""

import math
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.errors import InputError
from lockstep.core.model import BatchNorm
from lockstep.core.plan import Plan
from lockstep.core.protocols import Strategy
from lockstep.core.world import World
from lockstep.stochastic.convert import untouched
from lockstep.strategy import DataParallel
from lockstep.strategy.sync_batchnorm import SyncBatchNorm
from lockstep.training.freezing import Freezing


class BlankExample(nn.Module):
    """Calls a network with a blank example, which no batch norm counts, if there is none, and drops its logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Any:
        images, *keys = inputs
        if len(images):
            return self.network(*inputs)
        norms = [module for module in self.modules() if isinstance(module, BatchNorm) and module.training]
        for norm in norms:
            norm.training, norm.blank = isinstance(norm, SyncBatchNorm), True  # type: ignore[assignment]
        # Not of one colour: a network may divide by the deviation of its pixels.
        ramp = torch.linspace(-1, 1, math.prod(images.shape[1:]), dtype=images.dtype, device=images.device)
        logits = self.network(ramp.view(1, *images.shape[1:]), *(key.new_zeros((1, *key.shape[1:])) for key in keys))
        for norm in norms:
            norm.training, norm.blank = True, False  # type: ignore[assignment]
        return logits[:0]


def for_empty_micro_batches(network: nn.Module, inputs: tuple[Tensor, ...], plan: Plan, world: World) -> nn.Module:
    """The network, or a `BlankExample` for it where it needs one: it is tried on none of `inputs`."""
    if (plan.examples % plan.batch or plan.batch) >= world.size * plan.micro_batches:
        return network
    with torch.no_grad(), untouched(network, inputs[0].device):
        try:
            network(*(tensor[:0] for tensor in inputs))
        except Exception:  # any error of any network; a full batch shows the user whether it works at all
            return BlankExample(network)
    return network


def batch_norm_counts(strategy: Strategy, count: int, ranks: int, micro_batches: int) -> set[int]:
    """The numbers of examples over which a batch norm counts in a step on a global batch of `count` examples."""
    ends = [piece * count // (ranks * micro_batches) for piece in range(ranks * micro_batches + 1)]
    sizes = [end - start for start, end in pairwise(ends)]
    if getattr(strategy, "sync_batchnorm", False):
        return {sum(sizes[part::micro_batches]) for part in range(micro_batches)}
    gpus = max(1, torch.cuda.device_count()) if isinstance(strategy, DataParallel) else 1
    return {len(chunk) for size in {*sizes} for chunk in torch.empty(size, device="meta").chunk(gpus)}


def batches_without_single(plan: Plan, strategy: Strategy, ranks: int) -> Iterator[int]:
    """The global batches of which no batch norm counts over one example: the plan's own, smaller and larger ones."""
    ends_epoch = plan.total_steps >= plan.steps_per_epoch
    for batch in chain(range(plan.batch, 0, -1), range(plan.batch + 1, plan.examples + 1)):
        counts = (batch, plan.examples % batch if ends_epoch else 0)
        if not any(1 in batch_norm_counts(strategy, count, ranks, plan.micro_batches) for count in counts):
            yield batch


def check_single_examples(
    network: nn.Module,
    inputs: tuple[Tensor, ...],
    plan: Plan,
    strategy: Strategy,
    ranks: int,
    freezing: Freezing,
) -> None:
    """Refuse, before the first step, a plan in which a batch norm counts over one example, and that is too few.

    It is too few for a layer that has one value per channel of an example. Frozen batch norms count nothing. Raises
    InputError: a batch norm would have one value per channel in a step of the plan.
    """
    better = next(batches_without_single(plan, strategy, ranks), None)
    if better == plan.batch:
        return
    try:
        with torch.no_grad(), untouched(network, inputs[0].device):
            for norm in freezing.norms:
                norm.train(not freezing.frozen(plan.total_steps))
            network(*(tensor[:1] for tensor in inputs))
    except Exception as error:  # any error of any network; a full batch shows the user whether it works at all
        if "more than 1 value per channel" not in str(error):
            return
        remedy = f"batch={better}" if better else "fewer ranks or micro-batches, or a model without batch norm"
        raise InputError(
            f"batch is {plan.batch}, which leaves a micro-batch of one of the {plan.examples} examples, too few for "
            f"the batch norm of this model; use {remedy}"
        ) from None
