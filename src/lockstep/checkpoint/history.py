"""Finds the checkpoint from which a run resumes, and notices that a run has lost its checkpoints.

A run that is killed before its first checkpoint starts again from step 0. A run that has lost its checkpoints must
not: it would cut its log, its TensorBoard files and its best weights. The file `checkpoints/none-yet` tells the two
cases apart: it exists from before the first logged step until the first checkpoint is complete. Whatever files are
lost, the second case never looks like the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint.reading import LoadedCheckpoint, read, whole_weights
from lockstep.checkpoint.validation import find_corruption, has_state
from lockstep.config import yaml_io
from lockstep.config.commands import override, program_words, typed
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import sync, write_atomic

Say = Callable[[str], None]


def candidates(folder: Path) -> list[Path]:
    """The checkpoints in a `checkpoints` folder, newest step first."""
    named = (path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{8,18}", path.name) and path.is_dir())
    return sorted(named, key=lambda path: int(path.name[5:]), reverse=True)


def latest_valid(folder: Path, say: Say = log.warn, run: str | None = None) -> Path | None:
    """The newest undamaged checkpoint in a `checkpoints` folder, of `run`; `say` reports each damaged one."""
    checkpoints = [path for path in candidates(folder) if has_state(path)]
    for number, path in enumerate(checkpoints, start=1):
        if not (reason := find_corruption(path, run)):
            return path
        next_try = "trying the one before it" if number < len(checkpoints) else "there is none before it"
        say(f"checkpoint {path} is damaged ({reason}); {next_try}")
    return None


def newest_of_run(run_dir: RunDir, say: Say = log.warn) -> Path | None:
    """The newest undamaged checkpoint of a run; None for a run that has not saved any yet.

    Raises:
        InputError: the run has saved checkpoints, but all of them are damaged.
    """
    warnings: list[str] = []
    newest = latest_valid(run_dir.checkpoints, warnings.append, run_dir.run)
    if newest is None and _has_saved(run_dir):
        raise InputError(_all_damaged_message(run_dir))
    for sentence in warnings:
        say(sentence)
    return newest


def load_newest(run_dir: RunDir) -> LoadedCheckpoint | None:
    """Read the checkpoint that `newest_of_run` finds, with its warnings and its errors."""
    newest = newest_of_run(run_dir)
    return None if newest is None else read(newest)


def mark_saved_or_not(run_dir: RunDir) -> None:
    """Before a run logs a step, record on the disk whether the run has saved a checkpoint.

    Raises:
        StorageError: the disk is full. Killed later, the run would look like one that has lost its checkpoints.
    """
    if _has_saved(run_dir):
        with suppress(OSError):
            run_dir.none_yet.unlink(missing_ok=True)  # it still exists after a kill just after the first checkpoint
        return
    write_atomic(run_dir.none_yet, "no checkpoint has been saved yet\n")
    sync(run_dir.checkpoints)


def _has_saved(run_dir: RunDir) -> bool:
    """Whether the run has ever saved a checkpoint, judged by the files that still exist."""
    saved = (run_dir.weights, run_dir.best, *run_dir.checkpoints.glob("step-*"))
    logged = (run_dir.metrics, run_dir.table, *run_dir.path.glob("events.out.tfevents.*"))
    if any(path.exists() for path in saved):
        return True
    return any(path.exists() for path in logged) and not run_dir.none_yet.exists()


def _all_damaged_message(run_dir: RunDir) -> str:
    """The error of a run that has lost its checkpoints: what is damaged, what can still be used, and what to type."""
    checkpoints = candidates(run_dir.checkpoints)
    reasons = [f"{path.name}: {find_corruption(path, run_dir.run) or 'it has weights only'}" for path in checkpoints]
    reasons = reasons or ["there is no checkpoint left"]
    whole = next((path for path in (*checkpoints, run_dir.path) if whole_weights(path)), None)
    usable = f"; {typed([override('init_from', whole)])} takes the weights that are whole" if whole else ""
    try:
        command = typed([*program_words(), *yaml_io.load_list(run_dir.overrides)])
    except InputError:
        command = "the command of this run and another hydra.run.dir=FOLDER"
    return (
        f"resume: no checkpoint in {run_dir.checkpoints} is whole ({'; '.join(reasons)}), and nothing was changed; "
        f"put a whole one back, or start afresh in another folder with `{command}`{usable}; to start afresh in this "
        f"folder remove it first"
    )
