"""Finds the runs of a folder, and the keys in which they differ. Imports no torch."""

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from lockstep.core import safe_read
from lockstep.core.errors import InputError
from lockstep.core.named_paths import pointed
from lockstep.core.run import Run, State
from lockstep.core.run_dir import RunDir
from lockstep.sweep.ledger import Ledger, record_of
from lockstep.sweep.record import Direction, Record


class JobRun(Run):
    """The run of a job of a sweep: its record says how far it is, also before there is a folder."""

    def __init__(self, ledger: Ledger, record: Record, direction: Direction) -> None:
        super().__init__(ledger.folder / record.folder)
        self.record, self.direction, self.rung = record, direction, record.rung
        self.started = record.started

    @cached_property
    def overrides(self) -> list[str]:
        return [*self.record.overrides]

    @cached_property
    def state(self) -> str:
        return State.damaged if self.problem else self.record.present_state

    @cached_property
    def score(self) -> float | None:
        return None if self.problem else self.record.score

    @cached_property
    def error(self) -> str:
        return self.problem or self.record.error


def run_folders(root: Path) -> Iterator[Path]:
    """The folders of sweeps and runs in a folder, sorted, a sweep before its jobs; `root` can be one itself.

    Behind them come the folders that this user may not read.
    """
    errors: list[OSError] = []
    for name, subfolders, _ in os.walk(root, onerror=errors.append):
        subfolders.sort()
        if is_run := safe_read.is_plain(RunDir(Path(name)).overrides):
            subfolders.clear()
        if is_run or Ledger(Path(name)).exists:
            yield Path(name)
    yield from (Path(error.filename) for error in errors if isinstance(error, PermissionError))


def existing(path: str) -> Path:
    """The folder that a user named, or the newest run for `latest`."""
    folder = pointed(Path(path), Path("outputs"), path)
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; name a run, a sweep, or a folder of them, such as outputs")
    return folder


def read_runs(root: Path) -> list[Run]:
    """The runs of a folder, also those of its sweeps."""
    runs: dict[Path, Run] = {}
    for folder in run_folders(root):
        ledger = Ledger(folder)
        try:
            if ledger.exists:
                runs |= {run.folder: run for run in read_jobs(ledger)}
            elif folder not in runs:
                runs[folder] = read_single(folder)
        except InputError as error:
            runs[folder] = Run(folder)
            runs[folder].damage.append(str(error))
    if not runs:
        raise InputError(f"{root} has no run in it; name a run, a sweep, or a folder of them")
    return list(runs.values())


def read_jobs(ledger: Ledger) -> list[Run]:
    """All jobs of a sweep."""
    direction = ledger.identity().direction
    return [JobRun(ledger, record, direction) for record in ledger.records()]


def read_single(folder: Path) -> Run:
    """The run of a folder, which may be the job of a sweep."""
    if (entry := record_of(folder)) is None:
        return Run(folder)
    return JobRun(*entry, entry[0].identity().direction)


def differing(runs: Sequence[Run], *, of_recipes: bool = False) -> list[str]:
    """The keys in which runs differ, those that a user typed first.

    Not the keys that only follow from the option of a group or, without `of_recipes`, from a recipe, in which runs
    differ too.
    """
    typed = dict.fromkeys(key for run in runs for key in run.typed_values if key in run.settings)
    keys = dict.fromkeys([*typed, *(key for run in runs for key in run.settings)])
    differ = [key for key in keys if len({run.settings[key] for run in runs if key in run.settings}) > 1]
    recipes = "experiment" in differ and not of_recipes
    return [key for key in differ if key in typed or not (recipes or key.partition(".")[0] in differ)]
