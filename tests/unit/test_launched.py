"""Ranks started by torchrun, srun or a script: the address of their store, and which ranks share a machine."""

import errno
import json
import os
import re
import socket
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import DistNetworkError, DistStoreError, TCPStore

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
    sizes = {
        "4": [4],
        "2(x3)": [2, 2, 2],
        "2(x3),1": [2, 2, 2, 1],
        "1,3(x2),16(x1)": [1, 3, 3, 16],
        "8(x12),4": [8] * 12 + [4],
    }
    assert {text: launch_env.tasks_per_node(text) for text in sizes} == sizes


def test_jobs_and_steps_that_run_beside_each_other_have_ports_of_their_own() -> None:
    ports = [launch_env.port_of_step(job, step) for job in range(4_000_000, 4_000_500) for step in range(10)]
    assert len(set(ports)) == len(ports)
    assert all(10_000 <= port < 30_000 for port in ports), "Linux assigns ports from 32768 on by itself"
    assert launch_env.port_of_step(2**32, 4_294_967_290) in launch_env.PORTS  # the number of an interactive step


def test_a_task_of_srun_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, **STEP)
    launch_env.adopt_srun()
    assert launched_place() == Place(rank=5, size=6, local_rank=1, local_size=2)
    assert started_by() is Starter.srun
    assert store_address() == ("localhost", launch_env.port_of_step(70001, 2))


def test_a_store_that_the_user_names_is_that_of_a_task_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, **STEP, MASTER_ADDR="10.0.0.7", MASTER_PORT="1234")
    launch_env.adopt_srun()
    assert store_address() == ("10.0.0.7", 1234)


def test_ranks_of_srun_meet_at_the_address_of_the_first_machine_also_where_the_variables_are_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_env, "address_of", lambda node: f"address of {node}")
    set_environment(monkeypatch, **STEP, MASTER_ADDR="", MASTER_PORT="")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "gpu[07-08],login")
    launch_env.adopt_srun()
    assert store_address() == ("address of gpu07", 10_000 + (17 * 70001 + 2) % 20_000)


@pytest.mark.parametrize("missing", STEP)
def test_a_process_without_all_variables_of_a_step_is_no_task(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    set_environment(monkeypatch, **{name: text for name, text in STEP.items() if name != missing})
    launch_env.adopt_srun()
    assert "RANK" not in os.environ


@pytest.mark.parametrize(
    ("knows", "facts", "expected"),
    [
        (True, None, "node7"),
        (False, None, "node7"),
        (False, "NodeName=node7 Arch=x\n   NodeAddr=10.0.0.7 NodeHostName=other", "10.0.0.7"),
        (False, "NodeName=node7", "node7"),
        (True, "NodeAddr=10.0.0.7", "node7"),
    ],
)
def test_machines_meet_at_the_name_of_the_first_or_at_its_address_where_no_name_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, knows: bool, facts: str | None, expected: str
) -> None:
    def resolve(host: str, port: object) -> list[Any]:
        hosts.append(host)
        if not knows:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    hosts = list[str]()
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setenv("PATH", str(tmp_path))
    if facts is not None:
        program = tmp_path / "scontrol"
        program.write_text(f'#!/bin/sh\n[ "$*" = "show node node7" ] && /bin/echo "{facts}"\n')
        program.chmod(0o755)
    # Each machine has its agent in a task of its own.
    set_environment(
        monkeypatch, SLURM_JOB_ID="70001", SLURM_JOB_NODELIST="node[7-9],gpu1", SLURM_PROCID="3", SLURM_STEP_ID="2"
    )
    assert launch_env.rendezvous() == f"{expected}:{launch_env.port_of_step(70001, 0)}"
    assert hosts == ["node7"]


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
    with pytest.raises(InputError) as caught:
        launch_env.adopt_srun()
    assert re.findall(r"(SLURM_\w+)='", str(caught.value)) == sorted(STEP)


