"""Ends a rank that hangs, or that does not stop when it is asked to, and leaves word of where it was.

Life is a finished step, micro-batch, block of an evaluation or save. Before the first step, which may wait for a
compilation or the reading of a data set, it is also that the process computes.
"""

from __future__ import annotations

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
from typing import NoReturn, TextIO

from lockstep.core.errors import Interrupted, LockstepError, RankFailed, Stopped
from lockstep.runtime.signals import GRACE_S, NOT_BEGUN, STOP_SIGNALS, StopRequest, importing

TICK_S = 0.5
# A process that computes for less than this share of its time only waits.
COMPUTES = 0.01
# So long a rank waits, once it is asked to stop, for another one that may still come to the end of its step.
PATIENCE_S = 30.0
# Of the process group. It goes by the clock, so it would end a job for the time in which that was suspended (Ctrl-Z):
# a collective that does not come to its end is found here.
GROUP_TIMEOUT_S = 365 * 24 * 3600.0

# Is given what a rank is ended with, and for each rank that something is known of where it was.
LeaveWord = Callable[[LockstepError, Mapping[int, str]], None]


@contextmanager
def dump_stacks_on_signal(log: Path) -> Iterator[TextIO]:
    """Have a crash in native code, and a peer that asks by SIGUSR2, leave the stacks of all threads in `log`."""
    enabled = faulthandler.is_enabled()
    with log.open("a") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR2, file)
        try:
            yield file
        finally:
            faulthandler.unregister(signal.SIGUSR2)
            faulthandler.disable()
            if enabled:
                faulthandler.enable()


class Watchdog(threading.Thread):
    """A thread that ends the process when it shows no life, or does not leave when it is asked to.

    The main thread hears a signal only between two of Python's instructions, and so not while it waits in native code
    for another rank or a disk. This one is told of each signal at once, through a pipe.

    Args:
        rank: of this process.
        timeout: without life. In seconds of this process: those in which it was suspended (Ctrl-Z) do not count.
        stop: what the main thread makes of the signals.
        file: where the stacks go.
        leave_word: says why and where a rank was ended.
        pipe: from which the numbers of signals are read.

    `local_peer_pids` has the process number of each other rank of this machine, as soon as they are known.
    """

    def __init__(
        self, rank: int, *, timeout: float, stop: StopRequest, file: TextIO, leave_word: LeaveWord, pipe: int
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.rank = rank
        self.timeout = timeout
        self.stop = stop
        self.file = file
        self.leave_word = leave_word
        self.pipe = pipe
        self.local_peer_pids: Mapping[int, int] = {}
        self.signs = 0
        self.over = threading.Event()
        self.heard = StopRequest()
        self.quiet = self.longest = 0.0  # seconds without a sign of life, and the most of them so far
        self.idle = 0.0  # seconds without computing either
        self.asked = 0.0  # seconds since a stop was asked for

    def heartbeat(self) -> None:
        """Show life. Called in every step: costs an addition."""
        self.signs += 1

    def run(self) -> None:
        seen, computed = 0, time.process_time()
        while not self.over.wait(TICK_S):
            now = time.process_time()
            living, computing = self.signs != seen, now - computed > COMPUTES * TICK_S
            seen, computed = self.signs, now
            self.longest = max(self.longest, self.quiet)
            self.quiet = 0.0 if living else self.quiet + TICK_S
            self.idle = 0.0 if living or computing else self.idle + TICK_S
            self._listen()
            if error := self._verdict():
                self.end(error)

    def _listen(self) -> None:
        with suppress(BlockingIOError):  # nothing came
            for number in os.read(self.pipe, 4096):
                if number in STOP_SIGNALS:
                    self.heard.take(number)
        self.asked += TICK_S * self.heard.heard

    def _verdict(self) -> LockstepError | None:
        """What to end the process with, if it has to be ended from here."""
        begun = self.stop.begun
        if self.heard.at_once:
            return Interrupted()
        # An import is not interrupted (`StopRequest`), and nothing that imports has to come to its end.
        if not begun and (self.asked > GRACE_S or (self.asked and importing(_main_frame()))):
            return Stopped(NOT_BEGUN)
        suspended = any(map(_stopped, self.local_peer_pids.values()))
        patience = GRACE_S if suspended else max(PATIENCE_S, 2 * self.longest)
        if min(self.asked, self.idle) > min(patience, self.timeout) and not self.stop.leaving:
            return Stopped(
                f"stopped without saving, because no step was finished for {self.quiet:g} s; the last checkpoint is "
                "what a resume goes on from"
            )
        if (self.quiet if begun else self.idle) >= self.timeout:
            return RankFailed(f"no step was finished for {self.timeout:g} s (launcher.timeout)")
        return None

    def end(self, error: LockstepError) -> NoReturn:
        """Say where this rank was, have its neighbours leave their stacks, and leave."""
        try:
            places = {self.rank: _place()}
            places |= {rank: "was stopped by a signal" for rank, pid in self.local_peer_pids.items() if _stopped(pid)}
            faulthandler.dump_traceback(self.file)
            self.leave_word(error, places)
            for pid in self.local_peer_pids.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
                    os.kill(pid, signal.SIGCONT)
            if isinstance(error, RankFailed):
                time.sleep(2 * TICK_S)  # for their stacks
        finally:
            os._exit(error.exit_code)


@contextmanager
def watched(
    rank: int, *, timeout: float, stop: StopRequest, file: TextIO, leave_word: LeaveWord
) -> Iterator[Watchdog]:
    """Watch this rank while the context is open. For the main thread: no other may say who is told of signals."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    dog = Watchdog(rank, timeout=timeout, stop=stop, file=file, leave_word=leave_word, pipe=reader)
    dog.start()
    try:
        yield dog
    finally:
        dog.over.set()
        dog.join()
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def _place() -> str:
    """Where the main thread is."""
    frame = _main_frame()
    code = frame.f_code
    return f"was in {code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


def _main_frame() -> FrameType:
    return sys._current_frames()[threading.main_thread().ident or 0]


def _stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (Linux; elsewhere it is not known)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
