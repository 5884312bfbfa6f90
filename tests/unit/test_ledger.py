"""The ledger of a sweep, the devices of its jobs, and its table, without Hydra and without a trainer."""

import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pynvml
import pytest
from hydra import compose
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from helpers import ROOT, view_of
from lockstep.cli.needs import kind
from lockstep.cli.sweep import failure_of
from lockstep.config.hydra_versions import initialize_config_dir
from lockstep.core.errors import InputError, Interrupted, LockstepError, NumericalError, Stopped, StorageError
from lockstep.core.run import State, born
from lockstep.core.run_dir import RunDir
from lockstep.core.tags import Direction, Monitor
from lockstep.records.ledger import Identity, Ledger, record_of, recorded, words_of_sweep
from lockstep.records.record import Record, checked_direction
from lockstep.records.runs import JobRun, read_jobs
from lockstep.report.sweep_page import sweep_page
from lockstep.runtime.host import CORES, VISIBLE
from lockstep.runtime.signals import RUNG_END, STOPPED_EARLY
from lockstep.sweeps import pool_launcher, search
from lockstep.sweeps.devices import Devices, Needs, Share
from lockstep.sweeps.line import choose_folder, sweep_of_line
from lockstep.sweeps.pool import CONTEXT_BYTES, Pool, SweepJob, memory_of_job, to_run
from lockstep.sweeps.view import JobProgress, SweepView

GPUS = [f"GPU-{number}" for number in range(8)]
ONE = Identity(base={"batch": 64, "train": {"ema": None}}, swept=("seed",), words=("seed=1,2",))


def begun(folder: Path) -> Ledger:
    ledger = Ledger(folder)
    ledger.create(ONE)
    return ledger


