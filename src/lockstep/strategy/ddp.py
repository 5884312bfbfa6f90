"""Replicas with averaged gradients: by torch's DDP, also as Accelerate makes it, or by the tutorials' all-reduces."""

import inspect
import os
import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lockstep.config.options import option
from lockstep.core.errors import InputError, check_installed
from lockstep.core.fields import choice, ranged
from lockstep.core.plan import Plan
from lockstep.core.protocols import NO_CONTEXT, Optimizer
from lockstep.core.world import World
from lockstep.strategy.base import Distributed, copy_back, flattened, rehearse

LARGE_GRADIENT = 2**16  # a gradient with at least this many elements gets its own all-reduce
COMM_HOOKS = ("none", "fp16", "bf16")
# Do not synchronise buffers in forward (`Strategy.share_buffers` does it). torch 2.15 renamed the argument.
NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}

# What `accelerate launch` and its config file set, the values that change nothing, and our override.
LAUNCH_SETTINGS = {
    "ACCELERATE_MIXED_PRECISION": (("", "no"), "precision=bf16"),
    "ACCELERATE_DYNAMO_BACKEND": (("", "no"), "model.compile=true"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (("", "1"), "train.micro_batches=N"),
    "ACCELERATE_USE_FSDP": (("", "false"), "strategy=fsdp"),
    "ACCELERATE_USE_DEEPSPEED": (("", "false"), "strategy=zero"),
    "ACCELERATE_USE_MEGATRON_LM": (("", "false"), "strategy=fsdp"),
}


@option("strategy")
class DDP(Distributed):
    """`DistributedDataParallel`: gradients averaged in buckets while backward runs."""

    gradient_as_bucket_view: bool = True  # keep the gradients in the buckets, which saves one copy of them
    # tell DDP that the graph is the same at every step; null: true with one micro-batch and without
    # `train.freeze_until`
    static_graph: bool | None = None
    # for models in which some parameters get no gradient; costs a walk through the graph
    find_unused_parameters: bool = False
    # size of a bucket in MiB; null: torch's default
    bucket_mb: float | None = ranged(None, least=0.001, most=100_000)
    comm_hook: str = choice("none", *COMM_HOOKS)  # compress gradients on the wire; changes the numbers
    imports: ClassVar[tuple[str, ...]] = ("torch._dynamo",)
    joins_alone: ClassVar[bool] = True

    def with_changing_graph(self) -> Self:
        # Otherwise DDP waits for gradients that never come, or does not send those that come later.
        if self.static_graph:
            raise InputError(
                "strategy.static_graph is true, but train.freeze_until changes the graph; remove "
                "strategy.static_graph"
            )
        return replace(self, static_graph=False, find_unused_parameters=True)

    def replicate(self, model: nn.Module, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        legal = plan.micro_batches == 1
        if self.static_graph and not legal:
            raise InputError(
                f"strategy.static_graph is true with train.micro_batches={plan.micro_batches}, but accumulation "
                "changes the graph within a step; use strategy.static_graph=null"
            )
        # A convolution with one input channel has two equivalent strides, and DDP warns if the other one is used.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        replica = DistributedDataParallel(
            model,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=legal if self.static_graph is None else self.static_graph,
            find_unused_parameters=self.find_unused_parameters,
            bucket_cap_mb=self.bucket_mb,
            **NO_BUFFERS,
        )
        # DDP rebuilds its buckets in the order of the first backward. On three or more ranks the order of a sum
        # depends on the bucket, so without these passes the first step after a resume would differ in its bits.
        rehearse(replica, example, passes=2)
        if self.comm_hook != "none":
            replica.register_comm_hook(None, getattr(default_hooks, f"{self.comm_hook}_compress_hook"))
        return replica

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        notes = super().notes(model, world, plan)
        if self.comm_hook != "none" and world.has_group:
            notes.append(
                f"strategy.comm_hook={self.comm_hook} rounds the gradients on the wire: this run differs from "
                "one without it, and from one on another number of ranks"
            )
        return notes


@option("strategy")
class Accelerate(Distributed):
    """Hugging Face Accelerate prepares the model and the optimizer; the data and the loop are Lockstep's. Needs
    `lockstep[accelerate]`.

    A run is the same as with `ddp`, under any launcher, `accelerate launch` too: Accelerate does not cut a batch, pad
    a shard, or step a schedule.
    """

    # for models in which some parameters get no gradient; costs a walk through the graph
    find_unused_parameters: bool = False

    def check(self, ranks: int, device: str) -> None:
        check_installed("accelerate", "strategy=accelerate")
        for name, (neutral, override) in LAUNCH_SETTINGS.items():
            value = os.environ.get(name, "")
            if value.lower() not in neutral:
                raise InputError(
                    f"accelerate requests {name}={value}, but a run is what its config says; use {override}, and "
                    "remove it of `accelerate launch` and `accelerate config`"
                )

    def with_changing_graph(self) -> Self:
        return replace(self, find_unused_parameters=True)

    def replicate(self, model: nn.Module, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        replica: nn.Module = accelerator(
            example[0].device, find_unused_parameters=self.find_unused_parameters
        ).prepare_model(model, device_placement=False)
        rehearse(replica, example, passes=2)  # DDP rebuilds its buckets, see `DDP.replicate`
        return replica

    def build_optimizer(self, optimizer: Optimizer, model: nn.Module, world: World) -> torch.optim.Optimizer:
        built = optimizer.build(model)
        if world.size == 1:
            return built
        return accelerator(world.device).prepare_optimizer(built, device_placement=False)


def accelerator(device: torch.device, **ddp: bool) -> Any:
    """The Accelerator of this rank, with options of DDP. It changes neither the threads nor the precision."""
    import accelerate
    from accelerate.utils import DistributedDataParallelKwargs

    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "OMP_NUM_THREADS/MKL_NUM_THREADS unset")
        built = accelerate.Accelerator(
            cpu=device.type == "cpu",
            mixed_precision="no",
            device_placement=False,
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True, **ddp)],
        )
    torch.set_num_threads(threads)
    return built


