"""Reads runs that have begun or ended: what each was, how it ended, its score. Imports no torch."""

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.core import safe_read
from lockstep.core.errors import InputError
from lockstep.core.fields import leaves
from lockstep.core.named_paths import pointed
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.sweep.ledger import Ledger, record_of
from lockstep.sweep.record import Direction, Record, State, born
from lockstep.telemetry.run_files import RunFiles

CLASS = "._target_"
KILLED = "killed"  # a state of a run besides those of a job
# Where a run is, and what it shows and keeps. Runs that differ only in these are equal.
ELSEWHERE = ("name", "output_root", "data_root", "resume", "sweep", "hydra", "logger", "telemetry", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, from its folder and from its record if it is the job of a sweep.

    Fields:
        folder: its folder, which a job that failed early does not have.
        state: a `State`, or `KILLED`.
        started: seconds since 1970; 0 if it has not started.
        score: the objective of a run that is done.
        error: why it has none.
        settings: its config as the user gave it: the option of each group, and the value of each key.
        direction: which score of its sweep is better; None for a run alone.
        rung: how far it came in a successive halving; empty without one.
    """

    folder: Path
    state: str = State.waiting
    started: float = 0.0
    score: float | None = None
    error: str = ""
    settings: Mapping[str, str]
    typed: Mapping[str, str]
    direction: Direction | None = None
    rung: str = ""


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
            runs[folder] = damaged(folder, str(error))
    if not runs:
        raise InputError(f"{root} has no run in it; name a run, a sweep, or a folder of them")
    return list(runs.values())


def read_jobs(ledger: Ledger) -> list[Run]:
    """All jobs of a sweep: a record says how far a job is, and its folder, if there is one, what it is."""
    direction = ledger.identity().direction
    return [_read_job(ledger, record, direction) for record in ledger.records()]


def read_single(folder: Path) -> Run:
    """The run of a folder, which may be the job of a sweep."""
    if (entry := record_of(folder)) is None:
        return read_run(folder)
    return _read_job(*entry, entry[0].identity().direction)


def _read_job(ledger: Ledger, record: Record, direction: Direction) -> Run:
    run = read_run(ledger.folder / record.folder, record.overrides)
    if run.state == State.damaged:
        return run
    return replace(
        run,
        state=state_of(record),
        started=record.started,
        score=record.score,
        error=record.error,
        direction=direction,
        rung=record.rung,
    )


def damaged(folder: Path, error: str) -> Run:
    return Run(folder=folder, state=State.damaged, error=error, settings={}, typed={})


def state_of(record: Record) -> str:
    """The state of a job, whose record says `running` after a kill."""
    here = record.host == socket.gethostname()
    return KILLED if record.state is State.running and here and not record.runs_here else record.state


def read_run(folder: Path, overrides: Sequence[str] = ()) -> Run:
    files = RunFiles(folder)
    summary, composed, choices = files.summary, files.composed, files.choices
    typed = dict(word.lstrip("+").partition("=")[::2] for word in overrides or files.overrides)
    if files.damage:
        return damaged(folder, files.damage[0])
    values = {**typed, **dict(leaves(composed))}
    values |= {key.removesuffix(CLASS): value for key, value in values.items() if key.endswith(CLASS)} | choices
    keys = [key for key in values if not key.endswith(CLASS) and key.partition(".")[0] not in ELSEWHERE]
    state = {"completed": State.done}.get(status := summary.get("status", State.waiting), status)
    return Run(
        folder=folder,
        state=KILLED if state == State.running and not _is_alive(files.run_dir) else state,
        started=summary.get("started") or 0,
        score=summary.get("objective"),
        error=summary.get("error", ""),
        settings={key: values[key] if isinstance(values[key], str) else json.dumps(values[key]) for key in keys},
        typed=typed,
    )


def _is_alive(run_dir: RunDir) -> bool:
    """Whether the process that holds the lock of a run lives, as far as this machine can see."""
    try:
        holder = safe_read.read_json(run_dir.lock)
        return bool(holder["host"] != socket.gethostname() or born(holder["pid"]))
    except (UnreadableFile, LookupError, TypeError):
        return False


def differing(runs: Sequence[Run], *, of_recipes: bool = False) -> list[str]:
    """The keys in which runs differ, those that a user typed first.

    Not the keys that only follow from the option of a group or, without `of_recipes`, from a recipe, in which runs
    differ too.
    """
    typed = dict.fromkeys(key for run in runs for key in run.typed if key in run.settings)
    keys = dict.fromkeys([*typed, *(key for run in runs for key in run.settings)])
    differ = [key for key in keys if len({run.settings[key] for run in runs if key in run.settings}) > 1]
    recipes = "experiment" in differ and not of_recipes
    return [key for key in differ if key in typed or not (recipes or key.partition(".")[0] in differ)]
