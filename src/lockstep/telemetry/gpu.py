"""The figures of the GPUs that a job uses, from NVML.

GPUs are found by UUID, because NVML numbers all GPUs of a machine, and CUDA only the visible ones. Where they are cut
into instances (MIG), the instances have UUIDs.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pynvml
from torch import nn

from lockstep.core.figures import parsed_samples
from lockstep.core.world import World
from lockstep.runtime.gpus import name_in_nvml
from lockstep.telemetry.sinks import truncate_after

# Reasons for which the hardware itself lowers the clocks: too hot, or too little power.
SLOWED_DOWN = (
    pynvml.nvmlClocksEventReasonSwPowerCap
    | pynvml.nvmlClocksEventReasonHwSlowdown
    | pynvml.nvmlClocksEventReasonSwThermalSlowdown
)
# The share of the time, in percent, in which an SM had work, tensor cores were at work, and memory was transferred.
ACTIVE = {
    "sm_active": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "tensor_active": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "memory_active": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}
# Counters in KiB, over all links of a GPU if the scope is this one.
LINKS = {
    "nvlink_in_mb_s": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    "nvlink_out_mb_s": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
}
ALL_LINKS = 2**32 - 1


class Counters:
    """The counters of a GPU: their difference between two samples is a figure. Those that it lacks are left out.

    NVML's utilisation is the time in which anything ran at all. GPM (GPU performance monitoring) counts what the SMs
    of Hopper and later GPUs do: how much of the GPU it used.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.looked, self.links = time.monotonic(), self._links()
        self.samples: list[Any] = []  # of GPM: the last one, and the memory for the next
        try:
            if pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                for _ in range(2):
                    self.samples.append(pynvml.nvmlGpmSampleAlloc())
                pynvml.nvmlGpmSampleGet(handle, self.samples[0])
        except pynvml.NVMLError:  # an old driver, a part of a GPU (MIG), or counters that only root may read
            self.close()

    def sample(self) -> dict[str, float]:
        """The figures since the last sample: percent, and MB per second."""
        before, self.looked = self.looked, time.monotonic()
        last, self.links = self.links, self._links()
        passed = max(self.looked - before, 1e-6)
        figures = {name: (self.links[name] - last[name]) * 1024 / 1e6 / passed for name in last if name in self.links}
        return figures | self._active()

    def close(self) -> None:
        while self.samples:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(self.samples.pop())

    def _links(self) -> dict[str, int]:
        """What went over NVLink so far, in KiB. A GPU without links has no such counter."""
        try:
            values = pynvml.nvmlDeviceGetFieldValues(self.handle, [(field, ALL_LINKS) for field in LINKS.values()])
        except pynvml.NVMLError:
            return {}
        pairs = zip(LINKS, values, strict=True)
        return {name: value.value.ullVal for name, value in pairs if value.nvmlReturn == pynvml.NVML_SUCCESS}

    def _active(self) -> dict[str, float]:
        if not self.samples:
            return {}
        request = pynvml.c_nvmlGpmMetricsGet_t(
            version=pynvml.NVML_GPM_METRICS_GET_VERSION,
            numMetrics=len(ACTIVE),
            sample1=self.samples[0],
            sample2=self.samples[1],
        )
        for metric, number in zip(request.metrics, ACTIVE.values(), strict=False):
            metric.metricId = number
        try:
            pynvml.nvmlGpmSampleGet(self.handle, self.samples[1])
            pynvml.nvmlGpmMetricsGet(request)
        except pynvml.NVMLError:
            self.close()
            return {}
        self.samples.reverse()
        answers = zip(ACTIVE, request.metrics, strict=False)
        return {name: answer.value for name, answer in answers if answer.nvmlReturn == pynvml.NVML_SUCCESS}


class Gpus:
    """The GPUs of a job on this machine, and the file of their figures.

    Args:
        uuids: the UUIDs of the GPUs, by local rank, as NVML spells them (`GPU-...`, `MIG-...`).

    Raises:
        pynvml.NVMLError: NVML is not there, or does not know one of them.
    """

    def __init__(self, uuids: list[str], path: Path) -> None:
        pynvml.nvmlInit()
        self.handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        self.uuids, self.path = uuids, path
        # Every line stays on a resume: `gpu.jsonl` goes by time, not by steps.
        self.file, _ = truncate_after(path, math.inf, lambda line: parsed_samples(line)[0])
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
