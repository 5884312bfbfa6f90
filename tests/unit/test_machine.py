"""What a machine tells the others of a job on several, and when main starts the ranks of all machines again."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from lockstep.core import network
from lockstep.core.errors import InputError, LockstepError, RankFailed, Stopped
from lockstep.core.run_dir import RunDir
from lockstep.launcher import MainMachine, OtherMachine, machine, roles
from lockstep.launcher.agent import Meeting
from lockstep.launcher.attach import REACHED_S
from lockstep.launcher.machine import JOINED, READ, REFUSED, REPORTS, STATE
from lockstep.launcher.roles import CLAIMED


def never_started(path: Path) -> None:
    raise AssertionError(f"a rank has started in {path}")


def main(folder: Path) -> tuple[TCPStore, Meeting]:
    """Main's store, in the third attempt of a job whose run folder is `folder`, and where it meets the others."""
    store, run_dir = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), RunDir(folder)
    run_dir.lock.write_text("main's")
    run_dir.config.write_text("")
    state = {"attempt": 3, "folder": str(folder), "lock": "main's", "overrides": [], "ranks": 1}
    store.set(STATE, json.dumps(state))
    return store, Meeting(host="127.0.0.1", port=store.port, least=2, most=2, timeout=5)


@pytest.mark.parametrize(
    "owner", [["another machine", 1], [network.machine(), os.getppid()]], ids=["machine", "process"]
)
def test_a_machine_with_the_number_of_another_is_refused_and_main_is_told(
    tmp_path: Path, owner: list[object]
) -> None:
    store, meeting = main(tmp_path)
    store.set(CLAIMED.format(3, 1), json.dumps(owner))
    with pytest.raises(InputError, match="node_rank=1, which another machine has"):
        OtherMachine(meeting, node_rank=1, overrides=[]).run_attempts(never_started)
    assert store.get(REFUSED).decode().startswith(f"machine {socket.gethostname()}: ")
    assert (store.check([JOINED.format(3)]), store.add(READ, 0)) == (False, 1)


def test_a_machine_says_that_it_waits_for_main_before_a_silent_network_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Main's address answers nothing: it is a socket that accepts nobody, and whose queue is full."""
    shown: list[float] = []
    silent = socket.create_server(("127.0.0.1", 0), backlog=0)
    address = silent.getsockname()

    def show(text: str) -> None:
        assert text == f"waiting for main at 127.0.0.1:{address[1]}"
        shown.append(time.monotonic() - start)
        silent.close()

    monkeypatch.setattr(roles, "ANSWER_S", 0.2)
    monkeypatch.setattr(roles, "FIRST_S", 0.0)
    monkeypatch.setattr(roles.log, "show", show)
    meeting = Meeting(host=address[0], port=address[1], least=2, most=2, timeout=0.0)
    with socket.create_connection(address):
        start = time.monotonic()
        with pytest.raises(RankFailed, match="nobody has listened at"):
            OtherMachine(meeting, node_rank=1, overrides=[]).run_attempts(never_started)
    assert shown[0] < REACHED_S


@pytest.mark.parametrize(("failed", "is_over"), [({}, False), ({1: 70}, True)], ids=["not needed", "failed"])
def test_only_a_machine_that_has_run_ranks_ends_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: dict[int, int], is_over: bool
) -> None:
    store, meeting = main(tmp_path)

    def run_agent(*arguments: object, **options: object) -> tuple[bool, dict[int, int]]:
        store.set(STATE, json.dumps({"end": 0, "sentence": ""}))
        return False, failed

    monkeypatch.setattr(machine, "run_agent", run_agent)
    OtherMachine(meeting, node_rank=1, overrides=[]).run_attempts(never_started)
    assert json.loads(store.get(JOINED.format(3))) == socket.gethostname()
    assert json.loads(store.get(REPORTS.format(3)))["is_over"] is is_over
    assert store.add(READ, 0) == 1


@pytest.mark.parametrize(
    ("node_rank", "overrides", "lock", "says"),
    [
        (None, ["epochs=3"], "main's", "it was started with epochs=3, and main with nothing; use the same command"),
        (None, [], "of another disk", "which main on 127.0.0.1 has created, is not visible"),
    ],
)
def test_a_machine_with_another_job_or_another_disk_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    node_rank: int | None,
    overrides: list[str],
    lock: str,
    says: str,
) -> None:
    store, meeting = main(tmp_path)
    monkeypatch.setattr(roles, "SEEN_S", 0.0)
    RunDir(tmp_path).lock.write_text(lock)
    with pytest.raises(InputError, match=says):
        OtherMachine(meeting, node_rank=node_rank, overrides=overrides).run_attempts(never_started)
    assert not store.check([JOINED.format(3)])


