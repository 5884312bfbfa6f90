"""The GPUs of this machine as NVML knows them: which ones CUDA shows, who uses them, and how they are connected.

The only place that reads `CUDA_VISIBLE_DEVICES`. It asks NVML and not CUDA, after which no process could be forked. A
GPU is named by its UUID (`GPU-...`, of an instance `MIG-...`), or by its number.
"""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pynvml
import torch

from lockstep.runtime.host import VISIBLE

# What lies between two GPUs, in the words of `nvidia-smi topo -m`: NVML's levels are 0, 10, ..., 50.
PATHS = ("one board", "PIX", "PXB", "PHB", "NODE", "SYS")


def visible_gpus() -> list[str]:
    """The names of the GPUs that CUDA shows to this process, in its order.

    Without `CUDA_VISIBLE_DEVICES`, a GPU that is cut into instances (MIG) is these. With it, torch's own parser reads
    it as CUDA does: what follows an entry that is not a GPU is ignored, the beginning of a UUID is enough, and a GPU
    that is named twice leaves none.
    """
    wholes, instances = [], []
    with suppress(pynvml.NVMLError), _nvml():
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            wholes.append(pynvml.nvmlDeviceGetUUID(handle))
            instances.append(_instances(handle))
    if VISIBLE not in os.environ:
        return list(itertools.chain(*(parts or [gpu] for gpu, parts in zip(wholes, instances, strict=True))))
    # Both are private; torch's device count comes from them, and tests/unit/test_gpus.py holds them to CUDA's rules.
    names: list[Any] = torch.cuda._parse_visible_devices()
    if not wholes:  # without NVML nobody can say which ones there are
        return [str(name) for name in names]
    if names and isinstance(names[0], str):
        known = list(itertools.chain(wholes, *instances))
        return [known[number] for number in torch.cuda._transform_uuid_to_ordinals(names, known)]
    return [str(number) for number in itertools.takewhile(range(len(wholes)).__contains__, names)]


def _instances(gpu: Any) -> list[str]:
    """The UUIDs of the instances of the GPU with this handle."""
    uuids = []
    with suppress(pynvml.NVMLError):
        if pynvml.nvmlDeviceGetMigMode(gpu)[0]:
            for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
                with suppress(pynvml.NVMLError_NotFound):
                    uuids.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)))
    return uuids


def name_in_nvml(number: int) -> str:
    """The UUID of a CUDA device as NVML spells it: CUDA numbers only the visible ones, and may sort them by speed."""
    names = visible_gpus()[number : number + 1]
    if names and names[0].startswith("MIG-"):
        return names[0]
    return f"GPU-{torch.cuda.get_device_properties(number).uuid}"


def driver_version() -> str | None:
    with suppress(pynvml.NVMLError), _nvml():
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None


def processes_on(gpu: str) -> list[int]:
    """The other processes that compute on a GPU; empty also where the driver does not say."""
    with suppress(pynvml.NVMLError), _nvml():
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(gpu))
        return [process.pid for process in processes if process.pid != os.getpid()]
    return []


def free_bytes(gpu: str) -> int:
    """The memory of a GPU that nobody uses now; 0 where the driver does not say."""
    with suppress(pynvml.NVMLError), _nvml():
        return int(pynvml.nvmlDeviceGetMemoryInfo(_handle(gpu)).free)
    return 0


def path_between(first: str, second: str) -> str:
    """What connects two GPUs: `NVLink`, or a word of `PATHS`, with whether they can copy to each other (P2P)."""
    with suppress(pynvml.NVMLError), _nvml():
        pair = _handle(first), _handle(second)
        refused = pynvml.nvmlDeviceGetP2PStatus(*pair, pynvml.NVML_P2P_CAPS_INDEX_WRITE)  # 0: it works
        if not pynvml.nvmlDeviceGetP2PStatus(*pair, pynvml.NVML_P2P_CAPS_INDEX_NVLINK):
            return "NVLink"
        return PATHS[pynvml.nvmlDeviceGetTopologyCommonAncestor(*pair) // 10] + " without P2P" * bool(refused)
    return "unknown path"  # instances of a GPU have none


@contextmanager
def _nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _handle(gpu: str) -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(gpu)
