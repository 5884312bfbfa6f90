"""Stop requests by signals, and the start and the end of each process of a job. Imports no torch."""

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from lockstep.core.errors import Interrupted, LockstepError, Stopped
from lockstep.core.launch_env import is_launched
from lockstep.core.native_threads import own_process
from lockstep.core.terminal import guard_streams, write_some


def _stop_signals() -> tuple[int, ...]:
    """The signals that ask a process to end: all that end it by default, except its own faults, and SIGUSR2.

    A signal that is ignored or handled when the program starts stays so: SIGHUP under `nohup`, SIGPROF under a
    profiler. The exception is SIGINT: a shell has background commands ignore it, but who sends it to one means it.
    """
    names = ["TERM", "HUP", "QUIT", "USR1", "ALRM", "VTALRM", "PROF", "POLL", "PWR", "STKFLT", "XCPU"]
    numbers = [getattr(signal, f"SIG{name}") for name in names if hasattr(signal, f"SIG{name}")]
    numbers += range(getattr(signal, "SIGRTMIN", 1), getattr(signal, "SIGRTMAX", 0) + 1)  # macOS has none
    return (signal.SIGINT, *(number for number in numbers if signal.getsignal(number) == signal.SIG_DFL))


STOP_SIGNALS = _stop_signals()
AGAIN_S = 1.0
# The seconds that the main thread has to finish if there is nothing to save, and the seconds for the exit handlers.
GRACE_S, LEAVE_S = 3.0, 3.0
# Environment variables with a process number: the launcher of this rank, and whom this command must not outlive.
LAUNCHER, PARENT = "LOCKSTEP_LAUNCHER", "LOCKSTEP_PARENT"
# The environment variable with the share of its steps at which a job of a successive halving stops.
RUNG_END = "LOCKSTEP_RUNG_END"
PR_SET_PDEATHSIG = 1
FOLLOW_S = 0.5  # how often a process looks for its parent, where the kernel does not

STOPPED_EARLY = "stopped before a run began; the same command starts it"
STOPPED = "stopped before it was done; the same command does it again"  # a command that starts no run


def not_begun(saved: str = "") -> Stopped:
    """The error of a stop before this process has finished a step of a run; `saved` is the run's `Run.saved`."""
    how = f"at {saved}, which was saved" if saved else "before a step was finished; nothing is lost"
    return Stopped(f"stopped {how}: rerun the command, or use resume=latest")


class StopNow(BaseException):
    """Raised in the main thread to act on a stop. Not an `Exception`, which a library might catch."""


class StopRequest:
    """The stop that signals have requested, and when to act on it. The object itself is the signal handler."""

    def __init__(self) -> None:
        self.requested = False
        # Whether to stop without saving, because of a second SIGINT. One Ctrl-C can arrive twice (from the terminal,
        # and from a parent process that forwards it), so a second SIGINT only counts `AGAIN_S` after the first.
        self.force = False
        self.immediate = True  # whether a stop interrupts the main thread, because no work there must be finished
        self.begun = False  # whether a step was finished, so that there is a state to save
        self.undoes = False  # whether the step under way is undone if a stop interrupts its compilation
        self.saved = ""  # how far an earlier process has saved the run; see `not_begun`
        self.leaving = False
        self.interrupted_at: float | None = None
        self.reason = ""  # why the run itself asked for the stop; empty for a signal
        self.rung_end = float(os.environ.get(RUNG_END, "inf"))  # the share of its steps at which the job stops

    def ask(self, reason: str) -> None:
        """Request a stop for a reason of the run's own."""
        self.requested, self.reason = True, reason

    def take(self, number: int) -> None:
        self.requested = True
        if number == signal.SIGINT:
            self.interrupted_at = self.interrupted_at or time.monotonic()
            self.force = time.monotonic() - self.interrupted_at >= AGAIN_S

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Only the first stop interrupts: a second one could interrupt the clean-up after it."""
        first = not self.requested
        self.take(number)
        if (self.force or (first and self.immediate)) and not importing(frame):
            raise StopNow

    def step_done(self) -> None:
        """Record that a step was finished: from now on, a stop waits until the state can be saved."""
        self.begun, self.immediate = True, False

    def requested_after_step(self) -> bool:
        """Whether to stop; called at the end of every step."""
        return self.requested

    @contextmanager
    def interrupting(self, allowed: bool = True) -> Iterator[None]:
        """Let a stop interrupt the context if `allowed` is set; raises StopNow if a stop is already requested."""
        before, self.immediate = self.immediate, allowed or self.immediate
        try:
            if self.immediate and self.requested:
                raise StopNow
            yield
        finally:
            self.immediate = before

    def error(self) -> LockstepError:
        """The error of a job that was stopped without saving: there was no state to save, or no time."""
        return Interrupted() if self.force else not_begun(self.saved)


def importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported. C++ code that imports a module crashes if the import raises."""
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


