"""The resources of this machine: cores, memory, instructions for bfloat16."""

from pathlib import Path

import psutil
import torch

from lockstep.core.errors import InputError
from lockstep.core.world import World
from lockstep.runtime.limits import memory_left

GB = 1e9
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})  # the last one is ARM's


def format_bytes(size: float) -> str:
    """A number of bytes as a text: `28 kB`, `0.3 MB`, `512 MB`, `4.2 GB`."""
    if size < 1e5:
        return f"{size / 1e3:.0f} kB"
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / 1e6:.{1 if size < 1e7 else 0}f} MB"


def has_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16, and torch's kernels use them.

    True if the system does not list the instructions. ONEDNN_MAX_CPU_ISA can forbid the kernels.
    """
    try:
        listed = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return True
    return not listed.isdisjoint(BFLOAT16) and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def free_memory(world: World) -> float:
    """The free memory of a rank's device, in GB. On the CPU, this is the rank's share of the host's memory."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0] / GB
    return available_memory() / world.local_size / GB


def available_memory() -> float:
    """The bytes of host memory, within the limits of the container, that are available without swapping.

    What the file cache takes is available.
    """
    return min(float(psutil.virtual_memory().available), memory_left())


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
