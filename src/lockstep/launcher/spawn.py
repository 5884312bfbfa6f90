"""Ranks as child processes of this process, with default signals and a free port.

The ranks are forked if this is safe, which takes milliseconds because everything is imported already. Otherwise each
rank is a fresh interpreter, which takes seconds to import torch.
"""

import multiprocessing.connection
import os
import signal
import socket
import sys
import time
from typing import ClassVar

import torch
from torch.distributed import TCPStore

from lockstep.config.options import option
from lockstep.core.errors import RankFailed
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.launcher.base import Inline, first_failure
from lockstep.launcher.network import LOOPBACK, loopback_listener
from lockstep.launcher.processes import POLL_S, RANKS_GRACE_S, Fork, Fresh, Process, can_fork, forwarding, starting
from lockstep.runtime import child


@option("launcher")
class Spawn(Inline):
    """One child process per rank: a fork of this process if that is safe, else a fresh interpreter."""

    starts_ranks: ClassVar[bool] = True

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        self.attempt(entry, run_dir)

    def can_fork(self) -> bool:
        """A process that has used a GPU's driver cannot be forked, and searching for a GPU uses the driver."""
        return not torch.cuda.is_available() and can_fork()

    def try_address(self) -> str:
        loopback_listener().close()
        return super().try_address()

    def attempt(self, entry: Entry, run_dir: RunDir, *, can_restart: bool = False) -> RankFailed | None:
        """Start the ranks and wait for them. Returns a failure that allows a restart; None if the ranks are done.

        Raises:
            LockstepError: the ranks ended by a stop, a mistake of the user, or a failure with no restarts left.
        """
        for path in run_dir.rank_errors():  # of an earlier attempt
            path.unlink()
        listener = loopback_listener()
        port = listener.getsockname()[1]
        words = [sys.executable, "-m", child.__name__, str(os.getpid()), entry.__module__, str(run_dir.path)]
        fork, children = self.can_fork(), Children()
        with children, forwarding(children.send) as request:
            with starting():
                for rank in range(int(self.ranks)):
                    variables = rank_variables(rank, int(self.ranks), port)
                    if fork:
                        children.ranks.append(_forked(entry, run_dir, variables, listener))
                    else:
                        children.ranks.append(Fresh(words, {**os.environ, "PYTHONSAFEPATH": "1", **variables}))
            # Not before the forks, because it starts threads. By default it would listen on all interfaces.
            children.store = TCPStore(
                LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            request.repeat()
            if failed := children.join():
                failure = first_failure(run_dir, failed)
                if isinstance(failure, RankFailed) and can_restart and not request.requested:
                    return failure
                raise failure  # inside `forwarding`, which turns it into Interrupted after a second SIGINT
        return None


def _forked(entry: Entry, run_dir: RunDir, environment: dict[str, str], listener: socket.socket) -> Process:
    def serve() -> None:
        listener.close()  # only the launcher needs it
        os.environ.update(environment)
        child.become_rank(entry.__module__, run_dir.path)

    process = Fork(serve)
    process.start()
    return process


class Children:
    """The ranks as child processes. The end of the context kills those that still run."""

    def __init__(self) -> None:
        self.ranks: list[Process] = []
        self.store: TCPStore | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self.send(signal.SIGKILL)
        for rank in self.ranks:
            rank.join()

    def join(self) -> dict[int, int]:
        """Wait until all ranks have ended. If ranks fail, end the others and return the failed ranks' exit codes."""
        while True:
            running = [rank.sentinel for rank in self.ranks if rank.exitcode is None]
            failed = {number: code for number, rank in enumerate(self.ranks) if (code := rank.exitcode)}
            if failed or not running:
                break
            multiprocessing.connection.wait(running, POLL_S)
        if failed:
            self.send(signal.SIGTERM)
        until = time.monotonic() + RANKS_GRACE_S
        while any(rank.exitcode is None for rank in self.ranks):
            if time.monotonic() > until:
                self.send(signal.SIGKILL)
            time.sleep(POLL_S)
        return failed

    def send(self, number: int) -> None:
        for rank in self.ranks:
            rank.send_signal(number)


def rank_variables(rank: int, size: int, port: int) -> dict[str, str]:
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
