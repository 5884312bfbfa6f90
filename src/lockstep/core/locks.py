"""The lock on a run folder or a sweep. The kernel releases it when its process ends, also by SIGKILL."""

import errno
import json
import os
import socket
import time
from pathlib import Path

from lockstep.core import safe_read, safe_write
from lockstep.core.errors import InputError
from lockstep.core.safe_read import UnreadableFile
from lockstep.core.safe_write import open_locked


class Lock:
    """The lock on one run folder, of the process that the user started, from `take` to `close`."""

    def __init__(self) -> None:
        self.path = Path()
        self.file: int | None = None

    def take(self, path: Path, *, user: str = "job", remedy: str = "hydra.run.dir=FOLDER") -> None:
        """Lock the file at `path`, once, and write into it who does. Raises InputError, or StorageError (full)."""
        if self.file is not None:
            assert path == self.path
            return
        try:
            while not self._open_and_lock(path):  # another job has just removed the file: try again
                continue
        except BlockingIOError:
            holder = _holder(path) or "which has just started or ended"
            raise InputError(
                f"{path.parent} is in use by another {user} ({holder}); wait for its end, or name another "
                f"folder with {remedy}"
            ) from None
        except OSError as error:
            safe_write.fail_if_full(path, error)
            raise InputError(
                f"output_root: {path} cannot be locked ({error.strerror}); choose another folder with "
                "output_root=FOLDER"
            ) from error

    def _open_and_lock(self, path: Path) -> bool:
        """Open and lock the file; returns whether `path` still names that file."""
        file = open_locked(path)
        try:
            if not _same_file(file, path):
                os.close(file)
                return False
            if os.fstat(file).st_size and not _holder(path):
                raise OSError(errno.EINVAL, "it is a file of another program", str(path))
            facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.ftruncate(file, 0)
            os.write(file, (json.dumps(facts) + "\n").encode())
        except OSError:
            os.close(file)
            raise
        self.path, self.file = path, file
        # A forked process can outlive a killed job, so it must not keep the lock.
        os.register_at_fork(after_in_child=self._close_file)
        return True

    def _close_file(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def close(self) -> None:
        """Remove the lock file, then release the lock: a job that finds no file creates a new one."""
        if self.file is not None and _same_file(self.file, self.path):
            self.path.unlink()
        self._close_file()


def _same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    """The holder of a lock, from its file, for use in a sentence; empty if Lockstep has not written the file."""
    try:
        facts = safe_read.read_json(path)
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    except (UnreadableFile, LookupError, TypeError):
        return ""
