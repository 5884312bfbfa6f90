"""Main's side of a job on several machines: which machines have joined, and the state of their ranks.

Main's launcher listens at the rendezvous from its start on. The launchers of the other machines connect, get the path
of the run folder, and start and end ranks when main's launcher tells them. For main's launcher these are more ranks,
whose exit codes arrive in messages. A failed rank, a stop and a restart are therefore handled as on one machine.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lockstep.core import log, safe_read
from lockstep.core.errors import InputError, LockstepError, RankFailed, Stopped
from lockstep.core.run_dir import RunDir
from lockstep.launcher.connection import Connection, ConnectionGone
from lockstep.launcher.processes import GRACE_S, POLL_S

# The seconds that machines have at least for joining a new job, and the seconds that a job with enough machines waits
# for more machines.
FIRST_S, LAST_CALL_S = 600.0, 5.0
# Seconds that a machine which returns waits for its old connection to be known as gone. A packet that was lost while
# the link was down is sent again after a second or two.
RETURN_S = 10.0


@dataclass(eq=False)
class Member:
    """Another machine, from the point of view of main's machine.

    Fields:
        connection: the connection to its launcher.
        host: its name; its address until it has sent its name.
        node_rank: the `launcher.node_rank` of its command; None if this is `auto`.
        overrides: the overrides of its command; None until it has sent them.
        connected_at: the time at which it connected.
        welcome: whether main has sent it the path of the run folder.
        ready: whether it sees the run folder, and waits for the message to start.
        refused: why it cannot take part; empty if it can.
        leaving: whether the user has asked it to stop.
        codes: the exit codes of its ranks in the present attempt; None while they run.
        gone: why it is gone; empty while it is connected.
        give_up_at: the time at which it counts as gone if its ranks, which were killed, have not ended.
    """

    connection: Connection
    host: str
    node_rank: int | None = None
    overrides: list[str] | None = None
    connected_at: float = field(default_factory=time.monotonic)
    welcome: bool = False
    ready: bool = False
    refused: str = ""
    leaving: bool = False
    codes: dict[int, int | None] = field(default_factory=dict)
    gone: str = ""
    give_up_at: float | None = None

    @property
    def runs(self) -> bool:
        return not self.gone and None in self.codes.values()

    def send(self, **message: Any) -> None:
        with suppress(ConnectionGone):  # the next `poll` notices it
            self.connection.send(**message)

    def poll(self) -> None:
        """Process its messages, or notice that it is gone."""
        try:
            for message in self.connection.receive():
                self._handle(message)
        except ConnectionGone as error:
            self.gone = str(error)
        if self.runs and self.give_up_at is not None and time.monotonic() > self.give_up_at:
            self.gone = f"its ranks were told to end, and no answer came within {GRACE_S:g} s"
        if self.gone:
            self.connection.close()

    def _handle(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"host": str(host), "node_rank": int() | None as node_rank, "overrides": list(overrides)}:
                self.host, self.node_rank, self.overrides = host, node_rank, list(map(str, overrides))
            case {"ready": True}:
                self.ready = True
            case {"refused": str(sentence)}:
                self.refused = sentence
            case {"leaving": True}:
                self.leaving = True
            case {"codes": dict(codes)}:
                self.codes.update({int(rank): code for rank, code in codes.items()})
            case _:
                raise ConnectionGone("it is not a launcher of Lockstep")


class Machines:
    """The machines of a job besides main's.

    Args:
        listener: the socket that listens at the rendezvous.
        least, most: the smallest and the largest number of machines of the job, including main's.
        overrides: the overrides of main's command; the commands of the other machines must have the same.
        timeout: seconds of silence after which a machine counts as gone, and seconds to wait for another one then.
    """

    def __init__(
        self, listener: socket.socket, *, least: int, most: int, overrides: Sequence[str], timeout: float
    ) -> None:
        listener.setblocking(False)
        self.listener = listener
        self.least, self.most = least, most
        self.overrides = sorted(overrides)
        self.timeout = timeout
        self.run_dir: RunDir | None = None
        self.arrived: list[Member] = []  # machines that are connected, but not in `members`, in the order of arrival
        self.members: list[Member] = []  # the machines of the present attempt, by node rank
        self.began = False  # whether an attempt has started

    @property
    def place(self) -> str:
        address, port, *_ = self.listener.getsockname()
        return f"{address}:{port}"

    def poll(self) -> None:
        """Accept new connections, process all messages, and notice which machines are gone."""
        self._accept()
        for member in self.arrived:
            member.poll()
            if member.overrides is not None and not (member.welcome or member.gone):
                self._welcome(member)
            if member.refused:
                self._refuse(member)
        self.arrived = [member for member in self.arrived if not member.gone]
        for member in self.members:
            if not member.gone:
                member.poll()

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            while True:
                connected, _ = self.listener.accept()
                connection = Connection(connected, self.timeout)
                self.arrived.append(Member(connection, connection.peer_address))

    def _welcome(self, member: Member) -> None:
        """Send a machine the path of the run folder, if it was started with main's command.

        A machine whose number another one has waits until that one is gone.
        """
        assert self.run_dir is not None
        assert member.overrides is not None
        others = [other for other in (*self.arrived, *self.members) if other is not member and not other.gone]
        same_number = member.node_rank is not None and member.node_rank in [other.node_rank for other in others]
        if sorted(member.overrides) != self.overrides:
            theirs, ours = (" ".join(words) or "nothing" for words in (sorted(member.overrides), self.overrides))
            member.refused = f"it was started with {theirs}, and main with {ours}; use the same command on each"
        elif same_number and time.monotonic() > member.connected_at + RETURN_S:
            member.refused = f"another machine has launcher.node_rank={member.node_rank} too; give each its own"
        elif not same_number:
            member.welcome = True
            member.send(folder=str(self.run_dir.path), lock=safe_read.read_text(self.run_dir.lock))

    def _refuse(self, member: Member) -> None:
        """Refuse a machine that cannot take part.

        Raises:
            InputError: the job cannot start without this machine.
        """
        sentence = f"machine {member.host}: {member.refused}"
        member.send(end=InputError.exit_code, sentence=sentence)
        member.gone = member.refused
        member.connection.close()
        if not self.began and self.least == self.most:
            raise InputError(sentence)
        log.warn(sentence)

    def gather(self, run_dir: RunDir, check: Callable[[], None]) -> None:
        """Wait until the job can start, and choose its machines: `members`.

        `check` is called repeatedly; it can raise to end the wait.

        Raises:
            RankFailed: too few machines have joined in time.
            InputError: a machine that the job needs cannot take part.
        """
        self.run_dir = run_dir
        self.arrived = [member for member in (*self.members, *self.arrived) if not (member.gone or member.leaving)]
        self.members = []
        patience = self.timeout if self.began else max(self.timeout, FIRST_S)
        until, last_call, announced = time.monotonic() + patience, 0.0, False
        while True:
            self.poll()
            check()
            ready = [member for member in self.arrived if member.ready]
            count, now = 1 + len(ready), time.monotonic()
            if count >= self.least:
                last_call = last_call or now + LAST_CALL_S
                if count >= self.most or now > last_call:
                    break
            elif now > until:
                raise RankFailed(
                    f"{count} of {self.least} machines met at {self.place} within "
                    f"{patience:g} s; start the same command on each, and see the output of the others"
                )
            elif not announced:
                log.console.print(f"waiting at {self.place} for {self.least - count} of {self.least} machines")
                announced = True
            time.sleep(POLL_S)
        ready.sort(key=lambda member: self.most if member.node_rank is None else member.node_rank)
        self.members = ready[: self.most - 1]
        self.arrived = [member for member in self.arrived if member not in self.members]
        self.began = True

    @property
    def address(self) -> str:
        """The address by which the members reach main's machine."""
        return self.members[0].connection.own_address

    @property
    def newcomers(self) -> bool:
        """Whether a machine waits that can still join the job."""
        return len(self.members) + 1 < self.most and any(member.ready for member in self.arrived)

    @property
    def remaining(self) -> int:
        """The number of machines that the job could use now: all that are not leaving or gone."""
        staying = (member for member in self.members if not (member.gone or member.leaving))
        return 1 + sum(1 for _ in staying) + sum(member.ready for member in self.arrived)

    def codes(self) -> dict[int, int | None]:
        """The exit codes of the members' ranks. A rank whose machine is gone has failed."""
        return {
            rank: LockstepError.exit_code if code is None and member.gone else code
            for member in self.members
            for rank, code in member.codes.items()
        }

    def send(self, number: int) -> None:
        """Send a signal to the members' ranks that still run."""
        for member in self.members:
            if member.runs:
                member.send(signal=int(number))
                if number == signal.SIGKILL and member.give_up_at is None:
                    member.give_up_at = time.monotonic() + GRACE_S

    def failure(self) -> LockstepError | None:
        """The error for machines that are gone with their ranks; None if there are none.

        It is a stop if the user asked all of these machines to stop.
        """
        gone = [member for member in self.members if member.gone and None in member.codes.values()]
        if not gone:
            return None
        words = "; ".join(f"machine {member.host} is gone ({member.gone})" for member in gone)
        return (Stopped if all(member.leaving for member in gone) else RankFailed)(words)

    def end(self, error: LockstepError | None) -> None:
        """Tell all machines how the job ended."""
        code, sentence = (error.exit_code, str(error)) if error is not None else (0, "")
        self._accept()  # machines that connected before the job was refused
        for member in (*self.members, *self.arrived):
            if not member.gone:
                member.send(end=code, sentence=sentence)
                member.connection.close()
        self.listener.close()
