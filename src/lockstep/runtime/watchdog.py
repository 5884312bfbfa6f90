"""The watchdog ends a rank that hangs or ignores a stop request, and records where the rank was.

A sign of life is a finished step, micro-batch, evaluation block or save. Until the first step is finished, which may
wait for a compilation or for a data set, CPU time that the process uses is a sign of life, too.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self, TextIO

import psutil

from lockstep.core.errors import Interrupted, LockstepError, RankFailed, Stopped
from lockstep.core.safe_write import append
from lockstep.runtime.signals import GRACE_S, LEAVE_S, STOP_SIGNALS, StopRequest, importing, not_begun

TICK_S = 0.5
# A process that uses less than this share of a core counts as waiting.
BUSY_SHARE = 0.01
# After a stop request, a rank waits this many seconds for another rank to finish its step.
PATIENCE_S = 30.0
# The timeout of the process group: practically none. It counts wall-clock time, so a shorter one would end a job that
# was suspended (Ctrl-Z) for long. The watchdog finds a collective that hangs.
GROUP_TIMEOUT_S = 365 * 24 * 3600.0

# Called with the error that ends this rank, and the known places of ranks in the program.
RecordError = Callable[[LockstepError, Mapping[int, str]], None]


@contextmanager
def dump_stacks_on_crash(log: Path) -> Iterator[TextIO]:
    """Write the stacks of all threads to `log` after a crash in native code; yields the open file."""
    enabled = faulthandler.is_enabled()
    with append(log) as file:
        if not enabled:  # where the program has its stacks written already cannot be asked
            faulthandler.enable(file)
        try:
            yield file
        finally:
            if not enabled:
                faulthandler.disable()


class Watchdog(threading.Thread):
    """A thread that ends the process when it shows no sign of life, or ignores a stop request, in its context.

    It also writes the stacks of all threads when a user or a peer sends SIGUSR2. It holds Python's lock then, so that
    no other thread changes them: a handler of `faulthandler.register` reads frames of running threads, and crashes.

    Python runs signal handlers only between two instructions of the main thread, so not while that thread waits in
    native code for another rank or a disk. The watchdog gets each signal at once, through a pipe: so only the main
    thread may enter the context.

    `timeout` is in seconds without a sign of life; time in which the process was suspended (Ctrl-Z) does not count.
    `file` is for the stacks. `record_error` records why the rank was ended, and where it was. `local_peer_pids` maps
    each other rank of this machine to its process number, when they are known.
    """

    def __init__(
        self, rank: int, *, timeout: float, stop: StopRequest, file: TextIO, record_error: RecordError
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.rank = rank
        self.timeout = timeout
        self.stop = stop
        self.file = file
        self.record_error = record_error
        self.local_peer_pids: Mapping[int, int] = {}
        self.signs = 0
        self.finished = threading.Event()
        self.received = StopRequest()
        self.quiet = self.longest = 0.0  # seconds since the last sign of life; the most between two of them
        self.idle = 0.0  # seconds since the last sign of life or use of the CPU
        self.since_stop = 0.0  # seconds since a stop was requested

    def __enter__(self) -> Self:
        self.pipe, self.signals = os.pipe()
        for end in (self.pipe, self.signals):
            os.set_blocking(end, False)
        self.wakeup_before = signal.set_wakeup_fd(self.signals, warn_on_full_buffer=False)
        self.stacks_before = signal.signal(signal.SIGUSR2, lambda number, frame: None)
        signal.siginterrupt(signal.SIGUSR2, False)  # native code that waits continues
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finished.set()
        self.join()
        if self.stacks_before is not None:  # a handler that C code has set cannot be set again
            signal.signal(signal.SIGUSR2, self.stacks_before)
        signal.set_wakeup_fd(self.wakeup_before)
        os.close(self.pipe)
        os.close(self.signals)

    def heartbeat(self) -> None:
        """Give a sign of life. Called in every step, so it must be cheap."""
        self.signs += 1

    def run(self) -> None:
        last_signs, computed = 0, time.process_time()
        while not self.finished.wait(TICK_S):
            now = time.process_time()
            living, computing = self.signs != last_signs, now - computed > BUSY_SHARE * TICK_S
            last_signs, computed = self.signs, now
            if living:  # a silence that continues says nothing of how long a step takes
                self.longest = max(self.longest, self.quiet)
            self.quiet = 0.0 if living else self.quiet + TICK_S
            self.idle = 0.0 if living or computing else self.idle + TICK_S
            self._listen()
            if error := self._error_to_end_with():
                self.end(error)

    def _listen(self) -> None:
        with suppress(BlockingIOError):  # no signal has arrived
            for number in set(os.read(self.pipe, 4096)):
                if number in STOP_SIGNALS:
                    self.received.take(number)
                elif number == signal.SIGUSR2:
                    faulthandler.dump_traceback(self.file)
        self.since_stop += TICK_S * self.received.requested

    def _error_to_end_with(self) -> LockstepError | None:
        """The error with which the watchdog must end the process; None if it must not."""
        begun = self.stop.begun
        if self.received.force:
            return Interrupted()
        # A stop does not interrupt an import (see `importing`); end the process: there is nothing to save yet.
        if not begun and (self.since_stop > GRACE_S or (self.since_stop and importing(_main_frame()))):
            return not_begun(self.stop.saved)
        suspended = any(map(_is_suspended, self.local_peer_pids.values()))
        patience = GRACE_S if suspended else max(PATIENCE_S, 2 * self.longest)
        if min(self.since_stop, self.idle) > min(patience, self.timeout) and not self.stop.leaving:
            return Stopped(
                f"stopped without saving, because no step was finished for {self.quiet:g} s; a resume continues "
                "from the last checkpoint"
            )
        if (self.quiet if begun else self.idle) >= self.timeout:
            return RankFailed(f"no step was finished for {self.timeout:g} s (launcher.timeout)")
        return None

    def end(self, error: LockstepError) -> NoReturn:
        """Record where this rank was, have its peers on this machine write their stacks, and end the process."""
        last_resort = threading.Timer(LEAVE_S, os._exit, [error.exit_code])  # the disk may be what hangs
        last_resort.daemon = True
        last_resort.start()
        try:
            code = (frame := _main_frame()).f_code
            places = {self.rank: f"was in {code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"}
            places |= {
                rank: "was stopped by a signal" for rank, pid in self.local_peer_pids.items() if _is_suspended(pid)
            }
            faulthandler.dump_traceback(self.file)
            self.record_error(error, places)
            for pid in self.local_peer_pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
                    os.kill(pid, signal.SIGCONT)
            if isinstance(error, RankFailed):
                time.sleep(2 * TICK_S)  # until the peers have written their stacks
        finally:
            os._exit(error.exit_code)


def _main_frame() -> FrameType:
    return sys._current_frames()[threading.main_thread().ident or 0]


def _is_suspended(pid: int) -> bool:
    with suppress(psutil.Error):  # it has ended
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False