class FakeLedger(Ledger):
    """Keeps the records in memory: a thousand schedules would write a hundred thousand files."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.by_number: dict[int, Record] = {}

    def write(self, record: Record) -> Record:
        self.by_number[record.number] = record
        return record

    def read(self, record: Record) -> Record:
        return self.by_number.get(record.number, record)

    def mark_best(self) -> None:
        """There is no folder."""


class FakeProcess:
    """A job that ends when it is told."""

    def __init__(self, number: int, share: Share) -> None:
        self.sentinel, self.share = number, share
        self.exitcode: int | None = None

    def join(self) -> None:
        assert self.exitcode is not None

    def send_signal(self, number: int) -> None: ...


SHOWN = SimpleNamespace(show=print, ended=lambda record: None)  # a view of a sweep, whose sentences are printed


class Blank(SweepView):
    """Shows nothing."""

    def __init__(self) -> None: ...

    def started(self, record: Record) -> None: ...

    def ended(self, record: Record) -> None: ...

    def refresh(self, waiting: int = 0) -> None: ...


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 10), max_size=24), st.randoms(use_true_random=False), st.sampled_from([None, 1, 3]))
def test_no_device_is_given_twice_or_idle_while_a_job_fits(needs: list[int], random: Any, most: int | None) -> None:
    ledger, running, started = FakeLedger(), dict[int, FakeProcess](), list[int]()
    devices = Devices(GPUS, cores=20)

    def start(_: Ledger, job: SweepJob, share: Share) -> FakeProcess:
        number = job.record.number
        started.append(number)
        running[number] = FakeProcess(number, share)
        assert len(share.gpus) == min(needs[number], len(GPUS))
        held = [gpu for process in running.values() for gpu in process.share.gpus]
        assert len(held) == len(set(held)), "a device was given twice"
        cores = [int(process.share.environment.get(CORES, 20)) for process in running.values()]
        assert sum(cores) <= 20, "jobs at once have more threads than cores"
        assert len(needs) > 1 or cores == [20], "a job alone has less than it may"
        return running[number]

    def wait(sentinels: list[int], seconds: float) -> None:
        idle = len(GPUS) - sum(len(process.share.gpus) for process in running.values())
        waiting = [number for number in range(len(needs)) if number not in started]
        if most is None or len(running) < most:
            assert not [number for number in waiting if min(needs[number], len(GPUS)) <= idle], "a device was idle"
        assert most is None or len(running) <= most
        ended = running.pop(random.choice(sentinels))
        ledger.end(job_of[ended.sentinel].record, State.done, objective=1.0)
        ended.exitcode = 0

    jobs = [SweepJob(job(number), Needs(gpus=gpus), lambda: None, ()) for number, gpus in enumerate(needs)]
    job_of = dict(enumerate(jobs))
    Pool(ledger, devices, Blank(), most=most, start=start, wait=wait).run(jobs)
    assert sorted(started) == list(range(len(needs)))
    assert sorted(devices.gpus) == GPUS


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.integers(1, 3)), max_size=24),
    st.lists(st.integers(4, 24), min_size=1, max_size=4),
    st.fixed_dictionaries({kind: st.integers(1, 30) for kind in "abc"}),
    st.randoms(use_true_random=False),
)
def test_jobs_share_gpus_by_the_memory_of_the_first_of_their_kind(
    jobs: list[tuple[str, int]], free: list[int], size_of: dict[str, int], random: Any
) -> None:
    ledger, running, started, known = FakeLedger(), dict[int, FakeProcess](), list[int](), set[str]()
    needs = [Needs(gpus=1 if kind else gpus, kind=kind) for kind, gpus in jobs]
    free_of = {f"GPU-{number}": memory for number, memory in enumerate(free)}

    def on(gpu: str) -> list[int]:
        return [number for number, process in running.items() if gpu in process.share.gpus]

    def start(_: Ledger, job: SweepJob, share: Share) -> FakeProcess:
        number = job.record.number
        started.append(number)
        running[number] = FakeProcess(number, share)
        for gpu in share.gpus:
            beside = on(gpu)
            if len(beside) > 1:
                assert all(needs[other].kind in known and needs[other].gpus == 1 for other in beside)
                assert sum(size_of[needs[other].kind] for other in beside) <= free_of[gpu], "a device over its memory"
        return running[number]

    def wait(sentinels: list[int], seconds: float) -> None:
        idle = [gpu for gpu in free_of if not on(gpu)]
        room = {
            gpu: free_of[gpu] - sum(size_of[needs[number].kind] for number in on(gpu))
            for gpu in free_of
            if all(running[number].share.memory is not None for number in on(gpu))
        }
        for number in set(range(len(jobs))) - set(started):
            assert len(idle) < min(needs[number].gpus, len(free)), "a device was idle"
            if (kind := needs[number].kind) in known:
                assert not [gpu for gpu in room if room[gpu] >= size_of[kind]], "a device had room"
        ended = running.pop(random.choice(sentinels))
        ledger.end(job_of[ended.sentinel].record, State.done, objective=1.0)
        known.update({needs[ended.sentinel].kind} - {""})
        ended.exitcode = 0

    def memory_of(_: Ledger, record: Record) -> int | None:
        return size_of.get(needs[record.number].kind)

    jobs = [SweepJob(job(number), need, lambda: None, ()) for number, need in enumerate(needs)]
    job_of = dict(enumerate(jobs))
    devices = Devices(free_of, 4, free_of.__getitem__)
    with patch("lockstep.sweeps.pool.memory_of_job", memory_of):
        Pool(ledger, devices, Blank(), start=start, wait=wait).run(jobs)
    assert (sorted(started), sorted(devices.gpus)) == ([*range(len(jobs))], sorted(free_of))


def test_a_job_shares_the_fullest_gpu_that_has_room() -> None:
    """So the others stay free for jobs that need more."""
    devices, large, small = Devices(["a", "b"], 4, lambda gpu: 10), Needs(gpus=1, kind="x"), Needs(gpus=1, kind="y")

    def taken(needs: Needs) -> Share:
        share = devices.take(needs)
        assert share is not None
        return share

    for needs, memory in ((large, 6), (small, 3), (small, 2)):  # the most that a job of the kind took
        devices.give_back(taken(needs), needs.kind, memory)
    on_one, beside = taken(large), taken(small)
    on_other = taken(small)
    assert on_one.gpus == beside.gpus != on_other.gpus
    devices.give_back(beside)
    assert taken(small).gpus == on_one.gpus


def test_the_memory_of_a_job_is_that_of_its_summary_and_a_job_of_another_rate_is_of_its_kind(tmp_path: Path) -> None:
    record = job(0, state=State.done)
    (tmp_path / record.folder).mkdir(parents=True)
    assert memory_of_job(Ledger(tmp_path), record) is None
    (tmp_path / record.folder / "summary.json").write_text('{"gpu_memory": 1000}')
    assert memory_of_job(Ledger(tmp_path), record) == 1000 + CONTEXT_BYTES
    assert memory_of_job(Ledger(tmp_path), job(0, state=State.failed)) is None
    of = {"seed": 1, "optimizer": {"lr": 0.1, "momentum": 0.9}, "batch": 8, "sweep": {"retry": False}}
    assert kind(of) == kind({**of, "seed": 2, "optimizer": {"lr": 0.2, "momentum": 0.9}, "sweep": {"retry": True}})
    assert kind(of) != kind({**of, "batch": 16})


def job(number: int, *overrides: str, **facts: Any) -> Record:
    return Record(number=number, overrides=overrides, folder=f"{number:03}-job", **facts)


def test_a_job_beside_others_has_its_share_of_the_cores_and_a_job_alone_all() -> None:
    for room, on_one in ((10, 2), (3, 1), (0, 1)):  # jobs of 5 on a GPU of so much memory
        devices = Devices(["a", "b"], 16, lambda gpu, room=room: room)
        devices.of_kind["x"] = 5
        shares = [devices.take(Needs(gpus=1, kind="x")) for _ in range(2 * on_one + 1)]
        environments = [share and {**share.environment} for share in shares]
        cores = {CORES: str(8 // on_one)}
        assert environments == [*[{VISIBLE: gpu, **cores} for gpu in "ab" for _ in range(on_one)], None]
    share = Devices([], cores=4).take(Needs(cores=2))
    assert share is not None
    assert share.environment == {CORES: "2"}
    assert replace(share, alone=True).environment == {}
    devices = Devices([], cores=4)
    assert devices.take(Needs(gpus=1, cores=3)) == Share(cores=3)
    assert devices.take(Needs(cores=2)) is None
    assert devices.take(Needs(cores=1)) == Share(cores=1)
    devices.give_back(Share(cores=4))
    assert devices.take(Needs(cores=99)) == Share(cores=4)


@pytest.mark.parametrize(
    ("processes", "visible", "free", "says"),
    [
        ([[], []], None, ["GPU-0", "GPU-1"], ""),
        ([[17, 18], [os.getpid()]], None, ["GPU-1"], "skipped, because others use them: GPU 0 (process 17);"),
        ([[17], [18]], None, [], "others use all GPUs of this machine: GPU 0 (process 17), GPU 1 (process 18);"),
        ([[17], [18]], "GPU-1", ["GPU-1"], ""),
        ([None, [18]], None, ["GPU-0"], "skipped, because others use them: GPU 1 (process 18);"),
    ],
)
def test_gpus_that_others_use_are_left_out_by_name_unless_the_user_names_them(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    processes: list[list[int] | None],
    visible: str | None,
    free: list[str],
    says: str,
) -> None:
    def running(number: int) -> list[SimpleNamespace]:
        if (pids := processes[number]) is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [SimpleNamespace(pid=pid) for pid in pids]

    fake = {
        **dict.fromkeys(("nvmlInit", "nvmlShutdown"), lambda: None),
        "nvmlDeviceGetCount": lambda: len(processes),
        "nvmlDeviceGetMigMode": lambda handle: [0, 0],
        "nvmlDeviceGetHandleByIndex": int,
        "nvmlDeviceGetUUID": "GPU-{}".format,
        "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid[-1]),
        "nvmlDeviceGetComputeRunningProcesses": running,
    }
    for name, function in fake.items():
        monkeypatch.setattr(pynvml, name, function)
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    devices = Devices.of_machine()
    assert devices.gpus == free
    devices.check([Needs(cores=1), Needs(cores=0, submits=True)])  # no job takes a GPU
    assert not capsys.readouterr().out
    if free:
        devices.check([Needs(gpus=1)])
    else:
        assert devices.all.gpus, "its jobs would be planned for the CPU"
        with pytest.raises(InputError, match=re.escape(says)):
            devices.check([Needs(gpus=1)])
    assert capsys.readouterr().out.startswith(says if free else "")


def test_a_job_is_found_by_its_overrides_in_any_order_after_a_move_too(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    first = ledger.enter([(["seed=1", "batch=8"], "seed=1"), (["seed=2", "batch=8"], "seed=2")])
    again = ledger.enter([(["batch=8", "seed=2"], "x"), (["seed=3", "batch=8"], "seed=3")])
    assert [record.folder for record in (*first, *again)] == ["000-seed=1", "001-seed=2", "001-seed=2", "002-seed=3"]
    assert ledger.records() == [*first, again[1]]
    (tmp_path / "jobs" / "000.json").unlink()
    (after_a_loss,) = ledger.enter([(["seed=4"], "seed=4")])
    assert after_a_loss.number == 3, "the numbers of other jobs stay theirs"
    first = ledger.enter([(["seed=1", "output_root=a"], "seed=1")])
    assert ledger.enter([(["output_root=./a", "seed=1"], "seed=1")]) == first


def test_a_record_tells_how_its_job_ended(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    (record,) = ledger.enter([(["seed=1"], "seed=1")])
    (tmp_path / record.folder).mkdir()

    def seen() -> float:
        running = ledger.read(record)
        assert (running.state, running.host, running.pid) == (State.running, socket.gethostname(), os.getpid())
        assert running.runs_here
        assert (running.ended, running.exit_code, running.error) == (0.0, 0, ""), "how it ended before is not told"
        return 90.0

    assert recorded(ledger, record, seen) == 90.0
    assert (ledger.read(record).state, ledger.read(record).objective) == (State.done, 90.0)
    for error, state, code in (
        (NumericalError("the loss is nan"), State.failed, 76),
        (Stopped("stopped"), State.stopped, 75),
        (KeyError("x"), State.failed, 70),
        (KeyboardInterrupt(), State.stopped, 75),
        (StorageError("there is no space"), State.stopped, 74),  # is no fault of the job: the same line goes on
    ):

        def fails(error: BaseException = error) -> float:
            raise error

        with pytest.raises((NumericalError, Stopped, KeyError, StorageError)):
            recorded(ledger, record, fails)
        assert (ledger.read(record).state, ledger.read(record).exit_code) == (state, code)
        assert recorded(ledger, ledger.read(record), seen) == 90.0
    (_, known) = record_of(tmp_path / record.folder) or (None, None)
    assert known == ledger.read(record)
    assert record_of(tmp_path / "001-other") is None
    assert record_of(tmp_path / "jobs") is None


@pytest.mark.parametrize("proc", ["/proc", "/nowhere"])
def test_a_killed_process_or_another_of_its_number_runs_no_job(proc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.core.run.Path", lambda text: Path(text.replace("/proc", proc)))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        facts = {"state": State.running, "host": socket.gethostname(), "pid": process.pid, "born": born(process.pid)}
        assert job(0, **facts).runs_here
        assert not job(0, **{**facts, "host": "elsewhere"}).runs_here
        assert not job(0, **{**facts, "born": "1"}).runs_here
        process.kill()
    assert not job(0, **facts).runs_here


def test_a_call_runs_what_is_not_done_and_on_request_what_failed() -> None:
    records = [job(number, state=state) for number, state in enumerate(State)]
    names = [record.state for record in to_run(records, retry=False)]
    assert names == [State.waiting, State.running, State.stopped, State.pruned, State.killed, State.damaged]
    assert [record.state for record in to_run(records, retry=True)] == [*names[:2], State.failed, *names[2:]]
    records = [job(number, state=state, submitted="77_1") for number, state in enumerate(State)]
    again = [State.stopped, State.pruned, State.killed, State.damaged]
    assert [record.state for record in to_run(records, retry=False)] == again
    assert len(to_run(records, retry=True)) == len(State) - 1


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"number": 0}', json.dumps({**dataclasses.asdict(job(0)), "state": "sleeping"})]
    + [json.dumps({**dataclasses.asdict(job(0)), "folder": name}) for name in ("../000-job", "001-job", "000/x")]
    + [json.dumps(dataclasses.asdict(job(1))), None]
    + [json.dumps({**dataclasses.asdict(job(0)), field.name: {}}) for field in dataclasses.fields(Record)],
)
def test_a_damaged_record_is_named_and_its_job_goes_on_in_its_folder(tmp_path: Path, text: str | None) -> None:
    ledger = begun(tmp_path)
    lines = [(["seed=1", "batch=8"], "seed=1"), (["seed=2", "batch=8"], "seed=2")]
    (before, other) = ledger.enter(lines)
    (overrides := RunDir.at(tmp_path / before.folder).overrides).write_text("- seed=1\n- batch=8\n")
    path = tmp_path / "jobs" / "000.json"
    if text is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_text(text)
    (damaged, same) = ledger.records()
    assert (damaged.state, damaged.folder, damaged.exit_code, same) == (State.damaged, before.folder, 2, other)
    assert re.match(rf"{path} is .*; rerun the sweep's command to resume the job$", damaged.error)
    overrides.unlink()
    assert ledger.records()[0].overrides == (), "of a job that has not begun, the file alone says what it is"
    overrides.write_text("- seed=1\n- batch=8\n")
    assert ledger.enter(lines) == [before, other]
    assert ledger.records() == [before, other]
    assert path.with_suffix(".damaged").exists()


def test_records_come_by_number_and_a_sweep_that_has_lost_them_goes_on(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    records = [ledger.write(dataclasses.replace(job(n), folder=f"{n:03}-job")) for n in (7, 999, 1000)]
    (tmp_path / "jobs" / "007 (copy).json").write_text("{}")
    assert ledger.records() == records
    shutil.rmtree(tmp_path / "jobs")
    assert ledger.enter([(["seed=1"], "seed=1")]) == ledger.records()


def test_the_sweep_of_an_earlier_version_has_a_score_without_a_figure(tmp_path: Path) -> None:
    file = begun(tmp_path).folder / "sweep.json"
    facts = json.loads(file.read_text())
    del facts["figure"]
    file.write_text(json.dumps(facts))
    assert Ledger(tmp_path).identity().monitor == Monitor("score")


def test_a_line_finds_its_sweep_and_says_which_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = (Ledger(tmp_path / "sweeps" / name) for name in ("20260101-1", "20260102-2"))
    older.create(ONE)
    assert getattr(sweep_of_line(tmp_path, ONE), "folder", None) == older.folder
    assert sweep_of_line(tmp_path, dataclasses.replace(ONE, swept=("batch",))) is None
    assert capsys.readouterr().out == ""
    newer.create(ONE)
    assert getattr(sweep_of_line(tmp_path, ONE), "folder", None) == newer.folder
    (newer.folder / "sweep.json").write_text("{")
    match = sweep_of_line(tmp_path, ONE)
    assert match is not None
    assert match.folder == older.folder
    assert f"warning: this sweep is not resumed: {newer.folder / 'sweep.json'}" in capsys.readouterr().out


@pytest.mark.parametrize("value", [None, [], {}])
def test_a_sweep_of_before_is_found_by_its_line_also_with_a_key_that_is_newer(tmp_path: Path, value: object) -> None:
    Ledger(tmp_path / "sweeps" / "20260101-1").create(ONE)
    later = dataclasses.replace(ONE, base={**ONE.base, "train": {"ema": None, "newer": value}})
    assert sweep_of_line(tmp_path, later) is not None
    assert sweep_of_line(tmp_path, dataclasses.replace(ONE, base={**ONE.base, "newer": 0})) is None


def test_a_job_that_is_done_and_whose_folder_is_gone_waits_again(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    better, other = ledger.enter([(["seed=1"], "seed=1"), (["seed=2"], "seed=2")])
    for record, score in ((better, 90.0), (other, 80.0)):
        (tmp_path / record.folder).mkdir()
        ledger.end(record, State.done, objective=score)
    assert to_run(ledger.records(), retry=False) == []
    (tmp_path / better.folder).rmdir()
    gone = ledger.read(better)
    assert (gone.state, gone.score) == (State.waiting, None)
    assert to_run(ledger.records(), retry=False) == [gone]
    assert [run.state for run in read_jobs(ledger)] == ["waiting", "done"]
    ledger.mark_best()
    assert ledger.best == other.folder


def test_a_sweep_is_its_base_config_and_the_keys_that_it_varies() -> None:
    more = dataclasses.replace(ONE, words=("seed=1,2,3",))
    assert ONE.hash == more.hash
    assert ONE.difference(more) == ""
    other = dataclasses.replace(ONE, base={"batch": 128, "train": {"ema": 0.9}})
    assert other.hash != ONE.hash
    assert ONE.difference(other) == "batch is 64 there and 128 here, train.ema is None there and 0.9 here"
    assert ONE.difference(dataclasses.replace(ONE, swept=())) == "it sweeps seed, and this line nothing"


def test_a_score_that_is_better_when_smaller_decides_the_best_the_table_and_who_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = {"lr=1": 0.5, "lr=2": 0.25, "lr=3": 0.75, "lr=4": 0.25}
    for direction, best in ((Direction.minimize, 1), (Direction.maximize, 2)):
        ledger = Ledger(tmp_path / direction)
        ledger.create(dataclasses.replace(ONE, direction=direction))
        records = ledger.enter([([word], word) for word in scores])
        for record, score in zip(records, scores.values(), strict=True):
            (ledger.folder / record.folder).mkdir()
            ledger.end(record, State.done, objective=score)
        assert ledger.best == records[best].folder
        view_of(ledger).show_table()
        assert f"best: job {best} with" in capsys.readouterr().out
    with pytest.raises(InputError, match="the direction of the scores is 'up', expected maximize or minimize"):
        checked_direction("up")


def halve(ledger: Ledger, records: Sequence[Record], factor: int, run: Any = lambda jobs, enough: None) -> None:
    """Halve jobs in a pool that runs them so."""
    jobs = {record.number: SweepJob(record, Needs(), lambda: None, ()) for record in records}
    pool: Any = SimpleNamespace(ledger=ledger, view=SHOWN, run=run)
    search.halve(pool, records, jobs, factor)


def jobs_of_rates(ledger: Ledger, number: int) -> list[Record]:
    return ledger.enter([([f"lr={rate}"], f"lr={rate}") for rate in range(number)])


def evaluated(ledger: Ledger, record: Record, *scores: float, averaged: bool = False) -> None:
    """Write what a job has logged: one evaluation after each of its steps so far, of four.

    With `averaged` weights, which have these scores, the others have the opposite ones.
    """
    folder = ledger.folder / record.folder
    folder.mkdir()
    (folder / "summary.json").write_text('{"steps": 4}')
    lines = [
        {"step": step, "acc/val_top1": -score, "acc/val_ema_top1": score}
        if averaged
        else {"step": step, "acc/val_top1": score}
        for step, score in enumerate(scores, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    ("direction", "expected"),
    [(Direction.maximize, [2.0, 5.0, 5.0, None]), (Direction.minimize, [2.0, 2.0, 1.0, None])],
)
@pytest.mark.parametrize("averaged", [False, True])
def test_the_score_of_a_round_is_the_best_one_until_its_end(
    tmp_path: Path, averaged: bool, direction: Direction, expected: list[float | None]
) -> None:
    ledger = Ledger(tmp_path)
    evaluated(ledger, job(0), 2.0, 5.0, 1.0, averaged=averaged)
    assert [search.score_at(ledger, job(0), share, direction) for share in (0.25, 0.5, 0.75, 1.0)] == expected


@pytest.mark.parametrize(("jobs", "factor", "pruned"), [(3, 2, [0]), (5, 2, [0, 1, 2]), (7, 3, [0, 1, 2, 3])])
def test_the_larger_part_of_odd_jobs_goes_on_and_a_late_rung_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], jobs: int, factor: int, pruned: list[int]
) -> None:
    ledger = begun(tmp_path)
    records = jobs_of_rates(ledger, jobs)
    for record in records:
        evaluated(ledger, record, *[float(record.number)] * 3)
    halve(ledger, records, factor)
    assert [record.number for record in ledger.records() if record.state is State.pruned] == pruned
    for record in records:  # jobs that are rarely evaluated
        (ledger.folder / record.folder / "metrics.jsonl").write_text('{"step": 4, "acc/val_top1": 1.0}\n')
    halve(ledger, records[:2], 2)
    late = "round 1 of 2 was to end after 50 % of the steps, and a job was first evaluated after 100 %; "
    assert late + "train.eval_every=50% saves the steps in between" in capsys.readouterr().out


# For each of three settings of two folds and two seeds, the scores of its four jobs after the first round.
UNEVEN = {"lr=0": (9.0, 9.0, 1.0, 1.0), "lr=1": (6.0, 6.0, 6.0, 6.0), "lr=2": (8.0, 2.0, 2.0, 2.0)}


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("failed", [(), (4,), (4, 5, 6, 7), (0, 4, 8)])
@pytest.mark.parametrize("seed", ["seed", "++seed"])
def test_a_setting_is_judged_by_all_its_seeds_and_folds(
    tmp_path: Path, direction: Direction, failed: tuple[int, ...], seed: str
) -> None:
    ledger = Ledger(tmp_path)
    ledger.create(dataclasses.replace(ONE, figure="top1", direction=direction))
    samples = [(f"{seed}={number}", f"dataset.fold={fold}") for number in (1, 2) for fold in (0, 1)]
    records = ledger.enter(
        [((lr, *sample), f"{lr},{number}") for lr in UNEVEN for number, sample in enumerate(samples)]
    )
    for record, score in zip(records, itertools.chain(*UNEVEN.values()), strict=True):
        if record.number not in failed:
            evaluated(ledger, record, *[score] * 3)

    def run(jobs: Sequence[SweepJob], enough: Any) -> None:
        for job in jobs:
            if job.record.number in failed:
                ledger.end(job.record, State.failed, exit_code=70, error="no")
            else:
                ledger.end(job.record, State.done, objective=1.0)

    halve(ledger, records, 2, run)
    settings = [ledger.records()[4 * number : 4 * number + 4] for number in range(3)]
    alive = [[record for record in setting if record.number not in failed] for setting in settings]
    assert all(len({record.state for record in setting}) <= 1 for setting in alive), "a setting ends as a whole"
    # The means of the jobs that have a score; a setting without one of its jobs comes behind those with all.
    order = {
        number: (len(of) - 4, direction.gain(statistics.mean(scores[r.number % 4] for r in of)))
        for number, (of, scores) in enumerate(zip(alive, UNEVEN.values(), strict=True))
        if of
    }
    better = sorted(order, key=order.__getitem__, reverse=True)[: 2 if len(order) > 2 else 1]
    assert {number for number in order if alive[number][0].state is State.done} == {*better}
    assert [record.number for record in ledger.records() if record.state is State.failed] == [*failed]


@pytest.mark.parametrize(("settings", "seeds", "factor"), [(4, 1, 2), (4, 2, 2), (5, 3, 2), (9, 2, 3), (2, 4, 2)])
def test_a_halving_knows_its_rounds_and_its_later_work_whatever_the_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: int, seeds: int, factor: int
) -> None:
    ledger, rounds_shown, work = begun(tmp_path), list[tuple[float, float]](), list[float]()
    names = [(f"lr={rate}", f"seed={seed}") for rate in range(settings) for seed in range(seeds)]
    records = ledger.enter([(words, "a") for words in names])
    for record in records:
        (folder := ledger.folder / record.folder).mkdir()
        (folder / "summary.json").write_text('{"steps": 99}')
    view = SimpleNamespace(show=print, ended=lambda record: None)

    def run(jobs: Sequence[SweepJob], enough: Any) -> None:
        rounds_shown.append((view.share, view.later))
        work.append(len(jobs) * view.portion)
        for job in jobs:
            line = {"step": math.ceil(99 * view.share), "acc/val_top1": float(job.record.number // seeds)}
            with (ledger.folder / job.record.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            state = State.done if view.share == 1 else State.waiting
            ledger.end(job.record, state, objective=1.0 if view.share == 1 else None)

    pool: Any = SimpleNamespace(ledger=ledger, view=view, run=run)
    jobs = {record.number: SweepJob(record, Needs(), lambda: None, ()) for record in records}
    search.halve(pool, records, jobs, factor)
    rounds = math.floor(math.log(settings, factor) + 1e-9)
    assert [share for share, _ in rounds_shown] == [float(factor) ** -left for left in range(rounds, -1, -1)]
    assert [later for _, later in rounds_shown] == pytest.approx([sum(work[done + 1 :]) for done in range(len(work))])
    unit, ahead = "jobs" if seeds == 1 else "settings", math.ceil(settings / factor)
    assert (
        f"{ahead} of {settings} {unit} continue after {100 * rounds_shown[0][0]:.3g} % of" in capsys.readouterr().out
    )


@pytest.mark.parametrize("number", [1, 2, 4])
def test_only_jobs_of_one_gpu_share_a_gpu_whatever_is_known_of_their_kind(number: int) -> None:
    devices = Devices(GPUS[:4], 8, lambda gpu: 100)
    first = devices.take(Needs(gpus=1, kind="a"))
    assert first is not None
    devices.give_back(first, "a", 40)
    share = devices.take(Needs(gpus=number, kind="a"))
    assert share is not None
    assert (len(share.gpus), share.memory) == (number, 40 if number == 1 else None)


class EndedPool:
    """A pool whose jobs end as they are told, without a record of their own, and note the signals that they get."""

    def __init__(self, *codes: int, most: int | None = None, stops: bool = False) -> None:
        self.ledger, self.codes, self.stops = FakeLedger(), codes, stops
        self.processes: dict[int, FakeProcess] = {}
        self.signals: list[tuple[int, int]] = []
        self.jobs = [SweepJob(job(number), Needs(), lambda: None, ()) for number in range(len(codes))]
        self.pool = Pool(self.ledger, Devices([], 99), Blank(), most=most, start=self.start, wait=self.wait)

    def start(self, _: Ledger, job: SweepJob, share: Share) -> FakeProcess:
        number = job.record.number
        process = self.processes[number] = FakeProcess(number, share)
        process.send_signal = lambda sent: self.signals.append((number, sent))  # type: ignore[method-assign]
        self.ledger.start(job.record)
        return process

    def wait(self, sentinels: list[int], seconds: float) -> None:
        if self.stops:
            os.kill(os.getpid(), signal.SIGTERM)
        for number in sentinels:
            self.processes[number].exitcode = self.codes[number]

    def states(self) -> list[str]:
        return [self.ledger.read(job.record).state for job in self.jobs]


def test_the_code_of_a_job_without_a_record_says_how_it_ended() -> None:
    ended = EndedPool(0, 75, 70, -9)
    ended.pool.run(ended.jobs)
    assert ended.states() == [State.done, State.stopped, State.failed, State.failed]
    assert "ran out of memory" not in ended.ledger.read(job(2)).error
    assert "was killed (SIGKILL), probably because the machine, or" in ended.ledger.read(job(3)).error
    killed = EndedPool(-signal.SIGKILL, -signal.SIGKILL)
    for one in killed.jobs:
        killed.pool.run([one])
    assert killed.states() == [State.failed, State.failed]


@pytest.mark.parametrize(
    ("codes", "advice"),
    [((-9,), "train.micro_batches=auto"), ((-9, 0), "hydra.launcher.jobs=1"), ((-9, 0, 0), "hydra.launcher.jobs=2")],
)
def test_a_killed_job_names_the_override_that_leaves_it_more_memory(codes: tuple[int, ...], advice: str) -> None:
    ended = EndedPool(*codes)
    ended.pool.run(ended.jobs)
    assert f"ran out of memory; use {advice}; its output is in" in ended.ledger.read(job(0)).error


def test_a_sweep_that_is_stopped_passes_the_signal_on_and_starts_no_other_job() -> None:
    stopped = EndedPool(75, 75, 0, 0, most=2, stops=True)
    with pytest.raises(Stopped, match="Rerun the command"):
        stopped.pool.run(stopped.jobs)
    assert {number for number, _ in stopped.signals} == {0, 1} == {*stopped.processes}
    assert stopped.states() == [State.stopped, State.stopped, State.waiting, State.waiting]


def test_a_job_that_a_second_interrupt_kills_is_stopped_and_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = EndedPool(-signal.SIGKILL, -signal.SIGKILL)

    def interrupted_twice(sentinels: list[int], seconds: float) -> None:
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr("lockstep.runtime.signals.AGAIN_S", 0.0)  # it counts as the second one at once
        signal.raise_signal(signal.SIGINT)
        assert {(number, signal.SIGKILL) for number in sentinels} <= {*killed.signals}
        killed.wait(sentinels, seconds)

    killed.pool.wait = interrupted_twice
    with pytest.raises(Interrupted):
        killed.pool.run(killed.jobs)
    assert killed.states() == [State.stopped, State.stopped]
    assert [killed.ledger.read(job.record).exit_code for job in killed.jobs] == [Interrupted.exit_code] * 2


def test_a_job_that_has_trained_enough_is_asked_once_to_end_and_waits_again() -> None:
    cut = EndedPool(75)
    cut.pool.wait = lambda sentinels, seconds: cut.wait(sentinels, seconds) if next(passes) == 3 else None
    for round_number in (1, 2):
        passes, answers = iter(range(9)), iter([False, True])
        cut.pool.run(cut.jobs, enough=lambda record, answers=answers: next(answers, False))
        assert cut.signals == [(0, signal.SIGTERM)] * round_number
        assert cut.states() == [State.waiting]


@pytest.mark.parametrize("direction", Direction)
def test_the_rounds_of_a_halving_follow_the_direction_and_are_in_the_ledger(
    tmp_path: Path, direction: Direction, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(tmp_path)
    ledger.create(dataclasses.replace(ONE, figure="top1", direction=direction))
    records = jobs_of_rates(ledger, 4)
    for record in records:
        evaluated(ledger, record, *(float(-record.number * step) for step in range(1, 4)))
    records = [ledger.end(record, State.stopped, exit_code=74, error="full") for record in records]  # by a full disk
    ran: list[list[int]] = []

    def run(jobs: Sequence[SweepJob], enough: Any) -> None:
        ran.append([job.record.number for job in jobs])
        for job in jobs:
            assert job.record.rung == f"{len(ran)} of 3"
            ledger.end(job.record, State.done, objective=1.0)

    halve(ledger, records, 2, run)
    winner = 0 if direction is Direction.maximize else 3
    assert ran == [[], [], [winner]], "the evaluations of the first rounds are there"
    order = sorted(range(4), key=lambda number: -direction.gain(-number))
    rungs = {record.number: (record.state, record.rung) for record in ledger.records()}
    assert [rungs[number] for number in order] == [
        (State.done, "3 of 3"),
        (State.pruned, "2 of 3"),
        (State.pruned, "1 of 3"),
        (State.pruned, "1 of 3"),
    ]
    view_of(ledger).show_table()
    assert capsys.readouterr().out.count("  pruned at step ") == 3
    assert not any(record.exit_code or record.error for record in ledger.records())


@pytest.mark.parametrize("round_of_failure", [0.125, 0.5, 1.0])
def test_a_job_that_fails_in_a_halving_changes_no_round_typed_again(tmp_path: Path, round_of_failure: float) -> None:
    ledger = begun(tmp_path)
    ran: list[list[int]] = []
    fails, stops = True, True

    def run(jobs: Sequence[SweepJob], enough: Any) -> None:
        ran.append([job.record.number for job in jobs])
        for job in jobs:
            share = float(job.environment.get(RUNG_END, 1))
            if job.record.number == 0 and share == round_of_failure and fails:
                ledger.end(job.record, State.failed, exit_code=76, error="the loss is nan")
                continue
            if job.record.number == 7 and stops:  # by a signal to it alone, or by a full disk
                ledger.end(job.record, State.stopped, exit_code=74, error="full")
                continue
            (folder := tmp_path / job.record.folder).mkdir(exist_ok=True)
            (folder / "summary.json").write_text('{"steps": 8}')
            steps = range(1, int(8 * share) + 1)
            lines = [f'{{"step": {step}, "acc/val_top1": {step - 10 * job.record.number}}}\n' for step in steps]
            (folder / "metrics.jsonl").write_text("".join(lines))
            ledger.end(job.record, State.done if share == 1 else State.waiting, objective=None)

    def line(*, retry: bool = False) -> list[tuple[int, str, str]]:
        ran.clear()
        records = jobs_of_rates(ledger, 8)
        jobs = {record.number: SweepJob(record, Needs(), lambda: None, ()) for record in to_run(records, retry=retry)}
        search.halve(SimpleNamespace(ledger=ledger, view=SHOWN, run=run), records, jobs, 2)  # type: ignore[arg-type]
        return [(record.number, record.state, record.rung) for record in ledger.records()]

    with pytest.raises(Stopped, match=r"jobs were stopped in round 1 of 4: 7; rerun the command"):
        line()
    stops = False
    first = line()
    assert first[0][1] == State.failed
    assert line() == first
    assert not any(ran), "nothing runs twice, and no other job takes the place of the one that failed"
    fails = False
    again = line(retry=True)
    assert again[0] == (0, State.done, "4 of 4")
    assert {number for numbers in ran for number in numbers} == {0}


def test_without_a_terminal_a_job_has_a_line_at_its_start_and_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)  # a busy disk takes seconds to write the records
    monkeypatch.chdir(tmp_path)
    ledger = begun(tmp_path)
    records = ledger.enter([(["seed=1", "batch=8"], "seed=1"), (["seed=2", "batch=8"], "seed=2")])
    with view_of(ledger) as view:
        view.started(ledger.start(records[0]))
        view.refresh()
        view.ended(ledger.end(ledger.read(records[0]), State.done, objective=90.0))
        view.ended(ledger.end(ledger.start(records[1]), State.failed, exit_code=2, error="no"))
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "job 0  seed=1  started; its log: jobs/000.log",
        "1 of 2  job 0  seed=1  done 90.00  in 0:00",
        "2 of 2  job 1  seed=2  failed: no  in 0:00",
    ]
    assert shown.err == "lockstep: job 1: no\n"


def test_a_failure_is_said_once_on_a_terminal_and_not_into_the_live_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = begun(tmp_path)
    records = ledger.enter([(["seed=1"], "seed=1"), (["seed=2"], "seed=2")])
    view = view_of(ledger)
    monkeypatch.setattr(type(view.live), "is_started", True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for record in records:
        ledger.end(ledger.start(record), State.failed, exit_code=2, error="no")
    view.running = {n: JobProgress(JobRun(ledger, r, view.monitor)) for n, r in enumerate(records)}
    view.refresh()  # reads that both have ended, before the pool says so
    for record in records:
        view.ended(ledger.read(record))
    shown = capsys.readouterr()
    assert re.findall(r"^\d of 2  job \d  seed=\d  failed.*(?=  in)", shown.out, re.MULTILINE) == [
        "1 of 2  job 0  seed=1  failed: no",
        "2 of 2  job 1  seed=2  failed for the same reason as job 0",
    ]
    assert shown.err == ""


def test_an_error_that_several_jobs_have_is_said_once_in_the_lines_the_table_the_report_and_the_exception(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = begun(tmp_path)
    with view_of(ledger) as view:
        for record in ledger.enter([([f"seed={seed}"], f"seed={seed}") for seed in range(4)]):
            error = "odd" if record.number == 2 else "no folder"
            view.ended(ledger.end(ledger.start(record), State.failed, exit_code=2, error=error))
        view.show_table()
    shown = capsys.readouterr()
    assert shown.err == "lockstep: job 0: no folder\nlockstep: job 2: odd\n"
    assert shown.out.count("no folder") == 2, shown.out
    assert shown.out.endswith("jobs 0, 1, 3: no folder\njob 2: odd\n")
    assert failure_of(2, tmp_path).args[:2] == ("jobs 0, 1, 3: no folder", "job 2: odd")
    notes = sweep_page(ledger)
    assert notes.count("no folder") == 1


@pytest.mark.parametrize(
    ("code", "of_job", "error", "says"),
    [
        (2, 2, InputError, "job 0: odd"),
        (70, 70, LockstepError, "job 0: odd"),
        (75, 75, Stopped, "job 0: odd"),
        (75, 2, Stopped, STOPPED_EARLY),
        (75, None, Stopped, STOPPED_EARLY),
        (-signal.SIGTERM, 2, Stopped, STOPPED_EARLY),
        (-signal.SIGKILL, 2, LockstepError, "the process of the sweep ended with exit code -9, and nothing says why"),
        (70, None, LockstepError, "the process of the sweep ended with exit code 70, and nothing says why"),
    ],
)
def test_a_sweep_from_a_program_ends_with_its_jobs_errors_unless_something_else_ended_it(
    tmp_path: Path, code: int, of_job: int | None, error: type[LockstepError], says: str
) -> None:
    ledger = begun(tmp_path)
    (record,) = ledger.enter([(["seed=1"], "seed=1")])
    if of_job is not None:
        ledger.end(ledger.start(record), State.failed, exit_code=of_job, error="odd")
    failure = failure_of(code, tmp_path)
    assert (type(failure), failure.args[0]) == (error, says)


@pytest.fixture
def running(tmp_path: Path) -> JobRun:
    """A job that was started 100 seconds ago, without figures yet."""
    ledger = begun(tmp_path)
    (record,) = ledger.enter([(["seed=1"], "seed=1")])
    (tmp_path / record.folder).mkdir()
    (tmp_path / record.folder / "summary.json").write_text('{"steps": 40, "steps_per_epoch": 16}')
    record = dataclasses.replace(ledger.start(record), started=time.time() - 100)
    return JobRun(ledger, record, Monitor())


def add(job: JobRun, *lines: dict[str, float]) -> None:
    with job.run_dir.metrics.open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)


def test_a_running_job_shows_how_far_it_is(running: JobRun) -> None:
    progress, metrics = JobProgress(running), running.run_dir.metrics
    progress.update(running.record, 1.0)
    assert (progress.epoch, progress.best, progress.left()) == ("1/3", None, None)
    now = time.time()
    add(
        running,
        {"step": 10, "time": now - 60, "perf/img_per_s": 99.5},
        {"step": 10, "acc/val_top1": 61.5, "time": now - 60},
    )
    progress.update(running.record, 1.0)
    assert (progress.epoch, progress.best, progress.rate) == ("1/3", 61.5, 99.5)
    # Ten steps in 40 s: 30 steps take 120 s from then on, of which a minute is over.
    assert progress.left() == pytest.approx(60, abs=2)
    add(running, {"step": 20, "time": now - 20, "acc/val_top1": 50.0})
    with metrics.open("a") as file:
        file.write('{"step": 23')  # the rest is not written yet
    progress.update(running.record, 1.0)
    assert (progress.epoch, progress.best, progress.step) == ("2/3", 61.5, 20)
    assert progress.left() == pytest.approx(60, abs=2)
    progress.update(running.record, 0.5)  # the round of a halving ends here
    assert progress.left() == 0


@pytest.mark.parametrize("direction", Direction)
def test_the_best_score_of_a_running_job_is_of_what_a_resume_has_not_undone(
    running: JobRun, direction: Direction
) -> None:
    def score(step: int, percent: float) -> dict[str, float]:
        return {"step": step, "acc/val_top1": percent if direction is Direction.maximize else -percent}

    progress = JobProgress(JobRun(running.ledger, running.record, Monitor("top1", direction)))
    shown = []
    for added in (score(5, 40), score(10, 60), score(15, 50), score(20, 70)):
        add(running, added)
        progress.update(running.record, 1.0)
        shown.append(progress.best)
    lines = running.run_dir.metrics.read_text().splitlines(keepends=True)[:2]
    running.run_dir.metrics.write_text("".join(lines))
    for added in ((), (score(15, 65),)):
        add(running, *added)
        progress.update(running.record, 1.0)
        shown.append(progress.best)
    assert [abs(best or 0) for best in shown] == [40, 60, 60, 70, 60, 65]


def test_a_resumed_job_is_timed_from_where_it_resumes(running: JobRun) -> None:
    now = time.time()
    add(running, {"step": 20, "time": now - 9999, "perf/img_per_s": 1.0})
    progress = JobProgress(running)
    progress.update(running.record, 1.0)
    assert progress.left() is None
    add(running, {"step": 30, "time": now})
    progress.update(running.record, 1.0)
    assert progress.left() == pytest.approx(100, abs=2)


def test_a_sweep_ends_after_each_of_its_running_jobs_and_its_time_falls(
    running: JobRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = view_of(running.ledger)
    view.started(running.record)
    assert view.seconds_left(waiting=3) is None
    add(running, {"step": 10, "time": time.time() - 50})  # ten steps in 50 s, so that 40 take 200 s
    view.running[0].update(running.record, 1.0)
    view.durations = [20.0]  # another job was quick
    left = view.running[0].left()
    assert view.seconds_left(waiting=0) == pytest.approx(left, abs=1)
    assert view.seconds_left(waiting=3) == pytest.approx(left + 3 * 20, abs=1)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 30)
    assert view.seconds_left(waiting=3) == pytest.approx(left + 3 * 20 - 30, abs=1)


def line(root: Path, *words: str) -> DictConfig:
    """Hydra's config for the line of a sweep."""
    with initialize_config_dir(str(ROOT / "conf")):
        options = ["name=test", "hydra.mode=MULTIRUN", f"output_root={root}", *words]
        return compose("config", overrides=words_of_sweep(options), return_hydra_config=True)


