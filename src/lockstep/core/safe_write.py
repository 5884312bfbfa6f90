"""Writing files that are complete or absent, also after a kill or a power cut; and locks.

The kernel releases a lock when its process ends, also by SIGKILL.

Somebody else may have written the folder, so nothing is written through a link: a temporary file has a name that
nobody can guess and must be new, and neither a file that grows nor a folder of ours may be a link. A hard link is one
too. For files that a library opens, `check_names` looks before it does.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.core.errors import InputError, StorageError
from lockstep.core.safe_read import UnreadableFile, file_kind, read_json

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # the errors of a full disk


def write_atomic(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Replace `path` by `content` in one step: a reader sees the old or the new content, also after a power cut.

    After a power cut within seconds it may be the old one. Where another file relies on the new one, call `sync` for
    its folder too. Content in parts need not fit into memory together. Raises StorageError.
    """
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")
    with storing(path), replacing(path) as temporary, temporary.open("wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new empty file next to `path`, to be written in the context. It then replaces `path` in one step.

    Its short name has nothing of `path` in it: TensorBoard would read a second event file.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    try:
        with usual_mode(temporary):
            yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


@contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """Give a file the mode of a new one, which follows the umask, in place of the context's: safetensors' is 0600."""
    append(path).close()
    mode = path.stat().st_mode
    yield
    if path.stat().st_mode != mode:
        path.chmod(stat.S_IMODE(mode))


def append(path: Path, mode: str = "a", **options: Any) -> Any:
    """Open a plain file to write at its end, as `open` does. Raises OSError, also for a link, a pipe or a device."""
    return open(path, mode, opener=_open_plain, **options)


def _open_plain(path: str | Path, flags: int) -> int:
    # Without blocking, because opening a pipe waits for a reader.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if unfit := _unfit(os.fstat(descriptor)):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is {unfit}, expected a plain file", str(path))
    return descriptor


def _unfit(status: os.stat_result) -> str:
    """Why a file is not written to, such as "a pipe"; empty for a plain file with one name."""
    return file_kind(status.st_mode) or "a hard link" * (status.st_nlink > 1)


def check_names(folder: Path, *patterns: str) -> None:
    """Raise InputError if a path in a folder leads elsewhere: a link, also a hard one, a pipe or a device."""
    for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
        with suppress(FileNotFoundError):  # another process has removed it
            if (unfit := _unfit(path.lstat())) not in ("", "a folder"):
                raise InputError(f"{path} is {unfit}, which leads elsewhere; remove it, or use a copy (cp -rL)")


def make_folder(path: Path) -> None:
    """Create a subfolder of a run or a sweep. Raises OSError, or InputError for a symbolic link."""
    if path.is_symlink():
        raise InputError(f"{path} is a symbolic link, expected a folder; replace it by its target")
    path.mkdir(exist_ok=True)


def check_out(path: Path, suffix: str = "") -> None:
    """Raise InputError if `path`, the user's `--out`, is not a new file, or a plain one with one name."""
    unfit = _unfit(path.lstat()) if os.path.lexists(path) else ""
    if unfit or not path.parent.is_dir() or not path.name.endswith(suffix):
        name, what = f" whose name ends with {suffix}" * bool(suffix), f"{path}, {unfit}" if unfit else path
        raise InputError(f"--out is {what}, expected a file{name} in a folder that exists")


def sync(path: Path) -> None:
    """Flush `path` to the disk (a file, or the list of names in a folder)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn a failed write of `path` into StorageError."""
    try:
        yield
    except Exception as error:
        if (number := system_error(error)) is None:
            raise
        remedy = "; free disk space there, and rerun the command" if number in FULL else ""
        raise StorageError(f"{path} cannot be written ({os.strerror(number)}){remedy}") from error


def system_error(error: BaseException) -> int | None:
    """The number of the system's error that this one is, or that it quotes, as safetensors' do; None for others."""
    quoted = re.search(r"\(os error (\d+)\)", str(error))
    return error.errno if isinstance(error, OSError) else int(quoted[1]) if quoted else None


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Turn the error of a full disk into StorageError. `folder` is named if the error names no file."""
    try:
        yield
    except OSError as error:
        fail_if_full(Path(error.filename or folder), error)
        raise


def fail_if_full(path: Path, error: OSError) -> None:
    """Raise StorageError for a write of `path` that failed because the disk is full."""
    if error.errno in FULL:
        with storing(path):
            raise error


def open_locked(path: Path, *, waits: bool = False) -> int:
    """Open a file, or create it, and lock it; closing the descriptor releases the lock. Raises OSError."""
    descriptor = _open_plain(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(path: Path, *, waits: bool = False) -> Iterator[None]:
    """Hold the lock of a file. Raises BlockingIOError if another process holds it and this one does not wait."""
    descriptor = open_locked(path, waits=waits)
    try:
        yield
    finally:
        os.close(descriptor)


def absent(*paths: Path) -> list[Path]:
    """Those of the paths, and of the folders above them, that do not exist, the deepest first."""
    candidates = {folder for path in paths for folder in (path, *path.parents)}
    return sorted((path for path in candidates if not os.path.lexists(path)), reverse=True)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders that this process has created (see `absent`), the deepest first, unless others use them."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


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
            fail_if_full(path, error)
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
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.lstat())
    return False


def _holder(path: Path) -> str:
    """The holder of a lock, from its file, for use in a sentence; empty if Lockstep has not written the file."""
    with suppress(UnreadableFile, LookupError, TypeError):
        facts = read_json(path)
        return f"process {facts['pid']} on {facts['host']} since {facts['since']}"
    return ""
