"""What is sampled of a machine while a run trains: its GPUs by NVML, the processes of its ranks, and their energy.

GPUs are found by UUID, because NVML numbers all GPUs of a machine, and CUDA only the visible ones. Where they are cut
into instances (MIG), the instances have UUIDs.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pynvml
from torch import nn

from lockstep.core import log
from lockstep.core.errors import StorageError
from lockstep.core.figures import parsed_samples
from lockstep.core.tags import CPU, GPU
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
# NVML's utilisation is the time in which anything ran at all. GPM (GPU performance monitoring) counts what the SMs of
# Hopper and later GPUs do: how much of the GPU it used.
ACTIVE = {
    "sm_active": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "tensor_active": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "memory_active": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
}
# The counters of the energy of each processor, in microjoules. Many systems show them to root only.
RAPL, SOCKETS = Path("/sys/class/powercap"), "intel-rapl:[0-9]/energy_uj"


class Gpu:
    """A GPU, by its UUID. A figure that NVML refuses is omitted: a part of a GPU (MIG) and a container have few."""

    def __init__(self, uuid: str) -> None:
        self.uuid, self.handle = uuid, pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self.gpm: list[Any] = []  # the last sample, and the memory for the next
        with suppress(pynvml.NVMLError):  # an old driver, a part of a GPU (MIG), or counters that only root may read
            if pynvml.nvmlGpmQueryDeviceSupport(self.handle).isSupportedDevice:
                samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
                pynvml.nvmlGpmSampleGet(self.handle, samples[0])
                self.gpm = samples

    def sample(self) -> dict[str, float]:
        """The figures now, and `ACTIVE` since the last sample.

        `util` in percent, `mem_gb`, `power_w`, `temp_c`, the SM clock `sm` in MHz, and `slowed` (1 while heat or the
        power limit lowers the clocks, else 0).

        Raises:
            pynvml.NVMLError: NVML refuses everything but `ACTIVE`.
        """
        gpu = self.handle
        queries: dict[str, Callable[[], float]] = {
            "util": lambda: float(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
            "mem_gb": lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / 1e9,
            "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "temp_c": lambda: float(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
            "sm": lambda: float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
            "slowed": lambda: float(bool(pynvml.nvmlDeviceGetCurrentClocksEventReasons(gpu) & SLOWED_DOWN)),
        }
        figures: dict[str, float] = {}
        for name, query in queries.items():
            try:
                figures[name] = query()
            except pynvml.NVMLError as error:
                refusal = error
        if not figures:
            raise refusal
        with suppress(pynvml.NVMLError):
            figures |= self._active() if self.gpm else {}
        return figures

    def _active(self) -> dict[str, float]:
        request = pynvml.c_nvmlGpmMetricsGet_t(
            version=pynvml.NVML_GPM_METRICS_GET_VERSION,
            numMetrics=len(ACTIVE),
            sample1=self.gpm[0],
            sample2=self.gpm[1],
        )
        for metric, number in zip(request.metrics, ACTIVE.values(), strict=False):
            metric.metricId = number
        pynvml.nvmlGpmSampleGet(self.handle, self.gpm[1])
        pynvml.nvmlGpmMetricsGet(request)
        self.gpm.reverse()
        answers = zip(ACTIVE, request.metrics, strict=False)
        return {name: answer.value for name, answer in answers if answer.nvmlReturn == pynvml.NVML_SUCCESS}


class Gpus:
    """The GPUs of a job on this machine, by local rank, and the file of their figures.

    Raises:
        pynvml.NVMLError: NVML is not there, or does not know a GPU with one of these UUIDs.
    """

    def __init__(self, uuids: list[str], path: Path) -> None:
        pynvml.nvmlInit()
        self.gpus, self.path = [Gpu(uuid) for uuid in uuids], path
        # Every line stays on a resume: `gpu.jsonl` goes by time, not by steps.
        self.file = truncate_after(path, math.inf, lambda line: parsed_samples(line)[0])
        self.joules_before = self._joules()
        self.joules = None if self.joules_before is None else 0.0

    def sample(self, step: int) -> dict[str, float]:
        """The figures of all GPUs by tag. Writes a line for each GPU."""
        now = round(time.time(), 3)
        samples = [gpu.sample() for gpu in self.gpus]  # all first: if one stops answering, none is written
        if self.joules_before is not None and (joules := self._joules()) is not None:
            self.joules = joules - self.joules_before
        for rank, (gpu, figures) in enumerate(zip(self.gpus, samples, strict=True)):
            line = {"time": now, "step": step, "local_rank": rank, "uuid": gpu.uuid, **figures}
            self.file.write(json.dumps(line) + "\n")
        return {
            f"{GPU}{name}/{rank}": value for rank, figures in enumerate(samples) for name, value in figures.items()
        }

    def _joules(self) -> float | None:
        """What the GPUs have used since their driver was loaded; None if one of them does not count it."""
        try:
            return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu.handle) for gpu in self.gpus) / 1000
        except pynvml.NVMLError:
            return None

    def close(self) -> None:
        self.file.close()
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


class Processes:
    """The processes of the ranks on this machine, and the energy of its processors (`counters`, in microjoules)."""

    def __init__(self, numbers: Iterable[int], counters: Sequence[Path] | None = None) -> None:
        self.processes = [psutil.Process(number) for number in numbers]
        self.counters = [*RAPL.glob(SOCKETS)] if counters is None else counters
        try:
            self.counted = self._counted()
        except OSError:
            self.counters, self.counted = [], 0.0
        self.joules = 0.0 if self.counters else None
        self.looked, self.usage = time.monotonic(), self._usage()

    def sample(self, step: int) -> dict[str, float]:
        """The figures since the last sample, by tag: cores in use, GB of memory, MB/s read and written, watts."""
        before, self.looked = self.looked, time.monotonic()
        passed = max(self.looked - before, 1e-6)
        usage, self.usage = self.usage, self._usage()
        seconds, read, written = ((now - last) / passed for now, last in zip(self.usage, usage, strict=True))
        figures = {
            "cores": seconds,
            "mem_gb": sum(process.memory_info().rss for process in self.processes) / 1e9,
            "read_mb_s": read / 1e6,
            "write_mb_s": written / 1e6,
        }
        if self.joules is not None:
            counted, self.counted = self.counted, self._counted()
            spent = max(0.0, self.counted - counted)  # a counter that starts again at zero loses one sample
            self.joules += spent
            figures["power_w"] = spent / passed
        return {CPU + name: value for name, value in figures.items()}

    def _counted(self) -> float:
        return sum(int(counter.read_text()) for counter in self.counters) / 1e6

    def _usage(self) -> tuple[float, float, float]:
        """Seconds of processor time, and bytes read from disks and written to them, so far."""
        seconds = read = written = 0.0
        for process in self.processes:
            times = process.cpu_times()
            seconds += times.user + times.system
            if hasattr(process, "io_counters"):  # not on macOS
                counters = process.io_counters()
                read, written = read + counters.read_bytes, written + counters.write_bytes
        return seconds, read, written


def parts_of(*, gpus: list[str], path: Path, processes: Iterable[int]) -> list[Gpus | Processes]:
    """What a watch samples: the GPUs with these UUIDs, if NVML knows them, and the processes with these numbers."""
    parts: list[Gpus | Processes] = []
    try:
        parts.append(Processes(processes))
    except psutil.Error as error:  # a rank of a run that has little left to do ends before main gets here
        log.logger.info("the processes of the ranks are not sampled: %s", error)
    if gpus:
        try:
            parts.insert(0, Gpus(gpus, path))
        except pynvml.NVMLError as error:
            log.warn(f"NVML is not available ({error}); the run continues without GPU figures")
        except StorageError as error:
            log.warn(f"{error}; the run continues without GPU figures")
    return parts


def watched_gpus(replica: nn.Module, world: World) -> list[str]:
    """The UUIDs, as NVML spells them, of the GPUs that the ranks of this machine use, by local rank. Collective.

    Each rank reports its own, because other GPUs may be invisible to a process. `torch.nn.DataParallel` uses several.
    """
    numbers: Iterable[int] = ()
    if world.device.type == "cuda":
        numbers = replica.device_ids if isinstance(replica, nn.DataParallel) else [world.device.index]
    uuids = world.gather([name_in_nvml(number) for number in numbers])
    return list(itertools.chain.from_iterable(uuids[rank] for rank in sorted({world.rank, *world.local_peer_pids})))
