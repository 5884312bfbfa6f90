"""How a launcher starts, ends and restarts the ranks of one machine. The ranks are pretended processes."""

import logging
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.core import launch_env
from lockstep.core.errors import InputError, Interrupted, LockstepError, RankFailed, Stopped
from lockstep.core.launch_env import AGENT
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.launcher import Elastic, Inline, Slurm, Spawn, elastic, processes, spawn
from lockstep.launcher.processes import Fresh, forwarding
from lockstep.launcher.spawn import RANKS_GRACE_S, Children
from lockstep.runtime.signals import AGAIN_S, LAUNCHER, STOP_SIGNALS, StopNow, not_begun


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
    for end in (launcher.attempt, launcher.run, launcher.launch, Elastic(ranks=2).run, Elastic(ranks=2).launch):
        ranks(None, 70)
        with pytest.raises(RankFailed, match="rank 1 left with exit code 70 and wrote no error"):
            end(Entry(entry), run)
    ranks(None, 70, None, 71)
    with pytest.raises(RankFailed, match="rank 1 left with exit code 71 and wrote no error"):
        Elastic(ranks=2, restarts=1).run(Entry(entry), run)
    ranks(Stopped.exit_code, Stopped.exit_code)
    with pytest.raises(Stopped):
        launcher.attempt(Entry(entry), run, can_restart=True)


@pytest.mark.parametrize("can_restart", [True, False])
def test_errors_of_an_earlier_attempt_are_none_of_the_next(
    tmp_path: Path, ranks: Callable[..., None], can_restart: bool
) -> None:
    run = RunDir.at(tmp_path / "run")
    run.logs.mkdir(exist_ok=True)
    (run.logs / "rank1.error.json").write_text("{}")
    ranks(0, 0)
    assert Spawn(ranks=2).attempt(Entry(entry), run, can_restart=can_restart) is None
    assert run.rank_errors() == []


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


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_ranks_are_started_again_as_often_as_restarts_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    def attempt(launcher: Elastic, entry: Entry, run_dir: RunDir, *, can_restart: bool) -> RankFailed | None:
        attempts.append(can_restart)
        assert len(attempts) < 9, "it goes on forever"
        return RankFailed("a fault") if can_restart else None

    attempts = list[bool]()
    monkeypatch.setattr(Elastic, "attempt", attempt)
    Elastic(restarts=restarts).run(Entry(entry), RunDir(tmp_path))
    assert attempts == [True] * restarts + [False]


def test_a_rank_of_an_agent_has_the_keys_of_its_job() -> None:
    own: dict[str, Any] = {"backend": "gloo", "timeout": "5min", "threads": 3}
    assert Elastic(ranks=2, restarts=1, **own).as_rank() == Inline(**own)


def test_machines_are_a_number_or_a_range_and_meet_only_if_there_are_several() -> None:
    assert [Elastic(nodes=nodes).node_range for nodes in (1, 3, "2:4")] == [(1, 1), (3, 3), (2, 4)]
    for launcher in (Elastic(nodes="1:2", rendezvous="a:1"), Elastic(nodes=2, node_rank=1), Elastic()):
        launcher.check()
    for alone in (Elastic(rendezvous="a:1"), Elastic(node_rank=0)):
        with pytest.raises(InputError, match=r"but launcher\.nodes is 1, so no machines meet"):
            alone.check()


