"""What the launchers that start processes share: signals, how ranks end, and where they meet."""

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
# Seconds that ranks have to end after the first one has. After a stop they only have files to close; after a fault
# one may hang in a collective.
GRACE_S = 5.0
LOOPBACK = "127.0.0.1"


class Ranks(Protocol):
    """The processes of one job."""

    def codes(self) -> dict[int, int | None]:
        """The exit code of each rank, negative for a signal; None while it runs."""

    def send(self, number: int) -> None:
        """Send a signal to the ranks that still run."""


def failures(ranks: Ranks) -> dict[int, int]:
    """The exit codes of the ranks that failed. If one has, the others cannot go on: end them before returning."""
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
    """Passes a stop on to the ranks as SIGTERM: the terminal may have sent them SIGINT already."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.immediate = False
        self.ranks = ranks

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.take(number)
        self.repeat()  # nothing is raised: the launcher waits for the ranks to end

    def repeat(self) -> None:
        """Send the stop again, for ranks that had not started when it came."""
        if self.requested:
            self.ranks.send(signal.SIGKILL if self.force else signal.SIGTERM)


@contextmanager
def forwarding(ranks: Ranks) -> Iterator[Forwarding]:
    """Pass SIGTERM, SIGINT and SIGUSR1 on to the ranks while the context is open; a second SIGINT kills them.

    Ctrl-Z suspends them with this process, and they continue with it, also in sessions of their own.

    Raises:
        Interrupted: a second SIGINT killed them.
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
            if request.force:
                raise Interrupted from error
            raise
        finally:
            signal.signal(signal.SIGTSTP, before)


@contextmanager
def starting() -> Iterator[None]:
    """Start ranks in this context: they are told who launches them, and signals are blocked meanwhile.

    A rank inherits the blocked signals, and unblocks them when it has its own handlers.
    """
    os.environ[LAUNCHER] = str(os.getpid())
    held = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        del os.environ[LAUNCHER]


def loopback_listener() -> socket.socket:
    """A free port on which the ranks of this machine can meet; other machines cannot reach it."""
    return socket.create_server((LOOPBACK, 0))


def store(listener: socket.socket) -> TCPStore:
    """A store that serves this port. By default a `TCPStore` listens on all interfaces. It starts threads."""
    address, port, *_ = listener.getsockname()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
