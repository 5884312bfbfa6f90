"""ZeRO (Rajbhandari et al. 2020), stage 1: replicas as in DDP, and the optimizer's state cut over the ranks.

torch's `ZeroRedundancyOptimizer` does the same, but needs parameters of one dtype, and when it is saved it sends its
whole state, pickled, to every rank.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.options import option
from lockstep.core.model import ShardedOptimizer, UpdateScope, wire
from lockstep.core.protocols import Optimizer
from lockstep.core.world import World
from lockstep.strategy.base import by_dtype, copy_back, flattened
from lockstep.strategy.ddp import DDP


@option("strategy", "zero")
class ZeRO(DDP):
    """`ddp` with the optimizer's state divided over the ranks.

    The state of a parameter is on one rank, which steps the parameter and sends it to the others.
    """

    widest: ClassVar[UpdateScope] = UpdateScope.parameter

    def build_optimizer(self, optimizer: Optimizer, model: nn.Module, world: World) -> torch.optim.Optimizer:
        whole = optimizer.build(model)
        return whole if world.size == 1 else ZeROOptimizer(whole, world)


class OwnedOptimizer(ShardedOptimizer):
    """An optimizer whose state is divided over the ranks: steps the parameters that this rank owns.

    Args:
        whole: the optimizer over all parameters, before its first step. It is reduced to this rank's parameters.
    """

    def __init__(self, whole: torch.optim.Optimizer, owners: Mapping[Tensor, int], world: World) -> None:
        # Do not call the base class: the groups have been checked, and the state is that of `own`.
        self.param_groups = [dict(group) for group in whole.param_groups]
        self.defaults = whole.defaults
        self.own = whole
        self.world = world
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.owners = {parameter: owners[parameter] for parameter in parameters}
        for group in whole.param_groups:
            group["params"] = [parameter for parameter in group["params"] if self.owners[parameter] == world.rank]
        for parameter in [parameter for parameter in whole.state if self.owners[parameter] != world.rank]:
            del whole.state[parameter]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.own.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for own_group, group in zip(self.own.param_groups, self.param_groups, strict=True):
            own_group |= {key: value for key, value in group.items() if key != "params"}
        self.own.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.owners:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """On main, the state of all parameters, in host memory; on others, that of their own. Collective."""
        numbers = {parameter: number for number, parameter in enumerate(self.owners)}
        own = {numbers[parameter]: dict(entries) for parameter, entries in self.own.state.items()}
        groups = [
            {**group, "params": [numbers[parameter] for parameter in group["params"]]} for group in self.param_groups
        ]
        return {"state": self._collected(own), "param_groups": groups}

    def _collected(self, own: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """The entries of all ranks on main. Tensors are sent one at a time; all other values are small."""
        outlines = self.world.gather_to_main({number: _outline(entries) for number, entries in own.items()})
        if not outlines:
            for entries in own.values():
                for value in entries.values():
                    if isinstance(value, Tensor):
                        dist.send(value.to(wire(self.world.device)).contiguous(), 0)
            return own
        for rank, outline in enumerate(outlines[1:], start=1):
            for number, entries in outline.items():
                own[number] = {key: self._received(value, rank) for key, value in entries.items()}
        return dict(sorted(own.items()))

    def _received(self, outline: Any, rank: int) -> Any:
        if not isinstance(outline, Tensor):
            return outline
        tensor = torch.empty(outline.shape, dtype=outline.dtype, device=wire(self.world.device))
        dist.recv(tensor, rank)
        return tensor.cpu()


def _outline(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries with the shape and dtype of each tensor only: on the meta device."""
    return {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in entries.items()}


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
