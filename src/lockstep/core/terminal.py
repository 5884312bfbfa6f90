"""Standard streams that may be closed, full, or not read: that alone must not end a run, or hold it up."""

import io
import math
import os
import re
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from textwrap import TextWrapper
from typing import Any, TextIO

READER_WAIT_S = 3.0
# Bytes that a stream accepts without waiting once it is writable: a terminal (line ends take two bytes there, and its
# buffers grow by 256 bytes); a pipe.
TERMINAL_BYTES, PIPE_BYTES = 128, select.PIPE_BUF

# What a line does not break, because it is copied as a whole: what stands in `` or in quotes, and a command with the
# words after it that are flags, overrides, paths or names in capitals; and no number from its %.
_ARGUMENT = r"(?:-[\w-]\S*|'[^']*'\S*|\S*[=/]\S*|[A-Z]{2,}\b\S*)"
_PROGRAM = r"\b(?:lockstep [a-z][a-z-]*|python (?:-m )?\S+|pip install|wandb sync|mlflow ui|tensorboard|srun|cd)"
_WHOLE = re.compile(rf"`[^`]+`|\d %|(?<!\w)'[^' ][^']*'(?!\w)|\"[^\"]+\"|{_PROGRAM}(?: {_ARGUMENT})*")
_GLUE = "\0"

_patience_s = math.inf


@contextmanager
def impatient() -> Iterator[None]:
    """Wait at most `READER_WAIT_S` for the reader of a standard stream, then drop what it does not read.

    A terminal that is held (Ctrl-S) or a pipe that nobody reads would otherwise block the process, and with it every
    timeout and every stop. For where a file has what is shown: without this, a command waits for its reader.
    """
    global _patience_s
    for name in ("stdout", "stderr"):
        standard(name).flush()  # what follows goes past the buffer
    before, _patience_s = _patience_s, READER_WAIT_S
    try:
        yield
    finally:
        _patience_s = before


def write_some(number: int, data: bytes, wait_s: float) -> int:
    """Write the first bytes of `data` to a descriptor; returns how many, and 0 if it takes none for `wait_s`."""
    if not select.select([], [number], [], wait_s)[1]:
        return 0
    return os.write(number, data[: TERMINAL_BYTES if os.isatty(number) else PIPE_BYTES])


def _has_descriptor(stream: TextIO | None) -> bool:
    """Whether what is written to a stream goes to its descriptor; it does not in a notebook."""
    buffer = getattr(stream, "buffer", None)
    return isinstance(stream, io.TextIOWrapper) and isinstance(getattr(buffer, "raw", buffer), io.FileIO)


def width() -> int:
    """The columns of the terminal, or 80 if there is none; the variable COLUMNS wins."""
    if re.fullmatch(r"[1-9]\d{,5}", variable := os.environ.get("COLUMNS", "")):
        return int(variable)
    for number in range(3):
        with suppress(OSError):
            return os.get_terminal_size(number).columns or 80
    return 80


def fill(text: str, width: int, indent: int) -> str:
    """A text in lines of `width`, broken between words; all but the first are indented. A longer word is a line."""
    glued = _WHOLE.sub(lambda whole: whole[0].replace(" ", _GLUE), text)
    lines = TextWrapper(width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    lines.replace_whitespace = False
    return lines.fill(glued).replace(_GLUE, " ")


class SafeStream:
    """A stream, of which `current` returns the present one, that raises no errors. The first error is kept."""

    def __init__(self, current: Callable[[], TextIO | None]) -> None:
        self.current = current
        self.error: OSError | None = None
        self.is_stuck = False  # nobody has read for so long that what follows is dropped at once

    def write(self, text: str) -> int:
        is_bounded = math.isfinite(_patience_s) and _has_descriptor(self.current())
        self._try(lambda stream: self._write_bounded(stream, text) if is_bounded else stream.write(text))
        return len(text)

    def _write_bounded(self, stream: TextIO, text: str) -> None:
        data = text.encode(stream.encoding, stream.errors or "strict")
        wait_s = 0.0 if self.is_stuck else _patience_s
        while data:
            written = write_some(stream.fileno(), data, wait_s)
            self.is_stuck = written == 0
            if self.is_stuck:
                return
            data, wait_s = data[written:], _patience_s

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


def standard(name: str) -> SafeStream:
    """The stream that is `sys.stdout` or `sys.stderr` whenever it is used: a notebook and tests replace them."""
    return SafeStream(lambda: getattr(sys, name))


def guard_streams() -> None:
    """Give this program standard streams that exist and do not raise their errors.

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
