"""How a job is asked to stop, and how its processes begin and end with those above them. Knows no torch."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from lockstep.core.errors import Interrupted, LockstepError, Stopped
from lockstep.core.launched import is_launched

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
AGAIN_S = 1.0
# So long the main thread has to come to its end where there is nothing to save, and then what is done at an exit.
GRACE_S, LEAVE_S = 3.0, 3.0
LAUNCHER = "LOCKSTEP_LAUNCHER"  # in the environment of a rank: the process number of our launcher above it
PARENT = "LOCKSTEP_PARENT"  # in the environment of a command: the process number of ours that it must not outlive
PR_SET_PDEATHSIG = 1

STOPPED_EARLY = "stopped before a run began; the same command starts it"
NOT_BEGUN = "stopped before a step was finished; nothing is lost: the same command, or resume=latest, goes on"


class StopNow(BaseException):
    """Raised where a stop is acted on. No `Exception`, which whatever is being imported or tried might swallow."""


class StopRequest:
    """What signals have asked for so far, and how it is acted on.

    Fields:
        heard: whether to stop.
        at_once: whether not even to save: at a second SIGINT. One Ctrl-C can arrive twice (from the terminal, and
            passed on by a process above), so the second counts from `AGAIN_S` after the first.
        immediate: whether a stop interrupts the main thread where it is, because nothing there has to be finished.
        begun: whether a step was finished, so that there is something to save.
        leaving: whether it is being saved.
    """

    def __init__(self) -> None:
        self.heard = False
        self.at_once = False
        self.immediate = True
        self.begun = False
        self.leaving = False
        self.interrupted_at: float | None = None

    def take(self, number: int) -> None:
        """Note a signal."""
        self.heard = True
        if number == signal.SIGINT:
            self.interrupted_at = self.interrupted_at or time.monotonic()
            self.at_once = time.monotonic() - self.interrupted_at >= AGAIN_S

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Only the first one interrupts: another could interrupt the clean-up after it."""
        first = not self.heard
        self.take(number)
        if (self.at_once or (first and self.immediate)) and not importing(frame):
            raise StopNow

    def begin(self) -> None:
        """A step was finished: from here on a stop waits until it can be saved."""
        self.begun, self.immediate = True, False

    def requested(self) -> bool:
        """Whether to stop. Asked at the end of every step."""
        return self.heard

    @contextmanager
    def interrupting(self, allowed: bool = True) -> Iterator[None]:
        """Let a stop interrupt what is done in the context, if `allowed`; raises StopNow if one is asked for."""
        before, self.immediate = self.immediate, allowed or self.immediate
        try:
            if self.immediate and self.heard:
                raise StopNow
            yield
        finally:
            self.immediate = before

    def error(self) -> LockstepError:
        """What a stop ends a job with that had nothing to save, or was not to save it."""
        return Interrupted() if self.at_once else Stopped(NOT_BEGUN)


def importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: some are by C++, which crashes if anything is raised."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


@contextmanager
def stop_signals(request: StopRequest, *, restore: bool = True) -> Iterator[None]:
    """Have `request` handle each signal that asks for a stop, those held back until now first.

    What it heard, the handler before it has heard too, so that a signal that comes again does not interrupt the end.

    Args:
        request: the handler.
        restore: whether to put the handlers back that were there before.

    Raises:
        LockstepError: a stop was acted on with nothing to save, now or before `request` listened. Then whatever
            else is raised is its effect: of a library that was interrupted, of another rank that left first.
    """
    before = listen(request)
    unraisable, sys.unraisablehook = sys.unraisablehook, silent_about_stops(sys.unraisablehook)
    earlier = [each for each in before.values() if isinstance(each, StopRequest)]
    try:
        if any(each.heard for each in earlier):
            request.heard = True
            raise StopNow
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        yield
    except StopNow:
        raise request.error() from None
    except Exception as error:
        if request.heard and request.immediate:
            raise request.error() from error
        raise
    finally:
        request.immediate = False
        sys.unraisablehook = unraisable
        for each in earlier:
            each.heard |= request.heard
        if restore:
            for number, handler in before.items():
                signal.signal(number, handler)


def silent_about_stops(hook: Callable[[Any], object]) -> Callable[[Any], object]:
    """`hook`, but not for a stop that was raised where nothing can be raised: in a `__del__`, or a weak reference's
    callback. It is heard all the same, and acted on by whoever asks next, or by the watchdog."""
    return lambda unraisable: None if unraisable.exc_type is StopNow else hook(unraisable)


def listen(handler: Any) -> dict[signal.Signals, Any]:
    """Set the handler of the signals that ask for a stop; returns the ones before."""
    return {each: signal.signal(each, handler) for each in STOP_SIGNALS}


def speaks() -> bool:
    """Whether this process tells the user of a stop: of the ranks that torchrun starts, and stops, one does."""
    return os.environ.get("RANK", "0") == "0"


def begin(parent: int | None = None, *, says: str = "") -> None:
    """What a process does first, before imports that take seconds: end with what is above it, and hear a stop.

    Args:
        parent: the process that started this one, and that it must not outlive. Without it, the one that the
            environment names, or whichever launched this rank (torchrun).
        says: the sentence for the user if a stop ends the process before it has handlers of its own.
    """
    named = os.environ.pop(PARENT, None)
    if parent is None and named is not None:
        parent = int(named)
    if parent is not None or is_launched():
        die_with_parent(parent)

    def leave_early(number: int, frame: FrameType | None) -> None:
        if says and speaks():
            os.write(2, f"lockstep: {says}\n".encode())
        os._exit(Stopped.exit_code)

    listen(leave_early)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def leave(code: int) -> NoReturn:
    """End the process once what is registered for its end is done, and in a bounded time.

    Taking the interpreter apart takes seconds with torch in it, and waits for threads, one of which may hang.
    """
    last_resort = threading.Timer(LEAVE_S, os._exit, [code])
    last_resort.daemon = True
    last_resort.start()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process when the one that started it (`parent`) is gone: no orphans (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # it went before the kernel was told
        os._exit(1)