def test_a_job_of_slurm_starts_its_ranks_with_what_it_was_submitted_with(monkeypatch: pytest.MonkeyPatch) -> None:
    for earlier in ({}, {"LOCKSTEP_SLURM_JOB": "16"}, {"SLURM_JOB_ID": "17"}):  # 16 runs a command that submits 17
        for name, value in earlier.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match="which only the command line can do"):
            Slurm().in_allocation()
    facts = {"SLURM_JOB_ID": "17", "LOCKSTEP_SLURM_JOB": "17", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "localhost"}
    for name, value in facts.items():
        monkeypatch.setenv(name, value)
    assert Slurm(ranks=3, timeout="5min").in_allocation() == Spawn(ranks=3, timeout="5min")
    assert [Slurm(restarts=number).in_allocation() for number in (1, 2)] == [Elastic(restarts=1), Elastic(restarts=2)]
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
    numbers = (signal.SIGTERM, signal.SIGTSTP, signal.SIGUSR2)
    before = [signal.signal(number, lambda number, frame: None) for number in numbers]
    own = [*map(signal.getsignal, numbers)]
    try:
        yield []
        assert [*map(signal.getsignal, numbers)] == own
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_stop_reaches_the_ranks_and_a_second_interrupt_kills_them(clock: Clock, sent: list[int]) -> None:
    with forwarding(sent.append):
        signal.raise_signal(signal.SIGHUP)
    assert sent == [signal.SIGTERM], "the terminal may have sent the ranks the same signal"
    sent.clear()

    def interrupt_twice(error: Exception) -> None:
        with forwarding(sent.append) as request:
            request.repeat()
            signal.raise_signal(signal.SIGINT)
            clock.now += 2 * AGAIN_S
            signal.raise_signal(signal.SIGINT)
            raise error

    with pytest.raises(Interrupted):
        interrupt_twice(LockstepError("rank 0 was killed"))
    assert sent == [signal.SIGTERM, signal.SIGKILL]
    with pytest.raises(ZeroDivisionError):  # a defect is told as one
        interrupt_twice(ZeroDivisionError())


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
    launcher = Elastic(nodes="2:3", ranks=4, restarts=5, rendezvous=place, node_rank=0, timeout="0.2s")
    with pytest.raises(RankFailed if says else SystemExit, match=says or str(exit_code)):
        launcher.run_agent(["python", "train.py"])
    ((config, program, words),) = configs
    assert (program, words) == ("python", ("train.py",))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (2, 3, 4, 5)
    waits = {"join_timeout": elastic.FIRST_S, "last_call_timeout": elastic.LAST_CALL_S, "read_timeout": 1}
    assert config.rdzv_endpoint == place
    assert config.rdzv_configs.items() >= {"is_host": True, **waits}.items()
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


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGSTOP, signal.SIGCONT, signal.SIGTERM, signal.SIGKILL])
def test_each_rank_gets_each_signal(number: int) -> None:
    children, received = Children(), list[tuple[str, int]]()
    for rank in ("first", "second"):
        process: Any = SimpleNamespace(send_signal=lambda number, rank=rank: received.append((rank, number)))
        children.ranks.append(process)
    children.send(number)
    assert received == [("first", number), ("second", number)]


def test_stacks_and_a_pause_are_passed_on_and_the_handlers_of_before_are_back(
    sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(-number if pid == os.getpid() else 0))
    with forwarding(sent.append) as request:
        signal.raise_signal(signal.SIGUSR2)
        assert sent == [signal.SIGUSR2]
        signal.raise_signal(signal.SIGTSTP)
        assert sent[1:] == [signal.SIGSTOP, -signal.SIGSTOP, signal.SIGCONT], "the ranks first, and they go on"
        assert not request.requested
    assert signal.getsignal(signal.SIGUSR2) is before
    with pytest.raises(LockstepError, match=r"^its own$") as raised, forwarding(sent.append):
        raise LockstepError("its own")
    assert type(raised.value) is LockstepError


def test_a_stop_is_sent_again_to_ranks_that_had_not_started_and_raises_nothing(sent: list[int]) -> None:
    with forwarding(sent.append) as request:
        request.repeat()
        assert sent == []
        signal.raise_signal(signal.SIGTERM)
        request.repeat()
    assert sent == [signal.SIGTERM] * 2


@pytest.mark.parametrize("error", [None, ValueError("odd"), KeyboardInterrupt(), SystemExit(3)])
def test_a_call_in_a_thread_has_its_result_or_its_error_whatever_that_is(error: BaseException | None) -> None:
    def call() -> str:
        threads.append(threading.current_thread())
        if error is not None:
            raise error
        return "done"

    threads: list[threading.Thread] = []
    future = processes.in_thread(call)
    if error is None:
        assert future.result(30) == "done"
    else:
        assert future.exception(30) is error
    assert threads[0].daemon, "it keeps no process from ending"


