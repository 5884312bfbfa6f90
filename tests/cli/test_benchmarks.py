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