OPEN: dict[str, dict[str, str]] = {
    r"the environment has RANK=0, but no WORLD_SIZE; .* env -u RANK": {"RANK": "0"},
    r"the environment has WORLD_SIZE=2, but no RANK; .* env -u WORLD_SIZE": {"WORLD_SIZE": "2"},
    **{
        rf"MPI has started 2 processes \({name}=2\), and each would .*: env -u {name}\)": {name: "2"}
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
    },
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
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert started_by() is Starter.srun
    set_environment(monkeypatch, RANK="1")
    assert started_by() is Starter.script, "a script of sbatch is task 0, whatever its ranks are"
    labels = {starter.value: (starter.label, starter.cause) for starter in Starter}
    assert labels == {
        "torchrun --nproc-per-node": ("torchrun", "torchrun"),
        "srun --ntasks": ("srun", "srun"),
        "by WORLD_SIZE": ("whoever set RANK and WORLD_SIZE", "RANK and WORLD_SIZE"),
    }


def test_a_rank_is_of_our_agent_by_the_name_that_it_has_for_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, TORCHELASTIC_RUN_ID="lockstep")
    assert not launch_env.in_agent(), "it is no rank"
    set_environment(monkeypatch, RANK="0", WORLD_SIZE="2")
    assert (launch_env.in_agent(), launch_env.follows()) == (True, False)
    set_environment(monkeypatch, RANK="1", TORCHELASTIC_RUN_ID="none", LOCAL_RANK="0")
    assert (launch_env.in_agent(), launch_env.follows()) == (False, True), "it is the first of another machine"


def test_the_ranks_on_this_machine_are_all_unless_a_launcher_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_env.local_size(3) == 3
    set_environment(monkeypatch, RANK="1", WORLD_SIZE="8")
    assert launch_env.local_size(3) == 8
    set_environment(monkeypatch, LOCAL_WORLD_SIZE="2")
    assert launch_env.local_size(3) == 2


def test_a_job_is_one_that_was_submitted_here_only_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launch_env.SUBMITTED, raising=False)
    assert not launch_env.is_submitted()
    for own, job, expected in (("7", None, False), (None, "7", False), ("7", "8", False), ("7", "7", True)):
        for name, value in ((launch_env.SUBMITTED, own), ("SLURM_JOB_ID", job)):
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
        assert launch_env.is_submitted() is expected


def test_the_local_rank_that_older_launchers_add_is_no_word_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--local-rank=1", "epochs=2", "--local_rank=1"]
    assert without_local_rank(words) == words
    set_environment(monkeypatch, RANK="1", WORLD_SIZE="2")
    assert without_local_rank(words) == words, "the variable is what launchers of today set"
    set_environment(monkeypatch, LOCAL_RANK="1")
    assert without_local_rank(words) == ["epochs=2"]


def test_an_invalid_store_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="the environment has RANK and WORLD_SIZE, but no MASTER_ADDR"):
        store_address()
    set_environment(monkeypatch, MASTER_ADDR="here")
    with pytest.raises(InputError, match="the environment has MASTER_PORT='', expected a number from 1 to 65535"):
        store_address()
    for port in ("0", "65536", "+1", "\u0663", "1.0"):
        set_environment(monkeypatch, MASTER_ADDR="here", MASTER_PORT=port)
        with pytest.raises(InputError, match=re.escape(f"MASTER_PORT='{port}', expected a number from 1 to 65535")):
            store_address()
    for port in ("1", "65535"):
        set_environment(monkeypatch, MASTER_PORT=port)
        assert store_address() == ("here", int(port))
    set_environment(monkeypatch, MASTER_ADDR="")
    with pytest.raises(InputError, match="but no MASTER_ADDR"):
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


def interfaces(monkeypatch: pytest.MonkeyPatch, **addresses_of: str) -> None:
    """Have this machine these interfaces, each with its addresses."""
    families = {True: socket.AF_INET6, False: socket.AF_INET}
    entries = {
        name: [
            SimpleNamespace(family=psutil.AF_LINK, address="00:00:5e:00:53:01"),
            *(SimpleNamespace(family=families[":" in text], address=text) for text in texts.split()),
        ]
        for name, texts in addresses_of.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)


