"""The strategies of one process, and what those of several ranks have in common."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.core.errors import InputError
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.strategy.sync_batchnorm import convert_sync_batchnorm, has_batchnorm


@dataclass(frozen=True, kw_only=True)
class Single:
    """One rank on one device. The base of the others: each shows only its difference."""

    def ranks(self, gpus: int) -> int:
        return 1

    def check(self, ranks: int, device: str) -> None:
        if ranks != 1:
            raise InputError(
                f"launcher.ranks is {ranks}, but this strategy has one rank; use strategy=ddp for several"
            )

    def wrap(self, model: nn.Module, world: World, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        return model

    def grad_divisor(self, world: World) -> int:
        return world.size

    def accumulate(self, replica: nn.Module, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce(self, replica: nn.Module) -> None:
        """One rank's gradient is the gradient."""

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        if plan.micro_batches > 1 and has_batchnorm(model):
            return ["batch norm counts per micro-batch: train.micro_batches changes the run of this model"]
        return []


class ThreadedReplica(nn.DataParallel[nn.Module]):
    """`torch.nn.DataParallel` whose threads compute in the number format of the thread that calls it.

    Autocast is a thread's own, and torch switches it on in the others without a format: in float16 on CUDA, whatever
    the caller has.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(Autocasting(model))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        device = inputs[0].device.type
        assert isinstance(self.module, Autocasting)
        self.module.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return super().forward(*inputs, **named)


class Autocasting(nn.Module):
    """A module that is run under autocast to `dtype`, if that is not None, in whatever thread."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.dtype: torch.dtype | None = None

    def forward(self, *inputs: Any) -> Any:
        if self.dtype is None:
            return self.module(*inputs)
        with torch.autocast(inputs[0].device.type, self.dtype):
            return self.module(*inputs)


@dataclass(frozen=True, kw_only=True)
class DataParallel(Single):
    """`torch.nn.DataParallel`: one process that drives all visible GPUs with threads."""

    def wrap(self, model: nn.Module, world: World, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        return ThreadedReplica(model)

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        devices = torch.cuda.device_count()
        return [
            f"strategy=dp splits each batch over {devices} GPU{'s' * (devices != 1)} from one process: the "
            "interpreter's lock, a copy of the weights at every step and batch norm per GPU hold it back; "
            "strategy=ddp has none of these",
            *super().notes(model, world, plan),
        ]


@dataclass(frozen=True, kw_only=True)
class Distributed(Single):
    """Several ranks, one process and one device each.

    `sync_batchnorm` makes batch norm count over the global micro-batch, which is what makes runs of
    different world sizes the same run for models that have it.
    """

    sync_batchnorm: bool = True

    def ranks(self, gpus: int) -> int:
        return gpus or 2

    def check(self, ranks: int, device: str) -> None:
        """Any number of ranks, on any device."""

    def wrap(self, model: nn.Module, world: World, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        if world.size == 1:
            return model
        if self.sync_batchnorm:
            model = convert_sync_batchnorm(model)
        share_weights(model)
        return self.replicate(model, plan, example)

    def replicate(self, model: nn.Module, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        """The replica of a job of several ranks."""
        return model

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        others = super().notes(model, world, plan)
        if world.size > 1 and not self.sync_batchnorm and has_batchnorm(model):
            others.append(
                "batch norm counts per rank: this run differs from one on another number of ranks; "
                "strategy.sync_batchnorm=true makes them the same"
            )
        return others


def share_weights(model: nn.Module) -> None:
    """Give every rank main's parameters and buffers."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor, src=0)


def rehearse(replica: nn.Module, example: tuple[Any, ...], passes: int) -> None:
    """Forward and backward on `example`, so many times, without a trace in gradients or buffers."""
    buffers = [buffer.clone() for buffer in replica.buffers()]
    for _ in range(passes):
        replica(*example).sum().backward()
    replica.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in zip(replica.buffers(), buffers, strict=True):
            buffer.copy_(before)


@dataclass(frozen=True, kw_only=True)
class Auto(Distributed):
    """`single` on one device, `ddp` on more. Resolved before a run starts; never used in one."""

    def ranks(self, gpus: int) -> int:
        return gpus or 1
