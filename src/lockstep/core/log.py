"""The terminal and the log files: `train.log` of main, `logs/rank*.log` of each rank."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import Interrupted, LockstepError, escaped
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import append, storing
from lockstep.core.terminal import fill, impatient, width

if TYPE_CHECKING:
    from rich.text import Text

logger = logging.getLogger("lockstep")
# A launcher process has no log file. Without this handler, `logging` would print its warnings a second time.
logger.addHandler(logging.NullHandler())


class LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


class LogFile(logging.FileHandler):
    """A log file of a run. If it cannot be written, the run continues, and the terminal says so once."""

    def __init__(self, path: Path) -> None:
        with storing(path):
            super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.failed = False

    def _open(self) -> Any:
        return append(Path(self.baseFilename), encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.failed:
            self.failed = True
            show_warning(f"{self.baseFilename} cannot be written ({error.strerror}); the run continues without it")

    def close(self) -> None:
        with suppress(OSError):  # closing tries once more to write what could not be written
            super().close()


@contextmanager
def rank_logging(run_dir: RunDir, rank: int, *, separate: bool) -> Iterator[None]:
    """Send this rank's log to its files while the context is open; main also writes `train.log`.

    If `separate` is set, everything that another rank prints goes to its own file, so that only main writes to the
    terminal. Raises StorageError: there is no space for a file.
    """
    handlers: list[LogFile] = [LogFile(run_dir.rank_log(rank))]
    level, propagate = logger.level, logger.propagate
    try:
        if rank == 0:
            handlers.append(LogFile(run_dir.log))
        elif separate:
            with storing(run_dir.rank_log(rank)), append(run_dir.rank_log(rank)) as file:
                os.dup2(file.fileno(), sys.stdout.fileno())
                os.dup2(file.fileno(), sys.stderr.fileno())
        for handler in handlers:
            handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(message)s"))
            logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        with impatient():  # the files have what is shown
            yield
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook, which show HTML, and is not quiet."""
    ipython = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        return False
    return not _console().terminal.quiet


def has_terminal(stream: str = "stdout") -> bool:
    """Whether a standard stream goes to a terminal that can move the cursor."""
    file = getattr(sys, stream)
    return file is not None and file.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def say_row(label: str, text: str, *, indent: int = 12) -> None:
    """Say a text after a label. On a terminal the text is wrapped, and all lines but the first are indented."""
    line = f"{label:>{indent - 2}}  {text}" if label else text
    _console().terminal.print_wrapped(wrapped(line, indent))
    logger.info(escaped(line, keep=""))


def wrapped(text: str, indent: int = 2, stream: str = "stdout") -> str:
    """A line for the user. On a terminal it is wrapped between words, and all lines but the first are indented."""
    line = escaped(text, keep="")
    return fill(line, max(width(), 2 * indent), indent) if has_terminal(stream) else line


def _console() -> ModuleType:
    from lockstep.core import console  # takes 20 ms: `--help` and `--cfg job` show no line

    return console


def show(text: str) -> None:
    """Print a sentence for the user, without logging it. On a terminal the sentence is wrapped between words."""
    _console().terminal.print_wrapped(wrapped(text))


def note(text: str) -> None:
    """Print a sentence about a result to standard error: the output itself may be read by a program."""
    console = _console()
    errors = console.Terminal(highlight=False, stderr=True, quiet=console.terminal.quiet)
    errors.print_wrapped(wrapped(text, stream="stderr"), "dim")


def say_command(label: str, command: str) -> None:
    say(f"   {label:<12} {command}")


def say(message: str = "", *, shown: Text | None = None) -> None:
    """Print one line for the user and log it. If `shown` is set, it is printed instead. Called by main only."""
    if shown is None:
        show(message)
    else:
        _console().terminal.print(shown, soft_wrap=True)
    logger.info(escaped(message, keep=""))


def warn(message: str) -> None:
    """Warn the user in one line, on the terminal and in the log."""
    show_warning(message)
    logger.warning(escaped(message, keep=""))


def show_warning(message: str) -> None:
    """Warn the user on the terminal only, for use where no log is open."""
    console = _console()
    shown_on = console.Terminal(highlight=False, stderr=True) if console.terminal.quiet else console.terminal
    shown_on.print_wrapped(wrapped(f"warning: {message}"), "yellow")


@contextmanager
def close_all(*closes: Callable[[], object]) -> Iterator[None]:
    """Call each of `closes` in turn when the context ends, even if the body or some of `closes` raise.

    The first error is raised, because it sets the exit code (an `ExitStack` raises the last); others are warnings.
    """
    first: BaseException | None = None
    try:
        yield
    except BaseException as error:
        first = error
    for close in closes:
        try:
            close()
        except Interrupted:  # the user interrupted twice: do not wait for the remaining calls
            raise
        except Exception as error:
            if first is None:
                first = error
            else:
                kind = "" if isinstance(error, LockstepError) else f"{type(error).__name__}: "
                warn(f"another error at the end of the run: {kind}{error}")
    if first is not None:
        raise first
