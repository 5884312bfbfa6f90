"""Local SGD (Stich 2019): ranks train on their own for some steps, and then average their weights.

Weights and the optimizer's state are averaged together (Yu, Jin and Yang 2019), so that after each average all ranks
have the same state, and a checkpoint holds all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.errors import InputError
from lockstep.core.fields import duration, ranged
from lockstep.core.plan import Plan
from lockstep.core.protocols import Optimizer, Precision, Trained
from lockstep.core.world import World
from lockstep.strategy.base import Distributed, by_dtype, copy_back, flattened
from lockstep.strategy.sync_batchnorm import has_batchnorm


class LocalReplica(nn.Module):
    """A model whose gradients are averaged over the ranks up to step `synchronous_until` only."""

    def __init__(self, model: nn.Module, synchronous_until: float) -> None:
        super().__init__()
        self.module = model
        self.synchronous_until = synchronous_until

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Distributed):
    """Each rank steps on the gradient of its own shard, and every `local_steps` steps the ranks average.

    A rank's gradient is that of the loss summed over its shard, times the number of ranks, divided by the size of the
    global batch. If all shards are equal, it is the gradient of the shard's mean loss.

    Fields:
        local_steps: steps from one average to the next; with 1, gradients are averaged, as in `ddp`.
        local_from: the steps up to this one are those of `ddp` (post-local SGD, Lin et al. 2020).
    """

    local_steps: int = ranged(8, least=1, most=1_000_000)
    local_from: int | str = duration(0, zero=True)

    @property
    def sync_every(self) -> int:
        return self.local_steps

    def check_parts(self, optimizer: Optimizer, precision: Precision, micro_batches: int | str) -> None:
        if self.local_steps > 1 and precision.dtype is torch.float16:
            raise InputError(
                f"strategy.local_steps is {self.local_steps}, but precision=fp16 has a loss scaler, and each rank "
                "would skip other steps; use precision=bf16, or strategy=ddp"
            )

    def replicate(self, model: nn.Module, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        until = plan.in_steps("strategy.local_from", self.local_from)
        return LocalReplica(model, float("inf") if self.local_steps == 1 else until)

    def reduce(self, replica: nn.Module, step: int) -> None:
        if isinstance(replica, LocalReplica) and step <= replica.synchronous_until:
            trained = [parameter for parameter in replica.parameters() if parameter.requires_grad]
            for parameter in trained:
                if parameter.grad is None:  # another rank may have one
                    parameter.grad = torch.zeros_like(parameter)
            average([parameter.grad for parameter in trained if parameter.grad is not None])

    def end_step(self, trained: Trained, step: int, plan: Plan) -> None:
        replica = trained.replica
        if isinstance(replica, LocalReplica) and step > replica.synchronous_until and plan.in_sync(step):
            state = [tensor for entries in trained.optimizer.state.values() for tensor in entries.values()]
            averages = [] if trained.ema is None else [*trained.ema.module.parameters()]
            average(
                tensor.detach() for tensor in (*trained.model.parameters(), *state, *averages) if _is_float(tensor)
            )

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        notes = super().notes(model, world, plan)
        if self.local_steps > 1 and world.size > 1:
            notes.append(
                f"strategy.local_steps={self.local_steps}: ranks train on their own for so many steps, then they "
                "average; the run is not that of ddp, and differs on each number of ranks. Log points, evaluations, "
                f"checkpoints and stops wait for a step that is a multiple of {self.local_steps}"
            )
            if self.sync_batchnorm and has_batchnorm(model):
                notes.append(
                    "batch norm still counts over all ranks, so each step needs messages, which local steps should "
                    "save; strategy.sync_batchnorm=false makes it local"
                )
        return notes


def average(tensors: Iterable[Tensor]) -> None:
    """Replace tensors by their mean over the ranks, in place, with one message for each dtype. Collective."""
    for same in by_dtype(tensors):
        message = flattened(same)
        dist.all_reduce(message)
        message /= dist.get_world_size()
        copy_back(message, same)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
