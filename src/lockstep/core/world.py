"""The place of this process among the ranks of its job, and the collectives for everything but gradients."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.core.launch_env import Place

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World(Place):
    """The place of this process among the ranks, with its device. It never changes.

    `control` is a gloo group for small messages between the ranks that never touch the device. `local_peer_pids` maps
    each other rank of this machine to its process number.
    """

    device: torch.device
    control: Any = None
    local_peer_pids: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def solo(cls, device: torch.device | str = "cpu") -> Self:
        """The world of a single process, without a process group."""
        return cls(rank=0, local_rank=0, size=1, local_size=1, device=torch.device(device))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def has_group(self) -> bool:
        """Whether there is a process group; a lone rank of a launcher has one under `strategy=ddp`."""
        return self.size > 1 or self.control is not None

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, in place; the same on every rank."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank. Waits for all ranks, on the host."""
        if self.size == 1:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, group=self.control)
        return bool(flags)

    def broadcast(self, value: T) -> T:
        """Main's `value` on every rank. The value is pickled: use this only for small values of our own."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, indexed by rank, on every rank. Pickled, as in `broadcast`."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def gather_to_main(self, value: T) -> list[T]:
        """The values of all ranks, indexed by rank, on main; an empty list on others. Pickled, as in `broadcast`."""
        if self.size == 1:
            return [value]
        if not self.is_main:
            dist.send_object_list([value], 0, group=self.control)
            return []
        values = [value]
        for rank in range(1, self.size):  # one at a time: they may be large
            box: list[Any] = [None]
            dist.recv_object_list(box, rank, group=self.control)
            values += box
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()