def test_an_interface_has_addresses_of_both_kinds_with_their_zones(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces(monkeypatch, lo="127.0.0.1 ::1", eth0="10.0.0.2 fe80::1%eth0", ib0="2001:db8::2")
    names = {"::1": "lo", "10.0.0.2": "eth0", "fe80::1": "eth0", "fe80::1%eth0": "eth0", "2001:db8::2": "ib0"}
    assert {address: addresses.interface_of(address) for address in names} == names


@pytest.mark.parametrize(
    ("addresses_of", "route", "name"),
    [
        ({"lo": "127.0.0.1 ::1", "eth0": "10.0.0.2 fe80::2%eth0"}, None, "eth0"),
        ({"lo": "127.0.0.1", "eth0": "10.0.0.2", "usb0": "169.254.1.1 fe80::3%usb0"}, None, "eth0"),
        ({"lo": "127.0.0.1", "eth0": "10.0.0.2", "eth1": "10.0.1.2"}, None, None),
        ({"lo": "127.0.0.1", "eth0": "10.0.0.2", "eth1": "10.0.1.2"}, "eth1", "eth1"),
        ({"lo": "127.0.0.1"}, None, None),
    ],
)
def test_the_interface_to_other_machines_is_that_of_the_default_route_or_the_only_one(
    monkeypatch: pytest.MonkeyPatch, addresses_of: dict[str, str], route: str | None, name: str | None
) -> None:
    interfaces(monkeypatch, **addresses_of)
    hosts = list[str]()
    monkeypatch.setattr(addresses, "interface_to", lambda host, port: (hosts.append(host), route)[1])
    assert addresses.interface_elsewhere() == name
    assert hosts == ["198.51.100.1"]


@pytest.mark.parametrize(
    ("one_machine", "route", "elsewhere", "gloo", "nccl"),
    [
        (True, "eth0", "eth1", "loop", "loop"),
        (False, "eth0", "eth1", "eth0", None),
        (False, "loop", "eth1", "eth1", None),  # main's machine, by a loopback address
        (False, "loop", None, None, None),
        (False, None, "eth1", None, None),  # the kernel does not tell
    ],
)
def test_ranks_listen_where_the_others_reach_them_unless_the_user_says_where(
    monkeypatch: pytest.MonkeyPatch,
    one_machine: bool,
    route: str | None,
    elsewhere: str | None,
    gloo: str | None,
    nccl: str | None,
) -> None:
    interfaces(monkeypatch, loop="127.0.0.1")
    set_environment(monkeypatch, MASTER_ADDR="main", MASTER_PORT="29500")
    monkeypatch.setattr(addresses, "interface_to", lambda host, port: {("main", 29500): route}[host, port])
    monkeypatch.setattr(addresses, "interface_elsewhere", lambda: elsewhere)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    addresses.choose_interface(one_machine=one_machine)
    assert [os.environ.get(name) for name in names] == [gloo, nccl]
    set_environment(monkeypatch, **dict.fromkeys(names, "mine"))
    addresses.choose_interface(one_machine=one_machine)
    assert [os.environ[name] for name in names] == ["mine", "mine"]


def test_where_the_system_tells_no_interface_of_loopback_it_is_lo(monkeypatch: pytest.MonkeyPatch) -> None:
    interfaces(monkeypatch, eth0="10.0.0.2")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    addresses.choose_interface(one_machine=True)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_the_next_address_of_a_host_is_tried_where_none_of_its_interfaces_leads_to_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_route = (socket.AF_INET6, "127.0.0.1")  # no address of this family
    for known, name in (([no_route, (socket.AF_INET, "127.0.0.1")], "lo"), ([no_route], None), ([], None)):
        monkeypatch.setattr(addresses, "resolve_host", lambda host, port, known=known: known)
        assert addresses.interface_to("both", 1) == name


def test_a_machine_is_another_one_after_a_boot_and_in_another_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words, boot = addresses.machine().split(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert words == [socket.gethostname(), boot, str(Path("/proc/self/ns/net").readlink())]
    assert addresses.machine() == " ".join(words), "one line"
    monkeypatch.setattr(addresses, "Path", lambda name: tmp_path / "none")  # a system without /proc
    assert addresses.machine() == socket.gethostname()


def test_a_server_of_this_machine_has_the_port_that_it_is_told() -> None:
    with addresses.loopback_server() as server:
        address = server.getsockname()
        assert address[0] == "127.0.0.1"
        with socket.create_connection(address), pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
            addresses.loopback_server(address[1])
    with addresses.loopback_server(address[1]) as again:
        assert again.getsockname() == address


def test_a_machine_that_does_not_reach_itself_is_told_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    class Down(socket.socket):
        def connect(self, address: Any) -> None:
            raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket, "socket", Down)
    says = (
        r"cannot reach itself at 127\.0\.0\.1 \(Network is unreachable\); .*: ip addr replace 127\.0\.0\.1/8 dev lo"
    )
    with pytest.raises(InputError, match=says):
        addresses.loopback_server()


def test_a_host_that_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(InputError, match=r"the host 'nowhere' is not known on this machine \(Name or service"):
        addresses.resolve_host("nowhere", 1)
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"is not known on this machine \(no host has such a name\); use its"):
        addresses.resolve_host("x" * 64, 1)
    known = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}
    assert [addresses.resolve_host(host, 1) for host in known] == [[(known[host], host)] for host in known]


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
    for machine, refused in ((addresses.machine(), False), ("another", True)):  # there it can have the same number
        store.set(attach.ARRIVED.format(0, 1), json.dumps([machine, os.getpid(), 9]))
        with pytest.raises(InputError) if refused else nullcontext():
            attach._arrive(store, attach.ONLY)


