"""Ranks as child processes of this process, with default signals and a free port.

The ranks are forked if this is safe, which takes milliseconds because everything is imported already. Otherwise each
rank is a fresh interpreter, which takes seconds to import torch.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch.distributed import TCPStore

from lockstep.core import log
from lockstep.core.errors import RankFailed
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.launcher.base import Inline, first_failure, remove_error_files
from lockstep.launcher.processes import (
    GRACE_S,
    LOOPBACK,
    POLL_S,
    forwarding,
    loopback_listener,
    starting,
    store,
)
from lockstep.runtime import child


@dataclass(frozen=True, kw_only=True)
class Spawn(Inline):
    """One child process per rank: a fork of this process if that is safe, else a fresh interpreter."""

    starts_ranks: ClassVar[bool] = True

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        restarts = self.most_restarts()
        while failure := self._attempt(entry, run_dir, can_restart=restarts > 0):
            log.warn(f"{failure}; all ranks are started again from the last checkpoint")
            restarts -= 1

    def most_restarts(self) -> int:
        """How often failed ranks are started again."""
        return 0

    def can_fork(self) -> bool:
        return can_fork()

    def _attempt(self, entry: Entry, run_dir: RunDir, *, can_restart: bool) -> RankFailed | None:
        """Start the ranks and wait for them. Returns a failure that allows a restart; None if the ranks are done.

        Raises:
            LockstepError: the ranks ended by a stop, a mistake of the user, or a failure with no restarts left.
        """
        remove_error_files(run_dir)
        listener = loopback_listener()
        port = listener.getsockname()[1]
        environments = [environment(rank, int(self.ranks), port) for rank in range(int(self.ranks))]
        fork, children = self.can_fork(), Children()
        with children, forwarding(children.send) as request:
            with starting():
                for variables in environments:
                    if fork:
                        children.ranks.append(_forked(entry, run_dir, variables, listener))
                    else:
                        children.ranks.append(fresh_rank(entry, run_dir, variables))
            children.store = store(listener)
            request.repeat()
            if failed := children.join():
                failure = first_failure(run_dir, failed)
                if isinstance(failure, RankFailed) and can_restart and not request.requested:
                    return failure
                raise failure  # inside `forwarding`, which turns it into Interrupted after a second SIGINT
        return None


def can_fork() -> bool:
    """Whether ranks can be forked from this process.

    A forked process has one thread. It would wait forever for a lock that another thread of its parent held (a thread
    of autograd after a backward pass, or of OpenMP), so this process must have one thread only. A process that has
    used a GPU's driver cannot be forked either, and searching for a GPU uses the driver.
    """
    if sys.platform != "linux" or torch.cuda.is_available():
        return False
    return len(list(Path("/proc/self/task").iterdir())) == 1


@dataclass(frozen=True)
class Rank:
    """One child process.

    Fields:
        pid: the number of the process.
        sentinel: a file descriptor that becomes readable when the process has ended.
        code: returns the exit code, negative for a signal; None while the process runs.
        close: waits until the process has ended, and frees the resources for it in this process.
    """

    pid: int
    sentinel: int
    code: Callable[[], int | None]
    close: Callable[[], None]


def _forked(entry: Entry, run_dir: RunDir, environment: dict[str, str], listener: socket.socket) -> Rank:
    """A rank as a fork of this process, which closes its copy of `listener`."""
    process = multiprocessing.get_context("fork").Process(
        target=child.begin, args=(os.getpid(), entry.__module__, run_dir.path, environment, listener.fileno())
    )
    process.start()
    assert process.pid is not None

    def close() -> None:
        process.join()
        process.close()

    return Rank(process.pid, process.sentinel, lambda: process.exitcode, close)


def fresh_rank(entry: Entry, run_dir: RunDir, environment: dict[str, str]) -> Rank:
    """A rank as a fresh interpreter, which does not run the program of this process again."""
    ended, lives = os.pipe()  # only the child keeps `lives` open, until it ends
    process = subprocess.Popen(
        [sys.executable, "-m", child.__name__, str(os.getpid()), entry.__module__, str(run_dir.path)],
        env={**os.environ, "PYTHONSAFEPATH": "1", **environment},
        pass_fds=[lives],
    )
    os.close(lives)

    def close() -> None:
        process.wait()
        os.close(ended)

    return Rank(process.pid, ended, process.poll, close)


class Children:
    """The ranks as child processes. The end of the context kills those that still run."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.store: TCPStore | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        for rank in self.ranks:
            rank.close()

    def join(self) -> dict[int, int]:
        """Wait until all ranks have ended. If ranks fail, end the others and return the failed ranks' exit codes."""
        while running := [rank.sentinel for rank in self.ranks if rank.code() is None]:
            multiprocessing.connection.wait(running, POLL_S)
            if failed := self._failures():
                return failed
        return self._failures()

    def _failures(self) -> dict[int, int]:
        """The exit codes of the ranks that failed. If any has failed, end the others before returning."""
        failed = {number: code for number, rank in enumerate(self.ranks) if (code := rank.code())}
        if failed:
            self.send(signal.SIGTERM)
            until = time.monotonic() + GRACE_S
            while any(rank.code() is None for rank in self.ranks):
                if time.monotonic() > until:
                    self.send(signal.SIGKILL)
                time.sleep(POLL_S)
        return failed

    def send(self, number: int) -> None:
        for rank in self.ranks:
            if rank.code() is None:
                os.kill(rank.pid, number)


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that torch.distributed needs in the environment of a rank, whose store has this port."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
