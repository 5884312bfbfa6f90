"""The profile of a few steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from helpers import train_here
from lockstep.telemetry import profile
from lockstep.telemetry.profile import gpu_shares


def launch(number: int, at: float) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1, "args": {"correlation": number}}


def kernel(number: int, begin: float, end: float, name: str = "gemm") -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": {"correlation": number}}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], {}),
        ([launch(1, 0), {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5}], {}),
        ([launch(1, 0), kernel(1, 10, 20)], {"computing": 1.0}),
        # The second kernel was launched at 30, when the GPU had been idle for 10.
        (
            [launch(1, 0), kernel(1, 10, 20), launch(2, 30), kernel(2, 40, 60)],
            {"computing": 0.6, "waiting_for_host": 0.4},
        ),
        # It was launched in time, and waited for something else.
        (
            [launch(1, 0), launch(2, 5), kernel(1, 10, 20), kernel(2, 40, 60)],
            {"computing": 0.6, "waiting_for_kernel": 0.4},
        ),
        # Half of the communication is hidden behind a kernel.
        (
            [launch(1, 0), launch(2, 1), kernel(1, 10, 20), kernel(2, 15, 30, "ncclDevKernel_AllReduce")],
            {"computing": 0.5, "communicating": 0.5},
        ),
    ],
)
def test_the_time_of_a_gpu_is_split_as_in_holistic_trace_analysis(
    events: list[dict[str, Any]], expected: dict[str, float]
) -> None:
    parts = gpu_shares(events)
    assert {name: part for name, part in parts.items() if part} == pytest.approx(expected)
    assert not parts or sum(parts.values()) == pytest.approx(1)


def test_a_profile_is_a_trace_and_a_table_and_changes_no_bit(tmp_path: Path) -> None:
    job = ("model=linear", "steps=12", "batch=50", "precision=fp64")
    plain = train_here(tmp_path / "plain", *job)
    profiled = train_here(tmp_path / "profiled", *job, "telemetry.profile=true")
    folder = profiled.logs / "profile"
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::addmm") == profile.STEPS
    assert "aten::addmm" in (folder / "operators.txt").read_text()
    assert profiled.weights.read_bytes() == plain.weights.read_bytes()
    assert not (plain.logs / "profile").exists()
