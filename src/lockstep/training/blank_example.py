"""Lets a network that takes no empty input have empty micro-batches, and refuses one that takes no single example.

The last global batch of an epoch may have fewer examples than all ranks have micro-batches. Many networks with
attention then ask torch for a size that it cannot infer from a tensor without elements.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.errors import InputError
from lockstep.core.model import BatchNorm
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.stochastic.convert import untouched
from lockstep.strategy.sync_batchnorm import SyncBatchNorm


class BlankExample(nn.Module):
    """Calls a network with an example of its own in place of none, and leaves out its logits.

    So all gradients are zero, as those of no example. No batch norm counts the example.
    """

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


def check_single_examples(network: nn.Module, inputs: tuple[Tensor, ...], plan: Plan) -> None:
    """Refuse, before the first step, a micro-batch of one example that the batch norm of one rank cannot take.

    Raises:
        InputError: a batch norm would have one value per channel in a step of the plan.
    """
    ends_epoch = plan.total_steps >= plan.steps_per_epoch

    def has_single(batch: int) -> bool:
        last = plan.examples % batch if ends_epoch else 0
        return any(0 < size < 2 * plan.micro_batches for size in (batch, last))

    if not has_single(plan.batch):
        return
    try:
        with torch.no_grad(), untouched(network, inputs[0].device):
            network(*(tensor[:1] for tensor in inputs))
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        better = next((size for size in range(plan.batch, 1, -1) if not has_single(size)), None)
        remedy = f"batch={better}" if better else "train.micro_batches=1"
        raise InputError(
            f"batch is {plan.batch}, which leaves a micro-batch of one of the {plan.examples} examples, too few for "
            f"the batch norm of this model; use {remedy}"
        ) from None
