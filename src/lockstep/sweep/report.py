"""Hydra's callbacks around the jobs of a sweep: a check before the jobs, and a table after them."""

from __future__ import annotations

import atexit
import contextlib
import sys
from pathlib import Path
from typing import Any, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lockstep.config.program_words import program_name
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.launched import is_launched, started_by
from lockstep.core.safe_read import parsed_json, read_lines
from lockstep.runtime import program
from lockstep.sweep import array
from lockstep.sweep.jobs import LEDGER, Outcome


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
    """Remove the `new_folders` of a sweep that was refused before its first job. Hydra has written a config there."""
    if folder.is_dir() and [file.name for file in folder.iterdir()] == ["multirun.yaml"]:
        (folder / "multirun.yaml").unlink()
        with contextlib.suppress(OSError):  # a folder is not empty: it has another sweep
            for new_folder in new_folders:
                new_folder.rmdir()


def _ledger(folder: Path) -> list[str]:
    """The lines that jobs have written to the ledger in a sweep's folder so far."""
    ledger = folder / LEDGER
    return [line for line in read_lines(ledger) if line] if ledger.is_file() else []


class Report(Callback):
    """Hydra's callbacks around a sweep: the table of its jobs, and the exit code of the first failed job."""

    earlier_lines = 0

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        _refuse_as_rank()
        # Hydra creates the folder before it composes the jobs, and has no callback for a mistake in a job's config.
        folder = Path(config.hydra.sweep.dir).absolute()
        self.earlier_lines = len(_ledger(folder))  # lines of an earlier sweep in this folder
        atexit.register(_remove_folders, folder, [path for path in (folder, *folder.parents) if not path.exists()])

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from rich.table import Table

        folder = Path(config.hydra.sweep.dir)
        if array.WAITING:
            with program.bypass_hydra_errors():
                array.submit_all(folder.absolute())
        outcomes = [Outcome(**parsed_json(line)) for line in _ledger(folder)[self.earlier_lines :]]
        if not outcomes:
            return
        table = Table("job", "overrides", "top-1 %", "ended")
        failed = [outcome for outcome in outcomes if outcome.exit_code]
        for outcome in outcomes:
            table.add_row(
                str(outcome.number),
                " ".join(outcome.overrides),
                "" if outcome.objective is None else f"{outcome.objective:.2f}",
                "done" if outcome.exit_code == 0 else f"failed ({outcome.exit_code})",
            )
        # Not as the table's title, which would be wrapped: a path on two lines cannot be copied.
        log.console.print(f"sweep in {folder}", soft_wrap=True)
        log.console.print(table)
        for outcome in failed:
            for sentence in outcome.error.split("\n"):
                log.console.print(f"job {outcome.number}: {sentence}", soft_wrap=True)
        if failed:
            sys.exit(failed[0].exit_code)
