"""Which error of several ranks is the job's: what each rank writes at its end, and what its launcher makes of it."""

import errno
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import resolved, run_dir
from lockstep.core.errors import InputError, Interrupted, LockstepError, RankFailed, Stopped, StorageError
from lockstep.core.observer import Callback
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.job import worker
from lockstep.job.ranks import on_ranks
from lockstep.job.worker import RankErrorFile, exit_as_rank
from lockstep.launcher import Elastic, Inline
from lockstep.launcher.spawn import Spawn, first_failure
from lockstep.runtime.signals import LAUNCHER
from lockstep.training.resolved_job import load_job


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.at(tmp_path / "run")


def write_error(run: RunDir, rank: int, error: Exception) -> None:
    with pytest.raises(type(error)), RankErrorFile(run, rank).record_exception():
        raise error


@pytest.fixture(autouse=True)
def _a_second_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(1000, 2000))
    monkeypatch.setattr(time, "time", lambda: float(next(times)))


def test_the_first_error_of_the_ranks_is_the_jobs(run: RunDir) -> None:
    write_error(run, 1, InputError("the labels are wrong"))
    write_error(run, 0, RuntimeError("connection closed by peer"))
    failure = first_failure(run, {0: LockstepError.exit_code, 1: InputError.exit_code})
    assert (type(failure), str(failure)) == (InputError, "the labels are wrong")


def test_an_error_that_is_no_mistake_of_the_user_names_its_rank_with_its_traceback(run: RunDir) -> None:
    write_error(run, 1, RuntimeError("odd"))
    write_error(run, 0, StorageError("a later one"))
    failure = first_failure(run, {0: 1, 1: 1})
    assert isinstance(failure, RankFailed)
    assert str(failure) == "rank 1 failed: RuntimeError: odd"
    assert "raise error\nRuntimeError: odd" in failure.details


def test_a_rank_that_was_killed_is_the_cause_of_what_the_others_raise(run: RunDir) -> None:
    write_error(run, 0, RuntimeError("connection closed by peer"))
    failure = first_failure(run, {0: LockstepError.exit_code, 1: -signal.SIGKILL})
    assert isinstance(failure, RankFailed)
    cause = "probably because the machine, or its memory cgroup (container), ran out of memory"
    remedy = f"use train.micro_batches=auto, or fewer ranks; see {run.rank_log(1)}"
    assert str(failure) == f"rank 1 was ended by SIGKILL, {cause}; {remedy}"


@pytest.mark.parametrize(
    ("codes", "kind", "says"),
    [
        ({0: Stopped.exit_code, 1: Stopped.exit_code}, Stopped, "stopped before a step was finished"),
        ({1: 1, 0: Stopped.exit_code}, RankFailed, "rank 0 left with exit code 75, rank 1 left with exit code 1 and"),
        ({1: StorageError.exit_code}, StorageError, "cannot be written, not even the error"),
        ({0: 1, 1: StorageError.exit_code}, StorageError, "cannot be written, not even the error"),
        ({}, RankFailed, "a rank left and wrote no error"),
        ({1: -signal.SIGSEGV}, RankFailed, "rank 1 was ended by SIGSEGV; see"),
        (
            {3: -signal.SIGKILL, 1: -signal.SIGSEGV},
            RankFailed,
            "rank 1 was ended by SIGSEGV, rank 3 was ended by SIGK",
        ),
        ({3: -signal.SIGKILL, 1: -signal.SIGSEGV, 0: 70}, RankFailed, "or fewer ranks; see {logs}/rank1.log"),
    ],
)
def test_the_exit_codes_speak_for_ranks_that_could_write_nothing(
    run: RunDir, codes: dict[int, int], kind: type, says: str
) -> None:
    failure = first_failure(run, codes)
    assert type(failure) is kind
    assert says.format(logs=run.logs) in str(failure)


