"""What a machine tells the others of a job on several."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from lockstep.core import network
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.launcher import OtherMachine, machine
from lockstep.launcher.agent import Meeting
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
