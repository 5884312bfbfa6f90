"""ZeRO (Rajbhandari et al. 2020), stage 1: replicas as in DDP, and the optimizer's state cut over the ranks.

torch's `ZeroRedundancyOptimizer` does the same, but wants parameters of one dtype and sends its whole state, pickled,
to every rank when it is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.protocols import Optimizer, Precision
from lockstep.core.sharding import ShardedOptimizer
from lockstep.core.update_scope import UpdateScope, refuse_wider
from lockstep.core.world import World
from lockstep.strategy.base import by_dtype, copy_back, flattened
from lockstep.strategy.ddp import DDP


@dataclass(frozen=True, kw_only=True)
class ZeRO(DDP):
    """`ddp`, whose optimizer keeps its state for each parameter on one rank: a rank has its share of it.

    That rank steps the parameter and sends it to the others.
    """

    def check_parts(self, optimizer: Optimizer, precision: Precision, micro_batches: int | str) -> None:
        remedy = "use optimizer=adamw, adam, sgd or muon, or strategy=ddp"
        refuse_wider(optimizer, UpdateScope.parameter, "zero", remedy=remedy)

    def build_optimizer(self, optimizer: Optimizer, model: nn.Module, world: World) -> torch.optim.Optimizer:
        whole = optimizer.build(model)
        return whole if world.size == 1 else ZeROOptimizer(whole, world)


class ZeROOptimizer(ShardedOptimizer):
    """Steps this rank's parameters, and gives every rank all of them."""

    def __init__(self, whole: torch.optim.Optimizer, world: World) -> None:
        # Not the base class's: the groups are checked already, and the state is that of `own`.
        self.param_groups = [dict(group) for group in whole.param_groups]
        self.defaults = whole.defaults
        self.own = whole
        self.world = world
        self.owners = assign([parameter for group in self.param_groups for parameter in group["params"]], world.size)
        for group in whole.param_groups:
            group["params"] = [own for own in group["params"] if self.owners[own] == world.rank]
        for parameter in [other for other in whole.state if self.owners[other] != world.rank]:
            del whole.state[parameter]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of this rank's parameters."""
        return self.own.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step this rank's parameters, and give every rank all of them. Collective."""
        assert closure is None
        for own, group in zip(self.own.param_groups, self.param_groups, strict=True):
            own |= {key: value for key, value in group.items() if key != "params"}
        self.own.step()
        for rank in range(self.world.size):
            for tensors in by_dtype(parameter for parameter, owner in self.owners.items() if owner == rank):
                _broadcast(tensors, rank, self.world.rank)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.owners:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters on main, in host memory, and that of this rank's on the others. Collective."""
        numbers = {parameter: number for number, parameter in enumerate(self.owners)}
        own = {numbers[parameter]: dict(entries) for parameter, entries in self.own.state.items()}
        groups = [
            {**group, "params": [numbers[parameter] for parameter in group["params"]]} for group in self.param_groups
        ]
        return {"state": self._collected(own), "param_groups": groups}

    def _collected(self, own: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """The entries of all ranks on main. Tensors are sent one at a time; all else is small."""
        outlines = self.world.gather_to_main({number: _outline(entries) for number, entries in own.items()})
        if not outlines:
            for entries in own.values():
                for value in entries.values():
                    if isinstance(value, Tensor):
                        dist.send(value.to(self.world.device).contiguous(), 0)
            return own
        for rank, outline in enumerate(outlines[1:], start=1):
            own |= {number: self._received(entries, rank) for number, entries in outline.items()}
        return dict(sorted(own.items()))

    def _received(self, outline: dict[str, Any], rank: int) -> dict[str, Any]:
        entries = {}
        for key, value in outline.items():
            if isinstance(value, _Shape):
                tensor = torch.empty(value.size, dtype=value.dtype, device=self.world.device)
                dist.recv(tensor, rank)
                value = tensor.cpu()
            entries[key] = value
        return entries


@dataclass(frozen=True)
class _Shape:
    """What is known of a tensor before it comes."""

    size: tuple[int, ...]
    dtype: torch.dtype


def _outline(entries: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _Shape(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        for key, value in entries.items()
    }


def assign(parameters: list[Tensor], ranks: int) -> dict[Tensor, int]:
    """A rank for each parameter: the largest first, always to the rank that has least. In the order given."""
    sizes = [0] * ranks
    owners: dict[Tensor, int] = dict.fromkeys(parameters, 0)
    for parameter in sorted(parameters, key=lambda each: -each.numel()):
        owners[parameter] = sizes.index(min(sizes))
        sizes[owners[parameter]] += parameter.numel()
    return owners


def _broadcast(tensors: list[Tensor], source: int, rank: int) -> None:
    """Give every rank the tensors of rank `source`, in one message."""
    message = flattened(tensors)
    dist.broadcast(message, source)
    if rank != source:
        copy_back(message, tensors)
