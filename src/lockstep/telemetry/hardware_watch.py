"""Samples the hardware once a second while a run trains, and adds up what the run costs, up to its budget."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pynvml

from lockstep.config.schema import BudgetBlock
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.log import close_all
from lockstep.core.observer import Observer, Outcome
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import is_number
from lockstep.runtime.signals import StopRequest
from lockstep.telemetry.hardware import Gpus, Processes

PERIOD_S = 1.0  # between two samples
# The longest wait for the last sample: a driver that does not answer must not keep a run from ending.
LAST_SAMPLE_S = 5.0
WRITE_EVERY_S = 30.0  # what a run has cost so far
JOULES_PER_KWH = 3.6e6
DIGITS = 9  # of what is written: small runs cost little


class HardwareWatch(threading.Thread):
    """A thread of main that samples the hardware. A part of it that fails is no longer sampled.

    The `observer` gets the samples. `step` returns the last finished step, and `sampled` is called after each sample.
    """

    period = PERIOD_S

    def __init__(self, parts: list[Gpus | Processes], observer: Observer, step: Callable[[], int]) -> None:
        super().__init__(name="hardware", daemon=True)
        self.parts, self.observer, self.step = parts, observer, step
        self.sampled: Callable[[], None] = lambda: None
        self.sampling = list(parts)
        self.done = threading.Event()
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self.most_memory: dict[str, float] = {}
        self.written = step()  # the last step of a sample for the observer, which gets at most one sample per step

    @property
    def joules(self) -> float | None:
        """The energy of all parts so far; None if no part tells its own."""
        told = [part.joules for part in self.parts if part.joules is not None]
        return sum(told) if told else None

    def run(self) -> None:
        while self.sampling and not self.done.wait(self.period):
            self._sample()
            self.sampled()

    def _sample(self) -> None:
        scalars: dict[str, float] = {}
        step = self.step()
        for part in list(self.sampling):
            try:
                scalars |= part.sample(step)
            except psutil.Error as error:  # a rank has ended
                log.logger.info("the processes of the ranks are no longer sampled: %s", error)
                self.sampling.remove(part)
            except (pynvml.NVMLError, OSError) as error:
                log.warn(f"the hardware stopped answering ({error}); its figures end here")
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
        if self.is_alive():
            self.join(LAST_SAMPLE_S)
            if self.is_alive():
                log.warn("NVML does not answer; the last figures of the GPUs are missing")
                return self._figures()
        with close_all(*(part.close for part in self.parts if isinstance(part, Gpus))):
            return self._figures()

    def _figures(self) -> dict[str, float]:
        means = {name: self.sums[name] / count for name, count in dict(self.counts).items()}
        return means | self.most_memory


def rates(spent: Mapping[str, float]) -> dict[str, float]:
    """Images per second, and percent of the time waiting for data, over all sessions."""
    seconds = max(spent["training_seconds"], 1e-9)
    return {"img_per_s": spent["images"] / seconds, "data_wait_pct": 100 * spent["waiting_seconds"] / seconds}


@dataclass(kw_only=True)
class Spending(Observer):
    """Adds up what a run costs, and stops the run when its budget is used up.

    Written at each checkpoint, at the end, and at the first log point after `WRITE_EVERY_S`. A killed session counts
    up to the last of these, with the steps after its last checkpoint, which the next session takes again.

    Fields:
        run_dir: the folder of the run; its summary has the cost of earlier sessions.
        gpus: the GPUs of the job, on all machines.
        watch: counts the energy of this machine, which is the only one of the job, or else counts nothing.
        trained: what this session has trained so far, for `rates`.
    """

    run_dir: RunDir
    gpus: int
    usd_per_gpu_hour: float | None
    budget: BudgetBlock
    watch: HardwareWatch
    counts_energy: bool
    stop: StopRequest
    trained: Callable[[], Mapping[str, float]] = dict

    def __post_init__(self) -> None:
        self.began = self.written = time.monotonic()
        before = Run(self.run_dir.path).spent
        self.before = {name: float(value) for name, value in before.items() if is_number(value)}
        if self.budget.kwh is not None and self._kwh() is None:
            raise InputError(
                f"budget.kwh is {self.budget.kwh:g}, but this machine does not tell its energy (neither NVML nor "
                "the counters of the processor); use budget.hours"
            )

    def _kwh(self) -> float | None:
        joules = self.watch.joules if self.counts_energy else None
        return None if joules is None else joules / JOULES_PER_KWH

    def so_far(self) -> dict[str, float]:
        """`hours`, `gpu_hours`, and where available `kwh` and `usd`."""
        hours = (time.monotonic() - self.began) / 3600
        spent: dict[str, float | None] = {"hours": hours, "gpu_hours": hours * self.gpus, "kwh": self._kwh()}
        if self.usd_per_gpu_hour is not None:
            spent["usd"] = hours * self.gpus * self.usd_per_gpu_hour
        return {
            name: round(value + self.before.get(name, 0.0), DIGITS)
            for name, value in spent.items()
            if value is not None
        }

    def check(self) -> None:
        """Ask for a stop if the budget is used up and there is a state to save."""
        spent = self.so_far()
        for name, most in vars(self.budget).items():
            if most is not None and spent[name] >= most and self.stop.begun:
                self.stop.ask(
                    f"budget.{name}={most:g} is used up ({spent[name]:.4g}); a larger one lets the run continue"
                )

    def _write(self) -> None:
        self.written = time.monotonic()
        spent = self.so_far()
        spent |= {name: round(value + self.before.get(name, 0.0), 3) for name, value in self.trained().items()}
        self.run_dir.write_summary(spent=spent, seconds=round(3600 * spent["hours"], 3))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if time.monotonic() - self.written >= WRITE_EVERY_S:
            self._write()

    def saved(self, step: int, checkpoint: Path) -> None:
        self._write()

    def end(self, outcome: Outcome) -> None:
        self._write()
