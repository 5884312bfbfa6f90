"""The launcher that restarts the ranks when one fails, and that runs a job on several machines."""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import TCPStore

from lockstep.core import log, network, plan
from lockstep.core.errors import InputError
from lockstep.core.fields import ranged, ruled
from lockstep.core.protocols import Entry
from lockstep.core.rules import Check
from lockstep.core.run_dir import RunDir
from lockstep.launcher.agent import Meeting
from lockstep.launcher.roles import MainMachine, OtherMachine
from lockstep.launcher.spawn import Spawn

MOST_NODES = 4096


def _is_node_range(value: Any) -> bool:
    """Whether a value is a number of machines, or the smallest and the largest number."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return False
    match = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", str(value))
    return match is not None and 1 <= int(match[1]) <= int(match[2] or match[1]) <= MOST_NODES


def _is_host_and_port(value: Any) -> bool:
    """Whether a value is `host:port`. An IPv6 address is written in brackets."""
    match = re.fullmatch(r"([\w.-]{1,253}|\[[\da-fA-F:.%\w]{2,60}\]):(\d{1,5})", str(value))
    return match is not None and 1 <= int(match[2]) <= 65_535


NODES = Check(f"a whole number from 1 to {MOST_NODES:,}, or the fewest and the most, such as 2:4", _is_node_range)
RENDEZVOUS = Check("HOST:PORT with a port from 1 to 65,535, such as 10.0.0.1:29500", _is_host_and_port)


@dataclass(frozen=True, kw_only=True)
class Elastic(Spawn):
    """One fresh interpreter per rank, which shares nothing with a failed attempt; on one machine or on several."""

    restarts: int = ranged(0, least=0, most=1_000_000)
    nodes: int | str = ruled(1, NODES)
    rendezvous: str | None = ruled(None, RENDEZVOUS)
    node_rank: int | str = ranged("auto", least=0, most=MOST_NODES - 1, words=("auto",))

    @property
    def node_range(self) -> tuple[int, int]:
        least, _, most = str(self.nodes).partition(":")
        return int(least), int(most or least)

    def check(self) -> None:
        for key, neutral in (("rendezvous", None), ("node_rank", "auto")):
            if self.node_range[1] == 1 and (value := getattr(self, key)) != neutral:
                raise InputError(
                    f"launcher.{key} is {value}, but launcher.nodes is 1, so no machines meet; use launcher.nodes=2, "
                    f"or leave out launcher.{key}"
                )

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        restarts = self.restarts
        while failure := self.attempt(entry, run_dir, can_restart=restarts > 0):
            log.warn(f"{failure}; all ranks are started again from the last checkpoint")
            restarts -= 1

    def can_fork(self) -> bool:
        return False

    def meet(self, overrides: Sequence[str]) -> MainMachine | OtherMachine:
        """This machine's role in a job on several machines.

        `overrides` are the overrides of the command that must be the same on all machines.

        Raises:
            InputError: the rendezvous or the number of this machine is wrong.
        """
        meeting = self._meeting()
        host, port = meeting.host, meeting.port
        if self._serves(meeting):
            listener = _listener(host, port).detach()
            store = TCPStore(
                host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener
            )
            return MainMachine(meeting, store, overrides=overrides, restarts=self.restarts)
        node_rank = None if self.node_rank == "auto" else int(self.node_rank)
        return OtherMachine(meeting, node_rank=node_rank, overrides=overrides)

    def try_address(self) -> str:
        if self.node_range[1] == 1:
            return super().try_address()
        meeting = self._meeting()
        if self._serves(meeting):
            _listener(meeting.host, meeting.port).close()
            return f"this machine can listen at {meeting.endpoint}"
        network.addresses(meeting.host, meeting.port)
        return f"{meeting.host} has an address; it listens at {meeting.endpoint} when the job starts there"

    def _serves(self, meeting: Meeting) -> bool:
        """Whether this machine is main's."""
        return self.node_rank == 0 or (self.node_rank == "auto" and network.is_own(meeting.host, meeting.port))

    def _meeting(self) -> Meeting:
        """Where the machines meet."""
        least, most = self.node_range
        timeout = plan.seconds("launcher.timeout", self.timeout)
        if self.rendezvous is None:
            raise InputError(
                f"launcher.nodes is {self.nodes}, but nothing says where the machines meet; name main's machine and "
                "a free port of it, the same on each: launcher.rendezvous=10.0.0.1:29500"
            )
        if isinstance(self.node_rank, int) and self.node_rank >= most:
            raise InputError(f"launcher.node_rank is {self.node_rank}, expected a number from 0 to {most - 1}")
        host, _, text = self.rendezvous.rpartition(":")
        return Meeting(host=host.strip("[]"), port=int(text), least=least, most=most, timeout=timeout)


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens at the rendezvous, at the address of main's machine that the other machines use.

    A machine can resolve its own name to a loopback address, which other machines do not reach. The socket then
    listens at all addresses.
    """
    family, address = network.addresses(host, port)[0]
    named = re.fullmatch(r"[\d.]+|.*:.*|localhost", host) is None
    if named and address.startswith("127."):
        address = ""
    try:
        return socket.create_server((address, port), family=family, backlog=MOST_NODES)
    except OSError as error:
        raise InputError(
            f"launcher.rendezvous: this machine cannot listen at {address or host}:{port} ({error.strerror}); use an "
            "address of it and a free port, or launcher.node_rank=1 if this is not main's machine"
        ) from error