def test_the_places_of_ranks_that_hang_are_in_the_order_of_ranks_and_of_the_first_to_say(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LAUNCHER, "1")
    for rank, places in ((10, {10: "waits", 2: "is suspended"}), (2, {2: "waits", 0: "reads"})):
        RankErrorFile(run, rank).record_hang(RankFailed(f"rank {rank} hangs"), places)
    failure = first_failure(run, {10: 70, 2: 70})
    assert str(failure) == (
        f"rank 10 hangs; the stacks are in {run.logs}/rank*.log; rank 0 reads, rank 2 is suspended, rank 10 waits"
    )


def test_an_error_that_the_rank_wrote_earlier_is_none_of_this_run(run: RunDir) -> None:
    for rank in (0, 1):
        write_error(run, rank, InputError("yesterday"))
    RankErrorFile(run, 1)
    assert run.rank_errors() == [run.rank_error(0)]
    RankErrorFile(run, 0)
    assert run.rank_errors() == []
    assert isinstance(first_failure(run, {0: Stopped.exit_code}), Stopped)


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (InputError("no"), 2), (Stopped("later"), 75), (ValueError("odd"), 70)]
)
def test_a_rank_exits_with_the_code_of_its_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception | None, code: int
) -> None:
    codes: list[int] = []

    def main(path: Path) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(worker, "run_rank", main)
    monkeypatch.setattr(worker, "listen", lambda handler: {})
    monkeypatch.setattr(worker, "leave", codes.append)
    exit_as_rank(tmp_path)
    assert codes == [code]


def test_a_rank_is_watched_for_the_timeout_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, watched = run_dir(tmp_path / "run", "launcher.timeout=2min"), []

    @contextmanager
    def context(*_: object, **options: Any) -> Iterator[Any]:
        watched.append(options)
        yield SimpleNamespace(local_peer_pids={}, heartbeat=lambda: None)

    monkeypatch.setattr(worker.watchdog, "Watchdog", context)
    monkeypatch.setattr(worker, "join", context)
    monkeypatch.setattr(worker, "stop_signals", context)
    monkeypatch.setattr(worker.experiment, "run", lambda *_, **__: None)
    worker.run_rank(run.path)
    assert [options["timeout"] for options in watched if "stop" in options] == [120.0]


@pytest.mark.parametrize(("words", "threads"), [([], 5), (["launcher.threads=3"], 3)])
@pytest.mark.parametrize(
    "error", [None, InputError("none"), Interrupted(), Stopped("stopped"), RankFailed("a fault")]
)
def test_the_ranks_of_a_command_have_the_threads_of_one_and_keep_the_logs_of_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, words: list[str], threads: int
) -> None:
    def launch(launcher: Spawn, entry: Entry, run_dir: RunDir) -> None:
        started.append((launcher.ranks, launcher.threads, entry.objects[0].call.keywords))
        if error is not None:
            raise error

    started = list[Any]()
    monkeypatch.setattr(Spawn, "launch", launch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    raised = Stopped if isinstance(error, Interrupted) else type(error)
    with nullcontext() if error is None else pytest.raises(raised):  # type: ignore[type-var]
        on_ranks(print, ["launcher.ranks=2", *words], "cpu")
    assert started == [(2, threads, {"threads": threads if words else None})]
    assert any(tmp_path.iterdir()) is isinstance(error, RankFailed)


def facts_of(run: RunDir, rank: int) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run.rank_error(rank).read_text())
    return facts