def test_a_line_goes_on_with_the_sweep_that_it_names_and_with_no_other(tmp_path: Path) -> None:
    folders = [tmp_path / "sweeps" / f"2026010{day}-000000-aaaa" for day in (1, 2)]
    for number, folder in enumerate(folders):
        first = choose_folder(line(tmp_path, f"hydra.sweep.dir={folder}", f"seed={number}", "sweep.resume=new"))
        assert first.folder == folder
    assert choose_folder(line(tmp_path, "sweep.resume=latest", "seed=1")).folder == folders[1]
    assert choose_folder(line(tmp_path, f"sweep.resume={folders[0]}", "seed=0")).folder == folders[0]
    assert choose_folder(line(tmp_path, "seed=0")).folder == folders[0], "it is the line of the first one"
    with pytest.raises(InputError, match=r"sweep\.resume=new, but .* has a sweep; name another folder"):
        choose_folder(line(tmp_path, f"hydra.sweep.dir={folders[0]}", "seed=0", "sweep.resume=new"))
    with pytest.raises(InputError, match="has another sweep"):
        choose_folder(line(tmp_path, f"sweep.resume={folders[0]}", "seed=7"))


def test_a_strict_strategy_makes_another_sweep_as_repro_does(tmp_path: Path) -> None:
    exact = choose_folder(line(tmp_path, f"hydra.sweep.dir={tmp_path}/sweeps/exact")).folder
    strict = choose_folder(line(tmp_path, "strategy=strict", f"hydra.sweep.dir={tmp_path}/sweeps/strict")).folder
    assert choose_folder(line(tmp_path)).folder == exact
    for words in (["strategy=strict"], ["repro=strict"], ["repro=strict", "strategy=strict"]):
        assert choose_folder(line(tmp_path, *words)).folder == strict, words


