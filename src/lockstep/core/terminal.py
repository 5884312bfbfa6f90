"""Words on the terminal may get lost, with a full disk or a reader that went away, and that ends no run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


class Shown:
    """Standard output, as it is at each write, without its errors: the log has the same words.

    A program may have none (`sys.stdout` is None).
    """

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
    """Have all that is written to `stream`, and all that it still holds, go nowhere.

    Python would try once more at its end, and leave with 120 instead of our exit code.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
