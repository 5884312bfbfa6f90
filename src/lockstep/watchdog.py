"""Finds a rank that hangs: leaves the stacks of all threads in its log and a word of where it was, and ends it.

Life is a finished step, block of an evaluation or save. What comes before the first step (a download, a
compilation) is bounded by the timeout of the process group only.
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
from typing import NoReturn, TextIO

from lockstep.errors import LockstepError
from lockstep.world import World

TICK_S = 1.0
# How much later than the watchdog the last resort and the process group's own timeout are, so that it is first.
SLACK_S = 15.0
GROUP_SLACK_S = 30.0

LeaveWord = Callable[[str, Mapping[int, str]], None]


@contextmanager
def stacks(log: Path) -> Iterator[TextIO]:
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
    """A thread that ends the process when `alive` was not called for `timeout` seconds; the first call starts it.

    Args:
        world: this rank, and its neighbours.
        timeout: in seconds of this process: those in which it was suspended (Ctrl-Z) do not count.
        file: where the stacks go.
        leave_word: is given a sentence, and for each rank that something is known of where it was.
    """

    def __init__(self, world: World, *, timeout: float, file: TextIO, leave_word: LeaveWord) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.world = world
        self.timeout = timeout
        self.file = file
        self.leave_word = leave_word
        self.signs = 0
        self.over = threading.Event()

    def alive(self) -> None:
        """Show life. Called in every step: costs an addition."""
        self.signs += 1

    def run(self) -> None:
        seen, quiet = 0, 0.0
        while not self.over.wait(TICK_S):
            if self.signs == 0:
                continue
            if self.world.size > 1:
                # The last resort: fires when this thread does not run, because another one keeps the GIL.
                faulthandler.dump_traceback_later(self.timeout + SLACK_S, exit=True, file=self.file)
            quiet = 0.0 if self.signs != seen else quiet + TICK_S
            seen = self.signs
            if quiet >= self.timeout:
                self.end()

    def end(self) -> NoReturn:
        """Say where this rank was, have its neighbours leave their stacks, and leave."""
        try:
            places = {self.world.rank: _place()}
            places |= {
                rank: "was stopped by a signal" for rank, pid in self.world.neighbours.items() if _stopped(pid)
            }
            faulthandler.dump_traceback(self.file)
            self.leave_word(f"no step was finished for {self.timeout:g} s (launcher.timeout)", places)
            for pid in self.world.neighbours.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
                    os.kill(pid, signal.SIGCONT)
            time.sleep(TICK_S)  # for their stacks
        finally:
            os._exit(LockstepError.exit_code)


@contextmanager
def watched(world: World, *, timeout: float, file: TextIO, leave_word: LeaveWord) -> Iterator[Callable[[], None]]:
    """Watch this rank while the context is open; gives what shows life."""
    dog = Watchdog(world, timeout=timeout, file=file, leave_word=leave_word)
    dog.start()
    try:
        yield dog.alive
    finally:
        dog.over.set()
        dog.join()
        faulthandler.cancel_dump_traceback_later()


def _place() -> str:
    """Where the main thread is."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    code = frame.f_code
    return f"was in {code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


def _stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal (Linux; elsewhere it is not known)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
