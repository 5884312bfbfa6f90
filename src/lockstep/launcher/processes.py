"""For all that starts processes: the processes themselves, and their signals."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from threading import Thread
from types import FrameType
from typing import Any, Protocol, TypeVar

from lockstep.core import log
from lockstep.core.errors import Interrupted, LockstepError
from lockstep.runtime.signals import StopRequest, stop_signals

POLL_S = 0.05
REACHED_S = 15.0  # seconds to wait for the store of an agent or a launcher, which exists before its ranks
SHOWN_S = 10.0  # seconds after which a rank shows what it waits for
# Why a process gets a SIGKILL that nobody of ours has sent.
KILLED = "probably because the machine, or its memory cgroup (container), ran out of memory"

T = TypeVar("T")


class Process(Protocol):
    """A child process. `sentinel` is what to wait for until it has ended: mostly a file descriptor."""

    @property
    def sentinel(self) -> Any: ...

    @property
    def exitcode(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""

    def join(self) -> None:
        """Wait for the end."""

    def send_signal(self, number: int) -> None:
        """No effect if the process has ended."""


class Fresh:
    """A fresh interpreter, which takes seconds. `options` are passed to `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], **options: Any) -> None:
        self.sentinel, lives = os.pipe()  # only the child keeps `lives` open, until it ends
        self.process = subprocess.Popen(words, env=environment, pass_fds=[lives], **options)
        os.close(lives)
        self.send_signal = self.process.send_signal

    @property
    def exitcode(self) -> int | None:
        return self.process.poll()

    def join(self) -> None:
        self.process.wait()
        os.close(self.sentinel)


class Forwarding(StopRequest):
    """Forwards a stop to the ranks as SIGTERM, because the terminal may have sent them SIGINT already."""

    def __init__(self, send: Callable[[int], None]) -> None:
        super().__init__()
        self.immediate = False
        self.send = send

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.take(number)
        self.repeat()  # nothing is raised: the launcher waits for the ranks to end

    def repeat(self) -> None:
        """Send the stop again, for ranks that had not started when it arrived."""
        if self.requested:
            self.send(signal.SIGKILL if self.force else signal.SIGTERM)


@contextmanager
def forwarding(send: Callable[[int], None]) -> Iterator[Forwarding]:
    """Forward a stop, SIGUSR2 (for stacks) and Ctrl-Z by `send`. Raises Interrupted after a second SIGINT."""

    def suspend(number: int, frame: FrameType | None) -> None:
        send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        send(signal.SIGCONT)

    request = Forwarding(send)
    with stop_signals(request):
        before = signal.signal(signal.SIGTSTP, suspend)
        stacks = signal.signal(signal.SIGUSR2, lambda number, frame: send(number))
        try:
            yield request
        except LockstepError as error:
            if request.force:
                raise Interrupted from error
            raise
        finally:
            signal.signal(signal.SIGTSTP, before)
            signal.signal(signal.SIGUSR2, stacks)


def in_thread(call: Callable[[], T]) -> futures.Future[T]:
    """The result of a call in a thread, which does not keep this process from ending."""
    future: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def is_listening(address: str, port: int, seconds: float = REACHED_S) -> bool:
    with suppress(OSError):
        socket.create_connection((address, port), timeout=seconds).close()
        return True
    return False


def wait(condition: Callable[[], T], seconds: float, *, show: str = "") -> T:
    """Wait until the condition holds, at most so long; returns its last value. Polls, so that signals are heard."""
    start = time.monotonic()
    while not (holds := condition()) and (waited := time.monotonic() - start) < seconds:
        if show and waited > SHOWN_S:
            log.show(f"{show} (at most {seconds:g} s)")
            show = ""
        time.sleep(POLL_S)
    return holds
