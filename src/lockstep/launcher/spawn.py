"""Ranks as child processes of this one, with clean signals and a port of their own.

Where it is safe they are forked, which takes milliseconds: they find everything imported and the data read. Else
each is a fresh interpreter, as from `torch.multiprocessing.spawn`, which takes seconds.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.distributed import TCPStore

from lockstep.core import log
from lockstep.core.errors import RankFailed
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.launcher.base import Inline, first_failure, forget_errors
from lockstep.launcher.processes import (
    LOOPBACK,
    POLL_S,
    failures,
    forwarding,
    loopback_listener,
    loopback_store,
    starting,
)
from lockstep.runtime import child


@dataclass(frozen=True, kw_only=True)
class Spawn(Inline):
    """One child process per rank: a fork of this process where that is safe."""

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        restarts = self.most_restarts()
        while failure := self._attempt(entry, run_dir, can_restart=restarts > 0):
            log.warn(f"{failure}; all ranks are started again from the last checkpoint")
            restarts -= 1

    def most_restarts(self) -> int:
        """How often failed ranks are started again."""
        return 0

    def can_fork(self) -> bool:
        """Whether ranks are forked from this process."""
        return can_fork()

    def _attempt(self, entry: Entry, run_dir: RunDir, *, can_restart: bool) -> RankFailed | None:
        """Start the ranks and wait for them. Returns the fault after which they can be started again, if any.

        Raises:
            LockstepError: what ended them otherwise: a stop, a mistake of the user, or a fault without restarts left.
        """
        forget_errors(run_dir)
        ranks, fork = int(self.ranks), self.can_fork()
        context = multiprocessing.get_context("fork") if fork else multiprocessing.get_context("spawn")
        listener = loopback_listener()
        port = listener.getsockname()[1]
        inherited = listener.fileno() if fork else None
        # The entry by its name: pickling the function would import its module first, before signals are handled.
        arguments = (os.getpid(), entry.__module__, run_dir.path)
        children = Children(
            [
                context.Process(target=child.begin, args=(*arguments, _environment(rank, ranks, port), inherited))
                for rank in range(ranks)
            ]
        )
        with children, forwarding(children) as request:
            if not fork:
                # Started first: its start unblocks the signals that the start of the ranks holds back.
                resource_tracker.ensure_running()
            children.start()
            children.store = loopback_store(listener)
            request.repeat()
            failed = children.join()
        if not failed:
            return None
        failure = first_failure(run_dir, failed)
        if isinstance(failure, RankFailed) and can_restart and not request.requested:
            return failure
        raise failure


def can_fork() -> bool:
    """Whether ranks can be forked from this process.

    A forked process has one thread, and waits for ever for a lock that another thread held (autograd's after a
    backward pass, OpenMP's): so this process must have one thread. A process that has used a GPU's driver cannot be
    forked either, and asking whether there is a GPU uses it.
    """
    if sys.platform != "linux" or torch.cuda.is_available():
        return False
    return len(list(Path("/proc/self/task").iterdir())) == 1


class Children:
    """The ranks as child processes. None of them outlives the context."""

    def __init__(self, processes: list[BaseProcess]) -> None:
        self.processes = processes
        self.store: TCPStore | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)

    def start(self) -> None:
        with starting():
            for process in self.processes:
                process.start()

    def join(self) -> dict[int, int]:
        """Wait until all ranks have ended. Returns the exit codes of those that failed, after ending the others."""
        while running := [each.sentinel for each in self.processes if each.exitcode is None]:
            multiprocessing.connection.wait(running, POLL_S)
            if failed := failures(self):
                return failed
        return failures(self)

    def codes(self) -> dict[int, int | None]:
        return {rank: process.exitcode for rank, process in enumerate(self.processes)}

    def send(self, number: int) -> None:
        for process in self.processes:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables that torch.distributed needs in the environment of a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
