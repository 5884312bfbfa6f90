"""Standard streams that may be closed, full, or without a reader: that alone must not end a run."""

import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO


class SafeStream:
    """A stream whose errors are not raised. The first one is kept, for a program whose result the output is.

    Args:
        current: returns the stream to write to, or None if there is none.
    """

    def __init__(self, current: Callable[[], TextIO | None]) -> None:
        self.current = current
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def _try(self, action: Callable[[TextIO], object]) -> None:
        if (stream := self.current()) is None:
            return
        try:
            action(stream)
        except OSError as error:
            self.error = self.error or error
            # Python would flush the stream again at exit, fail, and exit with code 120 instead of ours.
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, stream.fileno())
            os.close(null_device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current(), name)


def guard_streams() -> None:
    """Give this program standard streams whose errors are not raised, and that exist.

    In the place of a closed one, the next file that is opened would get its number, and what libraries print. A
    device that refuses to be written keeps the number instead. Text that the encoding lacks is written as escapes.
    """

    def guarded(stream: TextIO) -> SafeStream:
        return SafeStream(lambda: stream)

    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)  # gets the lowest number that is free
        stream = getattr(sys, name) or os.fdopen(number, "w" if number else "r", closefd=False)
        if number and not isinstance(stream, SafeStream):
            if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
                stream.reconfigure(errors="backslashreplace")
            stream = guarded(stream)
        setattr(sys, name, stream)


def forgive_output() -> None:
    """Forget that standard output could not be written: what it showed is in a file too."""
    if isinstance(sys.stdout, SafeStream):
        sys.stdout.error = None
