"""Becoming a rank: the device, the threads and the process group of this process."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.core.errors import InputError, Stopped
from lockstep.core.launch_env import ATTEMPT, Place, is_launched, launched_place, store_address
from lockstep.core.world import World
from lockstep.launcher import network

SPARE_FILES = 512  # files that a rank may have open besides its connections


@contextmanager
def join(*, device: str, backend: str, timeout: float, threads: int) -> Iterator[World]:
    """Become a rank of the job: set the device and the threads, and join the process group of several ranks.

    The group is destroyed at the end and after a saved stop, when all ranks have just met. After an error it is not
    destroyed: another rank may hang in a collective, and waiting for that rank would hide the error. `timeout` is in
    seconds; a collective that takes longer is an error.

    Raises:
        InputError: this rank has no GPU, the variables of its launcher are wrong, or the rank may not open enough
            files to be connected with all ranks.
    """
    torch.set_num_threads(threads)
    place = launched_place() if is_launched() else None
    if place is None or place.size == 1:  # a group would take 20 ms, and more with NCCL
        yield World.solo(torch.device(device, 0) if device == "cuda" else device)
        return
    on_device = torch.device(device, own_gpu(place.local_rank)) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(on_device)
    _choose_interface(one_machine=place.local_size == place.size)
    allow_connections(place.size)
    _init_process_group(backend, timedelta(seconds=timeout), on_device, place)
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
        InputError: the process sees several GPUs, but none for this rank.
    """
    visible = torch.cuda.device_count()
    if visible > 1 and local_rank >= visible:
        raise InputError(
            f"local rank {local_rank} has no GPU: its process sees {visible}; start at most {visible} ranks on this "
            "machine, or show each one its own (srun --gpus-per-task=1)"
        )
    return local_rank if visible > 1 else 0


def allow_connections(ranks: int) -> None:
    """Raise this process's limit on open files to the number that the process groups of `ranks` ranks need.

    In each group, gloo connects each rank with every other rank, and there may be two gloo groups.

    Raises:
        InputError: the system does not allow so many files.
    """
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


def _init_process_group(backend: str, timeout: timedelta, device: torch.device, place: Place) -> None:
    store = None  # the one at MASTER_ADDR
    if attempt := os.environ.get(ATTEMPT):  # torchrun's store also has the addresses of earlier attempts
        served = dist.TCPStore(*store_address(), is_master=False, wait_for_workers=False, timeout=timeout)
        store = dist.PrefixStore(attempt, served)
    bound = device if backend == "nccl" else None
    try:
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout, device_id=bound
        )
    except RuntimeError as error:
        if "Duplicate GPU" not in str(error):
            raise
        raise InputError(
            f"several ranks have the same GPU ({device}), which NCCL does not allow; start as many ranks on this "
            "machine as it has GPUs, or use launcher.backend=gloo"
        ) from error


def _choose_interface(*, one_machine: bool) -> None:
    """Have the ranks of one machine listen on the loopback interface, others on the one that reaches main's machine.

    By default gloo takes the address of this machine's own name, which can be a loopback address, or unknown (on
    macOS). On main's machine, MASTER_ADDR can be a loopback address too.
    """
    loopback = network.interface_of(network.LOOPBACK) or "lo"
    name = loopback if one_machine else network.interface_to(*store_address())
    if name == loopback and not one_machine:
        name = network.interface_elsewhere()
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if one_machine:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _local_peer_pids(control: Any) -> dict[int, int]:
    """The process numbers of the other ranks of this machine. Collective."""
    own = (network.machine(), os.getpid())
    processes: list[tuple[str, int]] = [own] * dist.get_world_size()
    dist.all_gather_object(processes, own, group=control)
    return {rank: pid for rank, (machine, pid) in enumerate(processes) if machine == own[0] and pid != own[1]}
