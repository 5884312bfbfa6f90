"""What this process may use of its machine: the cores and memory that its container and its sweep leave it.

torch is imported where it is needed: the plugins of a sweep read the cores before it is loaded.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from lockstep.core.errors import InputError
from lockstep.core.native_threads import is_own_process

if TYPE_CHECKING:
    from lockstep.core.world import World

GB = 1e9
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})  # the last one is ARM's
VISIBLE = "CUDA_VISIBLE_DEVICES"
CORES = "LOCKSTEP_CORES"  # the cores of a job that runs in parallel with others of its sweep
CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# The files of a limit of memory, of what is used of it, and the name of the cached files in it which the kernel gives
# up first (Kubernetes does not count these as used either): of version 2, and of version 1.
MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# Words in the errors of libraries that do not raise torch.OutOfMemoryError. In this order: CUDA, NCCL and Triton;
# cuBLAS and cuSOLVER; cuDNN; torch's allocator for host memory; oneDNN.
OUT_OF_MEMORY = (
    "out of memory",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "can't allocate memory",
    "could not create a primitive",
)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's numbers for two options of `mallopt` (malloc.h)


def format_bytes(size: float) -> str:
    """A number of bytes as a text: `700 B`, `28 kB`, `0.3 MB`, `512 MB`, `4.2 GB`."""
    if size < 1e5:
        return f"{size / 1e3:.0f} kB" if size >= 1e3 else f"{size:.0f} B"
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / 1e6:.{1 if size < 1e7 else 0}f} MB"


def cores() -> int:
    """The CPU cores that this process may use: by its affinity, its container's quota, and its share of a sweep."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = [allowed, int(os.environ.get(CORES, allowed))]
    for group in cgroups("cpu"):
        quota = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if quota and quota[0] not in ("max", "-1"):
            most.append(math.ceil(int(quota[0]) / int(quota[1])))
    return max(1, min(most))


def memory_left() -> float:
    """The bytes up to the nearest limit of memory of this process's containers, infinite without a limit."""
    left = math.inf
    for group in cgroups("memory"):
        stat = _words(group / "memory.stat")
        sizes = dict(zip(stat[::2], stat[1::2], strict=False))
        for limit, used, cached in MEMORY:
            if (most := _words(group / limit)) not in ([], ["max"]):
                taken = int(*_words(group / used)) - int(sizes.get(cached, 0))
                left = min(left, max(0, int(*most) - max(0, taken)))
    return left


def cgroups(controller: str) -> Iterator[Path]:
    """The folders of this process's cgroups, from its own to the root; a container may show the last ones only."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:  # not Linux
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or controller in controllers.split(","):
            root = CGROUPS / controller if controllers else CGROUPS
            folder = root / path.lstrip("/")
            yield from takewhile(lambda place: place.is_relative_to(root), (folder, *folder.parents))  # noqa: B023


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def has_bfloat16() -> bool:
    """Whether the CPU has bfloat16 instructions and torch uses them; true where the system does not list them."""
    import torch

    try:
        listed = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return True
    return not listed.isdisjoint(BFLOAT16) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def free_memory(world: World) -> float:
    """The free memory of a rank's device, in GB. On the CPU, this is the rank's share of the host's memory."""
    if world.device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(world.device)[0] / GB
    return available_memory() / world.local_size / GB


def available_memory() -> float:
    """The bytes of host memory within the container's limits that are free or only cache files."""
    return min(float(psutil.virtual_memory().available), memory_left())


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def keep_freed_memory(world: World, *, keep: bool) -> None:
    """On the CPU: have the C library keep freed memory for the next step (`keep`), or return it.

    By default glibc maps new memory for each tensor above 32 MB, and the kernel clears its pages at the first write,
    for large activations at every step. Kept memory is fragmented, so a job that is short of memory (it has
    micro-batches) does not keep it. A program that uses Lockstep as a library is not changed.
    """
    libc = ctypes.CDLL(None)
    if is_own_process() and world.device.type == "cpu" and hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0 if keep else 65536)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1 if keep else 128 * 1024)
        if not keep:
            libc.malloc_trim(0)  # return what an earlier job of this process kept


def idle_seconds() -> float:
    """The seconds that all cores of the machine together had nothing to do so far, whoever may use them."""
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))  # one that waits for a disk could work too


def check_room(purpose: str, size: float, remedy: str) -> None:
    """Raise InputError if `size` bytes are more than the available memory."""
    room = available_memory()
    if size > room:
        raise InputError(
            f"{purpose} need {size / GB:,.1f} GB, and this machine has {room / GB:,.1f} GB free; use {remedy}"
        )
