"""How a job is asked to stop, and how its processes begin and end with those above them. Knows no torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
AGAIN_S = 1.0
LAUNCHER = "LOCKSTEP_LAUNCHER"  # in the environment of a rank: the process number of our launcher above it
PR_SET_PDEATHSIG = 1


class StopRequest:
    """What signals have asked for so far.

    Fields:
        heard: whether to stop.
        at_once: whether not even to save: at a second SIGINT. One Ctrl-C can arrive twice (from the terminal, and
            passed on by a process above), so the second counts from `AGAIN_S` after the first.
    """

    def __init__(self) -> None:
        self.heard = False
        self.at_once = False
        self.interrupted_at: float | None = None

    def take(self, number: int) -> None:
        """Note a signal."""
        self.heard = True
        if number == signal.SIGINT:
            self.interrupted_at = self.interrupted_at or time.monotonic()
            self.at_once = time.monotonic() - self.interrupted_at >= AGAIN_S


@contextmanager
def stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have `handler` called for each signal that asks for a stop, those held back until now first."""
    before = listen(handler)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def listen(handler: Any) -> dict[signal.Signals, Any]:
    """Set the handler of the signals that ask for a stop; returns the ones before."""
    return {each: signal.signal(each, handler) for each in STOP_SIGNALS}


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process when the one that started it (`parent`) is gone: no orphans (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:  # it went before the kernel was told
        os._exit(1)
