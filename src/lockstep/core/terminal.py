"""Standard output that may fail: a full disk or a closed pipe must not end a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


class SafeStdout:
    """Writes to the current `sys.stdout`, which may be None, and ignores its errors: the log has the same lines."""

    def write(self, text: str) -> int:
        self._try(lambda stdout: stdout.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stdout: stdout.flush())

    def _try(self, show: Callable[[TextIO], object]) -> None:
        stdout: TextIO | None = sys.stdout
        if stdout is None:
            return
        try:
            show(stdout)
        except OSError:
            drop(stdout)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def drop(stream: TextIO) -> None:
    """Discard the buffer of `stream` and all further output to it.

    Otherwise Python would flush the stream again at exit, fail, and exit with code 120 instead of ours.
    """
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, stream.fileno())
    os.close(null_device)
