"""Sweeps as the command runs them: a pool of jobs, a folder and a record for each, and a line that goes on."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from helpers import Done, forked, losses, on_a_terminal, train_here, weights
from lockstep.core.run import State
from lockstep.core.safe_write import Lock
from lockstep.records.ledger import Ledger
from lockstep.records.record import Record
from lockstep.runtime.signals import AGAIN_S
from lockstep.sweeps.pool import to_run
from processes import FORKS, PATIENCE, background, close, ended, processes, ranks, wait_for

SHORT = ("steps=3", "telemetry.interval=1", "device=cpu", "logger=jsonl", "launcher.threads=1")
LONG = (
    "device=cpu",
    "epochs=1000",
    "schedule=constant",
    "telemetry.interval=1",
    "checkpoint.every=5",
    "model=linear",
)


def ledger(root: Path) -> Ledger:
    """The ledger of the one sweep in an output root."""
    (folder,) = (root / "sweeps").iterdir()
    return Ledger(folder)


def states(root: Path) -> list[str]:
    return [record.state for record in ledger(root).records()]


def sweep(root: Path, *overrides: str, program: tuple[str, ...] = ("train.py",), **environment: str) -> Done:
    words = (*program, "-m", *overrides, f"output_root={root}")
    process = background(root, sys.executable, *words, **environment)
    try:
        out, err = process.communicate(timeout=PATIENCE)
        return Done(process.wait(), out, err)
    finally:
        close([process])


def files(folder: Path) -> dict[Path, int]:
    """The files below a folder, with the times of their last change."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    root = tmp_path_factory.mktemp("seeds")
    return root, sweep(root, "model=digitnet,basicnet", "seed=1,2", "strategy=ddp", *SHORT)


def test_each_job_of_a_sweep_has_a_folder_named_by_what_it_varies(seeds: tuple[Path, Done]) -> None:
    root, done = seeds
    assert done.code == 0, done.err
    names = [f"model={model},seed={seed}" for model in ("digitnet", "basicnet") for seed in (1, 2)]
    assert [record.folder for record in ledger(root).records()] == [f"{n:03}-{name}" for n, name in enumerate(names)]
    for record in ledger(root).records():
        summary = json.loads((ledger(root).folder / record.folder / "summary.json").read_text())
        assert (summary["status"], summary["objective"]) == ("completed", record.objective)
        assert re.fullmatch(r"[\w.,=+-]+", record.folder), "a shell takes the name without quotes"


def test_a_sweep_ends_with_a_table_of_its_jobs_and_its_seeds_together(seeds: tuple[Path, Done]) -> None:
    root, done = seeds
    folder = ledger(root).folder
    assert f"sweep in {folder}\n" in done.out
    table = done.out[done.out.index("sweep in") :]
    for jobs, model in (("0, 1", "digitnet"), ("2, 3", "basicnet")):
        assert re.search(rf"^{jobs}  {model} +\d+\.\d\d ± \d+\.\d\d  2 done", table, re.MULTILINE)
    best = max(ledger(root).records(), key=lambda record: record.objective or 0)
    assert f"best: job {best.number} with {best.objective:.2f} % top-1, {folder / best.folder}\n" in done.out


def test_a_sweep_is_compared_and_listed_and_its_best_is_used(seeds: tuple[Path, Done]) -> None:
    root, _ = seeds
    folder, records = ledger(root).folder, ledger(root).records()
    compared = forked("lockstep", "compare", str(folder), "--json")
    assert compared.code == 0, compared.err
    assert {(row["model"], row["done"]) for row in json.loads(compared.out)} == {("digitnet", 2), ("basicnet", 2)}
    listed = forked("lockstep", "runs", str(folder), "--filter", "seed=1", "--sort", "score")
    assert [int(line.split()[0]) for line in listed.out.splitlines()[1:-1]] == [
        record.number for record in sorted(records[::2], key=lambda record: -(record.objective or 0))
    ]
    one = forked("lockstep", "runs", f"{folder}/2")
    assert f"lockstep evaluate {folder}/2\n" in one.out, one.err
    best = max(records, key=lambda record: record.objective or 0)
    assert (folder / "best").read_text() == f"{best.folder}\n"
    used = forked("lockstep", "evaluate", str(folder / "best"), "--out", str(root))
    assert f"top-1 {best.objective:.2f} %" in used.out, used.err
    for words in (("compare", str(root / "no")), ("runs", str(root / "no")), ("compare", str(folder), "--by", "x")):
        refused = forked("lockstep", *words)
        assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)


