"""Hugging Face Accelerate prepares the model and the optimizer; the data and the loop are Lockstep's.

So a run is the same as with `ddp`: Accelerate does not cut a batch, pad a shard, or step a schedule.
"""

import os
import warnings
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from lockstep.config.options import option
from lockstep.core.errors import InputError, check_installed
from lockstep.core.plan import Plan
from lockstep.core.protocols import Optimizer
from lockstep.core.world import World
from lockstep.strategy.base import Distributed, rehearse

# Environment variables that `accelerate launch` and its config file set, their values that change nothing, and the
# override that has the same effect here.
LAUNCH_SETTINGS = {
    "ACCELERATE_MIXED_PRECISION": (("", "no"), "precision=bf16"),
    "ACCELERATE_DYNAMO_BACKEND": (("", "no"), "model.compile=true"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (("", "1"), "train.micro_batches=N"),
    "ACCELERATE_USE_FSDP": (("", "false"), "strategy=fsdp"),
    "ACCELERATE_USE_DEEPSPEED": (("", "false"), "strategy=zero"),
    "ACCELERATE_USE_MEGATRON_LM": (("", "false"), "strategy=fsdp"),
}


@option("strategy")
class Accelerate(Distributed):
    """`accelerate.Accelerator` wraps the model and the optimizer, under any launcher, `accelerate launch` too."""

    find_unused_parameters: bool = False

    def check(self, ranks: int, device: str) -> None:
        check_installed("accelerate", "strategy=accelerate")
        for name, (neutral, override) in LAUNCH_SETTINGS.items():
            value = os.environ.get(name, "")
            if value.lower() not in neutral:
                raise InputError(
                    f"accelerate asks for {name}={value}, but a run is what its config says; use {override}, and "
                    "leave it out of `accelerate launch` and `accelerate config`"
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
    """The Accelerator of this rank, with options of DDP. It changes neither the threads nor the number format."""
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