def test_a_wait_ends_with_the_condition_or_with_its_time_and_says_once_what_it_waits_for(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    assert processes.wait(lambda: "now", 5, show="waiting for it") == "now"
    assert clock.now == 100
    assert processes.wait(lambda: 0, 5, show="waiting for it") == 0
    assert clock.now == pytest.approx(105, abs=2 * processes.POLL_S)
    assert not capsys.readouterr().out, "not before ten seconds"
    assert not processes.wait(lambda: clock.now > 1000, 30, show="waiting for it")
    assert capsys.readouterr().out == "waiting for it (at most 30 s)\n"
    began = clock.now
    assert processes.wait(lambda: clock.now >= began + 3, 30) is True
    assert clock.now < began + 4
    began = clock.now
    assert processes.wait(lambda: clock.now > began, processes.POLL_S / 2) is True, (
        "it looks when the time has passed"
    )


def test_a_port_listens_or_it_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert processes.is_listening("127.0.0.1", port)
    assert not processes.is_listening("127.0.0.1", port)


def test_a_fresh_interpreter_has_its_options_and_is_alone_with_the_end_of_its_pipe(tmp_path: Path) -> None:
    before = {*map(str, Path("/proc/self/fd").iterdir())}
    with (tmp_path / "out").open("w") as out:
        process = Fresh(["sh", "-c", "pwd; echo $A; exit 3"], {"A": "b"}, cwd=tmp_path, stdout=out)
        assert multiprocessing.connection.wait([process.sentinel], 30) == [process.sentinel]
        assert processes.wait(lambda: process.exitcode, 30) == 3, "seen before anybody waits for its end"
        process.join()
    assert process.exitcode == 3
    process.send_signal(signal.SIGTERM)  # it has ended
    assert (tmp_path / "out").read_text() == f"{tmp_path}\nb\n"
    assert {*map(str, Path("/proc/self/fd").iterdir())} == before
    killed = Fresh(["sleep", "60"], {**os.environ})
    assert killed.exitcode is None
    killed.send_signal(signal.SIGKILL)
    assert processes.wait(lambda: killed.exitcode, 30) == -signal.SIGKILL
    killed.join()
    assert killed.exitcode == -signal.SIGKILL


def test_ranks_start_with_the_number_of_their_launcher_and_with_stops_held_back(
    tmp_path: Path, ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> None:
        held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        seen.append((os.environ[LAUNCHER], {*STOP_SIGNALS, signal.SIGUSR2} <= held))

    seen: list[tuple[str, bool]] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ranks(0, 0, act=look)
    Spawn(ranks=2).run(Entry(entry), RunDir.at(tmp_path / "run"))
    assert seen == [(str(os.getpid()), True)] * 2
    for held in (before, before | {signal.SIGTERM}, before | {signal.SIGUSR1}):
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        try:
            with pytest.raises(KeyError), spawn._starting():
                raise KeyError
            assert LAUNCHER not in os.environ
            assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == held
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_fresh_rank_knows_its_place_whatever_the_environment_of_its_launcher_says(
    tmp_path: Path, ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(words: list[str], variables: dict[str, str]) -> Rank:
        started.append((words, variables))
        return Rank(0)

    started: list[tuple[list[str], dict[str, str]]] = []
    ranks()
    monkeypatch.setattr(spawn, "Fresh", start)
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("OF_THE_USER", "yes")
    run = RunDir.at(tmp_path / "run")
    Spawn(ranks=2).run(Entry(entry, ("object",)), run)
    for rank, (words, variables) in enumerate(started):
        place = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "PYTHONSAFEPATH": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        assert variables.items() >= {**place, "OF_THE_USER": "yes"}.items()
        assert words[:3] == [sys.executable, "-m", "lockstep.runtime.child"]
        assert words[3:6] == [str(os.getpid()), Entry(entry).module, str(run.path)]
        assert len(words) == 7, "the file with the objects"
    assert len({variables["MASTER_PORT"] for _, variables in started}) == 1
    assert not Path(started[0][0][6]).exists()


def test_the_remedy_of_a_job_is_that_of_its_entry(tmp_path: Path, ranks: Callable[..., None]) -> None:
    ranks(None, -signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"ran out of memory; use fewer ranks; see .*rank1\.log$"):
        Spawn(ranks=2).attempt(Entry(entry, (), "use fewer ranks"), RunDir.at(tmp_path / "run"))


@pytest.mark.parametrize("saved", ["", "step 3"])
def test_a_stop_before_a_rank_hears_it_says_what_is_saved(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(path: Path) -> None:
        raise StopNow

    run = RunDir.at(tmp_path / "run")
    run.write_summary(objective=3.0)
    assert Inline().launch(Entry(entry), run) == 3.0
    monkeypatch.setattr("lockstep.core.run.Run.saved", saved)
    with pytest.raises(Stopped) as raised:
        Inline().launch(Entry(stopped), run)
    assert str(raised.value) == str(not_begun(saved))


VALUES = {
    elastic.NODES: (
        (1, 4096, "1", "2:4", "3:3", "4096"),
        (0, 4097, "0", "4:2", "1:4097", "2:", ":2", "x", True, None, 1.5),
    ),
    elastic.RENDEZVOUS: (
        ("a:1", "10.0.0.1:65535", "[fe80::1%eth0]:29500", "my-host.example.org:29500"),
        ("a", "a:0", "a:65536", ":1", "a:b", "a b:1", "fe80::1:29500", "[]:1", None, 3),
    ),
}


@pytest.mark.parametrize("check", VALUES, ids=lambda check: check.expected[:9])
def test_machines_and_their_meeting_are_written_in_one_way(check: Any) -> None:
    right, wrong = VALUES[check]
    assert [value for value in right if not check.fits(value)] == []
    assert [value for value in wrong if check.fits(value)] == []


@pytest.mark.parametrize(
    ("place", "host", "port"),
    [("a.b:1", "a.b", 1), ("[fe80::1]:29500", "fe80::1", 29500), ("10.0.0.1:65535", "10.0.0.1", 65535)],
)
def test_a_meeting_is_a_host_without_brackets_and_a_port(place: str, host: str, port: int) -> None:
    launcher = Elastic(nodes=2, rendezvous=place, node_rank=1)
    assert launcher._meeting() == (host, port)
    assert not launcher.is_host
    assert Elastic(nodes=2, rendezvous=place, node_rank=0).is_host
    assert Elastic(nodes="2:4", rendezvous=place, node_rank=3)._meeting() == (host, port), "it may join later"
    with pytest.raises(InputError, match=r"^launcher\.node_rank is 4, expected a number from 0 to 3$"):
        Elastic(nodes="2:4", rendezvous=place, node_rank=4)._meeting()
    with pytest.raises(InputError, match=r"^launcher\.nodes is 2, but nothing says where the machines meet"):
        Elastic(nodes=2)._meeting()


@pytest.mark.parametrize(
    ("node_rank", "own", "is_host"), [("auto", True, True), ("auto", False, False), (1, True, False)]
)
def test_main_s_machine_is_the_one_with_the_address(
    node_rank: int | str,
    own: bool,
    is_host: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(elastic.addresses, "is_own_address", lambda host, port: own)
    monkeypatch.setattr(elastic.addresses, "resolve_host", lambda host, port: [(socket.AF_INET, "127.0.0.1")])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    launcher = Elastic(nodes="2:3", ranks=1, rendezvous=f"here:{port}", node_rank=node_rank)
    assert launcher.is_host is is_host
    says = "this machine can listen at" if is_host else "here has an address; it listens at"
    assert launcher.try_address().startswith(f"{says} here:{port}")
    monkeypatch.setattr(elastic, "is_listening", lambda host, port, seconds=0.0: patience.append(seconds) or True)
    patience: list[float] = []
    launcher._await_main(3)
    shown = capsys.readouterr().out
    assert shown == (f"waiting at here:{port} for 1 of 2 machines\n" if is_host else "")
    assert patience == ([] if is_host else [elastic.ANSWER_S])
    config = launcher._launch_config(30, 600)
    assert config.rdzv_configs.items() >= {"is_host": is_host, "join_timeout": 600, "read_timeout": 30}.items()
    assert config.local_addr == ("here" if is_host else f"~{node_rank:>8}~{socket.gethostname()}")


@pytest.mark.parametrize("error", ["rendezvous", "store", "not needed", "signal"])
def test_an_agent_that_meets_nobody_or_is_stopped_ends_with_a_sentence_or_its_code(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed import DistStoreError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError
    from torch.distributed.launcher import api

    errors = {
        "rendezvous": RendezvousTimeoutError("too late"),
        "store": DistStoreError("gone"),
        "not needed": AttributeError("no result"),
        "signal": SignalException("stop", signal.SIGTERM),
    }

    def run(*words: str) -> None:
        raise errors[error]

    monkeypatch.setattr(api, "elastic_launch", lambda config, program: run)
    monkeypatch.setattr(Elastic, "_await_main", lambda self, patience: waited.append(patience))
    monkeypatch.setattr(os, "environ", {**os.environ})
    waited: list[float] = []
    launcher = Elastic(nodes="2:3", ranks=1, rendezvous="127.0.0.1:1", node_rank=1, timeout="20min")
    if error == "signal":
        with pytest.raises(SystemExit) as left:
            launcher.run_agent(["python"])
        assert left.value.code == Stopped.exit_code
    else:
        with pytest.raises(RankFailed, match=r"^no 2 machines have met at 127\.0\.0\.1:1, or main's is gone \("):
            launcher.run_agent(["python"])
    assert waited == [1200]
    logger = logging.getLogger("torch.distributed.elastic")
    assert not logger.propagate
    assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


@pytest.mark.parametrize(
    ("gpu", "system", "forks"), [(True, True, False), (False, True, True), (False, False, False)]
)
def test_ranks_are_forked_where_no_gpu_is_and_the_system_can(
    gpu: bool, system: bool, forks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn.torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(spawn, "can_fork", lambda: system)
    assert Spawn().can_fork() is forks
    assert not Elastic().can_fork()
    assert not Inline().can_fork()


def test_a_launcher_of_one_machine_tries_whether_that_reaches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: list[socket.socket] = []

    def serve() -> socket.socket:
        servers.append(socket.create_server(("127.0.0.1", 0)))
        return servers[-1]

    monkeypatch.setattr(spawn, "loopback_server", serve)
    says = "the ranks of one machine meet at a port that is free when they start"
    assert [launcher.try_address() for launcher in (Inline(), Spawn(), Elastic())] == [says] * 3
    assert [server.fileno() for server in servers] == [-1, -1], "they are closed"


@pytest.mark.parametrize(
    ("changed", "key", "value"),
    [({"rendezvous": "a:1"}, "rendezvous", "a:1"), *(({"node_rank": at}, "node_rank", at) for at in (0, 3))],
)
def test_a_key_of_several_machines_is_refused_for_one_with_both_remedies(
    changed: dict[str, Any], key: str, value: object
) -> None:
    with pytest.raises(InputError) as raised:
        Elastic(**changed).check()
    assert str(raised.value) == (
        f"launcher.{key} is {value}, but launcher.nodes is 1, so no machines meet; use launcher.nodes=2, or remove "
        f"launcher.{key}"
    )


def test_each_restart_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    attempts = iter([RankFailed("rank 3 was killed"), RankFailed("rank 1 was killed"), None])
    monkeypatch.setattr(Elastic, "attempt", lambda *_, **__: next(attempts))
    Elastic(restarts=5).run(Entry(entry), RunDir(tmp_path))
    shown = capsys.readouterr()
    for rank in (3, 1):
        assert f"rank {rank} was killed; all ranks are started again" in shown.out + shown.err


def test_the_agents_of_a_job_know_each_other_by_its_name_and_obey_each_stop() -> None:
    launcher = Elastic(nodes="2:3", ranks=2, rendezvous="127.0.0.1:29500", node_rank=1)
    config = launcher._launch_config(30, 600)
    assert (config.run_id, config.rdzv_backend) == (AGENT, "c10d"), "by which a rank knows its launcher"
    assert config.monitor_interval == 0.1
    named = {signal.Signals[name] for name in config.signals_to_handle.split(",")}
    assert named == {*signal.Signals} & {*STOP_SIGNALS}


def test_a_machine_says_where_it_waits_for_main(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def wait(condition: Callable[[], bool], seconds: float) -> bool:
        waited.append(seconds)
        return condition()

    answers = iter([False, True])
    hosts: list[Any] = []
    waited: list[float] = []
    monkeypatch.setattr(elastic, "wait", wait)
    monkeypatch.setattr(elastic, "is_listening", lambda *place: hosts.append(place) or next(answers))
    monkeypatch.setattr(elastic.addresses, "resolve_host", lambda host, port: [(socket.AF_INET, "10.0.0.9")])
    Elastic(nodes=2, ranks=1, rendezvous="main:7000", node_rank=1)._await_main(60)
    assert capsys.readouterr().out == "waiting for main at main:7000\n"
    assert (hosts, waited) == ([("main", 7000, elastic.ANSWER_S), ("main", 7000)], [60])


@pytest.mark.parametrize(
    ("machines", "says"), [(2, "for 1 of 2 machines"), ("3:5", "for 2 of 3 machines"), ("1:2", "for 0 of 1 machines")]
)
def test_main_says_for_how_many_machines_it_waits(
    machines: int | str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(Elastic, "try_address", lambda self: "")
    Elastic(nodes=machines, ranks=1, rendezvous="here:7000", node_rank=0)._await_main(60)
    assert capsys.readouterr().out == f"waiting at here:7000 {says}\n"


@pytest.mark.parametrize(("seconds", "waited"), [((), processes.REACHED_S), ((2.5,), 2.5)])
def test_an_answer_of_a_port_is_waited_for_as_long_as_asked_for(
    seconds: tuple[float, ...], waited: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        calls.append((address, timeout))
        raise TimeoutError

    calls: list[Any] = []
    monkeypatch.setattr(socket, "create_connection", connect)
    assert not processes.is_listening("far", 7, *seconds)
    assert calls == [(("far", 7), waited)]


def test_a_rank_that_ends_with_no_error_is_no_failure_and_others_are_waited_for() -> None:
    class Late(Rank):
        """A rank that ends by itself after a while."""

        looks = 0

        @property
        def exitcode(self) -> int | None:
            self.looks += 1
            return None if self.looks < 9 else 0

        @exitcode.setter
        def exitcode(self, code: int | None) -> None:
            """Ignore the base class, which sets it."""

    late = Late()
    assert join(Rank(0), late) == {}
    assert late.looks >= 9
    assert not {signal.SIGTERM, signal.SIGKILL} & {*late.got}


def test_ranks_that_fail_together_are_all_told_and_none_of_those_that_ended_well(clock: Clock) -> None:
    assert join(Rank(3), Rank(0), Rank(-9), Rank(None)) == {0: 3, 2: -9}


def test_a_launch_on_slurm_keeps_all_that_its_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"SLURM_JOB_ID": "17", "LOCKSTEP_SLURM_JOB": "17", "SLURM_NODEID": "2", "SLURM_JOB_NODELIST": "localhost"}
    for name, value in facts.items():
        monkeypatch.setenv(name, value)
    own: dict[str, Any] = {"ranks": 3, "backend": "gloo", "timeout": "5min", "threads": 7}
    assert Slurm(**own).in_allocation() == Spawn(**own)
    assert Slurm(**own, restarts=2).in_allocation() == Elastic(**own, restarts=2)
    place = {"nodes": 4, "node_rank": 2, "rendezvous": launch_env.rendezvous()}
    for restarts in (0, 2):
        machines = Slurm(**own, nodes=4, restarts=restarts).in_allocation()
        assert machines == Elastic(**own, **place, restarts=restarts)


def test_a_stop_that_came_while_ranks_were_started_is_sent_to_them_again(
    tmp_path: Path, ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(words: list[str], variables: dict[str, str]) -> Rank:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # held until both ranks have started
        return Rank(obeys=(signal.SIGKILL,))

    def join(children: Children) -> dict[int, int]:
        received.extend([*rank.got] for rank in children.ranks)  # type: ignore[attr-defined]
        return {}

    received: list[list[int]] = []
    ranks()
    monkeypatch.setattr(spawn, "Fresh", start)
    monkeypatch.setattr(Children, "join", join)
    assert Spawn(ranks=2).attempt(Entry(entry), RunDir.at(tmp_path / "run")) is None
    assert received == [[signal.SIGTERM] * 2] * 2, "the first may have come before they could hear it"


def test_a_launcher_that_is_stopped_does_not_wait_for_its_store(
    tmp_path: Path, ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, waited = threading.Event(), list[bool]()

    def start(words: list[str], variables: dict[str, str]) -> Rank:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        return Rank(obeys=(signal.SIGKILL,))

    def store(*_: object, master_listen_fd: int, **options: object) -> object:
        served.wait()
        os.close(master_listen_fd)
        return object()

    ranks()
    monkeypatch.setattr(spawn, "Fresh", start)
    monkeypatch.setattr(spawn, "TCPStore", store)
    monkeypatch.setattr(spawn, "wait", lambda condition, seconds: waited.append(bool(condition())))
    monkeypatch.setattr(Children, "join", lambda self: {})
    assert Spawn(ranks=2).attempt(Entry(entry), RunDir.at(tmp_path / "run")) is None
    served.set()
    assert waited == [True]


def test_an_agent_of_torch_is_silent_and_its_ranks_end_with_their_own_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher import api

    failures = {0: ProcessFailure(0, 1, 74, "none"), 2: ProcessFailure(2, 1, 2, "none")}
    failures[0].timestamp, failures[2].timestamp = 2000, 1000

    def run(*words: str) -> None:
        logging.getLogger("torch.distributed.elastic").warning("a rank has failed")
        raise ChildFailedError("ranks", failures)

    monkeypatch.setattr(logging.getLogger("torch.distributed.elastic"), "handlers", [])
    monkeypatch.setattr(api, "elastic_launch", lambda config, program: run)
    monkeypatch.setattr(Elastic, "_await_main", lambda self, patience: None)
    monkeypatch.setattr(os, "environ", {**os.environ})
    with pytest.raises(SystemExit) as left:
        Elastic(nodes=2, ranks=4, rendezvous="127.0.0.1:1", node_rank=1).run_agent(["python"])
    assert left.value.code == 2, "of the first that failed"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("timeout", "read"), [("0.2s", 1), ("1.4s", 1), ("90s", 90), ("601s", 601), ("2h", 7200)])
def test_machines_wait_for_each_other_as_long_as_for_a_step_and_at_first_ten_minutes(
    timeout: str, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.launcher import api

    waits: list[Any] = []
    monkeypatch.setattr(api, "elastic_launch", lambda config, program: lambda *words: None)
    monkeypatch.setattr(Elastic, "_await_main", lambda self, patience: waits.append(patience))
    monkeypatch.setattr(Elastic, "_launch_config", lambda self, *seconds: waits.append(seconds))
    monkeypatch.setattr(os, "environ", {**os.environ})
    Elastic(nodes=2, ranks=1, rendezvous="a:1", node_rank=1, timeout=timeout).run_agent(["python"])
    patience = max(read, 600)
    assert waits == [patience, (read, patience)]


def test_an_address_that_is_in_use_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(InputError) as raised:
            Elastic(nodes=2, ranks=1, rendezvous=place, node_rank=0).try_address()
    says = f"launcher.rendezvous: this machine cannot listen at {place} (Address already in use"
    assert str(raised.value).startswith(says)
    assert str(raised.value).endswith(
        "; use an address of it and a free port, or launcher.node_rank=1 if this is not main's machine"
    )
    for _ in range(2):  # it is given back
        assert Elastic(nodes=2, ranks=1, rendezvous=place, node_rank=0).try_address().endswith(f"listen at {place}")


def test_the_place_of_a_meeting_is_tried_by_the_first_address_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def serve(address: tuple[str, int], family: int) -> SimpleNamespace:
        tried.append((address, family))
        return SimpleNamespace(close=lambda: tried.append("close"))

    known = [(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")]
    monkeypatch.setattr(elastic.addresses, "resolve_host", lambda host, port: known)
    monkeypatch.setattr(socket, "create_server", serve)
    Elastic(nodes=2, ranks=1, rendezvous="here:7000", node_rank=0).try_address()
    assert tried == [(("::1", 7000), socket.AF_INET6), "close"]


def test_a_store_that_cannot_be_served_ends_the_ranks_with_its_error(
    tmp_path: Path, ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def store(*_: object, master_listen_fd: int, **options: object) -> None:
        os.close(master_listen_fd)
        raise RuntimeError("no store")

    def start(words: list[str], variables: dict[str, str]) -> Rank:
        started.append(Rank())
        return started[-1]

    started: list[Rank] = []
    ranks()
    monkeypatch.setattr(spawn, "TCPStore", store)
    monkeypatch.setattr(spawn, "Fresh", start)
    monkeypatch.setattr(Children, "join", lambda self: {})
    with pytest.raises(RuntimeError, match=r"^no store$"):
        Spawn(ranks=2).attempt(Entry(entry), RunDir.at(tmp_path / "run"))
    assert [rank.got for rank in started] == [[signal.SIGKILL]] * 2


def test_a_forked_rank_has_its_place_and_the_objects_themselves_and_not_the_socket_of_the_store(
    tmp_path: Path, ranks: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forked(Rank):
        """A fork that does its work at once, in this process."""

        def __init__(self, target: Callable[[], None]) -> None:
            super().__init__(0)
            self.target = target

        def start(self) -> None:
            monkeypatch.setattr(os, "environ", {**variables})
            self.target()
            assert {*variables} <= {*os.environ}, "what the command has, a rank has"
            places.append(
                {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
            )
            monkeypatch.setattr(os, "environ", variables)

    calls, places, closed, variables = list[Any](), list[dict[str, str]](), list[bool](), os.environ
    ranks()
    monkeypatch.setattr(Spawn, "can_fork", lambda self: True)
    monkeypatch.setattr(spawn, "Fork", Forked)
    monkeypatch.setattr(spawn.child, "become_rank", lambda *words: calls.append(words))
    listener = SimpleNamespace(
        close=lambda: closed.append(True), detach=lambda: os.open(os.devnull, 0), getsockname=lambda: ("127.0.0.1", 7)
    )
    monkeypatch.setattr(spawn, "loopback_server", lambda: listener)
    run, own = RunDir.at(tmp_path / "run"), threading.Lock()  # which no pickle takes
    monkeypatch.setenv("LOCAL_RANK", "5")  # of another launcher
    before = {**os.environ}
    Spawn(ranks=2).run(Entry(entry, (own, "second")), run)
    assert {**os.environ} == before, "the command is no rank"
    assert calls == [(Entry(entry).module, run.path, own, "second")] * 2
    assert places == [
        {"RANK": f"{n}", "LOCAL_RANK": f"{n}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"} for n in (0, 1)
    ]
    assert closed == [True] * 2
