"""Samples the machine once a second while a run trains: its GPUs, the processes of its ranks, and their energy."""

import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import psutil
import pynvml

from lockstep.core import log
from lockstep.core.errors import StorageError
from lockstep.core.log import close_all
from lockstep.core.observer import Observer
from lockstep.telemetry.gpu import Gpus

PERIOD_S = 1.0
# The longest wait for the last sample: a driver that does not answer must not keep a run from ending.
LAST_SAMPLE_S = 5.0
# The counters of the processor's energy, one for each socket, which many systems show to root only.
RAPL = Path("/sys/class/powercap")
SOCKET = re.compile(r"intel-rapl:\d+$")


class Usage(NamedTuple):
    """What processes have used so far: seconds of processor time, and bytes read from disks and written to them."""

    seconds: float
    read: float
    written: float


class Processes:
    """The processes of the ranks on this machine, and the energy of its processors (`counters`, in microjoules)."""

    def __init__(self, numbers: Iterable[int], counters: Iterable[Path] | None = None) -> None:
        self.processes = [psutil.Process(number) for number in numbers]
        paths = _energy_counters() if counters is None else counters
        self.counters = {path: joules for path in paths if (joules := _joules(path)) is not None}
        self.joules: float | None = 0.0 if self.counters else None
        self.looked, self.usage = time.monotonic(), self._usage()

    def sample(self, step: int) -> dict[str, float]:
        """The figures since the last sample, by tag: cores in use, GB of memory, MB/s read and written, watts."""
        before, self.looked = self.looked, time.monotonic()
        passed = max(self.looked - before, 1e-6)
        used, self.usage = self.usage, self._usage()
        figures = {
            "cpu/cores": (self.usage.seconds - used.seconds) / passed,
            "cpu/mem_gb": sum(process.memory_info().rss for process in self.processes) / 1e9,
            "cpu/read_mb_s": (self.usage.read - used.read) / passed / 1e6,
            "cpu/write_mb_s": (self.usage.written - used.written) / passed / 1e6,
        }
        if self.joules is not None:
            spent = 0.0
            for path, last in self.counters.items():
                now = _joules(path)
                if now is not None:
                    spent += max(0.0, now - last)  # a counter that starts again at zero loses one sample
                    self.counters[path] = now
            self.joules += spent
            figures["cpu/power_w"] = spent / passed
        return figures

    def _usage(self) -> Usage:
        seconds = read = written = 0.0
        for process in self.processes:
            times = process.cpu_times()
            seconds += times.user + times.system
            if hasattr(process, "io_counters"):  # not on macOS
                counters = process.io_counters()
                read, written = read + counters.read_bytes, written + counters.write_bytes
        return Usage(seconds, read, written)

    def close(self) -> None:
        """Nothing is open."""


class Monitor:
    """A thread of main that samples the hardware. A part of it that fails is left out from then on.

    The `observer` gets the samples. `step` returns the last finished step, and `sampled` is called after each sample.
    """

    def __init__(
        self,
        *,
        parts: list[Gpus | Processes],
        observer: Observer,
        step: Callable[[], int],
        sampled: Callable[[], None] = lambda: None,
        period: float = PERIOD_S,
    ) -> None:
        self.parts, self.observer, self.step, self.sampled, self.period = parts, observer, step, sampled, period
        self.sampling = list(parts)
        self.done = threading.Event()
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self.most_memory: dict[str, float] = {}
        self.written = step()  # the last step of a sample for the observer, which gets at most one sample per step
        self.thread = threading.Thread(target=self._watch, name="hardware", daemon=True)

    @property
    def joules(self) -> float | None:
        """The energy of all parts so far; None if no part tells its own."""
        told = [part.joules for part in self.parts if part.joules is not None]
        return sum(told) if told else None

    def start(self) -> None:
        self.thread.start()

    def _watch(self) -> None:
        while self.sampling and not self.done.wait(self.period):
            self._sample()
            self.sampled()

    def _sample(self) -> None:
        scalars: dict[str, float] = {}
        step = self.step()
        for part in list(self.sampling):
            try:
                scalars |= part.sample(step)
            except pynvml.NVMLError as error:
                log.warn(f"NVML stopped answering ({error}); GPU figures end here")
                self.sampling.remove(part)
            except psutil.Error as error:  # a rank has ended
                log.logger.info("the processes of the ranks are no longer sampled: %s", error)
                self.sampling.remove(part)
            except OSError as error:
                log.warn(f"{getattr(part, 'path', RAPL)} fails ({error}); its figures end here")
                self.sampling.remove(part)
        for tag, value in scalars.items():
            name = "_".join(tag.split("/")[:2])  # the mean is over the GPUs too
            self.sums[name] += value
            self.counts[name] += 1
            if name.endswith("mem_gb"):
                self.most_memory[name] = max(value, self.most_memory.get(name, 0.0))
        if scalars and step > self.written:
            self.written = step
            self.observer.write_gpu(step, scalars)

    def close(self) -> dict[str, float]:
        """Stop sampling; returns the figures of the run, as `gpu_util` or `cpu_cores`.

        They are means over the run and the GPUs; of memory, the largest sample of a GPU, or of all ranks on a CPU.
        """
        self.done.set()
        if self.thread.is_alive():
            self.thread.join(LAST_SAMPLE_S)
            if self.thread.is_alive():
                log.warn("NVML does not answer; the last figures of the GPUs are missing")
                return self._figures()
        with close_all(*(part.close for part in self.parts)):
            return self._figures()

    def _figures(self) -> dict[str, float]:
        means = {name: self.sums[name] / count for name, count in dict(self.counts).items()}
        return means | self.most_memory


def parts_of(*, gpus: list[str], path: Path, processes: Iterable[int]) -> list[Gpus | Processes]:
    """What a monitor samples: the GPUs with these UUIDs, if NVML knows them, and the processes with these numbers."""
    parts: list[Gpus | Processes] = []
    try:
        parts.append(Processes(processes))
    except psutil.Error as error:  # a rank of a run that has little left to do ends before main gets here
        log.logger.info("the processes of the ranks are not sampled: %s", error)
    if not gpus:
        return parts
    try:
        return [Gpus(gpus, path), *parts]
    except pynvml.NVMLError as error:
        log.warn(f"NVML is not available ({error}); the run goes on without GPU figures")
    except StorageError as error:
        log.warn(f"{error}; the run goes on without GPU figures")
    return parts


def _energy_counters() -> list[Path]:
    listed = sorted(RAPL.iterdir()) if RAPL.is_dir() else []
    return [folder / "energy_uj" for folder in listed if SOCKET.match(folder.name)]


def _joules(counter: Path) -> float | None:
    """The joules that a counter shows; None if it cannot be read."""
    try:
        return int(counter.read_text()) / 1e6
    except (OSError, ValueError):
        return None