@contextmanager
def stop_signals(request: StopRequest, *, restore: bool = True) -> Iterator[None]:
    """Have `request` handle each signal that requests a stop, including the signals that were blocked until now.

    At the end of the context, the previous handler also records the stop, so that a repeated signal does not
    interrupt the exit. With `restore`, the previous handlers then take over again. Raises LockstepError if a stop
    interrupted the context, or was requested before it, when there was no state to save. It replaces other errors,
    which are effects of the stop: a library was interrupted, or another rank left.
    """
    before = listen(request)
    earlier = [handler for handler in before.values() if isinstance(handler, StopRequest)]
    try:
        if any(handler.requested for handler in earlier):
            request.requested = True
            raise StopNow
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        yield
    except StopNow:
        raise request.error() from None
    except Exception as error:
        if request.requested and request.immediate:
            raise request.error() from error
        raise
    finally:
        request.immediate = False
        for handler in earlier:
            handler.requested |= request.requested
        if restore:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(handler: Any) -> dict[int, Any]:
    """Set the handler of all signals that ask for a stop; returns the previous handlers."""
    return {number: signal.signal(number, handler) for number in STOP_SIGNALS}


def reports_stops() -> bool:
    """Whether this process tells the user about a stop. torchrun stops all its ranks, and only rank 0 reports it."""
    return os.environ.get("RANK", "0") == "0"


def begin(parent: int | None = None, *, says: str = "") -> None:
    """Prepare a process of ours, before imports that take seconds: its streams, its end, its reaction to stops.

    It must not outlive `parent`, by default the process that the environment names, or the launcher of this rank
    (torchrun). `says` is the sentence for the user if a stop ends the process before it has set its own handlers.
    """
    guard_streams()
    own_process()
    # With Python's own limit, 700 new objects, a tenth of the time of the imports goes to searches for garbage.
    gc.set_threshold(50_000, 10, 10)
    named = os.environ.pop(PARENT, None)
    if parent is None and named is not None and not is_launched():  # a rank's parent is the launcher's agent
        parent = int(named)
    if parent is not None or is_launched():
        die_with_parent(parent)

    def leave_early(number: int, frame: FrameType | None) -> None:
        if says and reports_stops():
            with suppress(OSError):  # nobody reads it
                write_some(2, f"lockstep: {says}\n".encode(), 0)
        os._exit(Stopped.exit_code)

    listen(leave_early)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # asks ranks for their stacks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGUSR2})


def leave(code: int) -> NoReturn:
    """Run the exit handlers and end the process: a normal exit takes seconds with torch, and may hang in a thread."""
    last_resort = threading.Timer(LEAVE_S, os._exit, [code])
    last_resort.daemon = True
    last_resort.start()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_parent(parent: int | None = None) -> None:
    """End this process when its parent is gone, so that no orphan remains: by the kernel (Linux), or by a thread."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_follow, args=[os.getppid()], daemon=True).start()
    if parent is not None and os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(FOLLOW_S)
    os.kill(os.getpid(), signal.SIGKILL)
