"""The strategies of one process, and the base class of those with several ranks."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config.options import is_ours, option
from lockstep.core.errors import InputError
from lockstep.core.model import UpdateScope, has_batchnorm
from lockstep.core.plan import Plan
from lockstep.core.protocols import NO_CONTEXT, Optimizer, Precision, Strategy
from lockstep.core.world import World

# What a rank steps under a strategy of this `widest` scope, the optimizers that look at no more, and at what.
STEPPED = {
    UpdateScope.element: ("a part of each parameter", "adamw, adam or sgd", "a number"),
    UpdateScope.parameter: ("some of the parameters", "adamw, adam, sgd or muon", "a parameter"),
}


@option("strategy")
class Single(Strategy):
    """One process on one device.

    The base class of the others, which override only what they change.
    """

    no_scaler: ClassVar[str] = ""
    """Why the strategy cannot work with a loss scaler; empty if it can."""

    def check(self, ranks: int, device: str) -> None:
        if ranks != 1:
            raise InputError(
                f"launcher.ranks is {ranks}, but this strategy has one rank; use strategy=ddp for several"
            )

    def check_parts(self, optimizer: Optimizer, precision: Precision, micro_batches: int | str) -> None:
        name, scope = type(self).__name__.lower(), optimizer.scope
        if scope > self.widest:
            seen = {UpdateScope.parameter: "whole parameters", UpdateScope.model: "all parameters together"}[scope]
            cut, others, needed = STEPPED[self.widest]
            own, declared = type(optimizer).__name__, ""
            if not is_ours(type(optimizer)):
                declared = (
                    f", or, if {own} updates {needed} by its own gradients alone, write scope = "
                    f"UpdateScope.{self.widest.name} in it (from lockstep.core.model)"
                )
            raise InputError(
                f"optimizer={own.lower()} looks at {seen}, but under strategy={name} a rank has {cut}; use "
                f"optimizer={others}, or strategy=ddp{declared}"
            )
        if precision.needs_loss_scaler and self.no_scaler:
            raise InputError(
                f"precision={type(precision).__name__.lower()} has a loss scaler, {self.no_scaler}; "
                "use precision=bf16, or strategy=ddp"
            )
        if micro_batches == "auto" and not self.whole_model:
            raise InputError(
                f"train.micro_batches=auto tries the whole model on each rank, and strategy={name} is for models "
                "that need not fit there; use a number, such as train.micro_batches=8"
            )

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        if plan.micro_batches > 1 and has_batchnorm(model):
            return [
                "batch norm counts per micro-batch: train.micro_batches changes the run of this model, and with "
                "several micro-batches so does the number of ranks"
            ]
        return []


class ThreadedReplica(nn.DataParallel[nn.Module]):
    """`torch.nn.DataParallel` whose threads use the caller's autocast dtype; torch's use float16 on CUDA."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(Autocasting(model))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        device = inputs[0].device.type
        assert isinstance(self.module, Autocasting)
        self.module.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return super().forward(*inputs, **named)


class Autocasting(nn.Module):
    """Runs a module under autocast to `dtype`, in any thread; without autocast if `dtype` is None."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.dtype: torch.dtype | None = None

    def forward(self, *inputs: Any) -> Any:
        if self.dtype is None:
            return self.module(*inputs)
        with torch.autocast(inputs[0].device.type, self.dtype):
            return self.module(*inputs)


@option("strategy", "dp")
class DataParallel(Single):
    """`torch.nn.DataParallel`: one process drives all GPUs. Slower than `ddp`."""

    recordable: ClassVar[bool] = False

    def devices(self, ranks: int, gpus: int) -> int:
        return gpus

    def check_compile(self, ranks: int, device: str) -> None:
        if device == "cuda" and (gpus := torch.cuda.device_count()) > 1:
            raise InputError(
                f"strategy=dp has a copy of the model on each of {gpus} GPUs, and all copies would call the code "
                "that is compiled for the first; use strategy=ddp or model.compile=false"
            )

    def wrap(self, model: nn.Module, world: World, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        return ThreadedReplica(model)

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        devices = torch.cuda.device_count()
        note = "strategy=dp has no second GPU to split a batch over, so it trains like strategy=single"
        if devices > 1:
            note = (
                f"strategy=dp splits each batch over {devices} GPUs from one process: the interpreter's lock, a copy "
                "of the weights at every step and batch norm per GPU hold it back; strategy=ddp has none of these"
            )
        return [note, *super().notes(model, world, plan)]


@dataclass(frozen=True, kw_only=True)
class Distributed(Single):
    """Several ranks, each with a process and a device. `sync_batchnorm`: batch norm counts over all ranks."""

    sync_batchnorm: bool = True  # batch norm over all ranks, so that the number of ranks does not change the run
    recordable: ClassVar[bool] = False

    def ranks(self, gpus: int) -> int:
        return gpus or 2

    def check(self, ranks: int, device: str) -> None:
        """Any number of ranks works, on any device."""

    def wrap(self, model: nn.Module, world: World, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        if not world.has_group:
            return model
        if self.sync_batchnorm and world.size > 1:
            from lockstep.strategy.sync_batchnorm import convert_sync_batchnorm  # one rank needs none

            model = convert_sync_batchnorm(model)
        share_weights(model)
        return self.replicate(model, plan, example)

    def replicate(self, model: nn.Module, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        return model

    def accumulate(self, replica: nn.Module, last: bool) -> AbstractContextManager[None]:
        return NO_CONTEXT if last or not isinstance(replica, DistributedDataParallel) else replica.no_sync()

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        notes = super().notes(model, world, plan)
        if world.size > 1 and not self.sync_batchnorm and has_batchnorm(model):
            notes.append(
                "batch norm counts per rank: this run differs from one on another number of ranks; "
                "strategy.sync_batchnorm=true makes them the same"
            )
        return notes


def flattened(tensors: list[Tensor]) -> Tensor:
    """Tensors of one dtype as one vector: one message costs less than many."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def copy_back(message: Tensor, tensors: list[Tensor]) -> None:
    """Copy the parts of a message that `flattened` has made back into its tensors."""
    parts = message.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)])


def share_weights(model: nn.Module) -> None:
    """Give every rank main's parameters and buffers."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, src=0)


def rehearse(replica: nn.Module, example: tuple[Any, ...], passes: int) -> None:
    """Run `passes` forward and backward passes on `example`; gradients are cleared and buffers restored."""
    buffers = [buffer.clone() for buffer in replica.buffers()]
    for _ in range(passes):
        replica(*example).sum().backward()
    replica.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in zip(replica.buffers(), buffers, strict=True):
            buffer.copy_(before)


@option("strategy")
class Auto(Distributed):
    """`single` on one device, `ddp` on several: replaced by one of them before a run starts."""

    adapts: ClassVar[bool] = True

    def ranks(self, gpus: int) -> int:
        return gpus or 1
