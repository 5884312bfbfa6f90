"""Standard output that may fail: a full disk or a closed pipe must not end a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


class Shown:
    """The present `sys.stdout`, whose errors are ignored: the log has the same lines. It may be None."""

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
    """Discard all further output to `stream`, and what it has buffered.

    Otherwise Python would flush it once more at exit, fail, and exit with 120 instead of our code.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
