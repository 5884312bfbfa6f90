"""The benchmarks that need other hardware than CI has: that they run, and say so where they cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from helpers import command

pytestmark = pytest.mark.slow


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_the_gpu_benchmark_says_that_there_is_no_gpu() -> None:
    done = command(sys.executable, "benchmarks/gpu.py")
    assert done.code == 2
    assert done.err == "torch finds no CUDA GPU here; --device cpu shows that the benchmark runs\n"


def test_the_gpu_benchmark_compares_lockstep_with_a_raw_loop(tmp_path: Path) -> None:
    kept = tmp_path / "gpu.json"
    small = ("--device", "cpu", "--model", "resnet10t", "--sizes", "32", "--batch", "4", "--steps", "3")
    quick = ("--interval", "1", "--repeats", "1", "--no-compile", "--precisions", "fp32", "--json", str(kept))
    done = command(sys.executable, "benchmarks/gpu.py", *small, *quick)
    assert done.code == 0, done.err
    rows = json.loads(kept.read_text())["resnet10t at 32, batch 4"]
    assert rows.keys() == {"fp32", "fp32, channels_last"}
    assert all(row["raw, img/s"] > 0 and row["lockstep, img/s"] > 0 for row in rows.values())


def test_the_gpu_check_passes_where_it_needs_no_gpu(tmp_path: Path) -> None:
    kept = tmp_path / "check.json"
    steps = ("strict", "hooks", "ranks", "resume", "memory", "stop")
    small = ("--device", "cpu", "--only", ",".join(steps), "--json", str(kept))
    done = command(sys.executable, "benchmarks/gpu_check.py", *small, timeout=580)
    assert done.code == 0, done.out + done.err
    verdicts = {name: each["verdict"] for name, each in json.loads(kept.read_text())["steps"].items()}
    assert verdicts == {**dict.fromkeys(steps, "passed"), "memory": "left out"}


def test_the_gpu_check_ends_a_step_and_all_its_processes_when_its_time_is_over(tmp_path: Path) -> None:
    kept = tmp_path / "check.json"
    short = ("--device", "cpu", "--only", "default,stop", "--budget", "5", "--json", str(kept))
    done = command(sys.executable, "benchmarks/gpu_check.py", *short, TMPDIR=str(tmp_path))
    assert done.code == 0, done.out + done.err
    steps = json.loads(kept.read_text())["steps"]
    assert {name: each["found"] for name, each in steps.items()} == {
        "default": "--budget ended it after 5 s",
        "stop": "the 5 s of --budget are over",
    }
    environments = (path for path in Path("/proc").glob("[0-9]*/environ"))
    assert not [path for path in environments if marked_with(path, str(tmp_path))]


def marked_with(environment: Path, text: str) -> bool:
    try:
        return f"LOCKSTEP_GPU_CHECK={text}".encode() in environment.read_bytes()
    except OSError:  # it ended just now, or is someone else's
        return False


def test_the_gpu_check_says_which_steps_there_are() -> None:
    done = command(sys.executable, "benchmarks/gpu_check.py", "--only", "strict,speed")
    assert done.code == 2
    assert "there is no step 'speed'; the steps are default, strict, " in done.err
