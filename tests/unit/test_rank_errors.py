"""Which error of several ranks is the job's: what each rank writes at its end, and what its launcher makes of it."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import run_dir
from lockstep.core.errors import InputError, LockstepError, RankFailed, Stopped, StorageError
from lockstep.core.run_dir import RunDir
from lockstep.job import worker
from lockstep.job.worker import RankErrorFile, exit_as_rank
from lockstep.launcher.spawn import first_failure


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
        ({0: Stopped.exit_code, 1: 1}, RankFailed, "rank 0 left with exit code 75, rank 1 left with exit code 1 and"),
        ({1: StorageError.exit_code}, StorageError, "cannot be written, not even the error"),
        ({}, RankFailed, "a rank left and wrote no error"),
        ({1: -signal.SIGSEGV}, RankFailed, "rank 1 was ended by SIGSEGV; see"),
    ],
)
def test_the_exit_codes_speak_for_ranks_that_could_write_nothing(
    run: RunDir, codes: dict[int, int], kind: type, says: str
) -> None:
    failure = first_failure(run, codes)
    assert type(failure) is kind
    assert says in str(failure)


def test_an_error_that_the_rank_wrote_earlier_is_none_of_this_run(run: RunDir) -> None:
    write_error(run, 0, InputError("yesterday"))
    RankErrorFile(run, 0)
    assert not run.rank_error(0).exists()
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
