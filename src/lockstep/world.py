"""Who this process is among the ranks of its job, and the collectives it needs besides gradients."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import InputError, Stopped

T = TypeVar("T")

# A word between the ranks takes less than a millisecond: a hundredth of a step that is busy for so long.
LONG_S = 0.1


@dataclass(frozen=True, kw_only=True)
class World:
    """A rank's identity, fixed for the life of the process.

    `control` is a gloo group for small words between the ranks (`StopConsensus`): it never touches the device.
    `local_peer_pids` has the process number of each other rank of this machine.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    device: torch.device
    control: Any = None
    local_peer_pids: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def solo(cls, device: torch.device | str = "cpu") -> World:
        """The world of a single process, without a process group."""
        return cls(rank=0, local_rank=0, size=1, local_size=1, device=torch.device(device))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, in place, and the same on each."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank. Waits for all of them, on the host."""
        if self.size == 1:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, group=self.control)
        return bool(flags)

    def broadcast(self, value: T) -> T:
        """Main's `value` on every rank. Pickled: for small values of our own at start-up only."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """The `value` of every rank, by rank, on each of them. Pickled, as in `broadcast`."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def share_buffers(self, module: torch.nn.Module) -> None:
        """Main's buffers on every rank.

        Running statistics do not enter a training forward, so main's are the truth and the others' are
        fetched where they matter (evaluation, checkpoints) instead of at each step.
        """
        if self.size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)


class StopConsensus:
    """Words that any rank can say and all hear at the same step, without making the step wait.

    The sum that is started at one step is read at the next, so a word takes effect one step later and the
    ranks agree on the step. Where steps are long it is waited for and read at once. With its wishes each rank says
    how long it was busy; `busy` is what was heard of all ranks, in seconds, and is empty where there is nothing to
    hear.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.busy: list[float] = []
        self.pending: Any = None
        self.ballot = torch.zeros(0, dtype=torch.int64)

    def __call__(self, *wishes: bool, busy: float = 0.0) -> list[bool]:
        """Cast this step's wishes; each is heard if any rank had it at the step before.

        In a world of one it is heard at once.
        """
        if self.world.size == 1:
            return list(wishes)
        heard = self._read(len(wishes))
        own = [int(1e6 * busy) if rank == self.world.rank else 0 for rank in range(self.world.size)]
        self.ballot = torch.tensor([*wishes, *own], dtype=torch.int64)
        self.pending = dist.all_reduce(self.ballot, group=self.world.control, async_op=True)
        if self.can_wait or not self.busy:  # the first is waited for: it tells how long steps are
            heard = [before or now for before, now in zip(heard, self._read(len(wishes)), strict=True)]
        return heard

    @property
    def can_wait(self) -> bool:
        """Whether waiting for a word costs next to nothing: alone, or where steps are long. On all ranks alike."""
        return self.world.size == 1 or max(self.busy, default=0.0) > LONG_S

    def _read(self, wishes: int) -> list[bool]:
        """What was wished in the sum that is under way, if one is."""
        if self.pending is None:
            return [False] * wishes
        self.close()
        votes = self.ballot.tolist()
        self.busy = [microseconds / 1e6 for microseconds in votes[wishes:]]
        return [bool(vote) for vote in votes[:wishes]]

    def close(self) -> None:
        """Finish the sum that is under way, so that the group can be destroyed."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None


def launched_rank() -> int | None:
    """The rank that a launcher (ours, torchrun, srun with its variables set) gave this process, if any."""
    return int(os.environ["RANK"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None


def local_size(ranks: int) -> int:
    """How many of a job's `ranks` are on this machine, as far as their launcher says: all, if it does not."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


@contextmanager
def join(*, device: str, backend: str, timeout: float, threads: int) -> Iterator[World]:
    """Become a rank of the job: set the device and the threads, and join the process group of several.

    The group is destroyed where all ranks have just met: at the end, and after a stop that was saved. After an error
    the other ranks may hang in a collective, and waiting for them would hide it.

    Args:
        device: `cpu` or `cuda`.
        backend: `gloo` or `nccl`.
        timeout: seconds after which a collective that does not end is an error.
        threads: CPU threads of this process.

    Raises:
        InputError: this rank has no GPU of its own.
    """
    torch.set_num_threads(threads)
    if launched_rank() is None or os.environ["WORLD_SIZE"] == "1":  # nobody to meet: a group takes 20 ms, NCCL's more
        yield World.solo(torch.device(device, 0) if device == "cuda" else device)
        return
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    on_device = torch.device(device, own_gpu(local_rank)) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(on_device)
    _stay_on_loopback()
    _init_process_group(backend, timedelta(seconds=timeout), on_device)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    try:
        yield World(
            rank=dist.get_rank(),
            local_rank=local_rank,
            size=dist.get_world_size(),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
            device=on_device,
            control=control,
            local_peer_pids=_neighbours(control),
        )
    except Stopped:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()  # not reached after another error, which is raised at the yield


def own_gpu(local_rank: int) -> int:
    """The number of a rank's GPU among those that its process sees.

    A launcher may show each process one GPU alone, which is then its number 0 (`srun --gpus-per-task=1`).

    Raises:
        InputError: the process sees several, but none for this rank.
    """
    visible = torch.cuda.device_count()
    if visible > 1 and local_rank >= visible:
        raise InputError(
            f"local rank {local_rank} has no GPU: its process sees {visible}; start at most {visible} ranks on this "
            "machine, or show each one its own (srun --gpus-per-task=1)"
        )
    return local_rank if visible > 1 else 0


def _init_process_group(backend: str, timeout: timedelta, device: torch.device) -> None:
    try:
        dist.init_process_group(backend, timeout=timeout, device_id=device if backend == "nccl" else None)
    except RuntimeError as error:
        if "Duplicate GPU" not in str(error):
            raise
        raise InputError(
            f"several ranks have the same GPU ({device}), which NCCL does not allow; start as many ranks on this "
            "machine as it has GPUs, or use launcher.backend=gloo"
        ) from error


def _stay_on_loopback() -> None:
    """Have the ranks of one machine talk on its loopback interface, so that they listen on no other (Linux)."""
    if sys.platform == "linux" and os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _neighbours(control: Any) -> dict[int, int]:
    """The process numbers of the other ranks of this machine. Called by all."""
    here = (socket.gethostname(), os.getpid())
    everyone: list[tuple[str, int]] = [here] * dist.get_world_size()
    dist.all_gather_object(everyone, here, group=control)
    return {rank: pid for rank, (host, pid) in enumerate(everyone) if host == here[0] and pid != here[1]}
