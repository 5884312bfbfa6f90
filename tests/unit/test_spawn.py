"""How a launcher starts, ends and restarts the ranks of one machine. The ranks are pretended processes."""

import multiprocessing.connection
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.core.errors import InputError, Interrupted, LockstepError, RankFailed, Stopped
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.launcher import Elastic, Slurm, Spawn, elastic, spawn
from lockstep.launcher.processes import Fresh, forwarding
from lockstep.launcher.spawn import RANKS_GRACE_S, Children
from lockstep.runtime.signals import AGAIN_S


class Clock:
    """Seconds that pass in sleeps alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 1000, "waits without end"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Rank:
    """A rank that has ended with `code`, or that runs until a signal of `obeys` ends it."""

    def __init__(self, code: int | None = None, obeys: tuple[int, ...] = (signal.SIGTERM, signal.SIGKILL)) -> None:
        self.exitcode, self.obeys, self.got, self.joined = code, obeys, [], False
        self.sentinel, self.end = os.pipe()

    def send_signal(self, number: int) -> None:
        if self.exitcode is None:
            self.got.append(number)
            if number in self.obeys:
                self.exitcode = Stopped.exit_code if number == signal.SIGTERM else -number

    def join(self) -> None:
        self.joined = True
        os.close(self.sentinel)
        os.close(self.end)


def join(*ranks: Rank) -> dict[int, int]:
    children = Children()
    children.ranks = list(ranks)
    with children:
        return children.join()


def test_the_failure_of_a_rank_ends_the_others_and_is_the_only_one(clock: Clock) -> None:
    ranks = Rank(), Rank(70), Rank(0)
    assert join(*ranks) == {1: 70}
    assert (ranks[0].got, ranks[0].exitcode) == ([signal.SIGTERM], Stopped.exit_code)
    assert all(rank.joined for rank in ranks)
    assert join(Rank(0), Rank(0)) == {}


def test_a_rank_that_hangs_after_a_failure_is_killed(clock: Clock) -> None:
    began, hangs = clock.now, Rank(obeys=(signal.SIGKILL,))
    assert join(hangs, Rank(70)) == {1: 70}
    assert hangs.exitcode == -signal.SIGKILL
    assert RANKS_GRACE_S < clock.now - began < RANKS_GRACE_S + 1


def entry(path: Path) -> None:
    """What the ranks would do."""


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has the launcher start these pretended ranks instead of fresh interpreters."""

    def store(*_: object, master_listen_fd: int, **options: object) -> object:
        os.close(master_listen_fd)
        return options

    def pretend(*codes: int | None, act: Callable[[], object] = lambda: None) -> None:
        waiting = iter(codes)

        def start(words: list[str], variables: dict[str, str]) -> Rank:
            act()
            return Rank(next(waiting))

        monkeypatch.setattr(spawn, "Fresh", start)
        monkeypatch.setattr(spawn, "TCPStore", store)
        monkeypatch.setattr(Spawn, "can_fork", lambda self: False)

    return pretend


def test_only_a_failure_with_restarts_left_allows_another_attempt(tmp_path: Path, ranks: Callable[..., None]) -> None:
    run, launcher = RunDir.at(tmp_path / "run"), Spawn(ranks=2)
    ranks(0, 0)
    assert launcher.attempt(Entry(entry), run, can_restart=True) is None
    ranks(None, 70)
    assert isinstance(launcher.attempt(Entry(entry), run, can_restart=True), RankFailed)
    ranks(None, 70)
    with pytest.raises(RankFailed, match="rank 1 left with exit code 70 and wrote no error"):
        launcher.attempt(Entry(entry), run)
    ranks(Stopped.exit_code, Stopped.exit_code)
    with pytest.raises(Stopped):
        launcher.attempt(Entry(entry), run, can_restart=True)


