"""Samples the GPUs once a second through NVML, for `gpu.jsonl` and the `gpu/*` tags.

GPUs are found by UUID, because NVML numbers all GPUs of a machine, and CUDA only the visible ones.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pynvml
import torch
from torch import nn

from lockstep.core import log
from lockstep.core.errors import StorageError
from lockstep.core.observer import Observer
from lockstep.core.safe_read import parsed_json
from lockstep.core.world import World
from lockstep.telemetry.sinks import truncate_after

PERIOD_S = 1.0


class NoMonitor:
    """Monitors nothing: there is no NVML, or no GPU."""

    def start(self) -> None:
        """Nothing to start."""

    def close(self) -> dict[str, float]:
        return {}


class Monitor(NoMonitor):
    """A thread of main that samples the GPUs that the job uses on this machine.

    Args:
        uuids: the UUIDs of the GPUs, by local rank, as NVML spells them (`GPU-...`).
        path: the path of `gpu.jsonl`.
        observer: receives the samples.
        step: returns the last finished step.
        period: seconds between two samples.
    """

    def __init__(
        self,
        *,
        uuids: list[str],
        path: Path,
        observer: Observer,
        step: Callable[[], int],
        period: float = PERIOD_S,
    ) -> None:
        pynvml.nvmlInit()
        self.handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        self.uuids, self.observer, self.step, self.period = uuids, observer, step, period
        self.path = path
        self.file, _ = truncate_after(path, 0, _step_zero)
        self.done = threading.Event()
        self.sums: dict[str, float] = {}
        self.samples = 0
        self.written = step()  # the last step of a sample for the observer, which gets at most one sample per step
        self.thread = threading.Thread(target=self._watch, name="gpu", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def _watch(self) -> None:
        while not self.done.wait(self.period):
            try:
                self._sample()
            except pynvml.NVMLError as error:
                log.warn(f"NVML stopped answering ({error}); GPU figures end here")
                return
            except OSError as error:
                log.warn(f"{self.path} cannot be written ({error}); GPU figures end here")
                return

    def _sample(self) -> None:
        now, step = round(time.time(), 3), self.step()
        scalars: dict[str, float] = {}
        # Sample all GPUs first: if one stops answering, the sums must not get half a sample.
        samples = [sample(handle) for handle in self.handles]
        self.samples += 1
        for rank, (uuid, figures) in enumerate(zip(self.uuids, samples, strict=True)):
            scalars |= {f"gpu/{name}/{rank}": value for name, value in figures.items()}
            for name, value in figures.items():
                self.sums[name] = self.sums.get(name, 0.0) + value / len(samples)
            self.file.write(
                json.dumps({"time": now, "step": step, "local_rank": rank, "uuid": uuid, **figures}) + "\n"
            )
        if step > self.written:
            self.written = step
            self.observer.write_gpu(step, scalars)

    def close(self) -> dict[str, float]:
        """Stop sampling; returns the mean of each figure over the run and the GPUs."""
        self.done.set()
        if self.thread.is_alive():
            self.thread.join()
        self.file.close()
        pynvml.nvmlShutdown()
        return {name: value / self.samples for name, value in self.sums.items()}


def sample(handle: Any) -> dict[str, float]:
    """A sample of one GPU: `util` in percent, `mem_gb`, `power_w`, `temp_c`, and the SM clock `sm` in MHz."""
    return {
        "util": float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "mem_gb": pynvml.nvmlDeviceGetMemoryInfo(handle).used / 1e9,
        "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temp_c": float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        "sm": float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
    }


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


def monitor(*, enabled: bool, gpus: list[str], path: Path, observer: Observer, step: Callable[[], int]) -> NoMonitor:
    """The monitor of the GPUs with these UUIDs; without NVML it warns once and monitors nothing."""
    if not enabled:
        return NoMonitor()
    if not gpus:
        log.logger.info("no GPU is used, so none is watched")
        return NoMonitor()
    try:
        return Monitor(uuids=gpus, path=path, observer=observer, step=step)
    except pynvml.NVMLError as error:
        log.warn(f"NVML is not available ({error}); the run goes on without GPU figures")
        return NoMonitor()
    except StorageError as error:
        log.warn(f"{error}; the run goes on without GPU figures")
        return NoMonitor()


def _step_zero(line: str) -> int:
    """0 for every line of GPU figures, so that a resume keeps it: `gpu.jsonl` goes by time, not by steps.

    Raises ValueError for any other line.
    """
    match parsed_json(line):
        case {"time": _, "step": _, "local_rank": _, "uuid": _}:
            return 0
    raise ValueError("not a line of GPU figures")
