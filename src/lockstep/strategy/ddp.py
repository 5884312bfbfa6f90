"""`torch.nn.parallel.DistributedDataParallel`: gradients are averaged in buckets while backward runs."""

import inspect
import warnings
from dataclasses import replace
from typing import Any, ClassVar, Self

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lockstep.config.options import option
from lockstep.core.errors import InputError
from lockstep.core.fields import choice, ranged
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.strategy.base import Distributed, rehearse

COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")
# Do not synchronise buffers in forward (`World.share_buffers` does it). torch 2.15 renamed the argument.
NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


@option("strategy")
class DDP(Distributed):
    """One all-reduce per bucket, overlapped with backward."""

    gradient_as_bucket_view: bool = True
    static_graph: bool | None = None
    find_unused_parameters: bool = False
    bucket_mb: float | None = ranged(None, least=0.001, most=100_000)
    comm_hook: str = choice("none", *COMM_HOOKS)
    imports: ClassVar[tuple[str, ...]] = ("torch._dynamo",)

    def with_changing_graph(self) -> Self:
        # Otherwise DDP waits for gradients that never come, or does not send those that come later.
        if self.static_graph:
            raise InputError(
                "strategy.static_graph is true, but train.freeze_until changes the graph; leave out "
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
        self._register_hook(replica)
        return replica

    def _register_hook(self, replica: DistributedDataParallel) -> None:
        match self.comm_hook:
            case "fp16":
                replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
            case "bf16":
                replica.register_comm_hook(None, default_hooks.bf16_compress_hook)
            case "powersgd":
                state = powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=10)
                replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        notes = super().notes(model, world, plan)
        if self.comm_hook != "none" and world.size > 1:
            notes.append(
                f"strategy.comm_hook={self.comm_hook} rounds the gradients on the wire: this run differs from "
                "one without it, and from one on another number of ranks"
            )
        if self.comm_hook == "powersgd":
            notes.append("strategy.comm_hook=powersgd has a state that no checkpoint holds: a resume is not exact")
        return notes
