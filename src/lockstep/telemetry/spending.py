"""What a run has cost over all its sessions, in hours, energy and money, and the budget that ends it."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.schema import BudgetBlock
from lockstep.core.errors import InputError
from lockstep.core.observer import Observer, Outcome
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import is_number
from lockstep.runtime.signals import StopRequest
from lockstep.telemetry.hardware import Monitor

JOULES_PER_KWH = 3.6e6
DIGITS = 9  # of what is written: small runs cost little
PERIOD_S = 30.0


def rates(spent: Mapping[str, float]) -> dict[str, float]:
    """Images per second, and percent of the time waiting for data, over all sessions."""
    seconds = max(spent["training_seconds"], 1e-9)
    return {"img_per_s": spent["images"] / seconds, "data_wait_pct": 100 * spent["waiting_seconds"] / seconds}


@dataclass(kw_only=True)
class Spending(Observer):
    """Adds up what a run costs, and stops the run when its budget is used up.

    Written at each checkpoint, at the end, and at the first log point after `PERIOD_S`. A killed session counts up to
    the last of these, with the steps after its last checkpoint, which the next session takes again.

    Fields:
        run_dir: the folder of the run, whose summary has what earlier sessions have cost.
        gpus: the GPUs of the job, on all machines.
        batch: the images of a step, over all ranks.
        usd_per_gpu_hour: the price of a GPU; None if it is not known.
        monitor: counts the energy of this machine, which is the only one of the job, or else counts nothing.
        trained: what this session has trained so far, for `rates`.
    """

    run_dir: RunDir
    gpus: int
    batch: int
    usd_per_gpu_hour: float | None
    budget: BudgetBlock
    monitor: Monitor
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
        joules = self.monitor.joules if self.counts_energy else None
        return None if joules is None else joules / JOULES_PER_KWH

    def so_far(self) -> dict[str, float]:
        """`hours`, `gpu_hours`, and as far as they are known `kwh` and `usd`."""
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
                    f"budget.{name}={most:g} is used up ({spent[name]:.4g}); a larger one lets the run go on"
                )

    def _write(self) -> None:
        self.written = time.monotonic()
        spent = self.so_far()
        spent |= {name: round(value + self.before.get(name, 0.0), 3) for name, value in self.trained().items()}
        if "kwh" in spent and self.monitor.step():
            spent["joules_per_image"] = JOULES_PER_KWH * spent["kwh"] / (self.monitor.step() * self.batch)
        self.run_dir.write_summary(spent=spent, seconds=round(3600 * spent["hours"], 3))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        if time.monotonic() - self.written >= PERIOD_S:
            self._write()

    def saved(self, step: int, checkpoint: Path) -> None:
        self._write()

    def end(self, outcome: Outcome) -> None:
        self._write()
