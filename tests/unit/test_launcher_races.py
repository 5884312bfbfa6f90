"""Launchers of several machines, when a rank ends or a machine leaves at the worst moment."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.core.errors import LockstepError, RankFailed, Stopped
from lockstep.launcher.connection import Connection
from lockstep.launcher.lead import Everyone, Lead
from lockstep.launcher.machines import Machines
from lockstep.launcher.machines import Member as Seen
from lockstep.launcher.member import Member
from lockstep.launcher.spawn import Children


class EndsInBetween(Children):
    """A rank that runs for the first `looks` polls, and then has ended because it was stopped."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def codes(self) -> dict[int, int | None]:
        self.looks -= 1
        return {0: None if self.looks >= 0 else Stopped.exit_code}


@pytest.fixture
def connected() -> Iterator[tuple[Connection, Connection]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = Connection(socket.create_connection(server.getsockname()), 60)
        there = Connection(server.accept()[0], 60)
    yield here, there
    here.close()
    there.close()


def machines() -> Machines:
    listener = socket.create_server(("127.0.0.1", 0))
    return Machines(listener, least=1, most=2, overrides=(), timeout=60)


@pytest.mark.parametrize("looks", range(4))
def test_a_rank_that_is_stopped_between_two_looks_is_no_job_that_is_done(looks: int) -> None:
    lead = Lead(machines=machines(), ranks=1, restarts=0)
    failed, _ = lead._wait(Everyone(EndsInBetween(looks), lead.machines))
    lead.machines.end(None)
    assert failed == {0: Stopped.exit_code}


@pytest.mark.parametrize("looks", range(5))
def test_a_machine_that_leaves_says_first_how_its_ranks_ended(
    connected: tuple[Connection, Connection], looks: int
) -> None:
    here, there = connected
    member = Member("127.0.0.1", 1, node_rank=None, overrides=(), timeout=60)
    member.children = EndsInBetween(looks)
    with pytest.raises(Stopped):
        member._obey(here, cast(Any, None), cast(Any, SimpleNamespace(requested=True)))
    assert list(there.receive(10))[-1] == {"codes": {"0": Stopped.exit_code}}


@pytest.mark.parametrize(("leaving", "kind"), [(True, Stopped), (False, RankFailed)])
def test_a_machine_that_leaves_while_its_ranks_are_being_started_is_no_fault(
    connected: tuple[Connection, Connection], leaving: bool, kind: type[LockstepError], tmp_path: Path
) -> None:
    here, there = connected
    known = machines()
    known.members = [Seen(there, "other", codes={1: None})]
    if leaving:
        here.send(leaving=True)
    here.socket.shutdown(socket.SHUT_RDWR)
    while not known.members[0].gone:
        known.poll()
    known.end(None)
    assert type(known.failure()) is kind