def test_ranks_are_told_the_run_folder_and_parse_no_command_line(seeds: tuple[Path, Done]) -> None:
    root, _ = seeds
    for run in root.glob("sweeps/*/0*"):
        assert "ranks  2 processes on the CPU by DDP" in (run / "train.log").read_text()
        assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank0.log", "rank1.log"]
        # What only a parser of the command line could know is in the folder already, resolved.
        assert "${" not in (run / "config.yaml").read_text()


def test_no_process_of_a_sweep_stays_alive(seeds: tuple[Path, Done]) -> None:
    assert processes(seeds[0]) == set()


@pytest.mark.slow
def test_the_same_line_runs_only_what_is_new_and_a_job_is_the_run_that_it_is_alone(tmp_path: Path) -> None:
    first = sweep(tmp_path, "seed=1,2", "model=linear", *SHORT)
    assert first.code == 0, first.err
    before = files(ledger(tmp_path).folder / "000-seed=1")
    refused = sweep(tmp_path, "seed=1,2,x", "model=linear", *SHORT)
    assert refused.code == 2
    assert "seed=1,2" in ledger(tmp_path).identity().words, "a refused line is none to go on with"
    record = ledger(tmp_path).records()[1]
    ledger(tmp_path).start(dataclasses.replace(record, objective=None))  # killed behind the end of its run
    path = ledger(tmp_path).folder / "jobs" / "001.json"
    path.write_text(path.read_text().replace(f'"pid": {os.getpid()}', '"pid": 999999999'))
    same = ("telemetry.report=never", "cost.usd_per_gpu_hour=2", "hydra.launcher.jobs=1", "launcher.threads=1")
    again = sweep(tmp_path, "seed=2,1,2", "model=linear", *SHORT, *same)  # a job that is there twice is one job
    assert (again.code, "started" in again.out) == (0, False), again.err
    assert ledger(tmp_path).records()[1].objective == record.objective
    assert files(ledger(tmp_path).folder / "000-seed=1") == before
    more = sweep(tmp_path, "seed=1,2,3", "model=linear", *SHORT)
    assert more.out.count("started") == 1
    assert [record.folder for record in ledger(tmp_path).records()] == ["000-seed=1", "001-seed=2", "002-seed=3"]
    alone = train_here(tmp_path / "alone", "seed=3", "model=linear", *SHORT)
    swept = ledger(tmp_path).folder / "002-seed=3"
    assert losses(swept) == losses(alone)
    assert all(torch.equal(tensor, weights(swept)[name]) for name, tensor in weights(alone).items())


def test_a_wrong_job_is_named_before_any_starts_and_nothing_is_left(tmp_path: Path) -> None:
    done = sweep(tmp_path, "batch=64,32", "optimizer.lr=0.1,-1", *SHORT)
    assert done.code == 2
    assert done.err.startswith("lockstep: job 1 (batch=64 optimizer.lr=-1): optimizer.lr is -1, expected auto or")
    assert not (tmp_path / "sweeps").exists()


@pytest.mark.slow
def test_a_failed_job_ends_no_sweep_and_is_tried_again_on_request(tmp_path: Path) -> None:
    words = ("precision=fp16,fp32", "strategy=single", *SHORT)
    done = sweep(tmp_path, *words)
    sentence = "precision=fp16 needs a CUDA GPU, but device is cpu; use precision=bf16 or precision=fp32"
    assert done.code == 2
    assert done.err == f"lockstep: job 0: {sentence}\n"
    assert states(tmp_path) == ["failed", "done"]
    assert re.search(r"^ *0 +fp16 +failed *$", done.out, re.MULTILINE)
    assert done.out.endswith(f"job 0: {sentence}\n")
    assert not (ledger(tmp_path).folder / "000-precision=fp16").exists()
    again = sweep(tmp_path, *words)
    assert (again.code, "started" in again.out) == (2, False)
    assert "1 failed (sweep.retry=true tries them again)" in again.out
    assert sweep(tmp_path, *words, "sweep.retry=true").out.count("started") == 1
    narrower = sweep(tmp_path, "precision=fp32,fp64", *words[1:])
    assert (narrower.code, narrower.out.count("started"), len(states(tmp_path))) == (0, 1, 3), (
        "the code is that of the line"
    )
    assert processes(tmp_path) == set()


