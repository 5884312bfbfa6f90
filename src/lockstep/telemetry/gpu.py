"""The figures of the GPUs that a job uses, from NVML.

GPUs are found by UUID, because NVML numbers all GPUs of a machine, and CUDA only the visible ones. Where they are cut
into instances (MIG), the instances have UUIDs.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pynvml
from torch import nn

from lockstep.core.safe_read import is_number, parsed_json, read_lines
from lockstep.core.world import World
from lockstep.runtime.gpus import name_in_nvml
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
        uuids: the UUIDs of the GPUs, by local rank, as NVML spells them (`GPU-...`, `MIG-...`).
        path: the path of `gpu.jsonl`.

    Raises:
        pynvml.NVMLError: NVML is not there, or does not know one of them.
    """

    def __init__(self, uuids: list[str], path: Path) -> None:
        pynvml.nvmlInit()
        self.handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        self.uuids, self.path = uuids, path
        # Every line stays on a resume: `gpu.jsonl` goes by time, not by steps.
        self.file, _ = truncate_after(path, math.inf, lambda line: _parsed(line)[0])
        self.joules_before = self._joules()
        self.joules = None if self.joules_before is None else 0.0
        self.counters = [Counters(handle) for handle in self.handles]

    def sample(self, step: int) -> dict[str, float]:
        """The figures of all GPUs by tag. Writes a line for each GPU."""
        now = round(time.time(), 3)
        # Sample all GPUs first: if one stops answering, there must not be half a sample.
        samples = [sample(handle) for handle in self.handles]
        samples = [figures | counters.sample() for figures, counters in zip(samples, self.counters, strict=True)]
        if self.joules_before is not None and (joules := self._joules()) is not None:
            self.joules = joules - self.joules_before
        for rank, (uuid, figures) in enumerate(zip(self.uuids, samples, strict=True)):
            self.file.write(
                json.dumps({"time": now, "step": step, "local_rank": rank, "uuid": uuid, **figures}) + "\n"
            )
        return {
            f"gpu/{name}/{rank}": value for rank, figures in enumerate(samples) for name, value in figures.items()
        }

    def _joules(self) -> float | None:
        """What the GPUs have used since their driver was loaded; None if one of them does not count it."""
        try:
            return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, self.handles)) / 1000
        except pynvml.NVMLError:
            return None

    def close(self) -> None:
        self.file.close()
        for counters in self.counters:
            counters.close()
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def sample(handle: Any) -> dict[str, float]:
    """A sample of one GPU. A figure that NVML refuses is left out: a part of a GPU (MIG) and a container have few.

    `util` in percent, `mem_gb`, `power_w`, `temp_c`, the SM clock `sm` in MHz, `slowed` (1 while heat or the power
    limit lowers the clocks, else 0), and the traffic over PCIe in MB per second.

    Raises:
        pynvml.NVMLError: NVML refuses all of them.
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
    answers: dict[str, float] = {}
    for name, query in queries.items():
        try:
            answers[name] = query()
        except pynvml.NVMLError as error:
            refusal = error
    if not answers:
        raise refusal
    return answers


def watched_gpus(replica: nn.Module, world: World) -> list[str]:
    """The UUIDs, as NVML spells them, of the GPUs that the ranks of this machine use, by local rank. Collective.

    Each rank reports its own, because other GPUs may be invisible to a process. `torch.nn.DataParallel` uses several.
    """
    numbers: Iterable[int] = ()
    if world.device.type == "cuda":
        numbers = replica.device_ids if isinstance(replica, nn.DataParallel) else [world.device.index]
    uuids = world.gather([name_in_nvml(number) for number in numbers])
    return list(itertools.chain.from_iterable(uuids[rank] for rank in sorted({world.rank, *world.local_peer_pids})))


def read_samples(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """The steps in a `gpu.jsonl`, if there is one, with the figures of a GPU by tag."""
    for line in read_lines(path) if path.exists() else ():
        with suppress(ValueError, RecursionError):
            yield _parsed(line or "")


def _parsed(line: str) -> tuple[int, dict[str, Any]]:
    """The step and the figures of a line of `gpu.jsonl`.

    Raises:
        ValueError, RecursionError: it is not one of ours.
    """
    match parsed_json(line):
        case {"time": _, "step": int(step), "local_rank": rank, "uuid": _, **figures}:
            return step, {f"gpu/{name}/{rank}": value for name, value in figures.items() if is_number(value)}
    raise ValueError("not a line of GPU figures")
