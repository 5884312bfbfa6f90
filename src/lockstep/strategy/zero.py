"""ZeRO (Rajbhandari et al. 2020): the state of a run is cut over the ranks instead of copied to each.

Stage 1 (`ZeRO`) cuts the optimizer's state. torch's `ZeroRedundancyOptimizer` does the same, but needs parameters of
one dtype, and when it is saved it sends its whole state, pickled, to every rank. Stage 3 (`FSDP`) cuts parameters and
gradients too, by `torch.distributed.fsdp.fully_shard`.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.options import option
from lockstep.core.errors import InputError
from lockstep.core.fields import ranged
from lockstep.core.model import ShardedOptimizer, UpdateScope, blocks
from lockstep.core.plan import Plan
from lockstep.core.protocols import Optimizer, Precision
from lockstep.core.world import World
from lockstep.strategy.base import Distributed, copy_back, flattened
from lockstep.strategy.ddp import DDP

MOST_REPLICAS = 100_000


@option("strategy", "zero")
class ZeRO(DDP):
    """`ddp`, with the optimizer's state cut over the ranks (ZeRO, stage 1): a rank steps a parameter and sends it."""

    widest: ClassVar[UpdateScope] = UpdateScope.parameter

    def build_optimizer(self, optimizer: Optimizer, model: nn.Module, world: World) -> torch.optim.Optimizer:
        whole = optimizer.build(model)
        return whole if world.size == 1 else ZeROOptimizer(whole, world)


class OwnedOptimizer(ShardedOptimizer):
    """Steps the parameters that this rank owns: `whole` is the optimizer of all, before its first step."""

    def __init__(self, whole: torch.optim.Optimizer, owners: Mapping[Tensor, int], world: World) -> None:
        # Do not call the base class: the groups have been checked, and `own` has the state.
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
        """On main, all parameters' state, in host memory; on other ranks, their own parameters' state. Collective."""
        numbers = {parameter: number for number, parameter in enumerate(self.owners)}
        groups = [
            {**group, "params": [numbers[parameter] for parameter in group["params"]]} for group in self.param_groups
        ]
        state = {
            numbers[parameter]: {key: part.cpu() if isinstance(part, Tensor) else part for key, part in own.items()}
            for parameter, own in self.own.state.items()
        }
        for entries_of_rank in self.world.gather_to_main(state)[1:]:
            state |= entries_of_rank
        return {"state": dict(sorted(state.items())), "param_groups": groups}


class ZeROOptimizer(OwnedOptimizer):
    """Steps this rank's parameters, and gives every rank all of them."""

    def __init__(self, whole: torch.optim.Optimizer, world: World) -> None:
        parameters = [parameter for group in whole.param_groups for parameter in group["params"]]
        super().__init__(whole, assign(parameters, world.size), world)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for rank in range(self.world.size):
            by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
            for parameter in (parameter for parameter, owner in self.owners.items() if owner == rank):
                by_dtype[parameter.dtype].append(parameter)
            for tensors in by_dtype.values():
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


@option("strategy")
class FSDP(Distributed):
    """`fully_shard`: parameters, gradients and the optimizer's state are cut over the ranks, for models that fill a
    device.

    The parameters of a block are gathered for its forward and its backward pass, and freed again. Each backward pass,
    of every micro-batch, adds its gradients to the parts, so that no rank holds whole gradients for long.
    """

    # groups of ranks that have the whole state each (hybrid sharding), such as the number of machines: gathering
    # stays inside a group, and gradients are then added up between the groups
    replicas: int = ranged(1, least=1, most=MOST_REPLICAS)
    cpu_offload: bool = False  # keep parameters, gradients and the optimizer's state in host memory, and step there
    # gather parameters and compute in the 16-bit format of `precision`, norms and residuals too: half of the traffic;
    # changes the numbers
    low_precision: bool = False
    whole_model: ClassVar[bool] = False
    widest: ClassVar[UpdateScope] = UpdateScope.element
    no_scaler: ClassVar[str] = (
        "which looks for overflows in whole gradients, but strategy=fsdp cuts them over the ranks"
    )

    def check(self, ranks: int, device: str) -> None:
        super().check(ranks, device)
        if ranks > 1 and ranks % self.replicas:
            fitting = next(number for number in range(2, ranks + 1) if not ranks % number)
            raise InputError(
                f"strategy.replicas is {self.replicas}, which does not divide the {ranks} ranks into equal groups; "
                f"use strategy.replicas={fitting}, or another launcher.ranks"
            )

    def check_parts(self, optimizer: Optimizer, precision: Precision, micro_batches: int | str) -> None:
        super().check_parts(optimizer, precision, micro_batches)
        if self.low_precision and precision.dtype is precision.storage:
            raise InputError(
                f"strategy.low_precision is true, but precision computes in {str(precision.dtype)[6:]}, in which the "
                "parameters are stored; use precision=bf16, or remove strategy.low_precision"
            )

    def shard(self, model: nn.Module, world: World, precision: Precision, images: Tensor) -> None:
        if world.size > 1:
            self.cut(model, world, precision)

    def cut(self, model: nn.Module, world: World, precision: Precision) -> None:
        """Cut a model over the ranks of the process group, which may be one."""
        # Imported here, because it takes a second.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        dtypes = {parameter.dtype for parameter in model.parameters()}
        if len(dtypes) > 1:
            raise InputError(
                f"strategy=fsdp gathers the parameters of a block together, and this model has {len(dtypes)} formats "
                f"({', '.join(sorted(str(dtype)[6:] for dtype in dtypes))}); use precision=bf16 or precision=fp32"
            )
        model.to(memory_format=torch.contiguous_format)  # the only format that FSDP cuts; the images keep theirs
        offload = (
            CPUOffloadPolicy(pin_memory=True) if self.cpu_offload and world.device.type != "cpu" else OffloadPolicy()
        )
        policy = MixedPrecisionPolicy(
            param_dtype=precision.dtype if self.low_precision else None, reduce_dtype=precision.storage
        )
        # Ranks of one machine follow each other, so with a replica a machine the parameters are gathered inside it.
        groups = (self.replicas, world.size // self.replicas) if self.replicas > 1 else (world.size,)
        mesh = init_device_mesh(world.device.type, groups, mesh_dim_names=("replicate", "shard")[-len(groups) :])
        for block in [*blocks(model), model]:
            fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy, offload_policy=offload)

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        notes = super().notes(model, world, plan)
        if self.low_precision and world.size > 1:
            notes.append(
                "strategy.low_precision=true has norms and residuals in 16 bits too: this run differs from one of "
                "another strategy by more than summation order"
            )
        return notes