@pytest.mark.slow
def test_another_line_is_another_sweep_and_is_refused_where_one_is_named(tmp_path: Path) -> None:
    assert sweep(tmp_path, "seed=1,2", "model=linear", *SHORT).code == 0
    folder = ledger(tmp_path).folder
    refused = sweep(tmp_path, "seed=1,2", "model=linear", "batch=32", *SHORT, f"sweep.resume={folder}")
    assert refused.code == 2
    assert f"{folder} has another sweep: batch is 64 there and 32 here; type its line (" in refused.err
    without_its_line = sweep(tmp_path, "sweep.resume=latest")
    assert (without_its_line.code, "started" in without_its_line.out) == (0, False)
    assert "\n0, 1 " in without_its_line.out
    assert sweep(tmp_path, "seed=1,2", "model=linear", *SHORT, "sweep.resume=new").code == 0
    assert len(list((tmp_path / "sweeps").iterdir())) == 2
    one_job = "this sweep is one job; values with commas make more, such as KEY=1,2"
    assert one_job not in refused.err + without_its_line.err
    assert one_job in sweep(tmp_path, "seed=1", "model=linear", *SHORT).err


def test_a_refused_line_removes_nothing_of_a_sweep_that_another_one_has_just_begun(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    here = f"hydra.sweep.dir={folder}"
    with closing(Lock()) as lock:
        lock.take(folder / ".lock")
        refused = sweep(tmp_path, "seed=1,2", here, *SHORT)
        assert (refused.code, "is in use by another sweep" in refused.err) == (2, True), refused.err
        assert Ledger(folder).exists
    other = sweep(tmp_path, "batch=32,64", here, *SHORT)
    assert (other.code, "has another sweep: it sweeps seed" in other.err) == (2, True), other.err
    assert Ledger(folder).exists


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("-m", "name='${oc.env:HOME}',b"), "name asks for ${oc.env:...}, which is not allowed; write name=VALUE"),
        (("-m", "sweep.retry=1,2"), "sweep.retry=1,2: all jobs of a sweep share sweep.retry; give it"),
        (("-m", "seed=range(5,1)"), "this line has no job: a range(...) or glob(...) in it has no value"),
        (
            ("-m", "optimizer.lr=interval(0,1)"),
            "is an interval, which only a search draws from; use hydra/sweeper=op",
        ),
        (("-m", "seed=1,2", "hydra.launcher.jobs=0"), "hydra.launcher.jobs is 0, expected a whole number from 1"),
        (("sweep.retry=true",), "sweep.* applies only to sweeps; add -m"),
    ],
)
def test_what_cannot_go_on_is_refused(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    process = background(tmp_path, sys.executable, "train.py", *words, f"output_root={tmp_path}")
    code, err = ended(process)
    assert (code, sentence in err) == (2, True), err
    assert not list(tmp_path.iterdir())


def started(root: Path, number: int) -> Record | None:
    """The record of a job of the sweep that has saved a checkpoint."""
    for record in ledger(root).records() if list(root.glob("sweeps/*/sweep.json")) else ():
        if record.number == number and (ledger(root).folder / record.folder / "checkpoints" / "last").exists():
            return record
    return None


def test_a_killed_job_ends_no_sweep_and_an_interrupt_saves_the_jobs_and_ends_it(tmp_path: Path) -> None:
    process = background(tmp_path, sys.executable, "train.py", "-m", "seed=1,2,3", *LONG, f"output_root={tmp_path}")
    for number, name in enumerate((signal.SIGKILL, signal.SIGINT)):
        wait_for(functools.partial(started, tmp_path, number))
        (job,) = ranks(tmp_path, process)
        commands = {Path(f"/proc/{pid}/cmdline").read_text() for pid in (job, process.pid)}
        assert (len(commands) == 1) == FORKS
        os.kill(job if name is signal.SIGKILL else process.pid, name)
    code, err = ended(process)
    assert code == 75, err
    assert "stopped; running jobs are saved. Rerun the command to continue" in err
    assert states(tmp_path) == ["failed", "stopped", "waiting"]
    error = ledger(tmp_path).records()[0].error
    assert "was killed (SIGKILL), probably because the machine, or its memory cgroup (container), ran out" in error
    assert "use train.micro_batches=auto" in error, "it ran alone"
    assert processes(tmp_path) == set()


@pytest.mark.slow
def test_a_killed_sweep_leaves_nothing_alive_and_its_line_goes_on_where_each_job_was(tmp_path: Path) -> None:
    words = ("-m", "seed=1,2", *LONG, "model=linear", "steps=150", "launcher.threads=1", f"output_root={tmp_path}")
    process = background(tmp_path, sys.executable, "train.py", *words)
    wait_for(functools.partial(started, tmp_path, 0))
    os.kill(process.pid, signal.SIGKILL)
    ended(process)
    wait_for(lambda: processes(tmp_path) == set())
    assert State.running in states(tmp_path)
    done = sweep(tmp_path, *words[1:-1])
    assert done.code == 0, done.err
    assert states(tmp_path) == ["done", "done"]
    steps = losses(ledger(tmp_path).folder / "000-seed=1")
    assert len(steps) == 150, "each step is in the log once"


@pytest.mark.slow
def test_halving_ends_with_the_winner_of_the_grid_whose_run_is_the_one_that_it_is_alone(tmp_path: Path) -> None:
    rates = ("0.00001", "0.003", "0.0001", "0.0003")
    words = ("model=linear", "steps=80", "train.eval_every=12.5%", *SHORT[1:])
    line = (f"optimizer.lr={','.join(rates)}", *words, "sweep.halving=2")
    done = sweep(tmp_path, *line)
    assert done.code == 0, done.err
    assert "2 of 4 jobs continue after 25 % of their steps" in done.out
    assert "1 of 2 jobs continue after 50 % of their steps" in done.out
    assert states(tmp_path) == ["pruned", "done", "pruned", "pruned"]
    folder = ledger(tmp_path).folder
    trained = [len(losses(folder / record.folder)) for record in ledger(tmp_path).records()]
    assert (sorted(trained), trained[1]) == ([20, 20, 40, 80], 80), "a job ends at its round's end, to the step"
    alone = train_here(tmp_path / "alone", "optimizer.lr=0.003", *words)
    assert losses(folder / "001-optimizer.lr=0.003") == losses(alone)
    swept = weights(folder / "001-optimizer.lr=0.003")
    assert all(torch.equal(tensor, swept[name]) for name, tensor in weights(alone).items())
    assert "  paused  in 0:" in done.out
    before = files(folder / "001-optimizer.lr=0.003")
    again = sweep(tmp_path, *line)
    assert (again.code, "started" in again.out) == (0, False)
    whole = sweep(tmp_path, *line[:-1])  # those that were left behind go on too
    assert (whole.code, states(tmp_path)) == (0, ["done"] * 4)
    assert files(folder / "001-optimizer.lr=0.003") == before
    best = max(ledger(tmp_path).records(), key=lambda record: record.objective or 0)
    assert best.number == 1


@pytest.mark.slow
def test_the_sentences_of_halving_stand_above_the_live_lines(tmp_path: Path) -> None:
    words = ("optimizer.lr=1e-3,1e-2,2e-2,3e-2", "model=linear", *SHORT, "train.eval_every=25%", "sweep.halving=2")
    code, shown = on_a_terminal("-m", *words, f"output_root={tmp_path}")
    assert code == 0
    for sentence in ("2 of 4 jobs continue", "1 of 2 jobs continue"):
        before = shown[: shown.index(sentence)].replace("\x1b[2K", "").replace("\x1b[1A", "")
        assert before[-1] in "\r\n", before[-80:]


def test_a_job_that_is_done_before_its_round_ends_is_not_run_again(tmp_path: Path) -> None:
    done = sweep(
        tmp_path, "optimizer.lr=0.0001,0.01", "model=linear", *SHORT, "train.eval_every=1", "sweep.halving=2"
    )
    assert done.code == 0, done.err
    assert "1 of 2 jobs continue after 50 % of their steps" in done.out
    assert states(tmp_path)[1] == "done"


def rows(out: str) -> int:
    """The jobs that are done in the table of a sweep."""
    return len(re.findall(r"^ +\d .* done\b", out, re.MULTILINE))


@pytest.mark.slow
def test_a_search_runs_its_trials_as_jobs_and_the_same_line_goes_on_with_it(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    space = ("optimizer.lr=tag(log,interval(1e-4,0.1))", "optimizer=adamw,sgd", "model=linear", *SHORT)
    words = ("hydra/sweeper=optuna", *space, "hydra.sweeper.n_jobs=2")
    done = sweep(tmp_path, *words, "hydra.sweeper.n_trials=3")
    assert done.code == 0, done.err
    assert (states(tmp_path), done.out.count("sweep in ")) == (["done"] * 3, 1)
    folder = ledger(tmp_path).folder
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "optuna.log")))
    study = optuna.load_study(study_name=None, storage=storage)  # there is one
    assert [trial.value for trial in study.trials] == [record.objective for record in ledger(tmp_path).records()]
    more = sweep(tmp_path, *words, "hydra.sweeper.n_trials=4")
    assert (more.code, more.out.count("started"), rows(more.out)) == (0, 1, 4), more.out
    again = sweep(tmp_path, *words, "hydra.sweeper.n_trials=4")
    assert (again.code, again.out.count("started"), rows(again.out)) == (0, 0, 4)


