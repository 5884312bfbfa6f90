"""Sweeps as the command runs them: one folder per job, a table, nothing left alive."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from helpers import Done
from processes import FORKS, PATIENCE, background, close, ended, processes, ranks, wait_for


def jobs(root: Path) -> list[str]:
    """The names of the run folders of the one sweep in an output root."""
    (sweep,) = (root / "sweeps").iterdir()
    return sorted(path.name for path in sweep.iterdir() if path.is_dir())


def sweep(root: Path, *overrides: str) -> Done:
    words = ("-m", *overrides, "steps=3", "device=cpu", "logger=jsonl", f"output_root={root}")
    process = background(root, sys.executable, "train.py", *words)
    try:
        out, err = process.communicate(timeout=PATIENCE)
        return Done(process.wait(), out, err)
    finally:
        close([process])


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    root = tmp_path_factory.mktemp("seeds")
    return root, sweep(root, "model=digitnet,basicnet", "seed=1,2", "strategy=ddp")


def test_each_job_of_a_sweep_has_a_folder_that_says_what_it_is(seeds: tuple[Path, Done]) -> None:
    root, done = seeds
    assert done.code == 0, done.err
    common = "strategy=ddp,steps=3,device=cpu,logger=jsonl"
    four = [f"model={model},seed={seed}" for model in ("digitnet", "basicnet") for seed in (1, 2)]
    assert jobs(root) == [f"{number:03}-{varied},{common}" for number, varied in enumerate(four)]
    for summary in root.glob("sweeps/*/*/summary.json"):
        assert json.loads(summary.read_text())["status"] == "completed"


def test_a_sweep_ends_with_a_table_of_its_jobs(seeds: tuple[Path, Done]) -> None:
    root, done = seeds
    (folder,) = (root / "sweeps").iterdir()
    assert f"sweep in {folder}\n" in done.out
    table = done.out[done.out.index("sweep in") :]
    for number in range(4):
        assert re.search(rf"^│ {number} +│ .*seed={number % 2 + 1} .*│ +\d+\.\d\d +│ done +│$", table, re.MULTILINE)


def test_ranks_are_told_the_run_folder_and_parse_no_command_line(seeds: tuple[Path, Done]) -> None:
    root, _ = seeds
    for run in root.glob("sweeps/*/0*"):
        assert "ranks  2 processes on the CPU by DDP" in (run / "train.log").read_text()
        assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank0.log", "rank1.log"]
        # What only a parser of the command line could know is in the folder already, resolved.
        assert "${" not in (run / "config.yaml").read_text()


def test_no_process_of_a_sweep_stays_alive(seeds: tuple[Path, Done]) -> None:
    assert processes(seeds[0]) == set()


def test_a_failing_job_is_reported_and_does_not_end_the_sweep(tmp_path: Path) -> None:
    done = sweep(tmp_path, "precision=fp16,fp32", "strategy=single")
    sentence = "precision=fp16 needs a CUDA GPU, but device is cpu; use precision=bf16 or precision=fp32"
    assert done.code == 2
    assert done.err == f"lockstep: job 0: {sentence}\n"
    (folder,) = jobs(tmp_path)
    assert folder.startswith("001-precision=fp32")
    assert re.search(r"^│ 0 +│ .*precision=fp16 .*│ +│ failed \(2\) +│$", done.out, re.MULTILINE)
    assert re.search(r"^│ 1 +│ .*precision=fp32 .*│ done +│$", done.out, re.MULTILINE)
    assert done.out.endswith(f"job 0: {sentence}\n")
    (ledger,) = tmp_path.glob("sweeps/*/jobs.jsonl")
    assert [json.loads(line)["exit_code"] for line in ledger.read_text().splitlines()] == [2, 0]
    assert processes(tmp_path) == set()


def begun(root: Path, number: int) -> bool:
    """Whether a job of the sweep has finished a step."""
    return any(path.read_text() for path in root.glob(f"sweeps/*/{number:03}*/metrics.jsonl"))


def test_a_killed_job_ends_no_sweep_and_an_interrupt_saves_the_job_and_ends_it(tmp_path: Path) -> None:
    words = ("-m", "seed=1,2,3", "device=cpu", "epochs=1000", "schedule=constant", "telemetry.interval=1")
    process = background(tmp_path, sys.executable, "train.py", *words, f"output_root={tmp_path}")
    for number, name in enumerate((signal.SIGKILL, signal.SIGINT)):
        wait_for(functools.partial(begun, tmp_path, number))
        (rank,) = ranks(tmp_path, process)
        commands = {Path(f"/proc/{pid}/cmdline").read_text() for pid in (rank, process.pid)}
        assert (len(commands) == 1) == FORKS
        os.kill(rank if name is signal.SIGKILL else process.pid, name)
    code, err = ended(process)
    assert code == 75, err
    (ledger,) = tmp_path.glob("sweeps/*/jobs.jsonl")
    assert [json.loads(line)["exit_code"] for line in ledger.read_text().splitlines()] == [70, 75]
    states = [json.loads(path.read_text())["status"] for path in sorted(tmp_path.glob("sweeps/*/00*/summary.json"))]
    assert states == ["failed", "stopped"]
    assert list(tmp_path.glob("sweeps/*/001*/checkpoints/last"))
    assert processes(tmp_path) == set()
