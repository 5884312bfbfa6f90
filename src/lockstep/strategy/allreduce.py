"""The gradient averaging of the tutorials, done correctly: the simplest way to see what DDP does."""

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.options import option
from lockstep.core.plan import Plan
from lockstep.core.protocols import NO_CONTEXT
from lockstep.core.world import World
from lockstep.strategy.base import Distributed, copy_back, flattened

LARGE = 2**16  # a gradient with at least this many elements gets an all-reduce of its own


@option("strategy", "allreduce")
class AllReduce(Distributed):
    """Blocking all-reduces after backward: one for each large gradient, and one for all the small ones together.

    A call costs as much as about 100 kB on the wire. With one call for each of a hundred small gradients, a step
    would take several times as long.
    """

    def grad_divisor(self, world: World) -> int:
        return 1

    def reduce(self, replica: nn.Module) -> None:
        if not dist.is_initialized():
            return
        gradients = [parameter.grad for parameter in replica.parameters() if parameter.grad is not None]
        for gradient in filter(_is_large, gradients):
            dist.all_reduce(gradient)
        if small := [gradient for gradient in gradients if not _is_large(gradient)]:
            total = flattened(small)
            dist.all_reduce(total)
            copy_back(total, small)


def _is_large(gradient: Tensor) -> bool:
    return gradient.numel() >= LARGE and gradient.is_contiguous()


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
    """One asynchronous all-reduce per gradient, started by a hook during backward."""

    def replicate(self, model: nn.Module, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        return HookedReplica(model)

    def accumulate(self, replica: nn.Module, last: bool) -> AbstractContextManager[None]:
        if isinstance(replica, HookedReplica):
            replica.sync = last
        return NO_CONTEXT

    def reduce(self, replica: nn.Module) -> None:
        if isinstance(replica, HookedReplica):
            replica.finish()