def test_a_search_and_all_combinations_are_two_sweeps(tmp_path: Path) -> None:
    sweepers: dict[str, tuple[str, ...]] = {"grid": (), "search": ("hydra/sweeper=optuna",)}
    folders = {
        name: choose_folder(line(tmp_path, *words, f"hydra.sweep.dir={tmp_path}/sweeps/{name}")).folder
        for name, words in sweepers.items()
    }
    for name, words in (*sweepers.items(), ("grid", ("hydra/sweeper=basic",))):
        assert choose_folder(line(tmp_path, *words)).folder == folders[name], words


@pytest.mark.parametrize(
    ("values", "seeds", "is_refused"), [(1, 1, True), (1, 3, True), (2, 1, False), (2, 3, False), (3, 1, False)]
)
def test_a_halving_needs_as_many_settings_as_it_compares(
    values: int, seeds: int, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [[f"lr={value}", f"seed={seed}"] for value in range(values) for seed in range(seeds)]
    launcher: Any = pool_launcher.PoolLauncher(None, 0, 1, "maximize")
    launcher.planned = {tuple(words): (None, Needs()) for words in jobs}
    launcher.halving, launcher.retry, launcher.devices = 2, False, Devices([], 4)
    monkeypatch.setattr(launcher, "_number", lambda *numbers: None)
    monkeypatch.setattr(pool_launcher, "words_of_job", list)
    if is_refused:
        with pytest.raises(
            InputError, match=r"sweep\.halving=2 keeps the best one of 2 jobs, .* this line has 1; add"
        ):
            launcher._enter(begun(tmp_path), jobs, 0)
    else:
        _, entered = launcher._enter(begun(tmp_path), jobs, 0)
        assert [job.record.number for job in entered] == [*range(len(jobs))]


SAME_RUNS = ("telemetry.report=never", "cost.usd_per_gpu_hour=2", "strategy=fsdp", "launcher.threads=1", "name=other")


def test_a_line_goes_on_with_its_sweep_if_it_changes_no_run(tmp_path: Path) -> None:
    folder = choose_folder(line(tmp_path, "batch=32", f"hydra.sweep.dir={tmp_path}/sweeps/one")).folder
    for word in SAME_RUNS:
        assert choose_folder(line(tmp_path, "batch=32", word)).folder == folder, word
        config = line(tmp_path, "sweep.resume=latest", word)
        assert choose_folder(config).folder == folder
        words = config.hydra.overrides.task
        assert ("batch=32" in words, words[-1]) == (True, word), "the jobs have the word, too"
    for number, word in enumerate(("seed=1", "train.ema=0.9", "model=linear", "strategy.sync_batchnorm=false")):
        other = choose_folder(line(tmp_path / str(number), "batch=32", word))
        assert other.identity().difference(Ledger(folder).identity()), word


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sweep.resume=latest"], "sweep.resume=latest: no sweep has been started in"),
        (["sweep.resume=/nowhere"], "sweep.resume: /nowhere is not a sweep's folder"),
        (
            ["sweep.objectives=[score,top1]"],
            "sweep.objectives is [score,top1], expected some of score, seconds, megabytes, kwh",
        ),
        (["hydra/launcher=basic", "sweep.objectives=[score,seconds]"], "which hydra/launcher=pool does; use"),
        (["hydra/launcher=basic", "sweep.gpu_share=true"], "sweep.gpu_share is true, which hydra/launcher=pool does"),
        (["hydra/launcher=basic", "sweep.halving=2"], "sweep.halving is 2, which hydra/launcher=pool does"),
        (["hydra.launcher.cores=1"], "hydra.launcher.cores=1 has no effect: launcher.ranks and"),
        (["sweep.halving=2", "logger=[tensorboard]"], "sweep.halving=2 needs metrics.jsonl of each job, and logger="),
        (["sweep.objectives=[score,seconds]", "logger=[]"], "sweep.objectives=seconds needs metrics.jsonl of each"),
    ],
    ids=str,
)
def test_what_a_sweep_cannot_go_on_with_is_refused(tmp_path: Path, words: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        choose_folder(line(tmp_path, *words))


def test_a_halving_has_as_many_rounds_as_the_factor_divides_the_jobs() -> None:
    for factor, power in itertools.product(range(2, 12), range(1, 6)):
        jobs = factor**power
        assert search.shares(jobs, factor) == [factor ** (number - power) for number in range(power + 1)]
        assert len(search.shares(jobs - 1, factor)) == power, "one job fewer is a round fewer"


def test_the_time_left_is_spread_over_the_jobs_that_run_at_once_and_is_at_least_the_longest(tmp_path: Path) -> None:
    view = SweepView(begun(tmp_path))
    view.durations, view.left = [20.0], 0
    lefts = (80.0, 10.0)
    view.running = {n: SimpleNamespace(duration=100.0, left=lambda of=of: of) for n, of in enumerate(lefts)}  # type: ignore[misc]
    assert view.seconds_left(waiting=4) == (80 + 10 + 4 * 20) / 2
    assert view.seconds_left(waiting=0) == 80
    view.portion, view.later = 0.5, 3.0
    assert view.seconds_left(waiting=8) == (80 + 10 + 8 * 10) / 2 + 3 * 20 / 2


def test_a_sweep_that_was_killed_before_it_named_its_best_does_so_at_its_end(
    tmp_path: Path,
) -> None:
    ledger = begun(tmp_path)
    records = ledger.enter([((f"seed={seed}",), f"seed={seed}") for seed in (1, 2)])
    with patch.object(Ledger, "mark_best"):
        for record, score in zip(records, (80.0, 90.0), strict=True):
            (tmp_path / record.folder).mkdir()
            ledger.end(ledger.start(record), State.done, objective=score)
    assert ledger.best == ""
    view_of(ledger).show_table()
    assert ledger.best == records[1].folder


def test_jobs_whose_records_were_cut_short_have_the_numbers_that_they_would_have_had(tmp_path: Path) -> None:
    jobs = [((f"seed={seed}",), f"seed={seed}") for seed in (1, 2, 3)]
    ledger, write = begun(tmp_path), Ledger.write
    written: list[Record] = []

    def dying(self: Ledger, record: Record) -> Record:
        if len(written) == 2:
            raise SystemExit(9)
        written.append(record)
        return write(self, record)

    with patch.object(Ledger, "write", dying), pytest.raises(SystemExit):
        ledger.enter(jobs)
    assert ledger.enter(jobs[::-1])[::-1] == [*written, ledger.record(2)]
    assert [record.number for record in ledger.enter(jobs)] == [0, 1, 2]
