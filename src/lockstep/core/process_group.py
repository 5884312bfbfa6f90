"""Becoming a rank: the device, the threads and the process group of this process."""

from __future__ import annotations

import enum
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.core import network
from lockstep.core.errors import InputError, Stopped
from lockstep.core.launched import is_launched, launched
from lockstep.core.world import World

SPARE_FILES = 512  # files that a rank may have open besides its connections


class Backend(enum.Enum):
    """What carries the collectives; `auto` is NCCL on CUDA and gloo on the CPU."""

    auto = "auto"
    nccl = "nccl"
    gloo = "gloo"


@contextmanager
def join(*, device: str, backend: str, timeout: float, threads: int) -> Iterator[World]:
    """Become a rank of the job: set the device and the threads, and join the process group if there are several.

    The group is destroyed at the end and after a saved stop, where all ranks have just met. After an error it is not:
    another rank may hang in a collective, and waiting for it would hide the error.

    Args:
        device: `cpu` or `cuda`.
        backend: `gloo` or `nccl`.
        timeout: seconds after which an unfinished collective is an error.
        threads: CPU threads of this process.

    Raises:
        InputError: this rank has no GPU of its own, the variables of its launcher do not fit, or it may not open
            enough files to be connected with all ranks.
    """
    torch.set_num_threads(threads)
    place = launched() if is_launched() else None
    if place is None or place.size == 1:  # a group would take 20 ms, and more with NCCL
        yield World.solo(torch.device(device, 0) if device == "cuda" else device)
        return
    on_device = torch.device(device, own_gpu(place.local_rank)) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(on_device)
    if place.local_size == place.size:
        _stay_on_loopback()
    else:
        _use_interface_to_main()
    allow_connections(place.size)
    _init_process_group(backend, timedelta(seconds=timeout), on_device)
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    try:
        yield World(
            **vars(place),
            device=on_device,
            control=control,
            local_peer_pids=_local_peer_pids(control),
        )
    except Stopped:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()  # not reached after another error, which is raised at the yield


def own_gpu(local_rank: int) -> int:
    """The index of a rank's GPU among those that its process sees.

    A launcher may show each process only one GPU, which then has index 0 (`srun --gpus-per-task=1`).

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


def allow_connections(ranks: int) -> None:
    """Raise this process's limit on open files to what the groups of so many ranks need.

    gloo connects each rank with every other one, once in a group, and there may be two groups of gloo.

    Raises:
        InputError: the system does not allow so many.
    """
    if sys.platform == "win32":
        return
    import resource

    needed = 2 * ranks + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(
            f"each of {ranks} ranks opens up to {needed} files and connections, and the system allows {hard}; raise "
            f"its limit before the launch: ulimit -n {needed}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


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
    """Let the ranks of one machine use the loopback interface only, so that they listen on no other (Linux)."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _use_interface_to_main() -> None:
    """Have gloo listen where the other machines reach this one: on the interface by which it reaches main's.

    By itself gloo takes the address of this machine's own name, which can be one of the loopback interface, or none.
    """
    name = network.interface_to(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if sys.platform == "linux" and name is not None and name != "lo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _local_peer_pids(control: Any) -> dict[int, int]:
    """The process numbers of the other ranks of this machine. Collective."""
    here = (socket.gethostname(), os.getpid())
    everyone: list[tuple[str, int]] = [here] * dist.get_world_size()
    dist.all_gather_object(everyone, here, group=control)
    return {rank: pid for rank, (host, pid) in enumerate(everyone) if host == here[0] and pid != here[1]}