def names_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *node_ranks: int | None, claimed: object = None
) -> list[str]:
    """The names with which machines join, in the order of their arrival; `claimed` has the number 1 already."""
    names: list[str] = []
    store, meeting = main(tmp_path)
    state = store.get(STATE)
    if claimed is not None:
        store.set(CLAIMED.format(3, 1), json.dumps(claimed))

    def run_agent(*arguments: object, own_name: str, **options: object) -> tuple[bool, dict[int, int]]:
        names.append(own_name)
        store.set(STATE, json.dumps({"end": 0, "sentence": ""}))
        return True, {}

    monkeypatch.setattr(machine, "run_agent", run_agent)
    for node_rank in node_ranks:
        store.set(STATE, state)
        OtherMachine(meeting, node_rank=node_rank, overrides=[]).run_attempts(never_started)
    return names


def test_numbered_machines_come_before_those_that_are_numbered_by_their_arrival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = names_in_order(tmp_path, monkeypatch, None, 12, None, 3)
    assert sorted(["127.0.0.1", *names]) == ["127.0.0.1", names[3], names[1], names[0], names[2]]


def test_a_machine_that_comes_back_has_its_number_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles.psutil, "pid_exists", lambda number: number != 4444)
    assert names_in_order(tmp_path, monkeypatch, 1, claimed=[network.machine(), 4444]) == ["~00000001"]


class Attempts:
    """The attempts of a job of two machines, of which each ends as the other machine and this one report."""

    def __init__(self, store: TCPStore, *attempts: tuple[dict[int, int], dict[str, object]]) -> None:
        self.store, self.attempts, self.seen = store, list(attempts), 0

    def run_agent(
        self, meeting: Meeting, number: int, *arguments: object, **options: object
    ) -> tuple[bool, dict[int, int]]:
        failed, report = self.attempts[self.seen]
        self.seen += 1
        report = {"host": "other", "is_over": bool(failed), "is_leaving": False, "failed": {}, **report}
        self.store.append(JOINED.format(number), json.dumps("other") + "\n")
        self.store.append(REPORTS.format(number), json.dumps(report) + "\n")
        return not failed, failed


def run_main(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *attempts: tuple[dict[int, int], dict[str, object]],
    restarts: int = 0,
    least: int = 2,
) -> tuple[type[LockstepError] | None, int]:
    """How a job ends on main's machine, and how many attempts it has taken."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = Meeting(host="127.0.0.1", port=store.port, least=least, most=3, timeout=5)
    run_dir, ended = RunDir.at(tmp_path / "run"), Attempts(store, *attempts)
    run_dir.lock.write_text("main's")
    monkeypatch.setattr(roles, "ANSWER_S", 0.0)
    monkeypatch.setattr(machine, "run_agent", ended.run_agent)
    error: LockstepError | None = None
    try:
        MainMachine(meeting, store, overrides=[], restarts=restarts).run(never_started, run_dir, ranks=1)
    except LockstepError as raised:
        error = raised
    return error and type(error), ended.seen


DONE: tuple[dict[int, int], dict[str, object]] = ({}, {})
FAILED: tuple[dict[int, int], dict[str, object]] = ({0: 70}, {})
STOPPED = {0: Stopped.exit_code}


@pytest.mark.parametrize(
    ("attempts", "restarts", "error", "number"),
    [
        ([DONE], 0, None, 1),
        ([FAILED], 0, RankFailed, 1),
        ([FAILED, DONE], 1, None, 2),
        ([FAILED, FAILED], 1, RankFailed, 2),
        ([(STOPPED, {}), FAILED, DONE], 1, None, 3),  # a machine that joins is no failure
    ],
)
def test_main_starts_the_ranks_again_as_often_as_restarts_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attempts: list[tuple[dict[int, int], dict[str, object]]],
    restarts: int,
    error: type[LockstepError] | None,
    number: int,
) -> None:
    assert run_main(tmp_path, monkeypatch, *attempts, restarts=restarts) == (error, number)


@pytest.mark.parametrize(("least", "error", "number"), [(1, None, 2), (2, Stopped, 1)])
def test_a_job_goes_on_while_as_many_machines_remain_as_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, error: type[LockstepError] | None, number: int
) -> None:
    leaving = (STOPPED, {"is_leaving": True})
    assert run_main(tmp_path, monkeypatch, leaving, DONE, least=least) == (error, number)


def test_an_attempt_of_machines_does_not_read_the_errors_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.at(tmp_path / "run")
    mistake = {"time": 1, "rank": 0, "exit_code": 2, "known": True, "sentence": "", "places": {}, "traceback": ""}
    run.rank_error(0).write_text(json.dumps(mistake))
    assert run_main(tmp_path, monkeypatch, FAILED, DONE, restarts=1) == (None, 2)
