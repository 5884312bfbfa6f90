"""What a run has cost over all its parts, in hours, energy and money, and the budget that ends it."""

import time
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.schema import BudgetBlock
from lockstep.core.errors import InputError
from lockstep.core.observer import Observer, Outcome
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import is_number
from lockstep.runtime.signals import StopRequest
from lockstep.telemetry.hardware import Monitor

JOULES_PER_KWH = 3.6e6
DIGITS = 9  # of what is written: small runs cost little


@dataclass(kw_only=True)
class Spending(Observer):
    """Adds up what a run costs, writes it at each checkpoint, and stops the run when its budget is used up.

    What is lost in a kill, the time since the last checkpoint, is not counted.

    Fields:
        run_dir: the folder of the run, whose summary has what earlier parts have cost.
        gpus: the GPUs of the job, on all machines.
        batch: the images of a step, over all ranks.
        usd_per_gpu_hour: the price of a GPU; None if it is not known.
        monitor: counts the energy of this machine, which is the only one of the job, or else counts nothing.
    """

    run_dir: RunDir
    gpus: int
    batch: int
    usd_per_gpu_hour: float | None
    budget: BudgetBlock
    monitor: Monitor
    counts_energy: bool
    stop: StopRequest

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        before = self.run_dir.spent()
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
        spent = self.so_far()
        if "kwh" in spent and self.monitor.step():
            spent["joules_per_image"] = JOULES_PER_KWH * spent["kwh"] / (self.monitor.step() * self.batch)
        self.run_dir.write_summary(spent=spent)

    def saved(self, step: int, checkpoint: Path) -> None:
        self._write()

    def end(self, outcome: Outcome) -> None:
        self._write()
