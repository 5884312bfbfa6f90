"""ZeRO (Rajbhandari et al. 2020), stage 1: replicas as in DDP, and the optimizer's state cut over the ranks.

torch's `ZeroRedundancyOptimizer` does the same, but needs parameters of one dtype, and when it is saved it sends its
whole state, pickled, to every rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.protocols import Optimizer
from lockstep.core.sharding import UpdateScope
from lockstep.core.world import World
from lockstep.strategy.base import by_dtype, copy_back, flattened
from lockstep.strategy.ddp import DDP
from lockstep.strategy.owned_optimizer import OwnedOptimizer


@dataclass(frozen=True, kw_only=True)
class ZeRO(DDP):
    """`ddp` with the optimizer's state divided over the ranks.

    The state of a parameter is on one rank, which steps the parameter and sends it to the others.
    """

    widest: ClassVar[UpdateScope] = UpdateScope.parameter

    def build_optimizer(self, optimizer: Optimizer, model: nn.Module, world: World) -> torch.optim.Optimizer:
        whole = optimizer.build(model)
        return whole if world.size == 1 else ZeROOptimizer(whole, world)


class ZeROOptimizer(OwnedOptimizer):
    """Steps this rank's parameters, and gives every rank all of them."""

    def __init__(self, whole: torch.optim.Optimizer, world: World) -> None:
        parameters = [parameter for group in whole.param_groups for parameter in group["params"]]
        super().__init__(whole, assign(parameters, world.size), world)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step this rank's parameters, and give every rank all of them. Collective."""
        super().step(closure)
        for rank in range(self.world.size):
            for tensors in by_dtype(parameter for parameter, owner in self.owners.items() if owner == rank):
                message = flattened(tensors)
                dist.broadcast(message, rank)
                if rank != self.world.rank:
                    copy_back(message, tensors)


def assign(parameters: list[Tensor], ranks: int) -> dict[Tensor, int]:
    """A rank for each parameter, in their order. The largest is assigned first, always to the rank with the least."""
    sizes = [0] * ranks
    owners: dict[Tensor, int] = dict.fromkeys(parameters, 0)
    for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
        owners[parameter] = sizes.index(min(sizes))
        sizes[owners[parameter]] += parameter.numel()
    return owners
