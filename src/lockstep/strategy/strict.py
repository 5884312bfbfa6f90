"""Bit-identical runs on one, two and four ranks: fixed virtual shards, summed by a fixed tree.

Floating-point sums depend on their order. Here the order does not depend on the ranks. A global batch is always cut
into the same number of virtual shards, and each of them has its own gradient. Neighbouring gradients are added in
pairs, then pairs of pairs, first within a rank and then between ranks. Batch norm counts per virtual shard.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.options import option
from lockstep.core.errors import InputError
from lockstep.core.fields import ranged
from lockstep.core.model import has_batchnorm
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.strategy.base import Single, copy_back, flattened, rehearse, share_weights


class TreeReplica(nn.Module):
    """A model that adds its gradients by a binary tree over the virtual shards."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        # The (height, sums) of complete subtrees whose neighbour is still missing: a binary counter.
        self.subtrees: list[tuple[int, list[Tensor]]] = []
        self.first_buffers: list[Tensor] = []

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def add_shard(self) -> None:
        """Move the gradients of one virtual shard from the parameters into the tree."""
        if not self.subtrees:
            self.first_buffers = [buffer.clone() for buffer in self.module.buffers()]
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in self._trained()]
        height = 0
        for parameter in self.module.parameters():
            parameter.grad = None
        while self.subtrees and self.subtrees[-1][0] == height:
            _, left = self.subtrees.pop()
            torch._foreach_add_(left, gradients)
            gradients, height = left, height + 1
        self.subtrees.append((height, gradients))

    def finish(self) -> None:
        """Add the subtrees of all ranks, nearest ranks first, and give the parameters the sum."""
        ((_, gradients),) = self.subtrees
        self.subtrees = []
        if dist.is_initialized():
            total = flattened(gradients)
            distance = 1
            while distance < dist.get_world_size():
                received, peer = torch.empty_like(total), dist.get_rank() ^ distance
                operations = [dist.P2POp(dist.isend, total, peer), dist.P2POp(dist.irecv, received, peer)]
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
                total += received  # both ranks add the same two numbers, and a + b equals b + a to the bit
                distance *= 2
            copy_back(total, gradients)
        for parameter, gradient in zip(self._trained(), gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            # Keep the statistics of each rank's first virtual shard; main's are the ones that are saved.
            for buffer, first_buffer in zip(self.module.buffers(), self.first_buffers, strict=True):
                buffer.copy_(first_buffer)

    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]


@option("strategy")
class Strict(Single):
    """Chosen by `repro=strict`: gradients of fixed virtual shards, added by a fixed tree, have the same bits on every
    number of ranks that divides the number of shards.
    """

    # number of virtual shards of a global batch, a power of two; a run is the same on any number of ranks that
    # divides it
    shards: int = ranged(4, least=1, most=65_536)
    recordable: ClassVar[bool] = False
    fixed_order: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.shards & (self.shards - 1):
            raise InputError(f"strategy.shards is {self.shards}, expected a power of two: strategy.shards=4")

    def ranks(self, gpus: int) -> int:
        return 2 ** (max(1, min(gpus, self.shards)).bit_length() - 1)  # the largest power of two

    def micro_batches(self, number: int | str, ranks: int) -> int:
        """Each virtual shard is a micro-batch."""
        if number != 1:
            raise InputError(
                f"train.micro_batches is {number}, but under repro=strict the virtual shards are the micro-batches; "
                f"use train.micro_batches=1, and strategy=strict strategy.shards={2 * self.shards} for smaller ones"
            )
        return max(1, self.shards // ranks)

    def check(self, ranks: int, device: str) -> None:
        if self.shards % ranks:
            raise InputError(
                f"launcher.ranks is {ranks}, but repro=strict cuts a global batch into {self.shards} virtual shards "
                f"and works on a number of ranks that divides them; use launcher.ranks={min(self.shards, 2)}"
            )

    def wrap(self, model: nn.Module, world: World, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        assert plan.micro_batches * world.size == self.shards
        torch.use_deterministic_algorithms(True)
        # Each `torch.empty` would take a kernel more, for the sake of code that reads what it has not written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        try:
            rehearse(model, example, passes=1)
        except RuntimeError as error:
            operation, nondeterministic, _ = str(error).partition(" does not have a deterministic implementation")
            if not nondeterministic:
                raise
            raise InputError(
                f"repro=strict has the same bits every time, but {operation}, which the model uses, has no "
                f"deterministic kernel on {example[0].device.type}; use repro=exact, or a model without it"
            ) from error
        if world.size > 1:
            share_weights(model)
        return TreeReplica(model)

    def grad_divisor(self, world: World) -> int:
        # No factor of the loss may depend on the ranks: it would change which numbers underflow.
        return 1

    @contextmanager
    def accumulate(self, replica: nn.Module, last: bool) -> Iterator[None]:
        assert isinstance(replica, TreeReplica)
        yield
        replica.add_shard()

    def reduce(self, replica: nn.Module) -> None:
        assert isinstance(replica, TreeReplica)
        replica.finish()

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        if has_batchnorm(model):
            return [f"repro=strict: batch norm counts per virtual shard, one of {self.shards} of the global batch"]
        return []