@option("strategy", "allreduce")
class AllReduce(Distributed):
    """Blocking all-reduces after backward, as the tutorials do by hand: one for each large gradient, one for all the
    small ones, because a call costs as much as 100 kB.
    """

    def grad_divisor(self, world: World) -> int:
        return 1

    def reduce(self, replica: nn.Module) -> None:
        if not dist.is_initialized():
            return
        gradients = [parameter.grad for parameter in replica.parameters() if parameter.grad is not None]
        small = []
        for gradient in gradients:
            if gradient.numel() >= LARGE_GRADIENT and gradient.is_contiguous():
                dist.all_reduce(gradient)
            else:
                small.append(gradient)
        if small:
            total = flattened(small)
            dist.all_reduce(total)
            copy_back(total, small)


class HookedReplica(nn.Module):
    """A model that starts the all-reduce of each gradient as soon as backward has computed it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self.sync = True
        self.pending: list[tuple[Any, Tensor]] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._start)

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def _start(self, parameter: Tensor) -> None:
        if self.sync and parameter.grad is not None:
            self.pending.append((dist.all_reduce(parameter.grad, async_op=True), parameter.grad))

    def finish(self) -> None:
        """Wait for the sums, and divide them by the number of ranks."""
        size = dist.get_world_size()
        for work, gradient in self.pending:
            work.wait()
            gradient /= size
        self.pending.clear()


@option("strategy", "allreduce_hooks")
class AllReduceHooks(Distributed):
    """One all-reduce per gradient from hooks, while backward runs."""

    def replicate(self, model: nn.Module, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        return HookedReplica(model)

    def accumulate(self, replica: nn.Module, last: bool) -> AbstractContextManager[None]:
        if isinstance(replica, HookedReplica):  # of one rank it is the model
            replica.sync = last
        return NO_CONTEXT

    def reduce(self, replica: nn.Module) -> None:
        if isinstance(replica, HookedReplica):
            replica.finish()
