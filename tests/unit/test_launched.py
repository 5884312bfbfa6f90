"""Ranks started by torchrun, srun or a script: the address of their store, and which ranks share a machine."""

import json
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from helpers import forked
from lockstep.core import launch_env
from lockstep.core.errors import InputError, RankFailed
from lockstep.core.launch_env import (
    ATTEMPT,
    Place,
    Starter,
    check_launched,
    launched_place,
    started_by,
    store_address,
    without_local_rank,
)
from lockstep.core.run_dir import RunDir
from lockstep.launcher import attach, processes
from lockstep.runtime import addresses

STEP = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "3,1,2",
    "SLURM_STEP_NODELIST": "localhost,gpu[07-08]",
}


@pytest.fixture(autouse=True)
def _nobody_launched_this(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("SLURM_", "MASTER_", "TORCHELASTIC_")) or name.endswith(("RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)


def set_environment(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_the_first_host_of_a_list_and_the_tasks_of_each_machine_are_found() -> None:
    hosts = {"login": "login", "node[7,01-03]": "node7", "login,gpu[1-2]": "login"}
    hosts |= {"rack[2-3]node[08-16,20]": "rack2node08", "a[1-2]b[3,5]c[7]d.example.org,z9": "a1b3c7d.example.org"}
    assert {text: launch_env.first_host(text) for text in hosts} == hosts
    sizes = {"4": [4], "2(x3)": [2, 2, 2], "2(x3),1": [2, 2, 2, 1], "1,3(x2),16(x1)": [1, 3, 3, 16]}
    assert {text: launch_env.tasks_per_node(text) for text in sizes} == sizes


def test_jobs_and_steps_that_run_beside_each_other_have_ports_of_their_own() -> None:
    ports = [launch_env.port_of_step(job, step) for job in range(4_000_000, 4_000_500) for step in range(10)]
    assert len(set(ports)) == len(ports)
    assert all(port in launch_env.PORTS for port in ports)
    assert launch_env.port_of_step(2**32, 4_294_967_290) in launch_env.PORTS  # the number of an interactive step


def test_a_task_of_srun_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, **STEP)
    launch_env.adopt_srun()
    assert launched_place() == Place(rank=5, size=6, local_rank=1, local_size=2)
    assert started_by() is Starter.srun
    assert store_address() == ("localhost", launch_env.port_of_step(70001, 2))


@pytest.mark.parametrize(
    "changed", [{"RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}], ids=["of another", "the only task"]
)
def test_another_process_of_srun_is_left_alone(monkeypatch: pytest.MonkeyPatch, changed: dict[str, str]) -> None:
    set_environment(monkeypatch, **{**STEP, **changed})
    launch_env.adopt_srun()
    assert "WORLD_SIZE" not in os.environ


def test_a_task_whose_variables_do_not_fit_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"SLURM_STEP_NUM_TASKS": "", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "first"}
    for name, text in {**wrong, "SLURM_JOB_ID": "70001.0"}.items():
        set_environment(monkeypatch, **{**STEP, name: text})
        with pytest.raises(InputError, match=f"do not fit together .*{name}='{text}'.*env -u SLURM_STEP_ID"):
            launch_env.adopt_srun()
        assert "RANK" not in os.environ


OPEN: dict[str, dict[str, str]] = {
    r"the environment has RANK=0, but no WORLD_SIZE; .* env -u RANK": {"RANK": "0"},
    r"the environment has WORLD_SIZE=2, but no RANK; .* env -u WORLD_SIZE": {"WORLD_SIZE": "2"},
    r"MPI has started 2 processes \(OMPI_COMM_WORLD_SIZE=2\), and each would": {"OMPI_COMM_WORLD_SIZE": "2"},
}


@pytest.mark.parametrize("says", OPEN)
def test_variables_that_leave_the_rank_open_are_refused(monkeypatch: pytest.MonkeyPatch, says: str) -> None:
    set_environment(monkeypatch, **OPEN[says])
    with pytest.raises(InputError, match=says):
        check_launched()


@pytest.mark.parametrize(
    "words", ["", "WORLD_SIZE=1", "OMPI_COMM_WORLD_SIZE=1", "RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_SIZE=2"]
)
def test_variables_of_one_launcher_are_accepted(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    set_environment(monkeypatch, **dict(word.split("=") for word in words.split()))
    check_launched()


def test_who_launched_a_rank_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, RANK="0", WORLD_SIZE="2")
    assert started_by() is Starter.script
    set_environment(monkeypatch, SLURM_PROCID="0", TORCHELASTIC_RUN_ID="none")
    assert started_by() is Starter.torchrun


def test_the_local_rank_that_older_launchers_add_is_no_word_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--local-rank=1", "epochs=2", "--local_rank=1"]
    assert without_local_rank(words) == words
    set_environment(monkeypatch, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert without_local_rank(words) == ["epochs=2"]


def test_an_invalid_store_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="the environment has RANK and WORLD_SIZE, but no MASTER_ADDR"):
        store_address()
    set_environment(monkeypatch, MASTER_ADDR="here")
    with pytest.raises(InputError, match="the environment has MASTER_PORT='', expected a number from 1 to 65535"):
        store_address()
    set_environment(monkeypatch, MASTER_ADDR="here", MASTER_PORT="0")
    with pytest.raises(InputError, match="MASTER_PORT='0', expected a number from 1 to 65535"):
        store_address()


def test_ranks_of_a_script_find_out_which_of_them_share_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    for rank, machine in enumerate(("other", addresses.machine(), "other", "third", addresses.machine())):
        store.set(attach.ARRIVED.format(0, rank), json.dumps([machine, rank, 5]))
    set_environment(monkeypatch, RANK="4", WORLD_SIZE="5")
    attach.find_local_ranks(store, "0")
    assert launched_place() == Place(rank=4, size=5, local_rank=1, local_size=2)


def test_an_address_of_this_machine_is_its_own_and_has_an_interface() -> None:
    assert addresses.interface_of("127.0.0.1") == "lo"
    assert addresses.interface_to("127.0.0.2", 9) == "lo"
    assert addresses.interface_of("198.51.100.1") is None
    assert addresses.is_own_address("127.0.0.1", 29500)
    assert addresses.is_own_address("localhost", 29500)
    assert not addresses.is_own_address("198.51.100.1", 29500)


def test_an_alias_is_of_its_interface_and_a_name_is_of_any_machine_that_has_one_of_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses_of = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"], "eth0:1": ["10.0.0.3"], "usb0": ["169.254.1.1"]}
    entries = {
        name: [SimpleNamespace(family=socket.AF_INET, address=text) for text in texts]
        for name, texts in addresses_of.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(addresses, "interface_to", lambda host, port: None)
    assert addresses.interface_of("10.0.0.3") == addresses.interface_elsewhere() == "eth0"
    for order in (("198.51.100.1", "127.0.0.1"), ("127.0.0.1", "198.51.100.1")):
        both = [(socket.AF_INET, address) for address in order]
        monkeypatch.setattr(addresses, "resolve_host", lambda host, port, both=both: both)
        assert addresses.is_own_address("both", 29500)


def test_a_host_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(InputError, match=r"the host 'nowhere' is not known on this machine \(Name or service"):
        addresses.resolve_host("nowhere", 1)


@pytest.fixture
def store() -> TCPStore:
    """The store that rank 0 of this process serves, if it serves one."""
    return TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=timedelta(seconds=30)
    )


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, port: int) -> None:
    set_environment(monkeypatch, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    monkeypatch.setattr(attach, "READ_S", 0.0)


def join() -> None:
    with attach.following() if launch_env.follows() else attach.leading():
        pytest.fail("a job of these ranks begins")


def test_a_rank_whose_number_another_process_has_is_refused(monkeypatch: pytest.MonkeyPatch, store: TCPStore) -> None:
    as_rank(monkeypatch, 1, store.port)
    store.set(attach.ARRIVED.format(0, 1), json.dumps([addresses.machine(), 7, 2]))
    with pytest.raises(InputError, match=rf"RANK=1 was given to two processes, 7 and {os.getpid()}; give each"):
        join()


def test_a_rank_of_another_job_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: TCPStore
) -> None:
    as_rank(monkeypatch, 0, store.port)
    store.set(attach.ARRIVED.format(0, 1), json.dumps([addresses.machine(), 7, 3]))
    with pytest.raises(SystemExit) as left:
        join()
    assert left.value.code == 2
    assert "rank 1 was started with WORLD_SIZE=3, and rank 0 with WORLD_SIZE=2" in capsys.readouterr().err
    assert store.get("lockstep/run_dir/0") == b"failed 2"


@pytest.mark.parametrize(("readers", "may_leave"), [(0, False), (1, True)])
def test_main_leaves_with_its_error_when_all_others_have_read_it(
    monkeypatch: pytest.MonkeyPatch, store: TCPStore, readers: int, may_leave: bool
) -> None:
    def wait(condition: Callable[[], object], seconds: float, **options: Any) -> object:
        return (
            waited.append(condition()) if seconds == attach.READ_S else processes.wait(condition, seconds, **options)
        )

    waited = list[object]()
    as_rank(monkeypatch, 0, store.port)
    monkeypatch.setattr(attach, "wait", wait)
    store.set(attach.ARRIVED.format(0, 1), json.dumps([addresses.machine(), 7, 3]))
    store.add(f"{attach.ANSWER.format(0)}/read", readers)
    with pytest.raises(SystemExit):
        join()
    assert waited == [may_leave]


def test_ranks_that_an_agent_starts_again_continue_in_the_folder_of_before(
    monkeypatch: pytest.MonkeyPatch, store: TCPStore, tmp_path: Path
) -> None:
    as_rank(monkeypatch, 0, store.port)
    set_environment(monkeypatch, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    for attempt, earlier in (("first", ""), ("second", str(tmp_path))):
        store.set(attach.ARRIVED.format(attempt, 1), json.dumps([addresses.machine(), 7, 2]))
        store.set(attach.SEEN.format(attempt, 1), attach.OK)
        followers = attach.Followers(store, attempt, 2)
        followers.gather()
        assert followers.earlier == earlier
        followers.send(RunDir(tmp_path))


def test_a_rank_that_never_starts_ends_the_wait_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: TCPStore
) -> None:
    as_rank(monkeypatch, 0, store.port)
    monkeypatch.setattr(attach, "JOIN_S", 0.3)
    monkeypatch.setattr(processes, "SHOWN_S", 0.1)
    with pytest.raises(SystemExit) as left:
        join()
    assert left.value.code == 70
    output = capsys.readouterr()
    assert (output.out + output.err).count("waiting for rank 1 (at most 0.3 s)") == 1
    assert "rank 1 of 2 has not joined within 0.3 s; its output says why" in output.err


def test_main_does_not_serve_at_a_port_of_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        as_rank(monkeypatch, 0, server.getsockname()[1])
        with pytest.raises(InputError, match=r"cannot listen at .*choose a free MASTER_PORT"):
            join()


def test_a_program_that_answers_nothing_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "REACHED_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        as_rank(monkeypatch, 1, server.getsockname()[1])
        with pytest.raises(RankFailed, match=r"no store at MASTER_ADDR=localhost .*does not answer as a store"):
            join()


def test_main_must_be_on_the_machine_of_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(server.getsockname()[1])}
    done = forked("test_launched:main_of_another_machine", MASTER_ADDR="198.51.100.1", **place)
    assert done.code == 0, done.err
    assert done.out.startswith("MASTER_ADDR=198.51.100.1 does not lead to this machine")


def main_of_another_machine() -> None:
    """Be rank 0 where it cannot serve. A process of its own: a thread still connects, and ends it at a usual exit."""
    attach.REACHED_S = 0.3
    with pytest.raises(InputError) as caught:
        join()
    print(caught.value, flush=True)
    os._exit(0)


@pytest.mark.parametrize("restarts", ["0", "2"])
def test_no_answer_of_a_former_main_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, restarts: str) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    set_environment(monkeypatch, RANK="1", WORLD_SIZE="2", TORCHELASTIC_RESTART_COUNT=restarts, **variables)
    # What the ranks of an earlier start have left in the store of the agent, which was called as this one.
    earlier = {attach.NAME_KEY.format(1): "gone", attach.INVITED_KEY.format("gone"): restarts}
    for key, value in (earlier | {f"lockstep/run_dir/{restarts}": f"ok {tmp_path}"}).items():
        store.set(key, value)

    def join(attempt: str, answer: str) -> Path:
        """What the rank gets from a main that invites it to an attempt, and answers."""
        store.set(attach.NAME_KEY.format(1), "gone")
        main = attach.in_thread(lambda: invite(attempt))
        store.set(f"lockstep/run_dir/{attempt}", answer)
        try:
            with attach.following() as run_dir:
                return run_dir.path
        finally:
            main.result(timeout=30)

    def invite(attempt: str) -> None:
        assert attach.wait(lambda: store.get(attach.NAME_KEY.format(1)) != b"gone", 30)
        store.set(attach.INVITED_KEY.format(store.get(attach.NAME_KEY.format(1)).decode()), attempt)

    RunDir.at(tmp_path / "now").config.touch()
    assert join("now", f"ok {tmp_path / 'now'}") == tmp_path / "now"
    assert os.environ[ATTEMPT] == "now"
    with pytest.raises(InputError, match="put it on a file system that all machines share"):
        join("elsewhere", f"ok {tmp_path / 'not' / 'here'}")
    with pytest.raises(SystemExit) as left:
        join("then", "failed 2")
    assert left.value.code == 2
    assert store.add("lockstep/run_dir/then/read", 0) == 1
