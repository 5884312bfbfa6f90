"""What this process may use of its machine: the cores and memory that its container (cgroup) and its sweep leave it.

Imports no torch: the plugins of a sweep need it.
"""

import math
import os
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
CORES = "LOCKSTEP_CORES"  # the cores of a job that runs beside others of its sweep
CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# The files of a limit of memory, of what is used of it, and the name of the cached files in it which the kernel gives
# up first (Kubernetes does not count these as used either): of version 2, and of version 1.
MEMORY = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def cores() -> int:
    """The CPU cores that this process may use: by its affinity, its container's quota, and its share of a sweep."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = [allowed, int(os.environ.get(CORES, allowed))]
    for group in _groups("cpu"):
        quota = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if quota and quota[0] not in ("max", "-1"):
            most.append(math.ceil(int(quota[0]) / int(quota[1])))
    return max(1, min(most))


def memory_left() -> float:
    """The bytes up to the nearest limit of memory of this process's containers, infinite without a limit."""
    left = math.inf
    for group in _groups("memory"):
        stat = _words(group / "memory.stat")
        sizes = dict(zip(stat[::2], stat[1::2], strict=False))
        for limit, used, cached in MEMORY:
            if (most := _words(group / limit)) not in ([], ["max"]):
                taken = int(*_words(group / used)) - int(sizes.get(cached, 0))
                left = min(left, max(0, int(*most) - max(0, taken)))
    return left


def _groups(controller: str) -> Iterator[Path]:
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