def test_a_rank_writes_what_it_was_and_explains_a_lack_of_memory(run: RunDir) -> None:
    write_error(run, 3, RuntimeError("odd"))
    write_error(run, 4, StorageError("full"))
    memory, of_rank = r"^out of memory \(MemoryError no more\)", RankErrorFile(run, 5)
    with pytest.raises(LockstepError, match=memory) as raised, of_rank.record_exception():
        raise MemoryError("no more")
    assert isinstance(raised.value.__cause__, MemoryError)
    facts = {rank: facts_of(run, rank) for rank in (3, 4, 5)}
    assert [fact["rank"] for fact in facts.values()] == [3, 4, 5]
    assert [fact["known"] for fact in facts.values()] == [False, True, True]
    assert [fact["exit_code"] for fact in facts.values()] == [70, StorageError.exit_code, LockstepError.exit_code]
    assert [fact["sentence"] for fact in facts.values()] == ["RuntimeError: odd", "full", str(raised.value)]
    assert all(fact["places"] == {} for fact in facts.values())
    assert "MemoryError: no more" in facts[5]["traceback"]
    for first in (4, 5):
        failure = first_failure(RunDir.at(run.path / str(first)), {first: 1})
        assert type(failure) is RankFailed


def test_the_error_of_a_rank_is_in_its_log_and_the_stacks_of_its_watchdog_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def watch(*_: object, **options: Any) -> Iterator[Any]:
        options["file"].write("the stacks\n")
        options["file"].flush()
        yield SimpleNamespace(local_peer_pids={}, heartbeat=print)

    def fail(*_: object, **__: object) -> None:
        raise ValueError("odd")

    run = run_dir(tmp_path / "run", "launcher.threads=1")
    monkeypatch.setattr(worker.watchdog, "Watchdog", watch)
    monkeypatch.setattr(worker, "stop_signals", lambda stop, restore: nullcontext())
    monkeypatch.setattr(worker, "join", fail)
    with pytest.raises(ValueError, match="odd"):
        worker.run_rank(run.path)
    text = run.rank_log(0).read_text()
    assert "the stacks\n" in text
    assert "ERROR rank 0: ValueError: odd\nTraceback (most recent call last)" in text


