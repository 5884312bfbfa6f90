"""Ranks as child processes of one machine, which meet at a free port. Keys: see `conf/launcher/`."""

import multiprocessing.connection
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch
from torch.distributed import TCPStore

from lockstep.config.options import option
from lockstep.core.errors import BY_EXIT_CODE, LockstepError, RankFailed, Stopped, StorageError
from lockstep.core.protocols import Entry
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile, read_json
from lockstep.launcher.inline import Inline
from lockstep.launcher.processes import KILLED, POLL_S, REACHED_S, Fresh, Process, forwarding, in_thread, wait
from lockstep.runtime import child
from lockstep.runtime.addresses import LOOPBACK, loopback_server
from lockstep.runtime.forking import Fork, can_fork
from lockstep.runtime.pickled import packed
from lockstep.runtime.signals import LAUNCHER, STOP_SIGNALS, not_begun

# Seconds that the other ranks have to end after one has failed: they may hang in a collective.
RANKS_GRACE_S = 5.0


@option("launcher")
class Spawn(Inline):
    """One child process per rank: on the CPU (Linux) a fork of the command's process, else a fresh interpreter."""

    starts_ranks: ClassVar[bool] = True

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        """Start the ranks, each of which calls `entry`, and wait for them. Raises the error of the first to fail."""
        self.attempt(entry, run_dir)

    def try_address(self) -> str:
        loopback_server().close()
        return super().try_address()

    def can_fork(self) -> bool:
        """A process that has used a GPU's driver cannot be forked, and searching for a GPU uses the driver."""
        return not torch.cuda.is_available() and can_fork()

    def attempt(self, entry: Entry, run_dir: RunDir, *, can_restart: bool = False) -> RankFailed | None:
        """Start the ranks and wait for them. Returns a failure that allows a restart, and raises any other."""
        for path in run_dir.rank_errors():  # of an earlier attempt
            path.unlink()
        listener = loopback_server()
        port = listener.getsockname()[1]
        words = (sys.executable, "-m", child.__name__, str(os.getpid()), entry.module, str(run_dir.path))
        fork, children = self.can_fork(), Children()
        with packed(() if fork else entry.objects) as file, children, forwarding(children.send) as request:
            with _starting():
                for rank in range(int(self.ranks)):
                    variables = {
                        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.ranks)),
                        "MASTER_ADDR": LOOPBACK,
                        "MASTER_PORT": str(port),
                        "TORCHELASTIC_USE_AGENT_STORE": "True",
                    }
                    if fork:
                        children.ranks.append(_forked(entry, run_dir, variables, listener))
                    else:
                        children.ranks.append(
                            Fresh([*words, *file], {**os.environ, "PYTHONSAFEPATH": "1", **variables})
                        )
            # Not before the forks, because it starts threads. By default it would listen on all interfaces. In a
            # thread, because it connects to itself in native code, where this process would hear no signal.
            listening = listener.detach()
            store = in_thread(
                lambda: TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
            )
            wait(lambda: request.requested or (store.done() and store.result()), REACHED_S)
            request.repeat()
            if failed := children.join():
                failure = first_failure(run_dir, failed, entry.remedy)
                if isinstance(failure, RankFailed) and can_restart and not request.requested:
                    return failure
                raise failure  # inside `forwarding`, which turns it into Interrupted after a second SIGINT
        return None


@contextmanager
def _starting() -> Iterator[None]:
    """The context in which ranks start: a variable names their launcher; they unblock signals when they hear them."""
    os.environ[LAUNCHER] = str(os.getpid())
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGUSR2})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        del os.environ[LAUNCHER]


def _forked(entry: Entry, run_dir: RunDir, environment: dict[str, str], listener: socket.socket) -> Process:
    def serve() -> None:
        listener.close()  # only the launcher needs it
        os.environ.update(environment)
        child.become_rank(entry.module, run_dir.path, *entry.objects)

    process = Fork(serve)
    process.start()
    return process


class Children:
    """The ranks as child processes. The end of the context kills those that still run."""

    def __init__(self) -> None:
        self.ranks: list[Process] = []

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


def killed(exit_codes: dict[int, int], remedy: str = Entry.remedy) -> str:
    """Which signals have ended ranks, by their negative exit codes."""
    signals = {rank: signal.Signals(-code) for rank, code in sorted(exit_codes.items())}
    words = ", ".join(f"rank {rank} was ended by {number.name}" for rank, number in signals.items())
    hint = f", {KILLED}; {remedy}" * (signal.SIGKILL in signals.values())
    return words + hint


def first_failure(run_dir: RunDir, exit_codes: dict[int, int], remedy: str = Entry.remedy) -> LockstepError:
    """The error that ended a job. `exit_codes` has the ranks that failed before the launcher ended the others.

    A rank that was killed by a signal left no error file, so the exit codes are checked first. Otherwise the earliest
    error in the files is the cause: a rank that raises breaks the connections of other ranks, which raise later.
    """
    if by_signal := {rank: code for rank, code in exit_codes.items() if code < 0}:
        return RankFailed(f"{killed(by_signal, remedy)}; see {run_dir.rank_log(min(by_signal))}")
    errors = []
    for path in run_dir.rank_errors():
        with suppress(UnreadableFile):  # a full disk may have ended its rank
            errors.append(read_json(path))
    if not errors and set(exit_codes.values()) == {Stopped.exit_code}:  # stopped before they could write error files
        return not_begun(Run(run_dir.path).saved)
    if not errors:
        if StorageError.exit_code in exit_codes.values():
            return StorageError(
                f"{run_dir.path} cannot be written, not even the error; free disk space there, and resume the run"
            )
        words = ", ".join(f"rank {rank} left with exit code {code}" for rank, code in sorted(exit_codes.items()))
        return RankFailed(f"{words or 'a rank left'} and wrote no error; see {run_dir.logs}")
    errors.sort(key=lambda error: error["time"])
    first: dict[str, Any] = errors[0]
    if not first["known"]:
        failed = RankFailed(f"rank {first['rank']} failed: {first['sentence']}", first["traceback"])
        failed.add_note(failed.details)  # for a program; the command shows it, too
        return failed
    # A rank that hangs wrote where it was and which ranks of its machine were suspended: combine these facts.
    places: dict[str, str] = {}
    for error in errors:
        places = {**error["places"], **places}
    where = ", ".join(f"rank {rank} {places[rank]}" for rank in sorted(places, key=int))
    known = BY_EXIT_CODE.get(first["exit_code"], RankFailed)(first["sentence"] + (f"; {where}" if where else ""))
    known.add_note(f"rank {first['rank']}:\n{first['traceback']}")  # shown by HYDRA_FULL_ERROR=1 only
    return known