def test_a_job_that_is_asked_to_stop_is_not_started_again(tmp_path: Path, ranks: Callable[..., None]) -> None:
    ranks(None, 70, act=lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(RankFailed):
        Spawn(ranks=2).attempt(Entry(entry), RunDir.at(tmp_path / "run"), can_restart=True)


def test_an_attempt_does_not_read_the_errors_of_the_one_before(tmp_path: Path, ranks: Callable[..., None]) -> None:
    run = RunDir.at(tmp_path / "run")
    run.rank_error(0).write_text('{"time": 1, "rank": 0, "exit_code": 2, "known": true, "sentence": "yesterday"}')
    ranks(70, 70)
    with pytest.raises(RankFailed, match="wrote no error"):
        Spawn(ranks=2).attempt(Entry(entry), run)


def test_machines_are_a_number_or_a_range_and_meet_only_if_there_are_several() -> None:
    assert [Elastic(nodes=nodes).node_range for nodes in (1, 3, "2:4")] == [(1, 1), (3, 3), (2, 4)]
    for launcher in (Elastic(nodes="1:2", rendezvous="a:1"), Elastic(nodes=2, node_rank=1), Elastic()):
        launcher.check()
    for alone in (Elastic(rendezvous="a:1"), Elastic(node_rank=0)):
        with pytest.raises(InputError, match=r"but launcher\.nodes is 1, so no machines meet"):
            alone.check()


def test_a_job_of_slurm_starts_its_ranks_with_what_it_was_submitted_with(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="which only the command line can do"):
        Slurm().in_allocation()
    facts = {"SLURM_JOB_ID": "17", "LOCKSTEP_SLURM_JOB": "17", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "localhost"}
    for name, value in facts.items():
        monkeypatch.setenv(name, value)
    assert Slurm(ranks=3, timeout="5min").in_allocation() == Spawn(ranks=3, timeout="5min")
    assert Slurm(restarts=2).in_allocation() == Elastic(restarts=2)
    machines = Slurm(nodes=2, restarts=1, ranks=4).in_allocation()
    assert (machines.nodes, machines.restarts, machines.ranks, machines.node_rank) == (2, 1, 4, 1)
    assert machines.rendezvous.startswith("localhost:1")


def test_a_fresh_interpreter_that_has_ended_leaves_no_open_file() -> None:
    process = Fresh(["true"], {})
    assert multiprocessing.connection.wait([process.sentinel], 30) == [process.sentinel]
    process.join()
    assert process.exitcode == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(process.sentinel)


@pytest.fixture
def sent() -> Iterator[list[int]]:
    """The signals that a launcher passes on; its own handlers are those of before at the end."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGTSTP)
    yield []
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGTSTP)) == before


def test_a_stop_reaches_the_ranks_and_a_second_interrupt_kills_them(clock: Clock, sent: list[int]) -> None:
    with forwarding(sent.append):
        signal.raise_signal(signal.SIGHUP)
    assert sent == [signal.SIGTERM], "the terminal may have sent the ranks the same signal"
    sent.clear()

    def interrupt_twice() -> None:
        with forwarding(sent.append) as request:
            request.repeat()
            signal.raise_signal(signal.SIGINT)
            clock.now += 2 * AGAIN_S
            signal.raise_signal(signal.SIGINT)
            raise LockstepError("rank 0 was killed")

    with pytest.raises(Interrupted):
        interrupt_twice()
    assert sent == [signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize(("exit_code", "says"), [(75, None), (-9, "rank 3 was ended by SIGKILL, probably because")])
def test_the_agent_meets_others_as_torchrun_does_and_ends_with_what_its_ranks_say(
    exit_code: int, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher import api

    configs: list[Any] = []

    def launch(config: Any, program: str) -> Callable[..., None]:
        def run(*words: str) -> None:
            configs.append((config, program, words))
            raise ChildFailedError("ranks", {3: ProcessFailure(0, 1, exit_code, "none")})

        return run

    monkeypatch.setattr(api, "elastic_launch", launch)
    monkeypatch.setattr(os, "environ", {**os.environ})
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
    launcher = Elastic(nodes="2:3", ranks=4, restarts=5, rendezvous=place, node_rank=0)
    with pytest.raises(RankFailed if says else SystemExit, match=says or str(exit_code)):
        launcher.run_agent(["python", "train.py"])
    ((config, program, words),) = configs
    assert (program, words) == ("python", ("train.py",))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (2, 3, 4, 5)
    assert (config.rdzv_endpoint, config.rdzv_configs["is_host"]) == (place, True)
    assert {"SIGTERM", "SIGUSR1", "SIGXCPU"} <= {*config.signals_to_handle.split(",")}
    assert config.logs_specs.root_log_dir == os.devnull


def test_a_machine_says_why_it_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "FIRST_S", 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InputError, match=f"this machine cannot listen at {place} "):
            Elastic(nodes=2, ranks=1, rendezvous=place).run_agent(["python"])
    with pytest.raises(RankFailed, match=f"nobody has listened at launcher.rendezvous={place} for 1 s"):
        Elastic(nodes=2, ranks=1, rendezvous=place, node_rank=1, timeout="1s").run_agent(["python"])
    with pytest.raises(InputError, match="expected a number from 0 to 1"):
        Elastic(nodes=2, ranks=1, rendezvous=place, node_rank=2).run_agent(["python"])