APP = """
import os, signal, time
import hydra

@hydra.main(config_path=None)
def app(config):
    print(f"x is {config.x}")
    if config.x == 2:
        os.kill(os.getpid(), 9)
    if config.x == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if config.x in ("deaf", "suspended"):
        print(flush=True)
        os.kill(os.getpid(), signal.SIGSTOP if config.x == "suspended" else 0)
        time.sleep(1000)
    return config.x * 10.0

app()
"""


@pytest.mark.slow
def test_any_hydra_app_can_use_the_pool(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    words = ("-m", "+x=1,2,3", "hydra/launcher=pool", "hydra.output_subdir=null", f"hydra.sweep.dir={tmp_path}/sweep")
    words += ("hydra.launcher.direction=minimize",)
    process = background(tmp_path, sys.executable, "app.py", *words, cwd=tmp_path, afresh=True)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 70, "that of the first job that failed"
    records = Ledger(tmp_path / "sweep").records()
    assert [record.objective for record in records] == [10.0, None, 30.0]
    assert "was killed (SIGKILL)" in records[1].error
    assert Ledger(tmp_path / "sweep").best == records[0].folder
    assert (tmp_path / "sweep" / "jobs" / "002.log").read_text() == "x is 3\n"


@pytest.mark.parametrize(("value", "code"), [("deaf", 130), ("suspended", 75)])
def test_a_job_that_hears_no_signal_can_be_stopped_and_the_same_line_goes_on(
    tmp_path: Path, value: str, code: int
) -> None:
    (tmp_path / "app.py").write_text(APP)
    words = ("-m", f"+x={value}", "hydra/launcher=pool", "hydra.output_subdir=null", f"hydra.sweep.dir={tmp_path}/s")
    process = background(tmp_path, sys.executable, "app.py", *words, cwd=tmp_path)
    output = tmp_path / "s" / "jobs" / "000.log"
    wait_for(lambda: output.exists() and "\n\n" in output.read_text())
    os.kill(process.pid, signal.SIGINT)
    if value == "deaf":
        time.sleep(2 * AGAIN_S)  # one Ctrl-C can arrive twice, and a busy machine can handle the first one late
        os.kill(process.pid, signal.SIGINT)
    assert ended(process)[0] == code
    (record,) = Ledger(tmp_path / "s").records()
    assert (record.state, record.exit_code, to_run([record], retry=False)) == (State.stopped, code, [record])
    assert processes(tmp_path) == set()