def test_of_two_processes_of_one_number_that_come_at_once_the_second_to_write_is_refused(
    monkeypatch: pytest.MonkeyPatch, store: TCPStore
) -> None:
    def after_another(write: Callable[..., Any]) -> Callable[..., Any]:
        def late(*words: str) -> Any:
            store.compare_set(key, "", json.dumps([addresses.machine(), 7, 2]))
            return write(*words)

        return late

    as_rank(monkeypatch, 1, store.port)
    key = attach.ARRIVED.format(attach.ONLY, 1)
    writing = {"compare_set": after_another(store.compare_set), "set": after_another(store.set)}
    seen: Any = SimpleNamespace(check=store.check, get=store.get, **writing)
    with pytest.raises(InputError, match=rf"RANK=1 was given to two processes, 7 and {os.getpid()}; give each"):
        attach._arrive(seen, attach.ONLY)


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


@pytest.mark.parametrize(("size", "readers"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_main_leaves_with_its_error_when_all_others_have_read_it(
    monkeypatch: pytest.MonkeyPatch, store: TCPStore, size: int, readers: int
) -> None:
    def wait(condition: Callable[[], object], seconds: float, **options: Any) -> object:
        return (
            waited.append(condition()) if seconds == attach.READ_S else processes.wait(condition, seconds, **options)
        )

    waited = list[object]()
    as_rank(monkeypatch, 0, store.port)
    set_environment(monkeypatch, WORLD_SIZE=str(size))
    monkeypatch.setattr(attach, "wait", wait)
    store.set(attach.ARRIVED.format(0, 1), json.dumps([addresses.machine(), 7, 4]))
    store.add(f"{attach.ANSWER.format(0)}/read", readers)
    with pytest.raises(SystemExit):
        join()
    assert waited == [readers == size - 1]


def test_ranks_that_an_agent_starts_again_continue_in_the_folder_of_before(
    monkeypatch: pytest.MonkeyPatch, store: TCPStore, tmp_path: Path
) -> None:
    as_rank(monkeypatch, 0, store.port)
    set_environment(monkeypatch, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", **{launch_env.RUN_FOLDER: "of the variable"})
    for attempt, earlier in (("first", "of the variable"), ("second", str(tmp_path))):
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


def test_a_lone_rank_has_no_followers_and_needs_no_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_environment(monkeypatch, RANK="0", WORLD_SIZE="1", **{launch_env.RUN_FOLDER: "before"})
    with attach.leading() as followers:
        assert ([*followers.ranks], followers.earlier, followers.have_folder) == ([], "before", False)
        followers.send(RunDir(tmp_path))
        assert followers.have_folder


@pytest.mark.parametrize("seen", [attach.OK, "machine b does not see the run folder"])
def test_main_goes_on_when_each_rank_sees_the_folder_and_ends_with_the_sentence_of_one_that_does_not(
    seen: str, monkeypatch: pytest.MonkeyPatch, store: TCPStore, tmp_path: Path
) -> None:
    def lead() -> None:
        with attach.leading() as followers:
            followers.send(RunDir(tmp_path))

    as_rank(monkeypatch, 0, store.port)
    store.set(attach.ARRIVED.format(0, 1), json.dumps([addresses.machine(), 7, 2]))
    store.set(attach.SEEN.format(0, 1), seen)
    if seen == attach.OK:
        lead()
    else:
        with pytest.raises(InputError, match=f"^{seen}$"):
            lead()
    assert store.get(attach.ANSWER.format(0)).decode() == f"ok {tmp_path}", "it is no refusal of the job"
    assert store.get(attach.FOLDER_KEY).decode() == str(tmp_path)
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("0", "2")
    assert ATTEMPT not in os.environ


@pytest.mark.parametrize(("restart", "warns"), [(None, False), ("0", False), ("1", True), ("3", True)])
def test_ranks_that_were_started_again_say_so(
    restart: str | None, warns: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_environment(monkeypatch, RANK="0", WORLD_SIZE="2")
    if restart is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
    monkeypatch.setattr(attach, "_store", lambda *, serve: None)
    monkeypatch.setattr(attach, "_arrive", lambda store, attempt: None)
    monkeypatch.setattr(attach.Followers, "gather", lambda self: None)
    with attach.leading():
        pass
    shown = capsys.readouterr()
    assert (f"all were started again: restart {restart}" in shown.out + shown.err) is warns


@pytest.mark.parametrize("parent", [True, False])
def test_a_folder_of_main_is_waited_for_where_its_place_is_seen(
    parent: bool, monkeypatch: pytest.MonkeyPatch, store: TCPStore, tmp_path: Path
) -> None:
    def wait(condition: Callable[[], object], seconds: float, **options: Any) -> object:
        if getattr(condition, "__name__", "") != "is_file":
            return processes.wait(condition, seconds, **options)
        waited.append(seconds)
        return condition()

    waited: list[float] = []
    folder = tmp_path / ("a run" if parent else "not here/run")
    as_rank(monkeypatch, 1, store.port)
    monkeypatch.setattr(attach, "wait", wait)
    store.set(attach.ARRIVED.format(0, 0), json.dumps(["main's", 7, 2]))
    store.set(attach.ANSWER.format(0), f"ok {folder}")
    with pytest.raises(InputError, match=rf"does not see the run folder {folder}, which main has created"):
        join()
    assert waited == [attach.SEEN_S if parent else 0.0]
    assert f"does not see the run folder {folder}" in store.get(attach.SEEN.format(0, 1)).decode()
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("0", "1")
    RunDir.at(folder).config.touch()
    with attach.following() as run_dir:
        assert run_dir.path == folder
    assert store.get(attach.SEEN.format(0, 1)) == b"ok"


def test_a_rank_that_main_dismisses_leaves_with_mains_code_and_says_that_it_has_read_it(
    monkeypatch: pytest.MonkeyPatch, store: TCPStore
) -> None:
    as_rank(monkeypatch, 1, store.port)
    set_environment(monkeypatch, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    store.set(attach.ANSWER.format(0), "failed 74")
    with pytest.raises(SystemExit) as left:
        join()
    assert left.value.code == 74
    assert store.add(f"{attach.ANSWER.format(0)}/read", 0) == 1


def test_ranks_whose_launcher_says_where_they_are_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, RANK="1", WORLD_SIZE="8", LOCAL_RANK="5", LOCAL_WORLD_SIZE="7")
    attach.find_local_ranks(None, "0")  # type: ignore[arg-type]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(attach, "_arrival", lambda store, attempt, rank: ("here", 8))
    attach.find_local_ranks(None, "0")  # type: ignore[arg-type]
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("5", "8")
    set_environment(monkeypatch, LOCAL_WORLD_SIZE="7")
    monkeypatch.delenv("LOCAL_RANK")
    attach.find_local_ranks(None, "0")  # type: ignore[arg-type]
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("1", "8"), "half of it says nothing"
    set_environment(monkeypatch, TORCHELASTIC_USE_AGENT_STORE="True")
    monkeypatch.delenv("LOCAL_RANK")
    attach.find_local_ranks(None, "0")  # type: ignore[arg-type]
    assert "LOCAL_RANK" not in os.environ, "an agent sets them"


def test_of_an_agent_the_present_rank_counts_whoever_had_its_number(
    monkeypatch: pytest.MonkeyPatch, store: TCPStore
) -> None:
    set_environment(monkeypatch, RANK="1", WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
    store.set(attach.ARRIVED.format("now", 1), json.dumps([addresses.machine(), 7, 9]))
    store.set(attach.NAME_KEY.format(1), "its name")
    attach._arrive(store, "now")
    assert os.environ[ATTEMPT] == "now"
    assert attach._arrival(store, "now", 1) == (addresses.machine(), 2)
    assert store.get(attach.INVITED_KEY.format("its name")) == b"now"
    followers = attach.Followers(store, "now", 3)
    store.set(attach.ARRIVED.format("now", 2), json.dumps([addresses.machine(), 7, 9]))
    followers.gather()  # what a rank says can be outdated


@pytest.mark.parametrize("error", [DistNetworkError("reset"), DistStoreError("gone")], ids=["network", "store"])
def test_a_store_that_ends_is_the_end_of_its_launcher(error: Exception) -> None:
    def look() -> str:
        raise error

    with pytest.raises(RankFailed, match=r"^the launcher, or the rank that serves its store, has ended$"):
        attach._wait_for_value(look, "main has not come")
    with pytest.raises(RankFailed, match=r"^main has not come within 0 s; its output says why$"):
        attach._wait_for_value(lambda: "", "main has not come", 0)


@pytest.mark.parametrize("agent", [True, False])
def test_the_store_of_an_agent_is_there_at_once_and_that_of_a_rank_when_it_has_started(
    agent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(condition: Callable[[], object], seconds: float, *, show: str = "") -> bool:
        waited.append((seconds, show))
        return False

    waited: list[tuple[float, str]] = []
    as_rank(monkeypatch, 1, 29500)
    set_environment(monkeypatch, TORCHELASTIC_USE_AGENT_STORE=str(agent))
    monkeypatch.setattr(attach, "wait", wait)
    where = "MASTER_ADDR=localhost MASTER_PORT=29500"
    with pytest.raises(RankFailed, match=rf"^no store at {where}: it does not answer$"):
        attach._store(serve=False)
    seconds = attach.REACHED_S if agent else attach.JOIN_S
    assert waited == [(seconds, f"waiting for rank 0 at {where}")]
    monkeypatch.setattr(addresses, "is_own_address", lambda address, port: False)
    with pytest.raises(InputError, match=r"^MASTER_ADDR=localhost does not lead to this machine, where RANK=0"):
        attach._store(serve=True)


def test_the_steps_that_a_job_has_at_a_time_have_other_ports_than_those_of_the_next_jobs() -> None:
    ports = [launch_env.port_of_step(job, step) for job in range(70_000, 70_500) for step in range(17)]
    assert len({*ports}) == len(ports)
    assert {launch_env.port_of_step(0, step) for step in range(20_000)} == {*range(10_000, 30_000)}


def test_an_address_that_is_empty_is_none_in_a_task_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, **STEP, MASTER_ADDR="", MASTER_PORT="")
    launch_env.adopt_srun()
    assert store_address() == ("localhost", launch_env.port_of_step(70001, 2))
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["WORLD_SIZE"]) == ("1", "2", "6")


def test_variables_that_say_too_little_are_told_with_the_whole_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError) as caught:
        store_address()
    assert str(caught.value) == (
        "the environment has RANK and WORLD_SIZE, but no MASTER_ADDR, where the ranks meet; set it to the address of "
        "rank 0 and MASTER_PORT to a free port there, or remove RANK and WORLD_SIZE"
    )
    set_environment(monkeypatch, PMI_SIZE="3")
    with pytest.raises(InputError) as caught:
        check_launched()
    assert str(caught.value) == (
        "MPI has started 3 processes (PMI_SIZE=3), and each would train alone; start the ranks with torchrun or "
        "srun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each (not under MPI: env -u PMI_SIZE)"
    )
    set_environment(monkeypatch, WORLD_SIZE="3")
    with pytest.raises(InputError) as caught:
        check_launched()
    assert str(caught.value) == (
        "the environment has WORLD_SIZE=3, but no RANK; let a launcher set both (torchrun), or remove WORLD_SIZE: "
        "env -u WORLD_SIZE"
    )
    monkeypatch.delenv("WORLD_SIZE")
    set_environment(monkeypatch, **{**STEP, "SLURM_NODEID": "9"})
    with pytest.raises(InputError) as caught:
        launch_env.adopt_srun()
    shown = " ".join(f"{name}={STEP[name]!r}" for name in sorted(STEP)).replace(
        "SLURM_NODEID='2'", "SLURM_NODEID='9'"
    )
    assert str(caught.value) == (
        f"the environment looks like a task of srun, but its variables do not fit together ({shown}); "
        "start the ranks with srun, or leave the task: env -u SLURM_STEP_ID"
    )


def no_answer(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each value of the store is waited for, without waiting."""

    def wait(condition: Callable[[], object], seconds: float, *, show: str = "") -> object:
        waited.append(seconds)
        return condition()

    waited: list[float] = []
    monkeypatch.setattr(attach, "wait", wait)
    return waited


@pytest.mark.parametrize(
    ("agent", "says"),
    [(False, "main has not created the run folder"), (True, "main has not asked this rank to join")],
)
def test_a_rank_without_an_answer_of_main_says_for_what_it_has_waited(
    agent: bool, says: str, monkeypatch: pytest.MonkeyPatch, store: TCPStore
) -> None:
    as_rank(monkeypatch, 1, store.port)
    set_environment(
        monkeypatch, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", TORCHELASTIC_USE_AGENT_STORE="True" if agent else "False"
    )
    monkeypatch.setattr(attach, "_store", lambda *, serve: store)
    waited = no_answer(monkeypatch)
    with pytest.raises(RankFailed, match=rf"^{says} within 1800 s; its output says why$"):
        join()
    assert waited == [1800]
    assert store.check([attach.NAME_KEY.format(1)]) is agent, "main looks for it there"


def test_main_waits_for_each_rank_to_see_the_folder_and_for_no_rank_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, store: TCPStore, tmp_path: Path
) -> None:
    waited = no_answer(monkeypatch)
    as_rank(monkeypatch, 0, store.port)
    set_environment(monkeypatch, WORLD_SIZE="4", LOCAL_RANK="0", LOCAL_WORLD_SIZE="4")
    followers = attach.Followers(store, "0", 4)
    for rank in (1, 2):
        store.set(attach.SEEN.format(0, rank), attach.OK)
    with pytest.raises(RankFailed, match=r"^rank 3 has ended within 1800 s; its output says why$"):
        followers.send(RunDir(tmp_path))
    store.set(attach.ARRIVED.format(0, 1), json.dumps(["b", 7, 4]))
    store.set(attach.ARRIVED.format(0, 3), json.dumps(["b", 8, 4]))
    with pytest.raises(RankFailed, match=r"^rank 2 of 4 has not joined within 600 s; its output says why$"):
        followers.gather()
    assert waited == [1800] * 3 + [600] * 2


def test_a_rank_of_another_size_is_named_with_both_sizes(monkeypatch: pytest.MonkeyPatch, store: TCPStore) -> None:
    as_rank(monkeypatch, 0, store.port)
    set_environment(monkeypatch, WORLD_SIZE="3", LOCAL_RANK="0", LOCAL_WORLD_SIZE="3")
    for own in (2, 5):
        for rank, size in ((1, 3), (2, own)):
            store.set(attach.ARRIVED.format(0, rank), json.dumps(["b", 7, size]))
        with pytest.raises(InputError) as raised:
            attach.Followers(store, "0", 3).gather()
        assert str(raised.value) == (
            f"rank 2 was started with WORLD_SIZE={own}, and rank 0 with WORLD_SIZE=3; use the same for each"
        )


def test_an_error_behind_the_folder_is_raised_and_ends_no_other_rank(
    monkeypatch: pytest.MonkeyPatch, store: TCPStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_rank(monkeypatch, 0, store.port)
    set_environment(monkeypatch, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    store.set(attach.ARRIVED.format(0, 1), json.dumps([addresses.machine(), 7, 2]))
    store.set(attach.SEEN.format(0, 1), attach.OK)

    def lead(error: Exception) -> None:
        with attach.leading() as followers:
            if isinstance(error, RankFailed):
                followers.send(RunDir(tmp_path))
            raise error

    with pytest.raises(RankFailed, match=r"^later$"):
        lead(RankFailed("later"))
    assert store.get(attach.ANSWER.format(0)).decode() == f"ok {tmp_path}"
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match=r"^odd$"):
        lead(ValueError("odd"))


def test_under_an_agent_main_begins_a_new_attempt_serves_no_store_and_leaves_without_a_wait(
    monkeypatch: pytest.MonkeyPatch, store: TCPStore, capsys: pytest.CaptureFixture[str]
) -> None:
    def own_store(*, serve: bool) -> TCPStore:
        serves.append(serve)
        return store

    def refuse(followers: attach.Followers) -> None:
        attempts.append(followers.attempt)
        raise InputError("odd")

    serves, attempts = list[bool](), list[str]()
    set_environment(monkeypatch, RANK="0", WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
    monkeypatch.setattr(attach, "_store", own_store)
    monkeypatch.setattr(attach.Followers, "gather", refuse)
    monkeypatch.setattr(attach, "wait", lambda *_: pytest.fail("the agent keeps the store"))
    for number in (1, 2):
        with pytest.raises(SystemExit):
            join()
        assert capsys.readouterr().err.count("odd") == 1
        assert os.environ[ATTEMPT] == attempts[-1]
        assert store.get(attach.ANSWER.format(attempts[-1])) == b"failed 2"
        assert json.loads(store.get(attach.ARRIVED.format(attempts[-1], 0)))[1:] == [os.getpid(), 2]
        assert (serves, len({*attempts})) == ([False] * number, number)


def test_a_store_has_a_few_seconds_to_answer_and_its_name_none_to_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(condition: Callable[[], object], seconds: float, **options: Any) -> bool:
        waited.append(seconds)
        return len(waited) == 1

    def reach(address: str, port: int, **options: Any) -> None:
        stores.append((address, port, options))

    waited, stores = list[float](), list[Any]()
    as_rank(monkeypatch, 1, 29500)
    monkeypatch.setattr(attach, "wait", wait)
    monkeypatch.setattr(attach, "TCPStore", reach)
    monkeypatch.setattr(attach, "in_thread", lambda call: (call(), processes.in_thread(lambda: None))[1])
    with pytest.raises(RankFailed, match=r"what listens there does not answer as a store$"):
        attach._store(serve=False)
    assert waited == [600, 30]
    usual = {"timeout": timedelta(seconds=15), "wait_for_workers": False, "multi_tenant": True}
    assert stores == [("localhost", 29500, {**usual, "is_master": False})]
    set_environment(monkeypatch, MASTER_ADDR="x" * 64)
    with pytest.raises(InputError, match="is not known on this machine"):
        attach._store(serve=False)
    assert len(waited) == 2
