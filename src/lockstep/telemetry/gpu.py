"""The figures of the GPUs that a job uses, from NVML.

GPUs are found by UUID, because NVML numbers all GPUs of a machine, and CUDA only the visible ones.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pynvml
import torch
from torch import nn

from lockstep.core.safe_read import parsed_json
from lockstep.core.world import World
from lockstep.telemetry.gpu_counters import Counters
from lockstep.telemetry.sinks import truncate_after

# Reasons for which the hardware itself lowers the clocks: too hot, or too little power.
SLOWED_DOWN = (
    pynvml.nvmlClocksEventReasonSwPowerCap
    | pynvml.nvmlClocksEventReasonHwSlowdown
    | pynvml.nvmlClocksEventReasonSwThermalSlowdown
)


class Gpus:
    """The GPUs of a job on this machine, and the file of their figures.

    Args:
        uuids: the UUIDs of the GPUs, by local rank, as NVML spells them (`GPU-...`).
        path: the path of `gpu.jsonl`.

    Raises:
        pynvml.NVMLError: NVML is not there, or does not know one of them.
    """

    def __init__(self, uuids: list[str], path: Path) -> None:
        pynvml.nvmlInit()
        self.handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        self.uuids, self.path = uuids, path
        self.file, _ = truncate_after(path, 0, _step_zero)
        self.energy = [_energy(handle) for handle in self.handles]
        self.joules: float | None = None if None in self.energy else 0.0
        self.counters = [Counters(handle) for handle in self.handles]

    def sample(self, step: int) -> dict[str, float]:
        """The figures of all GPUs by tag. Writes a line for each GPU."""
        now = round(time.time(), 3)
        # Sample all GPUs first: if one stops answering, there must not be half a sample.
        samples = [sample(handle) for handle in self.handles]
        samples = [figures | counters.sample() for figures, counters in zip(samples, self.counters, strict=True)]
        if self.joules is not None:
            after = [_energy(handle) or 0.0 for handle in self.handles]
            self.joules += sum(new - (old or 0.0) for new, old in zip(after, self.energy, strict=True))
            self.energy = list(after)
        for rank, (uuid, figures) in enumerate(zip(self.uuids, samples, strict=True)):
            self.file.write(
                json.dumps({"time": now, "step": step, "local_rank": rank, "uuid": uuid, **figures}) + "\n"
            )
        return {
            f"gpu/{name}/{rank}": value for rank, figures in enumerate(samples) for name, value in figures.items()
        }

    def close(self) -> None:
        self.file.close()
        for counters in self.counters:
            counters.close()
        pynvml.nvmlShutdown()


def sample(handle: Any) -> dict[str, float]:
    """A sample of one GPU; figures that it does not offer (a part of a GPU, MIG, has few) are left out.

    `util` in percent, `mem_gb`, `power_w`, `temp_c`, the SM clock `sm` in MHz, `slowed` (1 while heat or the power
    limit lowers the clocks, else 0), and the traffic over PCIe in MB per second.
    """
    queries: dict[str, Callable[[], float]] = {
        "util": lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "mem_gb": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 1e9,
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temp_c": lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        "sm": lambda: float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        "slowed": lambda: float(bool(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle) & SLOWED_DOWN)),
        "pcie_in_mb_s": lambda: pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_RX_BYTES) / 1000,
        "pcie_out_mb_s": lambda: pynvml.nvmlDeviceGetPcieThroughput(handle, pynvml.NVML_PCIE_UTIL_TX_BYTES) / 1000,
    }
    answers = {name: _answer(query) for name, query in queries.items()}
    return {name: value for name, value in answers.items() if value is not None}


def _energy(handle: Any) -> float | None:
    """The joules that a GPU has used since its driver was loaded; None if it does not count them."""
    millijoules = _answer(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    return None if millijoules is None else millijoules / 1000


def _answer(query: Callable[[], float]) -> float | None:
    """What NVML answers; None if the GPU or the driver does not offer it."""
    try:
        return query()
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None


def watched_gpus(replica: nn.Module, world: World) -> list[str]:
    """The UUIDs, as NVML spells them, of the GPUs that the ranks of this machine use, by local rank. Collective.

    Each rank reports its own, because other GPUs may be invisible to a process. `torch.nn.DataParallel` uses several.
    """
    numbers: Iterable[int] = ()
    if world.device.type == "cuda":
        numbers = replica.device_ids if isinstance(replica, nn.DataParallel) else [world.device.index]
    own = [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in numbers]
    uuids = world.gather(own)
    return list(itertools.chain.from_iterable(uuids[rank] for rank in sorted({world.rank, *world.local_peer_pids})))


def _step_zero(line: str) -> int:
    """0 for every line of GPU figures, so that a resume keeps it: `gpu.jsonl` goes by time, not by steps.

    Raises ValueError for any other line.
    """
    match parsed_json(line):
        case {"time": _, "step": _, "local_rank": _, "uuid": _}:
            return 0
    raise ValueError("not a line of GPU figures")
