"""The files that describe a job in its run folder, and their removal if the job is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lockstep.core.errors import InputError, StorageError
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile, read_if_exists
from lockstep.core.safe_write import write_atomic


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The files that were written into a run folder for a job. As a context, it calls `close` with a raised error.

    Fields:
        run_dir: the run folder.
        before: the old content of each file; None for a file that did not exist.
        logs_before: the size of each log, to which a job that was refused by a rank has added lines.
        errors_before: the content of each rank's error file.
        summary_before: the identity of the summary's file (`_file_id`).
    """

    run_dir: RunDir
    before: Mapping[Path, bytes | None]
    logs_before: Mapping[Path, int]
    errors_before: Mapping[Path, bytes]
    summary_before: tuple[int, int] | None

    @classmethod
    def write(cls, run_dir: RunDir, texts: Mapping[Path, str]) -> Preparation:
        """Write the files that describe a job.

        Raises:
            StorageError: a file cannot be written; all files are as they were.
        """
        before = {path: read_if_exists(path) for path in texts}
        preparation = cls(
            run_dir=run_dir,
            before=before,
            logs_before={path: path.stat().st_size for path in run_dir.log_files()},
            errors_before={path: read_if_exists(path) or b"" for path in run_dir.logs.glob("rank*.error.json")},
            summary_before=_file_id(run_dir.summary),
        )
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
        """Undo `write` and what ranks have logged: remove the files of a new job, and restore those of an older one.

        Raises:
            StorageError: a file cannot be written back.
        """
        if not self.run_dir.began and not any(self.before.values()):
            self._remove()
            return
        for path, content in self.before.items():
            if content is None:
                path.unlink(missing_ok=True)
            elif content != read_if_exists(path):
                write_atomic(path, content)
        for path in self.run_dir.log_files():
            if path not in self.logs_before:
                path.unlink()
            else:
                os.truncate(path, self.logs_before[path])
        for path, content in self.errors_before.items():  # launchers remove these
            write_atomic(path, content)
        self._remove_empty_folders()

    def close(self, error: BaseException) -> None:
        """Write into the summary how the job ended. Undo `write` if the job was refused before training started."""
        same_summary = self.before and _file_id(self.run_dir.summary) == self.summary_before
        if isinstance(error, InputError) and (same_summary or not self.run_dir.began):
            with suppress(OSError, StorageError, UnreadableFile):
                self.undo()
        else:
            self.run_dir.write_ending(error)

    def _remove(self) -> None:
        """Remove the files of a job that never began, and the folders that are empty afterwards."""
        for file in self.run_dir.prepared_files():
            file.unlink(missing_ok=True)
        self._remove_empty_folders()

    def _remove_empty_folders(self) -> None:
        for folder in (self.run_dir.hydra, self.run_dir.logs, self.run_dir.checkpoints, self.run_dir.path):
            with suppress(OSError):  # not empty
                folder.rmdir()

    def __enter__(self) -> RunDir:
        return self.run_dir

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.close(error)


def _file_id(path: Path) -> tuple[int, int] | None:
    """The identity of a file, which changes when the file is replaced; None if the file does not exist."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns
