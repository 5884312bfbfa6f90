"""The ledger of a sweep, the devices of its jobs, and its table, without Hydra and without a trainer."""

import dataclasses
import errno
import io
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
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pynvml
import pytest
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf, open_dict

from helpers import ROOT, view_of
from lockstep.cli.needs import kind
from lockstep.cli.sweep import failure_of
from lockstep.config.commands import override
from lockstep.config.hydra_versions import initialize_config_dir
from lockstep.config.schema import Job
from lockstep.core import terminal
from lockstep.core.errors import InputError, Interrupted, LockstepError, NumericalError, Stopped, StorageError
from lockstep.core.fields import with_history
from lockstep.core.formats import FileFormat, stamp
from lockstep.core.run import State, born
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import Lock, absent
from lockstep.core.tags import Direction, Monitor
from lockstep.records.ledger import (
    Identity,
    Ledger,
    output_of,
    record_of,
    recorded,
    resumed_sweep,
    words_of_sweep,
)
from lockstep.records.record import Record, checked_direction, job_key
from lockstep.records.runs import JobRun, read_jobs
from lockstep.report.sweep_page import sweep_page
from lockstep.runtime.host import CORES, VISIBLE
from lockstep.runtime.program import JobError
from lockstep.runtime.signals import PARENT, RUNG_END, STOPPED_EARLY, StopNow
from lockstep.sweeps import line as line_of_sweep
from lockstep.sweeps import pool, pool_launcher, search
from lockstep.sweeps.devices import Devices, Needs, Share
from lockstep.sweeps.line import (
    FILES,
    _say_what_goes_on,
    choose_folder,
    params_of,
    remove_refused,
    sweep_of_line,
)
from lockstep.sweeps.pool import CONTEXT_BYTES, Pool, SweepJob, memory_of_job, to_run
from lockstep.sweeps.sweepers import GridSweeper
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
        self.joined = False

    def join(self) -> None:
        assert self.exitcode is not None
        self.joined = True

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
    assert kind(of) == kind(dict(reversed(of.items())))
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
    assert ledger.read(after_a_loss) == after_a_loss
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
    for name in ("000-copy", "001-other", "jobs"):
        assert record_of(tmp_path / name) is None, name


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


def test_a_resumed_sweep_counts_its_jobs_and_warns_of_the_damaged_ones_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = begun(tmp_path)
    records = ledger.enter([([f"seed={number}"], f"seed={number}") for number in range(6)])
    for record, state in zip(records[:4], (State.done, State.done, State.failed, State.waiting), strict=True):
        (tmp_path / record.folder).mkdir()
        ledger.write(replace(record, state=state))
    shown = {}
    for name in ("healthy", "submitted", "damaged"):
        if name == "submitted":
            ledger.write(replace(records[4], submitted="77_1"))
        if name == "damaged":
            (tmp_path / "jobs" / "005.json").write_text("{")
        _say_what_goes_on(ledger)
        *warnings, line = capsys.readouterr().out.splitlines()
        shown[name] = (len(warnings), line.partition("jobs are done")[2], re.search(r"(\d of \d) jobs", line)[1])
    failed, anew = ", 1 failed (sweep.retry=true tries them again)", "; sweep.resume=new starts all again"
    cluster = ", 1 are with the cluster (sweep.retry=true submits them again)"
    assert shown == {
        "healthy": (0, failed + anew, "2 of 6"),
        "submitted": (0, failed + cluster + anew, "2 of 6"),
        "damaged": (1, failed + cluster + anew, "2 of 6"),
    }


@pytest.mark.parametrize("coded", [True, False])
def test_a_resumed_sweep_compares_the_code_of_its_done_jobs_if_any_has_some(
    coded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, compared, code = begun(tmp_path), list[Any](), {"mine": {"files": {"a.py": "1"}}}
    monkeypatch.setattr(line_of_sweep, "_say_other_code", compared.append)
    for record, state in zip(
        ledger.enter([([f"seed={number}"], f"seed={number}") for number in range(3)]),
        (State.done, State.done, State.failed),
        strict=True,
    ):
        (tmp_path / record.folder).mkdir()
        (tmp_path / record.folder / "env.json").write_text(
            json.dumps({"code": code} if coded and record.number else {})
        )
        ledger.write(replace(record, state=state))
    _say_what_goes_on(ledger)
    assert compared == ([{0: {}, 1: code}] if coded else [])


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
    minimize, maximize = Direction.minimize, Direction.maximize
    lines = [((0.5, 0.25, 0.75, 0.25), minimize, 1), ((0.5, 0.25, 0.75, 0.25), maximize, 2)]
    lines += [((0.5, 0.0), minimize, 1), ((-0.5, 0.0), maximize, 1)]  # a score of 0 is a score
    for number, (scores, direction, best) in enumerate(lines):
        ledger = Ledger(tmp_path / str(number))
        ledger.create(dataclasses.replace(ONE, direction=direction))
        records = ledger.enter([([f"lr={lr}"], f"lr={lr}") for lr, _ in enumerate(scores)])
        for record, score in zip(records, scores, strict=True):
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
    stopped, ended = EndedPool(75, 75, 0, 0, most=2, stops=True), list[Record]()
    with pytest.raises(Stopped, match="Rerun the command"):
        stopped.pool.run(stopped.jobs, more=lambda record: ended.append(record) or ())
    assert ended == [], "nobody will run what follows a job"
    assert {number for number, _ in stopped.signals} == {0, 1} == {*stopped.processes}
    assert stopped.states() == [State.stopped, State.stopped, State.waiting, State.waiting]


def test_a_sweep_that_is_stopped_repeats_its_signal_once_however_long_a_job_takes_to_save() -> None:
    stopped, passes = EndedPool(75), iter(range(9))

    def wait(sentinels: list[int], seconds: float) -> None:
        match next(passes):
            case 0:
                os.kill(os.getpid(), signal.SIGTERM)
            case 4:
                stopped.wait(sentinels, seconds)

    stopped.pool.wait = wait
    with pytest.raises(Stopped):
        stopped.pool.run(stopped.jobs)
    assert [sent for _, sent in stopped.signals if sent != signal.SIGCONT] == [signal.SIGTERM] * 2


def test_a_job_frees_its_devices_once() -> None:
    ended, most = EndedPool(0, 0, 0, 0, 0), list[int]()

    def wait(sentinels: list[int], seconds: float) -> None:
        most.append(len(sentinels))
        ended.wait(sentinels[:1], seconds)

    ended.pool.wait, ended.pool.devices = wait, Devices([], 2)
    ended.pool.run(ended.jobs)
    assert most == [2, 2, 2, 2, 1]


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


@pytest.mark.parametrize("early", [None, "{}"])
def test_a_job_that_has_told_nothing_yet_is_read_again(running: JobRun, early: str | None) -> None:
    summary = running.run_dir.summary
    (whole := summary.read_text()) and summary.unlink()
    if early is not None:
        summary.write_text(early)
    progress = JobProgress(running)
    progress.update(running.record, 1.0)
    assert (progress.steps, progress.steps_per_epoch) == (0, 0)
    summary.write_text(whole)
    progress.update(running.record, 1.0)
    assert (progress.steps, progress.steps_per_epoch) == (40, 16)


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
    for text, shown in ((', "acc/val_top1": 7', (20, 61.5)), ("0.5}", (20, 61.5)), ("\n", (23, 70.5))):
        with metrics.open("a") as file:
            file.write(text)
        progress.update(running.record, 1.0)
        assert (progress.step, progress.best) == shown


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


def test_a_job_whose_figures_are_a_link_shows_none_of_them(running: JobRun, tmp_path: Path) -> None:
    add(running, {"step": 20, "time": 1.0, "acc/val_top1": 9.0})
    running.run_dir.metrics.rename(tmp_path / "elsewhere")
    running.run_dir.metrics.symlink_to(tmp_path / "elsewhere")
    progress = JobProgress(running)
    progress.update(running.record, 1.0)
    assert (progress.step, progress.best, progress.epoch) == (0, None, "1/3")


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


def test_a_sweep_keeps_the_words_of_its_line_for_hydras_sweeper_and_no_others_of_hydra(tmp_path: Path) -> None:
    of_sweeper = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=7", "+hydra.sweeper.params.seed='1,2'")
    ledger = choose_folder(line(tmp_path, *of_sweeper, f"hydra.sweep.dir={tmp_path}/mine", "hydra.job.chdir=false"))
    assert ledger.identity().of_hydra == of_sweeper


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


def test_a_sweep_is_the_same_from_another_folder_and_may_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = line(Path("runs"))
    folder = choose_folder(config).folder
    assert folder.parent == tmp_path / "runs" / "sweeps"
    assert config.hydra.sweep.dir == str(folder)
    for words in ([], ["sweep.retry=true", "sweep.resume=latest"], ["sweep.retry=true", f"sweep.resume={folder}"]):
        assert choose_folder(line(Path("runs"), *words)).folder == folder


def test_the_order_of_what_a_line_sweeps_makes_no_other_sweep(tmp_path: Path) -> None:
    folders = []
    line_of_both = ["batch=8,16", "seed=1,2"]
    for words in (line_of_both, line_of_both[::-1]):
        config = line(tmp_path)
        config.hydra.overrides.task = words
        folders.append((ledger := choose_folder(config)).folder)
        assert ledger.identity().swept == ("batch", "seed")
    assert folders[0] == folders[1]


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


def launcher_of(jobs: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> Any:
    launcher: Any = pool_launcher.PoolLauncher(None, 0, 1, "maximize")
    launcher.planned = {tuple(words): (None, Needs()) for words in jobs}
    launcher.halving, launcher.retry, launcher.devices = None, False, Devices([], 4)
    monkeypatch.setattr(launcher, "_number", lambda *numbers: None)
    monkeypatch.setattr(pool_launcher, "words_of_job", list)
    return launcher


def test_a_job_that_a_line_has_twice_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [[f"seed={seed}"] for seed in (2, 1, 2)]
    records, entered = launcher_of(jobs, monkeypatch)._enter(begun(tmp_path), jobs, 0)
    assert [record.number for record in records] == [0, 1, 0]
    assert [job.record.number for job in entered] == [0, 1]


def test_a_draw_that_does_not_fit_has_failed_with_its_own_sentence_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = [["x=1"], ["x=2"]]
    launcher, ended = launcher_of([[], *draws], monkeypatch), list[Record]()
    launcher.search = SimpleNamespace(fixed=[], left=1, follow=lambda record: [ended.append(record) or ["x=2"]])
    enter = launcher._enter

    def entered(ledger: Ledger, jobs: list[list[str]], number: int) -> Any:
        if jobs == [["x=1"]]:
            raise pool_launcher.WrongJob("job 0: x=1 is too small") from InputError("x=1 is too small")
        return enter(ledger, jobs, number)

    monkeypatch.setattr(launcher, "_enter", entered)
    view: Any = MagicMock()
    jobs = launcher._enter_drawn(ledger := begun(tmp_path), view, [["x=1"]])
    assert [job.record.number for job in jobs] == [1]
    (failed,) = ended
    assert (failed.number, failed.state, failed.exit_code) == (0, State.failed, InputError.exit_code)
    assert failed.error == "x=1 is too small", "without the number of the job"
    assert [record.state for record in ledger.records()] == [State.failed, State.waiting]
    view.ended.assert_called_once_with(failed)


@pytest.mark.parametrize(
    ("values", "seeds", "is_refused"), [(1, 1, True), (1, 3, True), (2, 1, False), (2, 3, False), (3, 1, False)]
)
def test_a_halving_needs_as_many_settings_as_it_compares(
    values: int, seeds: int, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [[f"lr={value}", f"seed={seed}"] for value in range(values) for seed in range(seeds)]
    launcher = launcher_of(jobs, monkeypatch)
    launcher.halving = 2
    if is_refused:
        with pytest.raises(
            InputError, match=r"sweep\.halving=2 keeps the best one of 2 jobs, .* this line has 1; add"
        ):
            launcher._enter(begun(tmp_path), jobs, 0)
    else:
        _, entered = launcher._enter(begun(tmp_path), jobs, 0)
        assert [job.record.number for job in entered] == [*range(len(jobs))]


SAME_RUNS = ("telemetry.report=never", "cost.usd_per_gpu_hour=2", "strategy=fsdp", "launcher.threads=1", "name=other")


def test_a_folder_that_the_line_names_is_that_of_the_sweep_though_another_one_has_the_same_line(
    tmp_path: Path,
) -> None:
    earlier = choose_folder(line(tmp_path, "batch=32")).folder
    assert choose_folder(line(tmp_path, "batch=32")).folder == earlier
    named = line(tmp_path, "batch=32", f"hydra.sweep.dir={tmp_path}/mine")
    assert choose_folder(named).folder == tmp_path / "mine"


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


def test_a_metric_of_a_sweep_may_have_the_value_of_another_key(tmp_path: Path) -> None:
    words = ("metric=accuracy", "steps=3", "metric.accuracy.top_k=${steps}", "monitor=accuracy")
    assert choose_folder(line(tmp_path, *words)).identity().monitor == Monitor("accuracy")


def test_a_halving_has_as_many_rounds_as_the_factor_divides_the_jobs() -> None:
    for factor, power in itertools.product(range(2, 12), range(1, 6)):
        jobs = factor**power
        assert search.shares(jobs, factor) == [factor ** (number - power) for number in range(power + 1)]
        assert len(search.shares(jobs - 1, factor)) == power, "one job fewer is a round fewer"


@pytest.mark.parametrize("state", [State.done, State.waiting, State.failed, State.stopped])
def test_a_job_that_has_ended_its_part_says_how_long_all_its_steps_take(state: State, tmp_path: Path) -> None:
    view = view_of(begun(tmp_path))
    view.portion = 0.25
    view.ended(job(0, state=state, started=100.0, ended=110.0))
    assert view.durations == [40.0] * (state in (State.done, State.waiting))


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


REFUSED_LINES = {
    "hydra.launcher.gpus=1": "hydra.launcher.gpus=1 has no effect: launcher.ranks and launcher.threads say what",
    "hydra.sweep.subdir=x": "hydra.sweep.subdir=x has no effect: hydra/launcher=pool names the folders of the jobs;",
    "hydra/sweeper=optuna hydra.sweeper.direction=minimize": (
        "hydra.sweeper.direction=minimize, but the jobs are compared by monitor=auto, whose direction is maximize;"
    ),
    "hydra/launcher=ray hydra.sweep.subdir=x": (
        "hydra.sweep.subdir=x has no effect: hydra/launcher=ray names the folders of the jobs; remove it"
    ),
    "hydra/launcher=ray hydra.launcher.cores=2": "hydra.launcher.cores=2 has no effect: launcher.ranks and launcher",
    "hydra/sweeper=optuna monitor=loss hydra.sweeper.direction=maximize": (
        "hydra.sweeper.direction=maximize, but the jobs are compared by monitor=loss, whose direction is minimize;"
    ),
    "sweep.retry=true sweep.resume=new": "sweep.retry=true runs jobs again that failed, and sweep.resume=new",
    "sweep.gpu_share=true device=cpu": "sweep.gpu_share=true shares GPUs, and device=cpu prevents that; remove one",
    "hydra/sweeper=basic sweep.halving=2 hydra.sweeper.max_batch_size=2": (
        "sweep.halving compares all jobs, and hydra.sweeper.max_batch_size prevents that; remove one of them"
    ),
    "sweep.objectives=[]": "sweep.objectives is [], expected some of score, seconds, megabytes, kwh and figures",
    "sweep.objectives=[score,score]": "sweep.objectives is [score,score], expected some of",
    "sweep.objectives=[-loss,loss]": "sweep.objectives is [-loss,loss], expected some of",
    "sweep.halving=1": "sweep.halving is 1, expected",
    "hydra/sweeper=optuna hydra.sweeper.pruner=median logger=[tensorboard,wandb]": (
        "hydra.sweeper.pruner=median needs metrics.jsonl of each job, and logger=[tensorboard,wandb] writes none; "
        "use logger=[jsonl,tensorboard,wandb]"
    ),
    "hydra/launcher=basic sweep.retry=true": "sweep.retry is true, which hydra/launcher=pool does; use",
    "hydra/launcher=ray sweep.gpu_share=true": "sweep.gpu_share is true, which hydra/launcher=pool does; use",
    "hydra.run.dir=x": "hydra.run.dir=x has no effect with -m; name a folder with hydra.sweep.dir=FOLDER",
}


@pytest.mark.parametrize("words", REFUSED_LINES)
def test_what_jobs_of_a_sweep_cannot_do_is_refused_before_it_has_a_folder(words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(REFUSED_LINES[words])}"):
        choose_folder(line(tmp_path, *words.split()))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "key"), [("output_root=a,b", "output_root"), ("sweep.retry=true,false", "sweep.retry")]
)
def test_what_all_jobs_of_a_sweep_share_has_one_value(word: str, key: str, tmp_path: Path) -> None:
    config = line(tmp_path)
    config.hydra.overrides.task = ["seed=1,2", word]
    with pytest.raises(InputError, match=rf"^{word}: all jobs of a sweep share {key}; give it one value$"):
        choose_folder(config)


def test_a_named_sweep_has_its_folder_and_another_line_is_told_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "sweeps" / "one"
    of_sweeper = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=7")
    choose_folder(line(tmp_path, f"hydra.sweep.dir={folder}", "batch=32", *of_sweeper))
    with pytest.raises(InputError, match=r"^sweep\.resume names a sweep, and hydra\.sweep\.dir a folder; remove one"):
        choose_folder(line(tmp_path, "sweep.resume=latest", f"hydra.sweep.dir={tmp_path}/other"))
    with pytest.raises(
        InputError, match=r"has another sweep: .*; type its line \((.*)\), or start anew with sweep\."
    ) as no:
        choose_folder(line(tmp_path, f"hydra.sweep.dir={folder}", "batch=64"))
    assert re.search(r"type its line \((.*)\),", str(no.value))[1].split() == [  # type: ignore[index]
        *of_sweeper,
        *("name=test", f"output_root={tmp_path}", "batch=32"),
    ]
    config = line(tmp_path, "batch=32", *of_sweeper, "sweep.retry=true")
    assert choose_folder(config).folder == folder
    assert config.hydra.sweep.dir == str(folder)
    assert "sweep.retry=true" not in config.hydra.overrides.task, "no key of a job"


def test_parameters_of_files_are_words_with_their_references() -> None:
    config: Any = OmegaConf.create({"hydra": {"sweeper": {"params": {"a": "1,2", "b": r"\${c}", "d": 3, "e": None}}}})
    assert params_of(config) == ["a=1,2", "b=${c}", "d=3", "e=None"]
    for empty in ({}, {"params": None}, {"params": {}}):
        assert params_of(OmegaConf.create({"hydra": {"sweeper": empty}})) == []


def test_a_refused_sweep_leaves_the_files_that_were_in_its_folder_before(tmp_path: Path) -> None:
    (tmp_path / "optuna.log").write_text("of the user")
    new = absent(*(tmp_path / name for name in (*FILES, "jobs")))
    ledger = Ledger(tmp_path)
    ledger.create(ONE)
    (tmp_path / "multirun.yaml").touch()
    remove_refused(ledger, new)
    assert [path.name for path in tmp_path.iterdir()] == ["optuna.log"]


@pytest.mark.parametrize("state", ["new", "of before", "with a job", "in use", "full disk"])
def test_a_refused_sweep_takes_what_it_has_made_with_it_and_nothing_else(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise StorageError("full")

    ledger, folder = Ledger(tmp_path / "a" / "sweep"), tmp_path / "a" / "sweep"
    new = absent(*(folder / name for name in (*FILES, "jobs")))
    if state == "of before":
        begun(folder)
        ledger = Ledger(folder)
    else:
        ledger.create(ONE)
    for name in FILES:
        (folder / name).touch()
    if state == "with a job":
        ledger.enter([(["seed=1"], "a")])
    with closing(Lock()) as lock:
        if state == "in use":
            process = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder / ".lock")], stdout=subprocess.PIPE)
            assert process.stdout is not None
            process.stdout.readline()
        if state == "full disk":
            monkeypatch.setattr(Path, "unlink", unlink)
        remove_refused(ledger, new)
        monkeypatch.undo()
        if state == "in use":
            process.kill()
            process.communicate()
        lock.close()
    left = {path.name for path in folder.iterdir()} if folder.exists() else {}
    assert ({*FILES} <= {*left}) is (state != "new")
    assert (tmp_path / "a").exists() is (state != "new")


HOLDS = """
import sys, time
from pathlib import Path
from lockstep.core.safe_write import Lock
lock = Lock()
lock.take(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("settings", "jobs", "sentence"),
    [
        ({"jobs": 0}, [["a=1"]], "hydra.launcher.jobs is 0, expected a whole number from 1"),
        ({"gpus": -1}, [["a=1"]], "hydra.launcher.gpus is -1, expected a whole number from 0"),
        ({"cores": 0}, [["a=1"]], "hydra.launcher.cores is 0, expected a whole number from 1"),
        ({}, [], r"this line has no job: a range\(...\) or glob\(...\) in it has no value"),
        ({"direction": "up"}, [["a=1"]], "the direction of the scores is 'up'"),
    ],
)
def test_a_pool_that_can_run_nothing_says_why(
    settings: dict[str, Any], jobs: list[list[str]], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"jobs": None, "gpus": 0, "cores": 1, "direction": "maximize"}
    launcher = pool_launcher.PoolLauncher(**{**usual, **settings})
    context = SimpleNamespace(callbacks=SimpleNamespace(callbacks=["first"]))
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}, "sweep": {"retry": True, "halving": 3}})
    launcher.setup(hydra_context=context, task_function=print, config=config)  # type: ignore[arg-type]
    assert context.callbacks.callbacks == [launcher, "first"]
    assert (launcher.retry, launcher.halving, launcher.objectives) == (True, 3, ["score"])
    with pytest.raises(InputError, match=f"^{sentence}"):
        launcher.launch(jobs, 0)
    assert not any(tmp_path.iterdir())


def test_a_sweep_ends_with_the_first_code_of_its_jobs_unless_it_has_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = pool_launcher.PoolLauncher(None, 0, 1, "minimize")
    context = SimpleNamespace(callbacks=SimpleNamespace(callbacks=[]))
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}})
    launcher.setup(hydra_context=context, task_function=print, config=config)  # type: ignore[arg-type]

    def launch(ledger: Ledger, jobs: Any, first: int) -> list[Record]:
        assert terminal._patience_s == terminal.READER_WAIT_S, "whoever does not read holds no job up"
        records = ledger.enter([([f"seed={number}"], "a") for number in range(5)])
        for record, code in zip(records, (75, 0, 70, 2, 76), strict=True):
            (ledger.folder / record.folder).mkdir()
            ledger.end(
                ledger.start(record), State.failed if code else State.done, exit_code=code, objective=float(code)
            )
        launcher.view = SimpleNamespace(records={1: 0, 2: 0, 3: 0, 4: 0})  # type: ignore[assignment]  # of this call
        return [ledger.read(record) for record in records]

    monkeypatch.setattr(launcher, "_launch", launch)
    returns = launcher.launch([["seed=1"]], 0)
    assert [returned.return_value for returned in returns] == [75.0, 0.0, 70.0, 2.0, 76.0]
    assert Ledger(tmp_path).identity().direction is Direction.minimize
    try:
        raise KeyError
    except KeyError:
        launcher.on_multirun_end(config)
    with pytest.raises(SystemExit) as left:
        launcher.on_multirun_end(config)
    assert left.value.code == 70
    launcher.exit_code = 0
    launcher.on_multirun_end(config)
    assert math.isnan(pool_launcher._returned(job(0)).return_value)
    assert pool_launcher._returned(job(0, objective=0.0)).return_value == 0.0


def test_a_sweeper_gets_the_scores_with_which_its_jobs_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(entered: list[Any]) -> None:
        for one in entered:
            (ledger.folder / one.record.folder).mkdir()
            ledger.end(ledger.start(one.record), State.done, objective=10.0 + one.record.number)

    jobs = [["seed=1"], ["seed=2"]]
    launcher, ledger = launcher_of(jobs, monkeypatch), begun(tmp_path)
    launcher.config = OmegaConf.create({"hydra": {"overrides": {"task": ["seed=1,2"]}}})
    launcher.view, launcher.objectives = MagicMock(), ["score"]
    for name, value in (("_devices", Devices([], 4)), ("_pool", SimpleNamespace(run=run))):
        monkeypatch.setattr(launcher, name, lambda *_, value=value: value)
    records = launcher._launch(ledger, jobs, 0)
    assert [(record.state, record.objective) for record in records] == [(State.done, 10.0), (State.done, 11.0)]


@pytest.mark.parametrize("error", [Stopped("saved"), Interrupted(), StorageError("full"), KeyError("odd")], ids=repr)
@pytest.mark.parametrize("ours", [True, False])
def test_a_sweep_that_is_stopped_ends_with_its_code_also_in_another_app(
    ours: bool,
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def launch(*_: object) -> None:
        raise error

    launcher = pool_launcher.PoolLauncher(None, 0, 1, "maximize")
    launcher.config, launcher.lock = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}), Lock()
    monkeypatch.setattr(launcher, "_launch", launch)
    monkeypatch.setattr(pool_launcher, "works_for_lockstep", lambda: ours)
    expected: Any = KeyError if isinstance(error, KeyError) else JobError if ours else SystemExit
    with pytest.raises(expected) as raised:
        launcher.launch([["seed=1"]], 0)
    if expected is SystemExit:
        assert raised.value.code == error.exit_code  # type: ignore[attr-defined]
        assert str(error) in capsys.readouterr().err
    with closing(Lock()) as lock:
        lock.take(tmp_path / ".lock")


def test_a_job_that_was_killed_at_the_end_of_its_record_is_done(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    records = ledger.enter([([f"seed={number}"], "a") for number in range(3)])
    for record, status in zip(records, ("completed", "completed", "stopped"), strict=True):
        run = RunDir.at(tmp_path / record.folder)
        run.start_summary(run="r", started=1.0)
        run.write_summary(status=status, objective=3.0, monitor="top1")
    killed = replace(ledger.start(records[0]), pid=0)
    running = ledger.start(records[1])
    settled = pool_launcher._settled(ledger, killed)
    assert (settled.state, settled.objective) == (State.done, 3.0)
    assert pool_launcher._settled(ledger, running) == running, "it runs"
    assert pool_launcher._settled(ledger, replace(records[2], pid=0)).state is State.waiting
    done = replace(records[0], state=State.done)
    assert pool_launcher._settled(ledger, done) is done


@pytest.mark.parametrize("retry", [True, False])
def test_jobs_that_failed_run_again_on_request_and_those_that_were_done_when_they_were_killed_do_not(
    retry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [[f"seed={number}"] for number in range(3)]
    launcher, ledger = launcher_of(jobs, monkeypatch), begun(tmp_path)
    launcher.retry = retry
    records = ledger.enter([(words, "a") for words in jobs])
    ledger.end(ledger.start(records[0]), State.failed, exit_code=70, error="odd")
    run = RunDir.at(tmp_path / records[1].folder)
    run.start_summary(run="r", started=1.0)
    run.write_summary(status="completed", objective=3.0, monitor="top1")
    ledger.write(replace(ledger.start(records[1]), pid=0))
    after, entered = launcher._enter(ledger, jobs, 0)
    assert [job.record.number for job in entered] == ([0, 2] if retry else [2])
    assert [record.state for record in after] == [State.failed, State.done, State.waiting]


def test_a_pool_has_as_many_jobs_at_once_as_its_setting_and_the_view_of_the_call(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    devices, view = Devices([], 4), view_of(ledger)
    for most in (None, 3):
        of_call = pool_launcher.PoolLauncher(most, 0, 1, "maximize")._pool(ledger, devices, view)
        assert (of_call.most, of_call.devices, of_call.view, of_call.ledger) == (most, devices, view, ledger)
        assert of_call.start is pool.start_process


def test_objectives_that_no_job_has_are_a_mistake_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_loader = SimpleNamespace(load_sweep_config=lambda config, words: "config")
    launcher = launcher_of([], monkeypatch)
    needs = Needs(monitor="top1", figures=("loss", "top1"))
    launcher.config, launcher.task_function = None, SimpleNamespace(needs=lambda config, devices: needs)
    launcher.hydra_context = SimpleNamespace(config_loader=config_loader)
    for objectives, fits in ((["score", "-loss"], True), (["score", "map"], False)):
        launcher.planned, launcher.objectives = {}, objectives
        if fits:
            assert launcher._planned(["x=1"]) == ("config", needs)
        else:
            with pytest.raises(InputError, match="map"):
                launcher._planned(["x=1"])


def test_draws_are_entered_in_their_order_also_behind_one_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, ledger = launcher_of([[], ["x=2"], ["x=3"], ["x=4"]], monkeypatch), begun(tmp_path)
    launcher.planned[("x=1",)] = InputError("x=1 is too small")
    launcher.search = SimpleNamespace(fixed=[], left=3, follow=lambda record: [["x=4"]])
    jobs = launcher._enter_drawn(ledger, MagicMock(), [["x=1"], ["x=2"], ["x=3"]])
    assert [job.record.overrides for job in jobs] == [("x=2",), ("x=3",), ("x=4",)]
    assert [record.overrides[0] for record in ledger.records()] == ["x=1", "x=2", "x=3", "x=4"]


def test_the_jobs_of_a_sweep_are_compared_by_one_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = launcher_of([], monkeypatch)
    ledger = begun(tmp_path)
    launcher._agree(ledger, {"-loss"})
    assert (ledger.identity().figure, ledger.identity().direction) == ("loss", Direction.minimize)
    launcher._agree(ledger, {"top1"})  # no job has run
    assert str(ledger.identity().monitor) == "top1"
    launcher._agree(ledger, set())
    with pytest.raises(pool_launcher.WrongJob, match="the monitors of these are -loss and top1; give all"):
        launcher._agree(ledger, {"top1", "-loss"})
    ledger.enter([(["seed=1"], "a")])
    launcher._agree(ledger, {"top1"})
    with pytest.raises(pool_launcher.WrongJob, match="the monitors of these are -loss and top1;"):
        launcher._agree(ledger, {"-loss"})


def test_a_sweep_is_written_with_all_that_it_is_and_read_again(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"base": {"batch": 8}, "swept": ("b", "a"), "words": ("a=1,2",), "of_hydra": ("x=1",)}
    facts |= {"direction": Direction.minimize, "figure": "loss", "latest": "runs/a", "id": "0f"}
    identity = Identity(**facts)
    ledger = Ledger(tmp_path / "a" / "b")
    assert (ledger.exists, ledger.is_new) == (False, False)
    (ledger.folder / "jobs").mkdir(parents=True)
    assert (ledger.exists, ledger.is_new) == (False, False), "its file is what makes a sweep"
    ledger.create(identity)
    assert (ledger.exists, ledger.is_new, (ledger.folder / "jobs").is_dir()) == (True, True, True)
    assert Ledger(ledger.folder).identity() == replace(identity, swept=("a", "b"))
    assert Ledger(ledger.folder).is_new is False
    assert identity.monitor == Monitor("loss", Direction.minimize)
    stored = json.loads((ledger.folder / "sweep.json").read_text())
    assert stored["hash"] == identity.hash
    assert stored.items() >= stamp(FileFormat.sweep).items()
    assert Identity().id != Identity().id


def test_the_swept_keys_of_an_earlier_version_are_in_the_order_of_their_present_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = Job.__dataclass_fields__["batch"]
    changed: Any = with_history(dataclasses.field(), names=("size_of_batch",))
    monkeypatch.setattr(field, "metadata", {**field.metadata, **changed.metadata})
    Ledger(tmp_path).create(replace(ONE, swept=("seed", "size_of_batch")))
    assert Ledger(tmp_path).identity().swept == ("batch", "seed")


@pytest.mark.parametrize("key", ["of_hydra", "figure", "latest"])
def test_what_an_earlier_version_did_not_write_has_its_usual_value(key: str, tmp_path: Path) -> None:
    file = begun(tmp_path).folder / "sweep.json"
    facts = json.loads(file.read_text())
    del facts[key]
    file.write_text(json.dumps(facts))
    usual = {"of_hydra": (), "figure": "score", "latest": ""}
    assert getattr(Ledger(tmp_path).identity(), key) == usual[key]


@pytest.mark.parametrize("key", ["base", "swept", "words", "direction", "id"])
def test_a_ledger_without_what_it_needs_is_a_sentence(key: str, tmp_path: Path) -> None:
    file = begun(tmp_path).folder / "sweep.json"
    whole = json.loads(file.read_text())
    wrong = {"base": 7, "swept": 7, "words": None, "direction": "up", "id": None}
    damaged = [{name: value for name, value in whole.items() if name != key}]
    damaged += [{**whole, key: wrong[key]}] * (key != "id")
    for facts in damaged:
        file.write_text(json.dumps(facts))
        with pytest.raises(InputError, match=r"sweep\.json is not a file of a sweep's ledger; start anew with sweep"):
            Ledger(tmp_path).identity()


def test_the_hash_of_a_sweep_is_of_what_decides_its_scores_in_any_order() -> None:
    one = Identity(base={"a": 1, "b": 2}, swept=("x",))
    assert one.hash == Identity(base={"b": 2, "a": 1}, swept=("x",), words=("w",), figure="loss").hash
    assert one.hash != Identity(base={"a": 1, "b": 2}, swept=("y",)).hash
    assert one.hash != Identity(base={"a": 1, "b": 3}, swept=("x",)).hash


def test_three_differences_of_two_sweeps_are_named() -> None:
    keys = ("batch", "epochs", "seed", "steps")
    for number in (3, 4):
        one, other = (Identity(base=dict.fromkeys(keys[:number], value)) for value in (7, 8))
        shown = [f"{key} is 7 there and 8 here" for key in keys[:3]]
        assert one.difference(other) == ", ".join(shown + ["and more"] * (number > 3))
    assert Identity(base={"seed": 7}).difference(Identity()) == "seed is 7 there and None here"
    assert Identity().difference(Identity(base={"seed": 7})) == "seed is None there and 7 here"
    assert Identity(swept=("a",)).difference(Identity(swept=("a", "b"))) == "it sweeps a, and this line a b"


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"output_root: .*/sweep cannot be written \(Not a directory\); choose a"):
        Ledger(tmp_path / "file" / "sweep").create(ONE)


def test_the_record_of_a_job_is_as_it_was_written_and_a_later_version_may_have_more(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    (record,) = ledger.enter([(["seed=1"], "seed=1")])
    (tmp_path / record.folder).mkdir()
    before = time.time()
    started = ledger.start(replace(record, started=1.0, ended=5.0, exit_code=70, error="odd", objective=1.0))
    facts = (started.host, started.pid, started.born, started.ended, started.exit_code, started.error)
    assert facts == (socket.gethostname(), os.getpid(), born(os.getpid()), 0.0, 0, "")
    assert before <= started.started <= time.time()
    assert ledger.end(started, State.failed, exit_code=7).objective is None, "not that of an earlier call"
    ended = ledger.end(started, State.failed, objective=2.5, exit_code=7, error="it broke")
    assert (ended.objective, ended.exit_code, ended.error, ended.state) == (2.5, 7, "it broke", State.failed)
    assert started.started <= ended.ended <= time.time()
    path = ledger.path_of(0)
    assert path == tmp_path / "jobs" / "000.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "later": 1}))
    assert ledger.read(started) == ended
    path.write_text(json.dumps({**json.loads(path.read_text()), "objective": 3, "started": 7}))
    assert ledger.read(started).objective == 3, "a whole number is a number"


@pytest.mark.parametrize("overrides", ["seed=1", {"seed": 1}, [1], None])
def test_overrides_that_are_no_list_of_words_are_damage(overrides: object, tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    ledger.enter([(["seed=1"], "seed=1")])
    path = ledger.path_of(0)
    path.write_text(json.dumps({**json.loads(path.read_text()), "overrides": overrides}))
    assert ledger.record(0).state is State.damaged
    assert ledger.record(0).exit_code == 2


def test_a_name_of_a_record_that_is_no_number_is_none(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    for name in ("\u00b2", "-1", "1.5", "x"):
        (tmp_path / "jobs" / f"{name}.json").write_text("{}")
    assert ledger.records() == []


def test_a_damaged_record_keeps_its_file_and_the_first_folder_of_its_number(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    ledger.enter([(["seed=1"], "b")])
    for name in ("000-b", "000-a"):
        RunDir.at(tmp_path / name).overrides.write_text("- seed=1\n")
    ledger.path_of(0).write_text("{")
    assert ledger.record(0).folder == "000-a"
    (again,) = ledger.enter([(["seed=1"], "c")])
    assert (again.number, again.folder, again.state, again.error) == (0, "000-a", State.waiting, "")
    assert (tmp_path / "jobs" / "000.damaged").read_text() == "{"


def test_the_best_is_named_although_the_disk_is_full_or_the_ledger_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = begun(tmp_path)
    (record,) = ledger.enter([(["seed=1"], "seed=1")])
    (tmp_path / record.folder).mkdir()
    for error in (StorageError("full"), InputError("damaged")):

        def fail(self: Ledger, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(Ledger, "mark_best", fail)
        assert ledger.end(record, State.done, objective=1.0).objective == 1.0
    assert ledger.best == ""


def test_a_newest_sweep_is_found_by_its_name_and_one_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("20260102-a", "20260101-b"):
        Ledger(tmp_path / "out" / "sweeps" / name).create(ONE)
    newest = tmp_path / "out" / "sweeps" / "20260102-a"
    assert resumed_sweep(Path("out"), "latest").folder == newest
    for named in ("out/sweeps/20260102-a", "~/out/sweeps/20260102-a", str(newest)):
        assert resumed_sweep(Path("elsewhere"), named).folder == newest
    (tmp_path / "out" / "sweep.json").mkdir()
    for named in ("out", 300 * "a"):
        with pytest.raises(InputError, match=rf"sweep\.resume: {named} is not a sweep's folder; name one with"):
            resumed_sweep(Path("out"), named)


def test_the_words_of_a_sweep_go_before_those_that_are_typed_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    ledger = Ledger(tmp_path / "sweeps" / "one")
    ledger.create(replace(ONE, words=("seed=1,2", "name=old", "batch=8"), of_hydra=("hydra/sweeper=basic",)))
    words = ["-m", f"output_root={tmp_path}", "sweep.resume=latest", "name=new"]
    stored = ["hydra/sweeper=basic", "seed=1,2", "batch=8"]
    assert words_of_sweep(words) == ["-m", *stored, *words[1:]]
    at_home = [f"output_root=~/{tmp_path.name}", *words[2:]]
    assert words_of_sweep(at_home) == [*stored, *at_home]
    for other in (["seed=3"], ["model=linear"]):
        assert words_of_sweep([*words, *other]) == [*words, *other], "it makes other jobs"
    for named in ("auto", "new", "nowhere"):
        line = [f"output_root={tmp_path}", f"sweep.resume={named}"]
        assert words_of_sweep(line) == line
    assert words_of_sweep(["seed=1"]) == ["seed=1"]


@pytest.mark.parametrize(
    ("words", "jobs"),
    [
        (["batch=3,4"], ["seed=1 batch=3", "seed=1 batch=4", "seed=2 batch=3", "seed=2 batch=4"]),
        (["batch=3", "seed=5"], ["batch=3 seed=5"]),
    ],
)
def test_the_parameters_of_a_sweeper_come_before_the_words_of_the_line_which_win(
    words: list[str], jobs: list[str]
) -> None:
    launched: list[list[str]] = []
    launcher = SimpleNamespace(launch=lambda jobs, initial_job_idx: launched.extend(jobs[initial_job_idx:]) or [])
    sweeper = GridSweeper({})
    sweeper.setup(launcher, OmegaConf.create({"hydra": {"sweeper": {"params": {"seed": "1,2"}}}}))
    sweeper.sweep(words)
    assert [" ".join(job) for job in launched] == jobs


@pytest.mark.parametrize("can", [True, False])
def test_a_job_is_forked_where_the_system_can_and_else_a_fresh_interpreter(
    can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a system without fork does is pretended; each way of its own is run by the tests of sweeps."""
    for name in ("forked", "fresh"):
        monkeypatch.setattr(pool, name, lambda *words, name=name: (name, *words))
    monkeypatch.setattr(pool, "can_fork", lambda: can)
    values: Any = ("ledger", "job", "share")
    assert pool.start_process(*values) == ("forked" if can else "fresh", *values)


def test_a_fresh_job_has_its_share_and_its_own_variables_before_those_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(pool, "Fresh", lambda words, variables, **options: started.append((words, variables)))
    ledger = begun(tmp_path)
    (record,) = ledger.enter([(["seed=1"], "seed=1")])
    command = {"CUDA_VISIBLE_DEVICES": "0,1", "OWN": "command", "KEPT": "yes"}
    job = SweepJob(record, Needs(), lambda: None, ("lockstep", "train", "seed=1"), {"OWN": "job"})
    pool.fresh(ledger, job, Share(gpus=("1",), cores=3), command)
    ((words, variables),) = started
    assert words == [*job.command, override("hydra.run.dir", ledger.folder / record.folder)]
    expected = {"CUDA_VISIBLE_DEVICES": "1", "OWN": "job", "KEPT": "yes", PARENT: str(os.getpid())}
    assert expected.items() <= variables.items()


FULL = OSError(errno.ENOSPC, "No space left on device", "a.bin")
NOT_BEGUN = "stopped before a step was finished; nothing is lost: rerun the command, or use resume=latest"


@pytest.mark.parametrize(
    ("error", "kind", "state", "sentence"),
    [
        (JobError(InputError("it is wrong")), InputError, State.failed, "it is wrong"),
        (JobError(Stopped("saved at step 3")), Stopped, State.stopped, "saved at step 3"),
        (KeyError("x"), KeyError, State.failed, "KeyError: 'x'"),
        (FULL, StorageError, State.stopped, "a.bin cannot be written (No space left on device); free space there"),
        (StopNow(), Stopped, State.stopped, NOT_BEGUN),
        (KeyboardInterrupt(), Stopped, State.stopped, NOT_BEGUN),
        (Interrupted(), Interrupted, State.stopped, str(Interrupted())),
    ],
    ids=repr,
)
def test_what_ended_a_job_is_in_its_record_in_the_words_of_its_error(
    error: BaseException, kind: type[BaseException], state: State, sentence: str, tmp_path: Path
) -> None:
    ledger = begun(tmp_path)
    (record,) = ledger.enter([(["seed=1"], "a")])

    def fails() -> float:
        raise error

    with pytest.raises(kind) as raised:
        recorded(ledger, record, fails)
    assert type(raised.value) is kind
    assert raised.value.__suppress_context__
    ended = ledger.read(record)
    assert (ended.state, ended.error, ended.objective) == (state, sentence, None)
    assert ended.exit_code == getattr(kind, "exit_code", LockstepError.exit_code)


def test_a_job_that_is_stopped_at_its_start_says_how_far_it_was_saved(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    (record,) = ledger.enter([(["seed=1"], "a")])
    run = RunDir.at(tmp_path / record.folder)
    run.write_summary(steps=9)
    run.last.write_text("step-00000007\n")

    def stops() -> float:
        raise StopNow

    with pytest.raises(Stopped, match=r"^stopped at step 7 of 9, which was saved: rerun the command"):
        recorded(ledger, record, stops)


def test_a_sweep_that_a_full_disk_does_not_take_is_no_mistake_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr("lockstep.records.ledger.make_folder", full)
    ledger = Ledger(tmp_path / "sweep")
    with pytest.raises(StorageError):
        ledger.create(ONE)
    assert not ledger.is_new


@pytest.mark.parametrize("number", [0, 12, 1003])
def test_a_damaged_record_of_a_job_without_a_folder_has_its_number_alone(number: int, tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    assert ledger.path_of(number) == tmp_path / "jobs" / f"{number:03}.json"
    assert output_of(ledger, replace(job(0), number=number)) == tmp_path / "jobs" / f"{number:03}.log"
    ledger.path_of(number).write_text("{")
    (damaged,) = ledger.records()
    assert (damaged.number, damaged.folder, damaged.overrides) == (number, f"{number:03}", ())
    assert damaged.state is State.damaged


def test_a_job_without_overrides_is_known_again_and_takes_no_damaged_record(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    (one,) = ledger.enter([([], "usual")])
    assert ledger.enter([([], "usual")]) == [one]
    ledger.path_of(0).write_text("{")
    (other,) = ledger.enter([([], "usual")])
    assert (other.number, other.folder, other.state) == (1, "001-usual", State.waiting)
    assert ledger.record(0).state is State.damaged
    assert not ledger.path_of(0).with_suffix(".damaged").exists()


def test_the_best_is_named_in_a_line_of_text_and_not_written_again(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    records = ledger.enter([([f"seed={seed}"], f"seed={seed}") for seed in (1, 2)])
    for record, score in zip(records, (5.0, 4.0), strict=True):
        (tmp_path / record.folder).mkdir()
        ledger.end(record, State.done, objective=score)
        assert (tmp_path / "best").read_text() == "000-seed=1\n"
        os.utime(tmp_path / "best", (1.0, 1.0))
    ledger.mark_best()
    assert (tmp_path / "best").stat().st_mtime == 1.0


def test_a_key_that_one_of_two_sweeps_does_not_have_has_its_default_there() -> None:
    earlier, later = Identity(base={"batch": 64}), Identity(base={"batch": 64, "seed": 0, "epochs": 20})
    assert (earlier.difference(later), later.difference(earlier)) == ("", "")
    other = Identity(base={"batch": 64, "seed": 1, "epochs": 20})
    assert earlier.difference(other) == "seed is None there and 1 here"
    assert other.difference(later) == "seed is 1 there and 0 here"


def test_a_sweep_is_looked_for_in_the_usual_folder_of_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Ledger(tmp_path / "outputs" / "sweeps" / "one").create(ONE)
    assert words_of_sweep(["-m", "sweep.resume=latest"]) == ["-m", *ONE.words, "sweep.resume=latest"]
    assert words_of_sweep(["-m", "name=a", "sweep.resume=latest"]) == [
        "-m",
        *ONE.words,
        "name=a",
        "sweep.resume=latest",
    ]
    for words in (["sweep.resume=latest", "+epochs=3"], ["--sweep.resume=latest"], ["sweep.resume"]):
        assert words_of_sweep(words) == words


def test_the_job_in_a_folder_is_that_of_its_number_and_of_no_other_name(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    ledger.write(replace(job(0), number=1003, folder="1003-job"))
    entry = record_of(tmp_path / "1003-job")
    assert entry is not None
    assert (entry[0].folder, entry[1].number) == (tmp_path, 1003)
    for name in ("1003-other", "1003", "01003-job", "x-job"):
        assert record_of(tmp_path / name) is None, name


def test_what_no_sweep_has_is_said_with_what_was_typed(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        resumed_sweep(tmp_path, "latest")
    assert str(raised.value) == f"sweep.resume=latest: no sweep has been started in {tmp_path / 'sweeps'} yet"
    with pytest.raises(InputError) as raised:
        resumed_sweep(tmp_path, "one")
    named = "name one with sweep.resume=FOLDER, or the newest with sweep.resume=latest"
    assert str(raised.value) == f"sweep.resume: one is not a sweep's folder; {named}"
    with pytest.raises(InputError) as raised:
        checked_direction(3)
    either = "hydra.launcher.direction=minimize, or hydra.sweeper.direction=minimize in a search"
    assert str(raised.value) == f"the direction of the scores is 3, expected maximize or minimize: {either}"
    assert [checked_direction(direction) for direction in ("minimize", Direction.maximize)] == [*Direction][::-1]


def test_a_job_that_ends_well_has_no_code_and_no_error_and_its_end_is_now(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    (record,) = ledger.enter([(["seed=1"], "a")])
    before = time.time()
    failed = ledger.end(record, State.failed, exit_code=70, error="odd")
    done = ledger.end(failed, State.done)
    assert (done.exit_code, done.error, done.objective, done.state) == (0, "", None, State.done)
    assert before <= failed.ended <= done.ended <= time.time()
    assert (done.host, done.pid, done.started) == ("", 0, 0.0), "it was not started here"


def test_a_record_has_nothing_but_its_job_until_it_begins() -> None:
    record = Record(number=3, overrides=("a=1",), folder="003-a")
    facts = {"number": 3, "overrides": ("a=1",), "folder": "003-a", "state": "waiting", "objective": None}
    facts |= dict.fromkeys(("host", "born", "error", "submitted", "rung"), "")
    assert dataclasses.asdict(record) == facts | {"pid": 0, "started": 0.0, "ended": 0.0, "exit_code": 0}


@pytest.mark.parametrize("folder", ["0000-job", "0001-job", "000job", "00-job", "000 -job", "000-job/..", "000-\0"])
def test_the_folder_of_a_record_begins_with_its_number_and_is_one_name(folder: str, tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    ledger.write(replace(job(0), folder=folder))
    assert ledger.record(0).state is State.damaged
    ledger.path_of(0).write_text(json.dumps(dataclasses.asdict(replace(job(0), number=1))))
    assert ledger.record(0).state is State.damaged, "it is the record of another job"
    ledger.write(replace(job(0), folder="000"))
    assert ledger.record(0).folder == "000"


def test_a_run_beside_the_jobs_of_a_sweep_is_none_of_them(tmp_path: Path) -> None:
    ledger = begun(tmp_path)
    ledger.enter([(["seed=1"], "seed=1")])
    for name in ("007-alone", "000-alone", "alone"):
        RunDir.at(tmp_path / name).overrides.write_text("[]")
        assert record_of(tmp_path / name) is None, name


def test_jobs_that_follow_the_end_of_others_run_unless_the_sweep_was_stopped() -> None:
    ended = EndedPool(0, 0, 0)
    following = {0: ended.jobs[1:2], 1: ended.jobs[2:]}
    ended.pool.run(ended.jobs[:1], more=lambda record: following.get(record.number, ()))
    assert ended.states() == [State.done] * 3
    stopped = EndedPool(75, 0, stops=True)
    with pytest.raises(Stopped):
        stopped.pool.run(stopped.jobs[:1], more=lambda record: stopped.jobs[1:])
    assert stopped.states() == [State.stopped, State.waiting]
    one_by_one = EndedPool(75, 75, 75, 0, stops=True)
    wait = one_by_one.pool.wait
    one_by_one.pool.wait = lambda sentinels, seconds: wait(sentinels[:1], seconds)
    draws = [one_by_one.jobs[3:]] * 2
    with pytest.raises(Stopped):
        one_by_one.pool.run(one_by_one.jobs[:3], more=lambda record: draws.pop() if draws else ())
    assert one_by_one.states() == [*[State.stopped] * 3, State.waiting]


def test_a_job_that_has_trained_enough_hears_so_once_and_again_in_its_next_round() -> None:
    ended, looks = EndedPool(75), list[int]()
    wait = ended.pool.wait

    def third_time(sentinels: list[int], seconds: float) -> None:
        looks.append(len(looks))
        if not len(looks) % 3:
            wait(sentinels, seconds)

    ended.pool.wait = third_time
    for round_ in (1, 2):
        ended.pool.run(ended.jobs, enough=lambda record: True)
        assert (ended.signals, ended.states()) == ([(0, signal.SIGTERM)] * round_, [State.waiting])


def test_the_pool_looks_twice_a_second_joins_what_has_ended_and_says_how_many_wait() -> None:
    ended, seen, shown = EndedPool(0, 0, 0, most=1), list[float](), list[int]()
    wait = ended.pool.wait

    def noted(sentinels: list[int], seconds: float) -> None:
        seen.append(seconds)
        wait(sentinels, seconds)

    ended.pool.wait = noted
    ended.pool.view.refresh = shown.append  # type: ignore[method-assign, assignment]
    ended.pool.run(ended.jobs)
    assert (seen, shown) == ([0.5] * 3, [2, 1, 0])
    assert all(process.joined for process in ended.processes.values())


def test_an_error_of_the_pool_leaves_no_job_alive() -> None:
    ended = EndedPool(0, 0)
    ended.pool.wait = lambda sentinels, seconds: None

    def fail(waiting: int = 0) -> None:
        raise KeyError("odd")

    ended.pool.view.refresh = fail  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        ended.pool.run(ended.jobs)
    assert ended.signals == [(0, signal.SIGKILL), (1, signal.SIGKILL)]


@pytest.mark.parametrize(
    ("jobs", "most", "cores", "alone"),
    [
        (1, None, 4, [True]),
        (2, None, 4, [False, False]),
        (2, None, 1, [False, True]),
        (3, 1, 4, [True, True, True]),
        (3, 2, 4, [False, False, True]),
    ],
)
def test_a_job_beside_which_none_will_run_is_alone(
    jobs: int, most: int | None, cores: int, alone: list[bool]
) -> None:
    ended = EndedPool(*[0] * jobs, most=most)
    ended.pool.devices = Devices([], cores)
    ended.pool.run(ended.jobs)
    assert [ended.processes[number].share.alone for number in range(jobs)] == alone


@pytest.mark.parametrize(
    ("code", "state", "error"),
    [
        (
            70,
            State.failed,
            "the process ended with exit code 70, and nothing says why; its output is in jobs/000.log",
        ),
        (1, State.failed, "the process ended with exit code 1, and nothing says why; its output is in jobs/000.log"),
        (-15, State.failed, "the process was killed (SIGTERM), and nothing says why; its output is in jobs/000.log"),
        (75, State.stopped, "stopped before a step was finished; nothing is lost: rerun the command, or use"),
        (0, State.done, ""),
    ],
)
def test_the_record_of_a_job_that_wrote_none_has_its_code_and_where_its_output_is(
    code: int, state: State, error: str
) -> None:
    ended = EndedPool(code)
    ended.pool.run(ended.jobs)
    record = ended.ledger.read(job(0))
    assert (record.state, record.exit_code) == (state, {State.failed: 70, State.stopped: 75, State.done: 0}[state])
    assert record.error.startswith(error.format("jobs/000.log"))
    assert record.error == error.format("jobs/000.log") or state is State.stopped


def test_a_job_that_was_suspended_on_its_own_hears_a_stop() -> None:
    stopped = EndedPool(75, 75, stops=True)
    with pytest.raises(Stopped):
        stopped.pool.run(stopped.jobs)
    for number in (0, 1):
        sent = [name for job_number, name in stopped.signals if job_number == number]
        assert len(sent) >= 2
        assert {*zip(sent[::2], sent[1::2], strict=True)} == {(signal.SIGTERM, signal.SIGCONT)}
    cut = EndedPool(75)
    cut.pool.running = [(cut.jobs[0], Share(), cut.start(cut.ledger, cut.jobs[0], Share()))]
    cut.pool.send(signal.SIGINT)
    assert (cut.signals, cut.pool.has_killed) == ([(0, signal.SIGINT)], False)


class Left(BaseException):
    """The process of a job has ended."""


@pytest.mark.parametrize(
    ("error", "code", "sentences"),
    [
        (None, 0, []),
        (NumericalError("nan"), 76, ["nan"]),
        (Stopped("saved"), 75, ["saved"]),
        (KeyError("odd"), 70, []),
    ],
    ids=repr,
)
def test_the_process_of_a_job_writes_to_its_log_and_ends_with_the_code_of_its_error(
    error: Exception | None, code: int, sentences: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(code: int) -> None:
        raise Left(code)

    def copy(source: int, target: int) -> None:
        copies.append((str(Path(f"/proc/self/fd/{source}").readlink()), target))

    def record_job(*facts: Any) -> None:
        recorded_jobs.append((facts, {name: os.environ.get(name) for name in ("OWN", "OF_SHARE", CORES)}))
        if error is not None:
            raise error

    shown, copies, recorded_jobs, tracebacks = list[str](), list[Any](), list[Any](), list[int]()
    for name, value in (("OWN", "program"), ("OF_SHARE", "program"), (CORES, "9")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pool.os, "dup2", copy)
    monkeypatch.setattr(pool, "leave", leave)
    monkeypatch.setattr(pool, "recorded", record_job)
    monkeypatch.setattr(pool, "explain", lambda error: shown.append(str(error)))
    monkeypatch.setattr(pool.traceback, "print_exc", lambda: tracebacks.append(1))
    ledger = begun(tmp_path)
    (record,) = ledger.enter([(["seed=1"], "seed=1")])
    one = SweepJob(record, Needs(), float, (), {"OWN": "job", CORES: "2"})
    with pytest.raises(Left) as left:
        pool._serve(ledger, one, Share(cores=3))
    assert left.value.args == (code,)
    assert recorded_jobs == [((ledger, record, float), {"OWN": "job", "OF_SHARE": "program", CORES: "2"})]
    log = str(tmp_path / "jobs" / "000.log")
    assert copies == [(log, sys.stdout.fileno()), (log, sys.stderr.fileno())]
    assert (shown, len(tracebacks)) == (sentences, isinstance(error, KeyError))


@pytest.mark.parametrize("fails", [True, False])
def test_a_fork_begins_with_stops_held_and_the_pool_hears_them_again(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[set[int]] = []

    def start() -> None:
        held.append({*signal.pthread_sigmask(signal.SIG_BLOCK, [])})
        if fails:
            raise OSError("no process")

    process = SimpleNamespace(start=start)
    monkeypatch.setattr(pool, "Fork", lambda target: process)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    values: Any = (begun, job(0), Share())
    try:
        if fails:
            with pytest.raises(OSError, match="no process"):
                pool.forked(*values)
        else:
            assert pool.forked(*values) is process  # type: ignore[comparison-overlap]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before | {signal.SIGUSR1}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGHUP} <= held[0]


def test_a_fresh_job_has_no_input_and_its_output_in_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []

    def fresh(words: list[str], variables: dict[str, str], **options: Any) -> None:
        started.append({name: getattr(value, "name", value) for name, value in options.items()})

    monkeypatch.setattr(pool, "Fresh", fresh)
    ledger = begun(tmp_path)
    (record,) = ledger.enter([(["seed=1"], "seed=1")])
    pool.fresh(ledger, SweepJob(record, Needs(), lambda: None, ()), Share(), {}, cwd="elsewhere")
    log = str(tmp_path / "jobs" / "000.log")
    assert started == [{"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "cwd": "elsewhere"}]


def test_a_job_with_a_gpu_takes_no_cores_from_those_without() -> None:
    devices = Devices(["a"], 4)
    share = devices.take(Needs(gpus=1, cores=4))
    assert share == Share(gpus=("a",), cores=4)
    devices.give_back(share)
    assert devices.take(Needs(cores=3)) == Share(cores=3)
    assert devices.take(Needs(cores=2)) is None
    assert devices.take(Needs(gpus=1)) is not None
    devices.give_back(Share(cores=3))
    assert devices.take(Needs(cores=9)) == Share(cores=4)
    assert devices.take(Needs(cores=1)) is None


def test_the_devices_of_a_machine_are_those_that_others_leave_with_their_cores_and_their_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = {"a": [], "b": [17, 18], "c": []}
    monkeypatch.setattr("lockstep.runtime.gpus.visible_gpus", lambda: [*processes])
    monkeypatch.setattr("lockstep.runtime.gpus.processes_on", processes.__getitem__)
    monkeypatch.setattr("lockstep.runtime.gpus.free_bytes", lambda gpu: {"a": 5, "c": 7}[gpu])
    monkeypatch.setattr("lockstep.sweeps.devices.cores", lambda: 6)
    monkeypatch.delenv(VISIBLE, raising=False)
    devices = Devices.of_machine()
    assert (devices.gpus, devices.cores, devices.all) == (["a", "c"], 6, Needs(2, 6))
    assert (devices.free_memory("a"), devices.free_memory("c")) == (5, 7)
    for _ in range(2):
        devices.check([Needs(gpus=1)])
    says = "skipped, because others use them: GPU 1 (process 17); CUDA_VISIBLE_DEVICES names GPUs to use all the same"
    assert capsys.readouterr().out.split("\n") == [says, ""], "once"


def test_what_a_kind_takes_is_the_most_that_a_job_of_it_took() -> None:
    devices = Devices(["a"], 4, lambda gpu: 10)
    for measured, most in ((4, 4), (6, 6), (3, 6), (None, 6)):
        devices.give_back(Share(), "x", measured)
        assert devices.of_kind == {"x": most}
    devices.give_back(Share(), "", 9)
    devices.give_back(Share(), "y")
    assert devices.of_kind == {"x": 6}


def test_a_job_without_enough_evaluations_has_the_score_of_its_record(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    evaluated(ledger, job(0), 2.0, 5.0)
    assert search.score_at(ledger, job(0, objective=7.0), 0.5, Direction.maximize) == 5.0
    assert search.score_at(ledger, job(0, objective=7.0), 0.75, Direction.maximize) == 7.0
    assert search.evaluations(ledger, job(0)) == [(0.25, 2.0), (0.5, 5.0)]
    assert search.evaluations(ledger, job(1)) == []
    assert search.shares(0, 3) == [1]


@pytest.fixture
def five(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepView:
    """A sweep of five jobs on a wide terminal: two are done, one has failed, one runs, and one waits."""
    ledger = Ledger(tmp_path)
    ledger.create(replace(ONE, swept=("lr",), figure="top1"))
    records = ledger.enter([([f"lr={number}", "batch=8"], f"lr={number}") for number in range(5)])
    for record, score in zip(records[:2], (80.0, 90.0), strict=True):
        (tmp_path / record.folder).mkdir()
        ledger.end(ledger.start(record), State.done, objective=score)
    ledger.end(ledger.start(records[2]), State.failed, exit_code=2, error="no")
    (tmp_path / records[3].folder).mkdir()
    (tmp_path / records[3].folder / "summary.json").write_text('{"steps": 40, "steps_per_epoch": 16}')
    ledger.write(replace(ledger.start(records[3]), started=1000.0))
    view = view_of(ledger)
    monkeypatch.setattr(type(view.live), "is_started", True)
    monkeypatch.setattr(time, "time", lambda: 1100.0)
    view.live.console.width = 200
    return view


def drawn(view: SweepView, waiting: int = 0) -> list[str]:
    """The lines that a sweep draws."""
    with patch.object(view.live, "update") as update:
        view.refresh(waiting)
    return [getattr(line, "plain", str(line)).rstrip() for line in update.call_args.args[0].renderables]


def test_the_live_lines_show_the_running_jobs_and_how_far_the_sweep_is(five: SweepView) -> None:
    assert drawn(five) == ["done 3 of 5  running 1  failed 1  best 90.00 (job 1)"]
    record = five.ledger.read(five.records[3])
    five.started(record)
    head, row, summary = drawn(five, 1)
    assert head.split() == ["job", "lr", "epoch", "val", "top-1", "img/s", "left"]
    assert row.split() == ["3", "3", "1/3", "starting"]
    assert summary == "done 3 of 5  running 1  failed 1  best 90.00 (job 1)", "no pace is known"
    figures = {"perf/img_per_s": 1234.4, "acc/val_top1": 61.5}
    add(JobRun(five.ledger, record, five.monitor), {"step": 17, "time": 1085.0, **figures})
    # 17 steps in 85 s: 40 take 200 s, so 115 s from then on, of which 15 are over; and 200 s of the job that waits.
    _, row, summary = drawn(five, 1)
    assert row.split() == ["3", "3", "2/3", "61.50", "1,234", "1:40"]
    ends = datetime.fromtimestamp(1100.0 + 300).strftime("%H:%M")
    assert summary == f"done 3 of 5  running 1  failed 1  best 90.00 (job 1)  left 5:00  ends {ends}"
    five.share = 0.5
    assert drawn(five, 1)[1].split()[-1] == "0:00", "its round is over"
    five.share, five.left = 1.0, 2
    assert drawn(five, 1)[-1].startswith("done 3 of 7  running 1  failed 1  best 90.00 (job 1)  left 11:40  ends ")


@pytest.mark.parametrize(
    ("direction", "best"), [(Direction.minimize, "80.00 (job 0)"), (Direction.maximize, "90.00")]
)
def test_the_best_of_the_live_lines_follows_the_direction(direction: Direction, best: str, five: SweepView) -> None:
    five.ledger.create(replace(five.ledger.identity(), direction=direction))
    five.enter(five.ledger.records(), [])
    assert f"  best {best}" in drawn(five)[-1]


def test_a_row_of_the_live_lines_is_of_one_job_in_whatever_order_they_began(five: SweepView) -> None:
    shown = {4: (33, "3/3", 40.5), 3: (17, "2/3", 61.5), 2: (5, "1/3", 7.5)}
    for number, (step, _, score) in shown.items():
        record = five.ledger.start(five.records[number])
        (five.ledger.folder / record.folder).mkdir(exist_ok=True)
        (five.ledger.folder / record.folder / "summary.json").write_text('{"steps": 40, "steps_per_epoch": 16}')
        five.started(record)
        add(JobRun(five.ledger, record, five.monitor), {"step": step, "time": 1085.0, "acc/val_top1": score})
    for ended in (None, 4, 2):
        if ended is not None:
            del shown[ended]
            five.ended(five.ledger.end(five.records[ended], State.done, objective=9.0))
        rows = [row.split()[:4] for row in drawn(five)[1:-1]]
        assert rows == [[str(job), str(job), epoch, f"{score:.2f}"] for job, (_, epoch, score) in shown.items()]


def test_a_running_job_shows_few_digits_of_its_settings(five: SweepView) -> None:
    record = five.ledger.write(replace(five.records[3], overrides=("lr=0.004043878", "batch=8")))
    five.started(record)
    assert drawn(five)[1].split()[:2] == ["3", "0.00404"]


def test_jobs_that_come_one_by_one_are_named_by_what_all_of_them_vary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(tmp_path)
    ledger.create(replace(ONE, swept=()))
    view = SweepView(ledger)
    for record in ledger.enter([([f"seed={number}", "batch=8"], "a") for number in range(2)]):
        view.enter([record], [record])
    view.ended(replace(view.records[1], state=State.failed))
    assert capsys.readouterr().out == "1 of 2  job 1  seed=1  failed\n"


def test_the_live_lines_have_no_thread_and_vanish_and_a_sentence_above_them_is_no_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view = SweepView(begun(tmp_path))
    live = vars(view.live)
    assert (view.live.auto_refresh, view.live.transient) == (False, True), "a process with two threads cannot fork"
    assert (live["_redirect_stdout"], live["_redirect_stderr"]) == (False, False)
    view.show("job 0  model=[bold]x[/bold]  x[1] failed")
    assert capsys.readouterr().out == "job 0  model=[bold]x[/bold]  x[1] failed\n"


def test_a_long_sentence_above_the_live_lines_is_wrapped_between_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    words = [f"word-{number}" for number in range(12)]
    SweepView(begun(tmp_path)).show(" ".join(words))
    lines = screen.getvalue().splitlines()
    assert [word for line in lines for word in line.split()] == words
    assert max(map(len, lines)) <= 40


def test_each_line_of_an_error_names_its_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = begun(tmp_path)
    (record,) = ledger.enter([(["seed=1"], "seed=1")])
    view_of(ledger).ended(replace(record, state=State.failed, exit_code=2, error="one\ntwo"))
    assert capsys.readouterr().err == "lockstep: job 0: one\nlockstep: job 0: two\n"


@pytest.mark.parametrize(("seconds", "form"), [(12 * 3600 - 1, "%H:%M"), (12 * 3600, "%a %H:%M")])
def test_an_end_in_twelve_hours_or_later_has_its_day(seconds: float, form: str, five: SweepView) -> None:
    five.durations = [seconds]
    ends = datetime.fromtimestamp(1100.0 + seconds).strftime(form)
    assert drawn(five, 1)[-1].endswith(f"  ends {ends}")


@pytest.mark.parametrize(
    ("step", "epoch"), [(0, "1/3"), (1, "1/3"), (16, "1/3"), (17, "2/3"), (33, "3/3"), (40, "3/3")]
)
def test_an_epoch_ends_with_its_last_step(step: int, epoch: str, running: JobRun) -> None:
    progress = JobProgress(running)
    progress.update(running.record, 1.0)
    progress.step = step
    assert progress.epoch == epoch
    progress.steps_per_epoch = 0
    assert progress.epoch == {0: "0 %", 1: "2 %", 16: "40 %", 17: "42 %", 33: "82 %", 40: "100 %"}[step]
    progress.steps = 0
    assert progress.epoch == ""


def test_the_rate_and_the_time_of_a_job_are_those_of_its_last_lines_that_have_them(
    running: JobRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = JobProgress(running)
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    add(running, {"step": 10, "time": 4000.0, "perf/img_per_s": 99.0}, {"step": 12, "time": 4100.0})
    progress.update(running.record, 1.0)
    assert (progress.rate, progress.logged_at, progress.step) == (99.0, 4100.0, 12)
    add(running, {"step": 14})
    with running.run_dir.metrics.open("a") as file:
        file.write("no line\n[1]\n")
    progress.update(running.record, 1.0)
    assert (progress.rate, progress.logged_at, progress.step) == (99.0, 5000.0, 14)


def test_only_the_first_job_says_where_its_log_is_and_on_a_terminal_no_other_says_that_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = begun(tmp_path)
    records = ledger.enter([([f"seed={number}"], f"seed={number}") for number in range(10)])
    for is_live in (False, True):
        view = SweepView(ledger, begun="submitted")
        view.enter(records, [])
        monkeypatch.setattr(type(view.live), "is_started", is_live)
        for record in records[:2]:
            view.started(record)
        first = "job 0  seed=0  submitted; its log: jobs/000.log"
        assert capsys.readouterr().out.splitlines() == [first, *["job 1  seed=1  submitted"] * (not is_live)]


def test_the_line_of_an_end_has_the_jobs_that_a_search_has_left_and_a_score_only_of_a_job_that_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = begun(tmp_path)
    records = ledger.enter([([f"seed={number}"], f"seed={number}") for number in range(5)])
    view = SweepView(ledger)
    view.enter(records, [], 9)
    times = {"started": 100.0, "ended": 165.0}
    facts: list[dict[str, Any]] = [
        {"state": State.done, "objective": 90.0, **times},
        {"state": State.pruned, "objective": 70.0, **times},
        {"state": State.waiting, "objective": 60.0, **times},
        {"state": State.stopped, "exit_code": 74, "error": "full", **times},
        {"state": State.stopped, "exit_code": 75, "error": "saved"},
    ]
    for record, of_record in zip(records, facts, strict=True):
        (tmp_path / record.folder).mkdir()
        view.ended(replace(record, **of_record))
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        " 1 of 14  job 0  seed=0  done 90.00  in 1:05",
        " 2 of 14  job 1  seed=1  pruned  in 1:05",
        " 2 of 14  job 2  seed=2  paused  in 1:05",
        " 2 of 14  job 3  seed=3  stopped: full  in 1:05",
        " 2 of 14  job 4  seed=4  stopped: saved",
    ]
    assert shown.err == "lockstep: job 3: full\n", "a full disk is a failure, a stop is none"


def test_a_job_of_a_line_that_varies_nothing_is_as_configured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(tmp_path)
    ledger.create(replace(ONE, swept=()))
    view = SweepView(ledger)
    view.enter(ledger.enter([(["batch=8"], "a")]), [])
    view.ended(replace(view.records[0], state=State.failed))
    assert capsys.readouterr().out == "1 of 1  job 0  as configured  failed\n"


def test_the_table_of_a_sweep_leads_to_the_output_of_jobs_that_ended_by_no_mistake_or_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    ledger = begun(tmp_path)
    records = ledger.enter([([f"seed={number}"], f"seed={number}") for number in range(5)])
    for record, code in zip(records[:4], (2, 70, 75, 76), strict=True):
        state = State.stopped if code == 75 else State.failed
        ledger.end(ledger.start(record), state, exit_code=code, error=f"error {code}")
    (tmp_path / records[4].folder).mkdir()
    ledger.end(ledger.start(records[4]), State.done, objective=77.25)
    view = SweepView(ledger)
    view.enter(records[:4], [])
    view.show_table()
    out = capsys.readouterr().out
    assert out.startswith(f"sweep in {tmp_path.name}\n")
    printed = [f"    what it printed: {tmp_path.name}/jobs/{number:03}.log" for number in (1, 3)]
    assert [line for line in out.splitlines() if "printed" in line] == printed
    assert "77.25" not in out, "a job of another call"
    lines = out.splitlines()
    assert lines[lines.index(printed[0]) - 1].endswith("error 70")


def submitting(jobs: list[list[str]], submits: list[bool], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[Any]]:
    """A launcher for jobs of which some submit themselves, and the configs of those that have."""
    launcher, ran = launcher_of(jobs, monkeypatch), list[Any]()
    for words, submitted in zip(jobs, submits, strict=True):
        launcher.planned[tuple(words)] = " ".join(words), Needs(submits=submitted)
    monkeypatch.setattr(launcher, "_run", ran.append)
    return launcher, ran


@pytest.mark.parametrize(
    ("submits", "ran", "entered"),
    [([True, True], ["seed=1", "seed=2"], None), ([True, False], ["seed=1"], [1]), ([False, False], [], [0, 1])],
)
def test_jobs_that_submit_themselves_do_so_at_once(
    submits: list[bool],
    ran: list[str],
    entered: list[int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs, numbered = [["seed=1"], ["seed=2"]], list[Any]()
    launcher, submitted = submitting(jobs, submits, monkeypatch)
    monkeypatch.setattr(launcher, "_number", lambda *facts: numbered.append(facts))
    records, to_run_here = launcher._enter(begun(tmp_path), jobs, 0)
    assert numbered == [("seed=1", 0, "000-seed=1"), ("seed=2", 1, "001-seed=2")]
    assert (submitted, [record.number for record in records]) == (ran, [0, 1])
    assert (to_run_here and [job.record.number for job in to_run_here]) == entered
    for job in to_run_here or ():
        job.function()
        assert submitted[-1] == " ".join(job.record.overrides), "each has its own config"
    launcher.search = SimpleNamespace()
    if any(submits):
        with pytest.raises(
            InputError, match=r"hydra/sweeper=optuna chooses by the scores of jobs, and launcher=slurm"
        ):
            launcher._enter(begun(tmp_path), jobs, 0)


def test_a_wrong_job_is_named_by_its_number_and_by_what_it_varies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [["seed=1", "batch=8"], ["seed=2", "batch=8"]]
    launcher = launcher_of(jobs, monkeypatch)
    launcher.planned[tuple(jobs[1])] = InputError("one mistake", "another")
    with pytest.raises(pool_launcher.WrongJob) as raised:
        launcher._enter(begun(tmp_path), jobs, 3)
    assert str(raised.value) == "job 4 (seed=2): one mistake\njob 4 (seed=2): another"
    assert raised.value.__cause__ is launcher.planned[tuple(jobs[1])]
    launcher.planned[("batch=8",)] = InputError("one mistake")
    with pytest.raises(pool_launcher.WrongJob, match=r"^job 0: one mistake$"):
        launcher._enter(begun(tmp_path), [["batch=8"]], 0)


def test_a_job_is_its_config_where_the_app_says_so_and_else_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = launcher_of([["a=1"], ["a=2"]], monkeypatch)
    launcher.planned[("a=1",)] = None, Needs(identity="one")
    launcher.planned[("a=3",)] = InputError("odd")
    assert launcher.identify(["a=1"]) == "one"
    assert launcher.identify(["a=2", "b=1"][:1]) == job_key(["a=2"])
    assert launcher.identify(["a=3"]) == job_key(["a=3"])


def test_a_folder_of_a_job_is_named_after_what_varies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = launcher_of([["seed=1", "batch=8"], ["batch=8"], ["seed=1", "batch=8", "lr=2"]], monkeypatch)
    records = launcher._recorded(begun(tmp_path), [["seed=1", "batch=8"], ["batch=8"]])
    assert [record.folder for record in records] == ["000-seed=1", "001-defaults"]
    ledger = Ledger(tmp_path / "of two keys")
    ledger.create(replace(ONE, swept=("seed", "lr")))
    (record,) = launcher._recorded(ledger, [["seed=1", "batch=8", "lr=2"]])
    assert record.folder == "000-seed=1,lr=2", "of one job, the ledger knows what varies"
    launcher.planned[("lr=0.004043878",)] = None, Needs()
    (record,) = launcher._recorded(ledger, [["lr=0.004043878"]])
    assert record.folder == "001-lr=0.00404", "with few digits"
    jobs = [["seed=1", "lr=3"], ["seed=2", "lr=3"]]
    launcher.planned |= {tuple(words): (None, Needs()) for words in jobs}
    records = launcher._recorded(ledger, jobs)
    assert [record.folder for record in records] == ["002-seed=1,lr=3", "003-seed=2,lr=3"], (
        "as an earlier line varied"
    )


@pytest.mark.parametrize(
    ("value", "score"), [(2, 2.0), (0.0, 0.0), (1.5, 1.5), (True, 1.0), (None, None), ("9", None), ({}, None)]
)
def test_the_score_of_a_job_is_the_number_that_it_returns(
    value: object, score: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**options: Any) -> Any:
        folder = Path(options["config"].hydra.sweep.dir, options["config"].hydra.sweep.subdir)
        folder.mkdir(parents=True)
        if value == "9":
            (folder / "file").touch()
        calls.append((options["job_dir_key"], options["job_subdir_key"], options["task_function"]))
        return SimpleNamespace(return_value=value)

    calls: list[Any] = []
    launcher = launcher_of([], monkeypatch)
    launcher.task_function, launcher.hydra_context = print, None
    monkeypatch.setattr(pool_launcher, "run_job", run)
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path / "sweep"), "subdir": "000-a"}}})
    returned = launcher._run(config)
    assert (returned, type(returned)) == (score, type(score))
    assert calls == [("hydra.sweep.dir", "hydra.sweep.subdir", print)]
    assert (tmp_path / "sweep").exists() == (value == "9"), "what it has made and left empty goes again"


def test_a_job_has_its_number_and_its_folder_in_its_config_and_in_hydra() -> None:
    launcher: Any = pool_launcher.PoolLauncher(None, 0, 1, "maximize")
    launcher.config = OmegaConf.create({"hydra": {"sweep": {"dir": "sweeps/one"}}})
    facts = {"job": {"id": "x", "num": -1}, "sweep": {"dir": "other", "subdir": "y"}}
    config = OmegaConf.create({"hydra": facts})
    OmegaConf.set_readonly(config, True)
    before = HydraConfig.instance().cfg
    try:
        launcher._number(config, 7, "007-a")
        assert HydraConfig.instance().cfg is config
    finally:
        HydraConfig.instance().cfg = before
    job_facts = {"job": {"id": "7", "num": 7}, "sweep": {"dir": "sweeps/one", "subdir": "007-a"}}
    assert OmegaConf.to_container(config.hydra) == job_facts


@pytest.mark.parametrize("mode", ["all", "halving", "search"])
def test_a_line_runs_its_jobs_and_shows_their_table_also_after_an_error(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def run(jobs: Any, enough: Any = None, more: Any = None, cut: Any = None) -> None:
        calls.append(([job.record.number for job in jobs], enough, cut))
        if more is not None:
            calls.append(more(jobs[0].record))
        raise KeyError("odd")

    launcher = launcher_of([["seed=1"]], monkeypatch)
    launcher.config = OmegaConf.create({"hydra": {"overrides": {"task": ["seed=1"]}}})
    launcher.view, launcher.objectives = MagicMock(), ["score", "seconds"]
    monkeypatch.setattr(launcher, "_devices", lambda: Devices([], 4))
    monkeypatch.setattr(launcher, "_pool", lambda *facts: SimpleNamespace(run=run))
    if mode == "halving":
        launcher.halving = 3
        monkeypatch.setattr(launcher, "_enter", lambda ledger, jobs, first: entered)
        monkeypatch.setattr(
            search, "halve", lambda pool, records, jobs, factor: calls.append((factor, [*jobs])) or 1 / 0
        )
    if mode == "search":
        launcher.search = SimpleNamespace(follow=lambda record=None: ["follows", record], has_enough="enough")
        monkeypatch.setattr(
            launcher, "_enter_drawn", lambda ledger, view, drawn: entered[1] if not drawn[1] else drawn
        )
    ledger = begun(tmp_path)
    (record,) = ledger.enter([(["seed=1"], "seed=1")])
    entered = [record], [SweepJob(record, Needs(), lambda: None, ())]
    with pytest.raises(ZeroDivisionError if mode == "halving" else KeyError):
        launcher._launch(ledger, [["seed=1"]], 0)
    expected = {"all": [([0], None, None)], "halving": [(3, [0])]}
    expected["search"] = [([0], "enough", State.pruned), ["follows", record]]
    assert calls == expected[mode]
    if mode != "search":
        launcher.view.enter.assert_called_once_with([record], [record])
    launcher.view.show_table.assert_called_once_with(["score", "seconds"])
    assert ledger.identity().words == ("seed=1",)
    assert ("this sweep is one job; values with commas make more" in capsys.readouterr().err) == (mode != "search")


def test_what_files_say_of_the_devices_and_the_direction_of_jobs_is_refused_as_typed_words_are(
    tmp_path: Path,
) -> None:
    for key, value, says in (
        ("launcher.gpus", 2, "hydra.launcher.gpus=2 has no effect: launcher.ranks and launcher.threads say"),
        ("launcher.cores", 3, "hydra.launcher.cores=3 has no effect: launcher.ranks and launcher.threads say"),
        (
            "sweeper.direction",
            "minimize",
            "hydra.sweeper.direction=minimize, but the jobs are compared by monitor=auto",
        ),
    ):
        words = ["hydra/sweeper=optuna"] * key.startswith("sweeper")
        config = line(tmp_path, *words)
        with open_dict(config.hydra):
            OmegaConf.update(config, f"hydra.{key}", value, force_add=True)
        with pytest.raises(InputError, match=f"^{re.escape(says)}"):
            choose_folder(config)
    # What these mean is for that launcher to say.
    choose_folder(line(tmp_path, "hydra/launcher=basic", "+hydra.launcher.gpus=2", "+hydra.launcher.cores=2"))
    for key, value in (("launcher.gpus", 1), ("launcher.cores", None)):
        config = line(tmp_path)
        with open_dict(config.hydra):
            OmegaConf.update(config, f"hydra.{key}", value, force_add=True)
        choose_folder(config)


@pytest.mark.parametrize(
    ("changed", "jobs"), [([1], "job 1"), ([0, 2], "jobs 0, 2"), ([0, 1, 2], "jobs 0-2"), ([], "")]
)
def test_the_jobs_that_were_trained_with_other_code_are_named(
    changed: list[int], jobs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def code_here(names: set[str]) -> str:
        assert names == {"mine", "own"}
        return "here"

    codes: Any = {number: {"mine": {"old": number in changed}, "own": {}} for number in range(3)}
    codes[3] = {}  # of a job without code of the user
    both = {"own": "b.py", "mine": "a.py"}
    monkeypatch.setattr("lockstep.runtime.user_code.code_here", code_here)
    monkeypatch.setattr(
        "lockstep.runtime.user_code.changes",
        lambda code, here: both if code and code["mine"]["old"] and here == "here" else {},
    )
    line_of_sweep._say_other_code(codes)
    out = " ".join(capsys.readouterr().out.split())
    remedy = "sweep.resume=new trains all again; to train one again, remove its folder"
    assert out == (
        f"warning: trained with other code of mine (a.py), own (b.py): {jobs}; {remedy}" if changed else ""
    )


def test_a_search_whose_fixed_words_are_wrong_ends_and_a_defect_of_the_app_is_no_wrong_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launcher_of([], monkeypatch)
    mistake = InputError("batch is odd")
    launcher.planned = {("x=1",): InputError("x=1 is odd: batch is odd"), (): mistake}
    launcher.search = SimpleNamespace(fixed=[], left=1, follow=lambda record: pytest.fail("no other draw is tried"))
    with pytest.raises(pool_launcher.WrongJob, match=r"^job 0(: | \(x=1\): )x=1 is odd: batch is odd"):
        launcher._enter_drawn(ledger := begun(tmp_path), MagicMock(), [["x=1"]])
    assert ledger.records() == []
    launcher.planned[("y=1",)] = None, Needs()
    launcher._recorded(ledger, [["y=1"]])
    with pytest.raises(pool_launcher.WrongJob, match=r"^job 1\b.*batch is odd"):
        launcher._enter_drawn(ledger, MagicMock(), [["x=1"]])

    composed: list[list[str]] = []

    def refuse(config: object, words: list[str]) -> None:
        composed.append(words)
        raise mistake

    launcher.planned, launcher.config = {}, None
    launcher.hydra_context = SimpleNamespace(config_loader=SimpleNamespace(load_sweep_config=refuse))
    for _ in range(2):
        with pytest.raises(pool_launcher.WrongJob, match=r"^job 1\b.*batch is odd"):
            launcher._enter_drawn(ledger, MagicMock(), [["x=1"]])
    assert composed == [["x=1"], []], "each once"

    def load(config: object, words: list[str]) -> None:
        raise ZeroDivisionError("a defect")

    launcher.hydra_context = SimpleNamespace(config_loader=SimpleNamespace(load_sweep_config=load))
    launcher.config = None
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="a defect"):
            launcher._planned(["x=2"])
    assert ("x=2",) not in launcher.planned


def test_the_needs_of_a_job_are_what_its_app_says_or_the_settings_of_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs_of(config: Any, devices: Needs) -> Needs:
        asked_with.append((config, devices))
        return Needs(gpus=7)

    asked_with, loaded = list[Any](), list[Any]()
    config_loader = SimpleNamespace(load_sweep_config=lambda config, words: loaded.append(words) or f"config {words}")
    for task, needs in ((SimpleNamespace(needs=needs_of), Needs(gpus=7)), (print, Needs(gpus=2, cores=3))):
        launcher = launcher_of([], monkeypatch)
        launcher.gpus, launcher.cores, launcher.config, launcher.objectives = 2, 3, None, ["score"]
        launcher.task_function, launcher.hydra_context = task, SimpleNamespace(config_loader=config_loader)
        for _ in range(2):
            assert launcher._planned(["x=1"]) == ("config ['x=1']", needs)
    assert asked_with == [("config ['x=1']", Needs(cores=4))]
    assert loaded == [["x=1"]] * 2, "each job is composed once"


def test_a_job_that_began_as_the_stop_arrived_hears_of_it_too() -> None:
    ended, waits = EndedPool(75, 0), iter(range(3))

    def start(*facts: Any) -> FakeProcess:
        process = ended.start(*facts)
        signal.raise_signal(signal.SIGTERM)  # before the pool knows its process
        return process

    def wait(sentinels: list[int], seconds: float) -> None:
        assert next(waits, None) is not None, "nobody told the job"
        if ended.signals:
            ended.wait(sentinels, seconds)

    ended.pool.start, ended.pool.wait, ended.pool.most = start, wait, 1
    with pytest.raises(Stopped):
        ended.pool.run(ended.jobs)
    assert ended.states() == [State.stopped, State.waiting]
    assert (0, signal.SIGTERM) in ended.signals


def test_a_job_that_dies_before_its_record_begins_has_failed_too() -> None:
    ended = EndedPool(70)

    def start(_: Ledger, one: SweepJob, share: Share) -> FakeProcess:
        ended.processes[0] = FakeProcess(0, share)
        return ended.processes[0]

    ended.pool.start = start
    ended.pool.run(ended.jobs)
    assert ended.states() == [State.failed]


def test_a_job_that_ends_its_part_by_itself_waits_for_the_next_one_without_an_error() -> None:
    ended = EndedPool(75)
    ended.pool.run(ended.jobs, enough=lambda record: True, cut=State.pruned)
    record = ended.ledger.read(job(0))
    assert (record.state, record.exit_code, record.error, ended.signals) == (State.pruned, 0, "", [])
    alone = EndedPool(75)
    alone.pool.run(alone.jobs, enough=lambda record: False)
    assert alone.states() == [State.stopped]


def test_gpus_that_others_use_are_told_if_one_of_the_jobs_needs_some(capsys: pytest.CaptureFixture[str]) -> None:
    devices = Devices(["a", "b", "c"], 4, others={"c": [19], "b": [17, 18]})
    devices.check([Needs(), Needs(gpus=1)])
    assert "them: GPU 1 (process 17), GPU 2 (process 19); " in capsys.readouterr().out
    devices.check([Needs(gpus=1)])
    assert capsys.readouterr().out == "", "said once"
    assert Share(gpus=("1", "2")).environment == {VISIBLE: "1,2"}
    assert Share(gpus=("1",), cores=3, alone=True).environment == {VISIBLE: "1"}


def halved(
    ledger: Ledger, steps: dict[int, tuple[int, ...]], states: dict[int, State] | None = None
) -> list[dict[int, str]]:
    """The ends of their parts that the jobs of a halving of four have, by round; and their evaluations before it."""
    records = jobs_of_rates(ledger, 4)
    for record in records:
        (folder := ledger.folder / record.folder).mkdir()
        (folder / "summary.json").write_text('{"steps": 4}')
        lines = [{"step": step, "acc/val_top1": float(record.number)} for step in steps.get(record.number, ())]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        if states is not None:
            ledger.write(replace(record, state=states[record.number], exit_code=75))
    ran: list[dict[int, str]] = []

    def run(jobs: Sequence[SweepJob], enough: Any) -> None:
        ran.append({one.record.number: one.environment.get(RUNG_END, "all") for one in jobs})
        for one in jobs:
            share = float(one.environment.get(RUNG_END, 1))
            line = {"step": int(4 * share), "acc/val_top1": float(one.record.number)}
            with (ledger.folder / one.record.folder / "metrics.jsonl").open("a") as file:
                file.write(f"{json.dumps(line)}\n")
            ledger.end(one.record, State.done if share == 1 else State.waiting, objective=1.0 if share == 1 else None)

    halve(ledger, [ledger.record(record.number) for record in records], 2, run)
    return ran


def test_a_job_stops_at_the_end_of_its_round_and_in_the_last_one_at_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert halved(begun(tmp_path), {}) == [dict.fromkeys(range(4), "0.25"), {2: "0.5", 3: "0.5"}, {3: "all"}]
    out = capsys.readouterr().out
    assert "warning" not in out, "each was evaluated at the end of its round"
    shown = ["2 of 4 jobs continue after 25 % of their steps", "1 of 2 jobs continue after 50 % of their steps"]
    assert out.splitlines() == shown


def test_a_late_evaluation_in_the_second_round_names_the_interval_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    halved(begun(tmp_path), dict.fromkeys(range(4), (1, 4)))
    assert [line for line in capsys.readouterr().out.splitlines() if "warning" in line] == [
        "warning: round 2 of 3 was to end after 50 % of the steps, and a job was first evaluated after 100 %; "
        "train.eval_every=25% saves the steps in between"
    ]


def test_a_job_that_was_stopped_behind_its_last_evaluation_still_ends(tmp_path: Path) -> None:
    ran = halved(begun(tmp_path), dict.fromkeys(range(4), (1, 2, 3, 4)), dict.fromkeys(range(4), State.stopped))
    assert ran == [{}, {}, {3: "all"}]


def test_jobs_that_come_later_are_open_beside_those_of_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = begun(tmp_path)
    records = ledger.enter([([f"seed={number}"], f"seed={number}") for number in range(3)])
    view = SweepView(ledger)
    for record in records[:2]:
        view.enter([record], [record])
    done = ledger.write(replace(records[2], state=State.done))
    view.enter([done], [done])  # it runs again
    for record in (records[1], done, records[0]):
        view.ended(replace(record, state=State.done, started=1.0, ended=2.0))
    assert [line[:6] for line in capsys.readouterr().out.splitlines()] == ["1 of 3", "2 of 3", "3 of 3"]
    view.started(records[0])
    assert "its log" not in capsys.readouterr().out, "it is not the first one"


@pytest.mark.parametrize(("live", "tty", "is_shown"), [(True, True, False), (True, False, True), (False, True, True)])
def test_an_error_is_explained_where_it_does_not_go_into_the_live_lines(
    live: bool,
    tty: bool,
    is_shown: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger = begun(tmp_path)
    records = ledger.enter([([f"seed={number}"], f"seed={number}") for number in range(2)])
    view = view_of(ledger)
    monkeypatch.setattr(type(view.live), "is_started", live)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: tty)
    for record in records:
        view.ended(replace(record, state=State.failed, exit_code=70, error="no"))
    assert capsys.readouterr().err == "lockstep: job 0: no\n" * is_shown


def test_the_usual_time_of_a_job_is_the_mean(tmp_path: Path) -> None:
    view = SweepView(begun(tmp_path))
    view.durations, view.left = [10.0, 20.0, 60.0], 2
    assert view.seconds_left(waiting=1) == 3 * 30.0


@pytest.mark.parametrize("retry", [True, False, None])
def test_an_error_that_was_handled_before_a_sweep_began_does_not_hide_its_code(
    retry: bool | None, tmp_path: Path
) -> None:
    launcher = pool_launcher.PoolLauncher(None, 0, 1, "maximize")
    context: Any = SimpleNamespace(callbacks=SimpleNamespace(callbacks=[]))
    config = OmegaConf.create({"hydra": {}, "sweep": {"retry": retry, "objectives": ["score", "kwh"]}})
    try:
        raise KeyError
    except KeyError:
        launcher.setup(hydra_context=context, task_function=print, config=config)
        launcher.exit_code = 70
        with pytest.raises(SystemExit):
            launcher.on_multirun_end(config)
    assert (launcher.retry, launcher.halving, launcher.objectives) == (retry is True, None, ["score", "kwh"])


def test_a_draw_of_a_search_is_entered_with_the_trials_that_are_left_and_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Any] = []
    launcher, ledger = launcher_of([["x=1"]], monkeypatch), begun(tmp_path)
    launcher.search = SimpleNamespace(left=7)
    launcher.devices = SimpleNamespace(check=checked.append)
    monkeypatch.setattr(pool_launcher, "words_of_job", lambda: ["of_job=1"])
    monkeypatch.setattr(pool_launcher, "command_of_program", lambda: ["python", "app.py"])
    (one,) = launcher._enter_drawn(ledger, view := MagicMock(), [["x=1"]])
    assert one.command == ("python", "app.py", "of_job=1")
    view.enter.assert_called_once_with([one.record], [one.record], 7)
    assert checked == [[Needs()]]


def test_a_search_keeps_its_score_before_its_first_job_has_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launcher_of([], monkeypatch)
    ledger = Ledger(tmp_path)
    ledger.create(replace(ONE, figure="top1"))
    launcher.search = SimpleNamespace()
    with pytest.raises(pool_launcher.WrongJob, match="the monitors of these are -loss and top1;"):
        launcher._agree(ledger, {"-loss"})


@pytest.mark.parametrize(
    ("words", "objectives", "figure", "swept"),
    [
        (["sweep.objectives=[top1,seconds]"], ["score", "seconds"], "top1", ()),
        (["sweep.objectives=[kwh,loss,score]"], ["kwh", "-loss", "score"], "top1", ()),
        (["monitor=loss", "sweep.objectives=[top1,-loss]"], ["top1", "score"], "loss", ()),
        (["+hydra.sweeper.params.seed='1,2'"], ["score"], "top1", ("seed",)),
    ],
)
def test_a_line_compares_its_jobs_by_their_score_and_by_the_figures_that_it_names(
    words: list[str], objectives: list[str], figure: str, swept: tuple[str, ...], tmp_path: Path
) -> None:
    config = line(tmp_path, *words)
    identity = choose_folder(config).identity()
    assert [*config.sweep.objectives] == objectives
    assert (identity.figure, identity.swept) == (figure, swept)
    assert identity.direction is (Direction.minimize if figure == "loss" else Direction.maximize)


@pytest.mark.parametrize(("gpus", "cores", "of_each"), [(3, 8, 2), (3, 7, 2), (4, 3, 1), (2, 5, 2)])
def test_the_cores_beside_a_gpu_are_a_whole_part_of_those_of_the_machine(gpus: int, cores: int, of_each: int) -> None:
    devices = Devices(map(str, range(gpus)), cores)
    shares = [devices.take(Needs(gpus=1)) for _ in range(gpus)]
    assert [share and share.cores for share in shares] == [of_each] * gpus


def test_gpus_are_taken_in_their_order_and_measured_again_for_each_job_that_has_one_for_itself() -> None:
    free = {"a": 10, "b": 10, "c": 10}
    devices = Devices(free, 6, lambda gpu: free[gpu])
    assert devices.take(Needs(gpus=2)) == Share(gpus=("a", "b"), cores=4)
    devices.of_kind["x"] = 4
    share = devices.take(Needs(gpus=1, kind="x"))
    assert share == Share(gpus=("c",), cores=1, memory=4)
    devices.give_back(share)
    free["c"] = 5  # another program has begun there
    shares = [devices.take(Needs(gpus=1, kind="x")) for _ in range(2)]
    assert shares == [Share(gpus=("c",), cores=1, memory=4), None]


def test_a_job_that_took_no_memory_of_its_own_has_the_context_of_cuda(tmp_path: Path) -> None:
    (tmp_path / "000-job").mkdir()
    (tmp_path / "000-job" / "summary.json").write_text('{"gpu_memory": 0}')
    assert memory_of_job(Ledger(tmp_path), job(0, state=State.done)) == CONTEXT_BYTES


@pytest.mark.parametrize("terminal", [True, False])
def test_the_live_lines_of_a_sweep_are_there_on_a_terminal_until_its_end(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    view = SweepView(begun(tmp_path))
    for name, is_one in (("stdout", terminal), ("stderr", True)):  # a user may read the errors alone
        monkeypatch.setattr(sys, name, SimpleNamespace(isatty=lambda is_one=is_one: is_one))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("start", "stop"):
        monkeypatch.setattr(view.live, name, lambda name=name: events.append(name))

    def fail() -> None:
        with view as entered:
            assert entered is view
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert events == [*["start"] * terminal, "stop"]


@pytest.mark.parametrize(
    "words",
    [
        "hydra/launcher=basic hydra.sweep.subdir=x",
        "hydra/launcher=ray sweep.retry=true sweep.halving=2",
        "hydra/sweeper=optuna monitor=loss hydra.sweeper.direction=minimize",
        "sweep.gpu_share=true device=auto",
    ],
)
def test_what_has_an_effect_with_a_launcher_is_not_refused(words: str, tmp_path: Path) -> None:
    assert choose_folder(line(tmp_path, *words.split())).exists


def test_a_line_whose_jobs_are_all_done_has_no_job_left_and_still_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, ledger = launcher_of([["seed=1"]], monkeypatch), begun(tmp_path)
    (record,) = ledger.enter([(["seed=1"], "seed=1")])
    (tmp_path / record.folder).mkdir()
    done = ledger.end(ledger.start(record), State.done, objective=90.0)
    assert launcher._enter(ledger, [["seed=1"]], 0) == ([done], []), "None is of jobs that submit themselves"
