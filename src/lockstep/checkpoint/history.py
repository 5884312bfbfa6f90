"""Which checkpoint of its own a run goes on from, and that one is not missing which was there.

A run that is killed before its first checkpoint starts again from nothing, and rightly so. One that has lost its
checkpoints must not: it would cut its log, its TensorBoard files and its best weights. So the difference is on the
disk from before the first logged step on, and it is made so that whatever gets lost, alone or together, never
makes the second look like the first: `checkpoints/none-yet` is there until a checkpoint is whole and in its place.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lockstep.checkpoint.reading import LoadedCheckpoint, read, whole_weights
from lockstep.checkpoint.validation import find_corruption
from lockstep.config import yaml_io
from lockstep.config.program_words import program_words
from lockstep.core import log
from lockstep.core.errors import InputError, StorageError
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import write_atomic

Say = Callable[[str], None]


def candidates(folder: Path) -> list[Path]:
    """The checkpoints in a `checkpoints` folder, newest step first."""
    named = (each for each in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{8,18}", each.name) and each.is_dir())
    return sorted(named, key=lambda each: int(each.name[5:]), reverse=True)


def latest_valid(folder: Path, say: Say = log.warn) -> Path | None:
    """The newest checkpoint of a `checkpoints` folder that passes its hashes; says of each that does not."""
    found = candidates(folder)
    for number, path in enumerate(found, start=1):
        if not (reason := find_corruption(path)):
            return path
        rest = "trying the one before it" if number < len(found) else "there is none before it"
        say(f"checkpoint {path} is damaged ({reason}); {rest}")
    return None


def newest_of_run(run_dir: RunDir, say: Say = log.warn) -> Path | None:
    """The newest whole checkpoint of a run; None for a run that has not saved one yet.

    Raises:
        InputError: it has saved some, and none of them is whole.
    """
    damaged: list[str] = []
    found = latest_valid(run_dir.checkpoints, damaged.append)
    if found is None and _has_saved(run_dir):
        raise InputError(_lost(run_dir))
    for sentence in damaged:
        say(sentence)
    return found


def load_newest(run_dir: RunDir) -> LoadedCheckpoint | None:
    """Read what `newest_of_run` finds, with its words and its errors."""
    found = newest_of_run(run_dir)
    return None if found is None else read(found)


def mark_saved_or_not(run_dir: RunDir) -> None:
    """Have it on the disk, before a run logs a step, whether there has been a checkpoint of it.

    Where that cannot be written the run goes on, as it does when a checkpoint cannot.
    """
    if _has_saved(run_dir):
        with suppress(OSError):
            run_dir.none_yet.unlink(missing_ok=True)  # left by a kill just after the first checkpoint
        return
    try:
        write_atomic(run_dir.none_yet, "no checkpoint has been saved yet\n")
    except StorageError as error:
        log.warn(f"{error}; a run that is killed before its first checkpoint will not be resumed")


def _has_saved(run_dir: RunDir) -> bool:
    """Whether there was a checkpoint at some time, as far as what is left can tell."""
    saved = (run_dir.weights, run_dir.best, *run_dir.checkpoints.glob("step-*"))
    logged = (run_dir.metrics, run_dir.table, *run_dir.path.glob("events.out.tfevents.*"))
    if any(each.exists() for each in saved):
        return True
    return any(each.exists() for each in logged) and not run_dir.none_yet.exists()


def _lost(run_dir: RunDir) -> str:
    """What is damaged, what can still be used, and what to type."""
    found = candidates(run_dir.checkpoints)
    reasons = [f"{path.name}: {find_corruption(path)}" for path in found] or ["there is none, and there was one"]
    whole = next((path for path in (*found, run_dir.path) if whole_weights(path)), None)
    usable = f"; init_from={whole} takes the weights that are whole" if whole else ""
    try:
        command = shlex.join([*program_words(), *yaml_io.load_list(run_dir.overrides)])
    except InputError:
        command = "the command of this run and another hydra.run.dir=FOLDER"
    return (
        f"resume: no checkpoint in {run_dir.checkpoints} is whole ({'; '.join(reasons)}), and nothing was changed; "
        f"put a whole one back, or start afresh in another folder with `{command}`{usable}; to start afresh in this "
        f"folder remove it first"
    )
