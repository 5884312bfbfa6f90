"""A pipeline: the layers of a model are divided over the ranks, and micro-batches pass from rank to rank.

`torch.distributed.pipelining` needs a model that it can trace or that is cut by hand, and micro-batches of one size.
Here a model is run unchanged, and the last batch of an epoch may be short.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lockstep.config.options import option
from lockstep.core.errors import InputError
from lockstep.core.fields import TEXT, choice, ranged, ruled
from lockstep.core.model import UpdateScope
from lockstep.core.plan import Plan
from lockstep.core.protocols import M, Optimizer, Precision
from lockstep.core.world import World
from lockstep.strategy.base import Single, share_weights
from lockstep.strategy.cutting import cut
from lockstep.strategy.stage import become_stage, stage_of
from lockstep.strategy.zero import OwnedOptimizer

MOST_STAGES = 1000


@option("strategy")
class Pipeline(Single):
    """Each rank has one stage: some consecutive layers, with their gradients and their optimizer state.

    Every rank reads the whole global batch. The first stage uses its images, the last stage its labels.
    """

    stages: int | None = ranged(None, least=1, most=MOST_STAGES)
    cuts: list[str] | None = ruled(None, TEXT)
    schedule: str = choice("1f1b", "1f1b", "gpipe")
    recordable: ClassVar[bool] = False
    whole_model: ClassVar[bool] = False
    widest: ClassVar[UpdateScope] = UpdateScope.parameter
    no_scaler: ClassVar[str] = "and under strategy=pipeline each stage would skip other steps"

    def ranks(self, gpus: int) -> int:
        return self.stages or gpus or 2

    def check(self, ranks: int, device: str) -> None:
        if self.stages not in (None, ranks):
            raise InputError(
                f"strategy.stages is {self.stages}, but launcher.ranks makes {ranks} ranks, and each rank has one "
                "stage: a pipeline is not data parallel as well; leave out strategy.stages or launcher.ranks"
            )
        if self.cuts is not None and len(self.cuts) != ranks - 1:
            raise InputError(
                f"strategy.cuts is [{','.join(self.cuts)}], which makes {len(self.cuts) + 1} stages, but there are "
                f"{ranks} ranks with one each; use launcher.ranks={len(self.cuts) + 1}, or leave out strategy.cuts"
            )

    def check_compile(self, ranks: int, device: str) -> None:
        if ranks > 1:
            raise InputError(
                "model.compile is true, but under strategy=pipeline a rank runs a part of the model that ends in its "
                "middle; use model.compile=false, or strategy=fsdp"
            )

    def data_world(self, world: World) -> World:
        return replace(world, rank=0, size=1)

    def wrap(self, model: nn.Module, world: World, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        if world.size > 1:
            share_weights(model)
        return model

    def shard(self, model: nn.Module, world: World, precision: Precision, images: Tensor) -> None:
        if world.size == 1:
            return
        images = images.to(precision.dtype)
        with precision.autocast(world.device):
            become_stage(model, cut(model, images, world.size, self.cuts), images, world)

    def build_optimizer(self, optimizer: Optimizer, model: nn.Module, world: World) -> torch.optim.Optimizer:
        whole = optimizer.build(model)
        if world.size == 1:
            return whole
        homes = stage_of(model).stages.homes
        return OwnedOptimizer(whole, {tensor: homes[name] for name, tensor in model.named_parameters()}, world)

    def grad_divisor(self, world: World) -> int:
        return 1  # every rank has the whole batch, so there is no sum over ranks

    def run_micro_batches(
        self,
        replica: nn.Module,
        micro_batches: Iterable[tuple[M, bool]],
        world: World,
        *,
        forward: Callable[[M], Tensor],
        backward: Callable[[Tensor], None],
        between: Callable[[], None],
    ) -> None:
        if world.size == 1:
            super().run_micro_batches(
                replica, micro_batches, world, forward=forward, backward=backward, between=between
            )
            return
        # `between` waits for all ranks, which would empty the pipeline: a stop comes at the end of the step.
        most = world.size - world.rank if self.schedule == "1f1b" else None
        losses: deque[Tensor] = deque()
        for micro, _ in micro_batches:
            losses.append(forward(micro))
            if len(losses) == most:
                backward(losses.popleft())
        while losses:
            backward(losses.popleft())

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        notes = super().notes(model, world, plan)
        if world.size > 1 and plan.micro_batches < 2 * world.size:
            idle = (world.size - 1) / (plan.micro_batches + world.size - 1)
            notes.append(
                f"with train.micro_batches={plan.micro_batches} each of {world.size} stages waits {idle:.0%} of a "
                f"step for the others; train.micro_batches={4 * world.size} leaves "
                f"{(world.size - 1) / (5 * world.size - 1):.0%}"
            )
        return notes
