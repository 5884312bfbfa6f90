"""Writing files that are complete or absent, also after a kill or a power cut."""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from lockstep.core.errors import InputError, StorageError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # the errors of a full disk


def write_atomic(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Replace `path` by `content` in one step: a reader sees the old or the new content, also after a power cut.

    After a power cut within seconds it may be the old one. Where another file relies on the new one, call `sync` for
    its folder too. Content in parts need not fit into memory together.

    Raises:
        StorageError: the file cannot be written; its old content is unchanged.
    """
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        fail_to_write(path, error)


def check_out(path: Path, suffix: str = "") -> None:
    """Raise InputError if `path`, which a user has named by `--out`, is no name for a new file or a plain one."""
    if not path.parent.is_dir() or (path.exists() and not path.is_file()) or not path.name.endswith(suffix):
        name = f" whose name ends with {suffix}" * bool(suffix)
        raise InputError(f"--out is {path}, expected a file{name} in a folder that exists")


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
    except OSError as error:
        fail_to_write(path, error)


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
        fail_to_write(path, error)


def fail_to_write(path: Path, error: OSError) -> NoReturn:
    """Raise StorageError for a write of `path` that failed with `error`."""
    remedy = "; make room there, and the same command goes on" if error.errno in FULL else ""
    raise StorageError(f"{path} cannot be written ({error.strerror}){remedy}") from error
