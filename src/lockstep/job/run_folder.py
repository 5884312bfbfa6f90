"""The folder of a job, locked while the job runs, and the files that describe the job. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.errors import InputError, StorageError
from lockstep.core.locks import Lock
from lockstep.core.run_dir import PathBelow, RunDir
from lockstep.core.safe_read import UnreadableFile, read_if_exists
from lockstep.core.safe_write import check_names, remove_empty, write_atomic


def lock_run_folder(folder: Path, lock: Lock) -> None:
    """Lock the folder of a job. Raises InputError if the job cannot run in it, or another job does."""
    run_dir = RunDir(folder)
    lock.take(run_dir.lock)
    if not run_dir.overrides.is_file() and not run_dir.only_prepared:
        raise InputError(
            f"hydra.run.dir: {folder} has files in it that are not of a run; name a new folder with "
            "hydra.run.dir=FOLDER"
        )
    _check_kinds(run_dir)


def _check_kinds(run_dir: RunDir) -> None:
    """Refuse links, pipes and devices in a run folder, which somebody else may have written, and misplaced files."""
    checkpoints = run_dir.checkpoints.glob("step-*")
    folders = {run_dir.hydra, run_dir.logs, run_dir.checkpoints, run_dir.incident, *checkpoints}
    known = {run_dir.path / path.name for path in vars(RunDir).values() if isinstance(path, PathBelow)}
    globs = ("logs/rank*.*", "events.out.tfevents.*", ".hydra/*.yaml")
    files = (known - folders).union(*map(run_dir.path.glob, globs))
    check_names(run_dir.path, "**/*")
    for path in sorted(run_dir.path.rglob("*")):
        present, expected = ("a folder", "a file") if path.is_dir() else ("a file", "a folder")
        if path in (files if path.is_dir() else folders):
            raise InputError(f"{path} is {present}, expected {expected}; move it")


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The files that were written into a run folder for a job. As a context, it calls `close` with a raised error."""

    run_dir: RunDir
    # The old content of these files, the summary and the ranks' error files; None without such a file. The size of
    # each log, to which a job that was refused by a rank has added lines.
    before: Mapping[Path, bytes | int | None]
    new: Sequence[Path]  # the folders that were created for the job, the deepest first

    @classmethod
    def write(cls, run_dir: RunDir, texts: Mapping[Path, str], new: Sequence[Path] = ()) -> Preparation:
        """Write the files that describe a job. Raises StorageError if one cannot be; all are then as before."""
        sizes = {path: path.stat().st_size for path in run_dir.log_files()}
        others = (run_dir.summary, run_dir.environment, *run_dir.rank_errors())
        before = {path: read_if_exists(path) for path in (*texts, *others)}
        preparation = cls(run_dir=run_dir, before={**sizes, **before}, new=new)
        try:
            # A resume compares the overrides with this file. Remove it first, so that a kill between the writes does
            # not leave it next to the overrides of another command.
            run_dir.composed.unlink(missing_ok=True)
            for path, text in texts.items():
                write_atomic(path, text)
        except StorageError:
            preparation.undo()
            raise
        return preparation

    def undo(self) -> None:
        """Remove what the job has created, and restore what was there before, and the logs. Raises StorageError."""
        before = {**dict.fromkeys(self.run_dir.log_files()), **self.before}
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            elif isinstance(content, int):
                os.truncate(path, content)
            elif content != read_if_exists(path):  # launchers remove error files
                write_atomic(path, content)
        if self.run_dir.path in self.new:  # this process holds the lock
            self.run_dir.lock.unlink(missing_ok=True)
        remove_empty(self.new)

    def close(self, error: BaseException) -> None:
        """Write into the summary how the job ended. Undo `write` if the job was refused before training started."""
        has_started = self.run_dir.began
        with suppress(UnreadableFile):
            has_started &= read_if_exists(self.run_dir.summary) != self.before[self.run_dir.summary]
        if has_started or not isinstance(error, InputError):
            self.run_dir.write_ending(error)
            return
        with suppress(OSError, StorageError, UnreadableFile):
            self.undo()

    def __enter__(self) -> RunDir:
        return self.run_dir

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.close(error)
