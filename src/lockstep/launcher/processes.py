"""The processes of a job's ranks, for the launchers that start some: signals, ends, and a place to meet."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from torch.distributed import TCPStore

from lockstep.core.errors import Interrupted, LockstepError
from lockstep.runtime.signals import LAUNCHER, STOP_SIGNALS, StopRequest, stop_signals

POLL_S = 0.05
# When a rank leaves because it was asked to, main has saved (or no step had ended), and the others only have files to
# close; one that waits in native code is ended by its watchdog. After a fault one may hang in a collective.
GRACE_S = 5.0
LOOPBACK = "127.0.0.1"


class Ranks(Protocol):
    """The processes of one job, whoever started them."""

    def codes(self) -> dict[int, int | None]:
        """The exit code of each rank, negative for a signal; None while it runs."""

    def send(self, number: int) -> None:
        """Send a signal to the ranks that still run."""


def failures(ranks: Ranks) -> dict[int, int]:
    """The exit codes of the ranks that failed; once one did the others cannot go on, and are ended first."""
    failed = {rank: code for rank, code in ranks.codes().items() if code}
    if failed:
        ranks.send(signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        while None in ranks.codes().values():
            if time.monotonic() > until:
                ranks.send(signal.SIGKILL)
            time.sleep(POLL_S)
    return failed


class Forwarding(StopRequest):
    """Passes a wish to stop on to the ranks, as SIGTERM: their terminal may have sent them a SIGINT already."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.immediate = False
        self.ranks = ranks

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.take(number)
        self.repeat()  # and nothing is raised: what the ranks make of it is waited for

    def repeat(self) -> None:
        """Say it (again), to ranks that were not there yet when it came."""
        if self.heard:
            self.ranks.send(signal.SIGKILL if self.at_once else signal.SIGTERM)


@contextmanager
def forwarding(ranks: Ranks) -> Iterator[Forwarding]:
    """Pass SIGTERM, SIGINT and SIGUSR1 on to the ranks while the context is open; a second SIGINT kills them.

    With Ctrl-Z they are suspended and go on together with this process, also in sessions of their own.

    Raises:
        Interrupted: they were killed so.
    """

    def suspend(number: int, frame: FrameType | None) -> None:
        ranks.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        ranks.send(signal.SIGCONT)

    request = Forwarding(ranks)
    with stop_signals(request):
        before = signal.signal(signal.SIGTSTP, suspend)
        try:
            yield request
        except LockstepError as error:
            if request.at_once:
                raise Interrupted from error
            raise
        finally:
            signal.signal(signal.SIGTSTP, before)


@contextmanager
def starting() -> Iterator[None]:
    """Around the start of ranks: tell them who launches them, and hold signals back until they can hear them.

    A rank inherits the held signals, and lets them through as soon as it has its own handlers.
    """
    os.environ[LAUNCHER] = str(os.getpid())
    held = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        del os.environ[LAUNCHER]


def loopback_listener() -> socket.socket:
    """A port of its own for the ranks of this machine to meet at, out of reach for other machines."""
    return socket.create_server((LOOPBACK, 0))


def loopback_store(listener: socket.socket) -> TCPStore:
    """A store that serves a port: left to itself a `TCPStore` listens on all interfaces. It has threads."""
    port = listener.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
