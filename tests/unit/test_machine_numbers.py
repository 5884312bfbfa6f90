"""The numbers of machines in a job on several."""

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
from lockstep.launcher import Member
from lockstep.launcher.agent import Meeting
from lockstep.launcher.machine import CLAIMED, JOINED, READ, REFUSED, STATE


def never_started(path: Path) -> None:
    raise AssertionError(f"a rank has started in {path}")


@pytest.mark.parametrize(
    "owner", [["another machine", 1], [network.machine(), os.getppid()]], ids=["machine", "process"]
)
def test_a_machine_with_the_number_of_another_is_refused_and_main_is_told(
    tmp_path: Path, owner: list[object]
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_dir = RunDir(tmp_path)
    run_dir.lock.write_text("main's")
    run_dir.config.write_text("")
    state = {"attempt": 3, "folder": str(tmp_path), "lock": "main's", "overrides": [], "ranks": 1}
    store.set(STATE, json.dumps(state))
    store.set(CLAIMED.format(3, 1), json.dumps(owner))
    meeting = Meeting(host="127.0.0.1", port=store.port, least=2, most=2, timeout=5)
    with pytest.raises(InputError, match="node_rank=1, which another machine has"):
        Member(meeting, node_rank=1, overrides=[]).run_attempts(never_started)
    assert store.get(REFUSED).decode().startswith(f"machine {socket.gethostname()}: ")
    assert (store.add(JOINED.format(3), 0), store.add(READ, 0)) == (0, 1)


def test_a_machine_that_two_threads_let_go_counts_once() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    machine = Member(
        Meeting(host="127.0.0.1", port=store.port, least=2, most=2, timeout=5), node_rank=1, overrides=[]
    )
    for _ in range(2):
        machine.acknowledge(store)
    assert store.add(READ, 0) == 1
