"""Hydra's callbacks around the jobs of a sweep: the choice of its folder, and its report."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lockstep.config.commands import program_name
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.launched import is_launched, started_by
from lockstep.runtime import program
from lockstep.sweep import array
from lockstep.sweep.ledger import Ledger
from lockstep.sweep.line import choose_folder


def _refuse_as_rank() -> None:
    """Exit if this process is a launched rank, because each rank would run the whole sweep."""
    if not is_launched():
        return
    from lockstep.launcher import create_on_main  # imported late: it needs torch, and --help must be fast

    def refuse() -> NoReturn:
        raise InputError(
            f"{started_by().label} would run the whole sweep in each rank; type {program_name()} -m ... instead"
        )

    with create_on_main(refuse, program.say):
        raise AssertionError("a refusal ends every rank")


def _remove_folders(folder: Path, new_folders: list[Path]) -> None:
    """Remove the `new_folders` of a sweep that was refused before its first job."""
    if any((folder / "jobs").glob("*.json")):
        return
    with contextlib.suppress(OSError):  # a folder is missing, or not empty: there is another sweep
        for name in ("multirun.yaml", "sweep.json", "optuna.log"):
            (folder / name).unlink(missing_ok=True)
        for new_folder in (folder / "jobs", *new_folders):
            new_folder.rmdir()


class Report(Callback):
    """Hydra's callbacks around a sweep."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        # A caller may start a sweep while it handles an error.
        self.handled, self.began = sys.exc_info()[1], time.monotonic()
        _refuse_as_rank()
        folder = Path(config.hydra.sweep.dir).absolute()
        new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        atexit.register(_remove_folders, folder, new_folders)
        with program.bypass_hydra_errors():  # Hydra would only warn of an error in a callback
            choose_folder(config)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if sys.exc_info()[1] is not self.handled:  # the sweep ends with an error, which decides the exit code
            return
        folder = Path(config.hydra.sweep.dir)
        if array.WAITING:
            with program.bypass_hydra_errors():
                array.submit_all(folder)
        from lockstep.sweep.page import write_sweep_report  # imported late: they need numpy, and --help must be fast
        from lockstep.telemetry.report import is_due

        if Ledger(folder).records() and is_due(config.telemetry.report, time.monotonic() - self.began):
            with program.bypass_hydra_errors():
                log.show(f"report: {write_sweep_report(Ledger(folder))}")
