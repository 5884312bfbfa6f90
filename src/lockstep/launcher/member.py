"""The other machines' side of a job on several: they start, signal and end ranks when main's launcher tells them."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from lockstep.core import log, safe_read
from lockstep.core.errors import BY_EXIT_CODE, InputError, RankFailed, Stopped
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.launcher.connection import Connection, ConnectionGone
from lockstep.launcher.machines import FIRST_S
from lockstep.launcher.processes import POLL_S, Forwarding, failures, forwarding, starting
from lockstep.launcher.spawn import Children, environment, fresh_rank

# Seconds for one try to connect, and for a file of another machine to become visible (NFS caches the content of a
# folder for up to a minute, by default for 3 to 60 s).
CONNECT_S, SEEN_S = 2.0, 30.0


class Member:
    """The role of this machine in a job whose main is on another machine.

    Args:
        host, port: the address of the rendezvous.
        node_rank: the `launcher.node_rank` of this machine's command; None if this is `auto`.
        overrides: the overrides of this machine's command that must be the same on all machines.
        timeout: seconds of silence after which main's machine counts as gone.
    """

    def __init__(
        self, host: str, port: int, *, node_rank: int | None, overrides: Sequence[str], timeout: float
    ) -> None:
        self.host, self.port = host, port
        self.node_rank = node_rank
        self.overrides = list(overrides)
        self.timeout = timeout
        self.children = Children()
        self.reported: dict[int, int | None] = {}
        self.first = 0
        self.run_dir: RunDir | None = None

    def codes(self) -> dict[int, int | None]:
        """The exit codes of this machine's ranks, by their number in the job."""
        return {self.first + rank: code for rank, code in self.children.codes().items()}

    def send(self, number: int) -> None:
        self.children.send(number)

    def run(self, entry: Entry) -> None:
        """Follow the messages of main's launcher until the job ends.

        Raises:
            LockstepError: the job failed or was stopped.
        """
        with closing(self._connect()) as connection, forwarding(self) as request:
            try:
                connection.send(host=socket.gethostname(), node_rank=self.node_rank, overrides=self.overrides)
                self._follow_main(connection, entry, request)
            except ConnectionGone as error:
                raise RankFailed(f"main's machine, {self.host}, is gone ({error})") from error
            finally:
                self.children.__exit__()

    def _connect(self) -> Connection:
        """Wait until main's launcher listens, and connect to it.

        Raises:
            RankFailed: it does not listen in time.
        """
        patience = max(self.timeout, FIRST_S)
        until, announced = time.monotonic() + patience, False
        while True:
            try:
                return Connection(socket.create_connection((self.host, self.port), CONNECT_S), self.timeout)
            except OSError as error:
                if time.monotonic() > until:
                    raise RankFailed(
                        f"nobody has listened at launcher.rendezvous={self.host}:{self.port} for {patience:g} s "
                        f"({error.strerror or error}); start the same command on that machine, or see its output"
                    ) from error
            if not announced:
                log.console.print(f"waiting for main at {self.host}:{self.port}")
                announced = True
            time.sleep(POLL_S)

    def _follow_main(self, connection: Connection, entry: Entry, request: Forwarding) -> None:
        leaving = False
        while True:
            for message in connection.receive(POLL_S):
                match message:
                    case {"folder": str(folder), "lock": str(lock)}:
                        self._confirm_run_folder(connection, Path(folder), lock)
                    case {"start": dict(start)}:
                        self._start(entry, start)
                        request.repeat()
                    case {"signal": int(number)}:
                        self.send(signal.Signals(number))
                    case {"end": 0}:
                        return
                    case {"end": int(code), "sentence": str(sentence)}:
                        raise BY_EXIT_CODE.get(code, RankFailed)(sentence)
                    case _:
                        raise ConnectionGone("it is not a launcher of Lockstep")
            if request.requested and not leaving:
                leaving = True
                connection.send(leaving=True)
            failures(self)
            if (codes := self.codes()) != self.reported:
                connection.send(codes=codes)
                self.reported = codes
            if leaving and None not in codes.values():  # main's launcher has got these exit codes
                raise Stopped("this machine was stopped and has left the job; the state of the run is saved")

    def _confirm_run_folder(self, connection: Connection, path: Path, lock: str) -> None:
        """Wait until this machine sees the run folder, and tell main's launcher.

        Raises:
            InputError: the folder does not become visible.
        """
        self.run_dir = RunDir(path)
        until = time.monotonic() + SEEN_S
        while not _is_locked(self.run_dir, lock):
            if time.monotonic() > until or not path.parent.is_dir():
                sentence = (
                    f"the run folder {path}, which main on {self.host} has created, is not visible on "
                    f"{socket.gethostname()}; put it on a file system that all machines share: output_root=FOLDER"
                )
                connection.send(refused=sentence)
                raise InputError(sentence)
            time.sleep(POLL_S)
        connection.send(ready=True)

    def _start(self, entry: Entry, start: Mapping[str, Any]) -> None:
        assert self.run_dir is not None
        self.children.__exit__()
        self.children, self.reported = Children(), {}
        self.first = int(start["first"])
        local = range(self.first, self.first + int(start["ranks"]))
        with starting():
            for rank in local:
                variables = environment(rank, int(start["size"]), str(start["address"]), int(start["port"]), local)
                self.children.ranks.append(fresh_rank(entry, self.run_dir, variables))


def _is_locked(run_dir: RunDir, lock: str) -> bool:
    """Whether this is the folder that main has locked, and not a folder with the same path on another disk."""
    try:
        return safe_read.read_text(run_dir.lock) == lock and run_dir.config.is_file()
    except UnreadableFile:
        return False
