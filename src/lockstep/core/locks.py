"""Locks on files and folders. The kernel releases a lock when its process ends, also by SIGKILL.

They work between machines if their file system has `flock`. Not filelock, which locks no folder and never removes its
file; before its version 4, a refused attempt empties the holder's file, and a child keeps the lock of a dead process.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_locked(path: Path, flags: int = os.O_RDONLY, *, wait: bool = False) -> int:
    """Open and lock a file or folder; closing the descriptor releases the lock.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is not set.
        OSError: it cannot be opened, or its file system has no locks.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o644)  # opening a pipe would block
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    descriptor = open_locked(folder, wait=wait)
    try:
        yield
    finally:
        os.close(descriptor)