def test_a_full_disk_does_not_hide_the_error_of_a_rank(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise StorageError("full")

    monkeypatch.setattr(worker, "write_atomic", full)
    write_error(run, 0, InputError("the labels are wrong"))
    assert run.rank_errors() == []


@pytest.mark.parametrize("has_launcher", [True, False])
@pytest.mark.parametrize("error", [RankFailed("it hangs"), Stopped("stopped")], ids=["hang", "stop"])
def test_a_rank_that_hangs_says_where_unless_its_launcher_does(
    has_launcher: bool,
    error: LockstepError,
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv(LAUNCHER, raising=False)
    if has_launcher:
        monkeypatch.setenv(LAUNCHER, "1")
    RankErrorFile(run, 1).record_hang(error, {1: "waits", 0: "reads"})
    hangs = isinstance(error, RankFailed)
    sentence = f"it hangs; the stacks are in {run.logs}/rank*.log" if hangs else "stopped"
    facts = facts_of(run, 1)
    assert (facts["sentence"], facts["places"]) == (sentence, {"1": "waits", "0": "reads"} if hangs else {})
    places = "; rank 1 waits; rank 0 reads" * hangs
    assert capsys.readouterr().err == ("" if has_launcher else f"lockstep: {sentence}{places}\n")
    assert run.read_summary().get("error", "") == ("" if has_launcher else f"{sentence}{places}")
    assert bool(run.read_summary()) is not has_launcher


def test_an_error_of_a_rank_has_its_own_traceback_for_those_who_ask(run: RunDir) -> None:
    write_error(run, 2, InputError("the labels are wrong"))
    (note,) = first_failure(run, {2: 2}).__notes__
    assert note.startswith("rank 2:\nTraceback (most recent call last)")
    write_error(run, 1, RuntimeError("odd"))
    run.rank_error(2).write_text("{")  # of a full disk
    failure = first_failure(run, {1: 1, 2: 2})
    assert str(failure) == "rank 1 failed: RuntimeError: odd"
    assert failure.__notes__ == [failure.details]


def test_a_job_of_several_machines_is_one_of_the_command_line(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(launcher: Inline, entry: Entry, run_dir: RunDir) -> float:
        launched.append((entry.objects, run_dir))
        return 3.0

    launched: list[Any] = []
    with pytest.raises(InputError, match=r"^launcher\.nodes requests 2 machines, which only the command line can do"):
        worker.start_job(run, SimpleNamespace(launcher=SimpleNamespace(node_range=(1, 2))))  # type: ignore[arg-type]
    monkeypatch.setattr(Inline, "launch", launch)
    job, callback = resolved("device=cpu"), Callback()
    assert worker.start_job(run, job) == worker.start_job(run, job, {"Callback": callback}) == 3.0
    assert launched[0] == ((), run), "the ranks read the job from its folder"
    (of_job, callbacks, code), _ = launched[1]
    assert (of_job, callbacks) == (job, {"Callback": callback})
    assert isinstance(code, dict)


@pytest.mark.parametrize("launched", [True, False])
@pytest.mark.parametrize(
    ("words", "variable"), [((), None), (("repro=strict",), ":4096:8"), (("repro=strict",), "own")]
)
def test_a_rank_runs_its_job_with_all_that_was_passed_to_it(
    launched: bool, words: tuple[str, ...], variable: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def context(*arguments: object, **options: Any) -> Iterator[Any]:
        entered.append((arguments, options))
        yield dog

    entered: list[tuple[Any, dict[str, Any]]] = []
    ran: list[tuple[Any, dict[str, Any]]] = []
    dog = SimpleNamespace(local_peer_pids={1: 7}, heartbeat=print)
    run = run_dir(tmp_path / "run", "launcher.timeout=2min", "launcher.threads=3", *words)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if variable == "own":
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "own")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
        if launched:
            monkeypatch.setenv(name, "1" if name == "RANK" else "0" if name == "LOCAL_RANK" else "2")
    monkeypatch.setattr(worker.watchdog, "Watchdog", context)
    monkeypatch.setattr(worker, "join", context)
    monkeypatch.setattr(worker, "stop_signals", context)
    monkeypatch.setattr(worker.log, "rank_logging", context)
    monkeypatch.setattr("lockstep.core.run.Run.saved", "step 3")
    monkeypatch.setattr(worker.experiment, "run", lambda *arguments, **options: ran.append((arguments, options)))
    worker.run_rank(run.path, None, {"a": 1}, {"mine": 2})  # type: ignore[dict-item]
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == variable
    (logging, signals, watch, joined) = entered
    assert (logging[0][1], logging[1]) == (int(launched), {"separate": launched})
    assert signals[1] == {"restore": not launched}
    stop = signals[0][0]
    assert stop.saved == "step 3"
    assert (watch[0], watch[1]["timeout"], watch[1]["stop"]) == ((int(launched),), 120.0, stop)
    assert watch[1]["record_error"].__name__ == "record_hang"
    settings = {"device": "cpu", "backend": "gloo", "timeout": worker.watchdog.GROUP_TIMEOUT_S, "threads": 3}
    if not words:
        assert joined == ((), {**settings, "alone": False})
    (((job, of_run, world), options),) = ran
    assert (job, of_run, world) == (load_job(run.config), run, dog)
    assert options == {"stop": stop, "heartbeat": print, "callbacks": {"a": 1}, "code": {"mine": 2}}
    calls: list[Any] = []
    worker.run_rank(run.path, worker.RankWork(job.launcher, "cpu", calls.append))
    assert (calls, len(ran)) == ([dog], 1)


def test_a_full_disk_is_recorded_as_what_the_user_can_do_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = run_dir(tmp_path / "run", "launcher.threads=1")
    monkeypatch.setattr(worker.experiment, "run", fail)
    with pytest.raises(StorageError):
        worker.run_rank(run.path)
    recorded = json.loads(run.rank_error(0).read_text())
    assert "cannot be written (No space left on device)" in json.dumps(recorded)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["launcher=slurm"], "launcher=slurm: this command starts its ranks on one machine alone; use launcher=auto"),
        (
            ["launcher=elastic", "launcher.nodes=1:2", "launcher.rendezvous=a:1"],
            "launcher=elastic: this command starts its ranks on one machine alone; use launcher=auto",
        ),
        (["launcher=elastic", "launcher.node_rank=1"], "launcher.node_rank is 1, but launcher.nodes is 1"),
    ],
)
def test_ranks_of_several_machines_are_those_of_a_training_alone(words: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        on_ranks(print, words, "cpu")


@pytest.mark.parametrize(
    ("words", "threads"), [([], None), (["launcher.ranks=1"], None), (["launcher.threads=3"], 3)]
)
def test_one_rank_works_in_this_process_on_the_device_that_is_asked_for(
    words: list[str], threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(world: Any, *, threads: int | None) -> None:
        called.append((str(world.device), world.size, threads))

    called: list[Any] = []
    for device in ("cpu", None):
        on_ranks(call, words, device)
    assert called == [("cpu", 1, threads)] * 2
    if not words:
        monkeypatch.setattr(worker.World, "solo", lambda device: SimpleNamespace(device=device, size=1))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        on_ranks(call, words, "cpu")
        on_ranks(call, words, None)
        assert called[2:] == [("cpu", 1, None), ("cuda", 1, None)]


def test_a_command_on_ranks_starts_them_on_its_device_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(launcher: Spawn, entry: Entry, run_dir: RunDir) -> None:
        started.append((entry.objects[0].device, entry.remedy, run_dir.path.is_dir()))

    started: list[Any] = []
    monkeypatch.setattr(Spawn, "launch", launch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("lockstep.runtime.forking.keep_one_thread", lambda: started.append("one thread, to fork"))
    on_ranks(print, ["launcher.ranks=2"], "cpu")
    assert started == ["one thread, to fork", ("cpu", "use fewer ranks", True)]
    assert not any(tmp_path.iterdir())


def test_the_ranks_of_a_job_are_launched_without_waiting_for_a_reader_of_what_they_show(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def impatient() -> Iterator[None]:
        steps.append("impatient")
        yield
        steps.append("patient")

    steps: list[str] = []
    monkeypatch.setattr(worker, "impatient", impatient)
    monkeypatch.setattr(worker, "forgive_output", lambda: steps.append("forgive"))
    monkeypatch.setattr(Inline, "launch", lambda launcher, entry, run_dir: steps.append("launch"))
    worker.start_job(run, resolved("device=cpu"))
    assert steps == ["impatient", "launch", "patient", "forgive"]


def test_the_entry_of_a_job_is_the_job_in_this_process_and_what_it_needs_in_another(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(worker, "run_rank", lambda *objects: started.append(objects))
    job = resolved("device=cpu")
    for objects in ((), (job, None, {"mine": 1})):
        entry = worker.entry_of(job, objects)
        assert (entry.objects, entry.module, entry.remedy) == (objects, worker.__name__, Entry.remedy)
        entry.here(run.path)
    assert started == [(run.path, job), (run.path, job, None, {"mine": 1})]
    assert worker.entry_of(job, (), "buy memory").remedy == "buy memory"


def test_a_rank_reads_its_job_unless_a_part_of_it_is_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.runtime import user_code

    def code_of(config: Any, parts: Any) -> dict[str, Any]:
        configs.append(config["optimizer"]["_target_"])
        return {"code": [*parts]}

    configs: list[str] = []
    job, callback = resolved("device=cpu"), Callback()
    monkeypatch.setattr(user_code, "code_of", code_of)
    monkeypatch.setattr("lockstep.training.objects.code_parts", lambda own, callbacks: [own, *callbacks])
    for callbacks in (None, {}):
        assert worker.objects_of(job, callbacks) == ()
    assert configs == []
    named = {"Callback": callback}
    assert worker.objects_of(job, named) == (job, named, {"code": [job, callback]})
    monkeypatch.setattr(worker.extensions, "is_importable", lambda cls: cls is not type(job.optimizer))
    assert worker.objects_of(job, None) == (job, None, {"code": [job]})
    assert configs == ["lockstep.optim.AdamW"] * 2


def test_a_rank_is_run_with_what_its_process_was_started_with_and_hears_no_signal_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Any] = []
    monkeypatch.setattr(worker, "run_rank", lambda *objects: steps.append(objects))
    monkeypatch.setattr(worker, "listen", lambda handler: steps.append(handler))
    monkeypatch.setattr(worker, "leave", lambda code: steps.append(code))
    exit_as_rank(tmp_path, "job", None, "code")
    assert steps == [(tmp_path, "job", None, "code"), signal.SIG_IGN, 0]


def test_the_watchdog_of_a_rank_knows_the_ranks_of_its_machine_and_the_run_its_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def watch(*_: object, **options: Any) -> Iterator[Any]:
        yield dog

    @contextmanager
    def join(**options: Any) -> Iterator[Any]:
        alone.append(options["alone"])
        yield world

    run, alone, ran = run_dir(tmp_path / "run", "strategy=ddp", "launcher.ranks=2"), list[bool](), list[Any]()
    dog, world = SimpleNamespace(local_peer_pids={}, heartbeat=print), SimpleNamespace(local_peer_pids={1: 7})
    monkeypatch.setattr(worker.watchdog, "Watchdog", watch)
    monkeypatch.setattr(worker, "join", join)
    monkeypatch.setattr(worker.experiment, "run", lambda job, run_dir, joined, **_: ran.append(joined))
    worker.run_rank(run.path)
    assert (dog.local_peer_pids, ran, alone) == ({1: 7}, [world], [True])
    worker.run_rank(run.path, worker.RankWork(load_job(run.config).launcher, "cpu", ran.append))
    assert (ran, alone) == ([world, world], [True, False])


def test_a_command_on_ranks_needs_a_device_of_its_own_only_where_words_name_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, device in ((["device=cpu"], None), (["launcher.ranks=1"], "cpu"), (["launcher.threads=2"], None)):
        on_ranks(lambda world, threads: devices.append(str(world.device)), words, device)
    assert devices == ["cpu"] * 3
    with pytest.raises(InputError, match=r"^device=cuda, but torch finds no CUDA GPU"):
        on_ranks(print, ["launcher.ranks=1"], "cuda")


@pytest.mark.parametrize(("nodes", "most"), [("1:2", 2), (3, 3)])
def test_a_program_is_told_how_to_train_on_several_machines(run: RunDir, nodes: int | str, most: int) -> None:
    job = resolved("device=cpu")
    launcher = Elastic(ranks=1, nodes=nodes, rendezvous="a:1", backend="gloo", threads=1)
    with pytest.raises(InputError) as raised:
        worker.start_job(run, replace(job, launcher=launcher))
    assert str(raised.value) == (
        f"launcher.nodes requests {most} machines, which only the command line can do; use lockstep train, or "
        "launcher.nodes=1"
    )


def test_a_hang_of_a_rank_keeps_where_the_first_one_saw_each_rank(run: RunDir, monkeypatch: Any) -> None:
    monkeypatch.setenv(LAUNCHER, "1")
    errors = RankErrorFile(run, 3)
    errors.record_hang(RankFailed("rank 3 hangs"), {3: "waits", 11: "is gone"})
    facts = json.loads(run.rank_error(3).read_text())
    assert (facts["time"], facts["rank"], facts["exit_code"], facts["known"]) == (1000.0, 3, 70, True)
    assert run.rank_error(3).read_text().endswith("}\n")
    assert "RankFailed: rank 3 hangs" in facts["traceback"]
    failure = first_failure(run, {3: 70})
    assert str(failure).endswith("rank*.log; rank 3 waits, rank 11 is gone")
    assert type(failure) is RankFailed
    assert failure.__notes__[0].startswith("rank 3:\n")
