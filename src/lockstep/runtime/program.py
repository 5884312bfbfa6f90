"""The end of a program: one sentence for the user, and an exit code for the kind of error."""

import _thread
import atexit
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from lockstep.config.commands import check_word
from lockstep.core.errors import InputError, LockstepError, RankFailed, Stopped, StorageError, escaped
from lockstep.core.log import wrapped
from lockstep.core.terminal import SafeStream, impatient, standard
from lockstep.runtime.signals import (
    GRACE_S,
    STOPPED_EARLY,
    StopNow,
    StopRequest,
    importing,
    leave,
    listen,
    reports_stops,
)

Says = Callable[[LockstepError], object]  # is told the error that ends a program
# Longer lines, in characters, are shown without their middle.
LONGEST_LINE = 800


def explain(error: LockstepError, label: str = "") -> None:
    """Show an error to the user: its sentence, and the traceback if a rank raised an error that is not ours."""
    if isinstance(error, Stopped) and not reports_stops():
        return
    stderr = standard("stderr")  # the exit code still tells the kind of error
    with impatient():
        if isinstance(error, RankFailed) and error.details:
            stderr.write(escaped(error.details.rstrip()) + "\n")
        for line in filter(None, str(error).split("\n")):
            if len(line) > LONGEST_LINE:
                line = f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"
            stderr.write(f"{wrapped(f'lockstep: {label}{line}', stream='stderr')}\n")
        stderr.flush()


class JobError(BaseException):
    """Carries an error of a job through Hydra, which would add its own line to an `Exception`."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _StopEarly(StopRequest):
    """The signal handler before and after the handlers of a job: a stop ends the program.

    The first signal interrupts the main thread. The interrupted code may swallow the exception (a callback from C, a
    bare `except`) or take long to end; a second thread then ends the program. During an import the program ends at
    once. `says` is the sentence for the user.
    """

    def __init__(self, says: str) -> None:
        super().__init__()
        self.says = says

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if importing(frame) and not self.requested:
            self._leave()
        if not self.requested:
            # Not with `threading`, whose locks the interrupted code may hold.
            _thread.start_new_thread(self._exit_after_grace, ())
        super().__call__(number, frame)

    def ignore_signals(self) -> None:
        """Ignore signals from now on: the program is ending, and a signal would only change its exit code."""
        self.leaving = True
        listen(signal.SIG_IGN)

    def _exit_after_grace(self) -> None:
        time.sleep(GRACE_S)
        if not self.leaving:
            self._leave()

    def _leave(self) -> NoReturn:
        explain(Stopped(self.says))
        os._exit(Stopped.exit_code)


@contextmanager
def bypass_hydra_errors() -> Iterator[None]:
    """Wrap the errors of a job for `command_line`, which takes any other error for one of the command line."""
    try:
        yield
    except Exception as error:
        raise JobError(error) from error


@contextmanager
def command_line(*, stopped: str = STOPPED_EARLY, says: Says = explain) -> Iterator[None]:
    """End the program with one sentence and the right exit code; a user's mistake shows no traceback.

    By default, Hydra prints its errors itself and exits with 1 for all of them. With HYDRA_FULL_ERROR it raises them,
    so this function sets the variable and translates the errors. If the user has set it, the traceback is also shown.
    `stopped` is the sentence for a stop. `says` is told the error.
    """
    full = os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # A child process must not import from the current folder, which can be somebody else's run folder.
    os.environ["PYTHONSAFEPATH"] = "1"
    stop = _StopEarly(stopped)
    listen(stop)
    try:
        _check_current_folder()
        for word in sys.argv[1:]:
            check_word(word)
        yield
    except SystemExit as raised:
        stop.ignore_signals()
        if raised.code in (0, None):
            finish()
        if isinstance(raised.code, int):
            leave(raised.code)
        raise
    except (Exception, JobError, StopNow) as raised:
        stop.ignore_signals()
        # An interrupted library may have turned the stop into another exception.
        early = Stopped(stopped) if stop.requested else None
        error = raised.error if isinstance(raised, JobError) else raised
        if isinstance(error, LockstepError):  # with nothing to import: the source may have changed during a long run
            _end(error, error if isinstance(raised, JobError) else early or error, full, says)
        from lockstep.config.messages import translate, translate_before_job

        if isinstance(raised, JobError):
            _end(error, translate(error) or early, full, says)
        _end(raised, early or translate(raised) or translate_before_job(raised), full, says)
    stop.ignore_signals()


def _check_current_folder() -> None:
    """Raise InputError if the current folder is gone, where Hydra and torch end with a traceback or a crash."""
    try:
        Path.cwd()
    except OSError as error:
        raise InputError(
            f"the current folder does not exist any more, or cannot be used ({error.strerror}); "
            "change to another one: cd ~"
        ) from error


def finish() -> NoReturn:
    """End the program after its work, without unloading its modules, which takes 0.1 s, and seconds with torch."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    error = sys.stdout.error if isinstance(sys.stdout, SafeStream) else None
    if error is not None and not isinstance(error, BrokenPipeError):  # a reader such as `head` has read enough
        explain(StorageError(f"the output cannot be written ({error.strerror})"))
        leave(StorageError.exit_code)
    leave(0)


def _end(error: BaseException, shown: LockstepError | None, full: bool, says: Says) -> NoReturn:
    if full or shown is None:
        sys.stderr.write(escaped("".join(traceback.format_exception(error))))
    if shown is None:
        leave(LockstepError.exit_code)
    says(shown)
    leave(shown.exit_code)
