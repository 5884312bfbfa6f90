"""What a run of several sessions cost: sums over all of them, in its summary, its report and its sweep's report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sklearn.datasets import load_digits

from helpers import train_here
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.sweep.record import Record
from lockstep.sweep.report import costs_of
from lockstep.telemetry.progress import format_duration
from lockstep.telemetry.report import facts_of

JOB = ("model=linear", "batch=100", "steps=40", "train.eval_every=10")
TRAINED = 1442  # of the 1,797 digits, see docs/configuration.md
# In an epoch of 15 steps, the last one has what is left.
IMAGES = sum(100 if step % 15 else TRAINED - 1400 for step in range(1, 41))


def summary(run: RunDir) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run.summary.read_text())
    return content


def test_the_figures_of_a_run_are_sums_over_its_sessions(tmp_path: Path) -> None:
    assert len(load_digits().target) == 1797
    sessions = []
    for stop_at in (7, 13, None):  # 20 steps are left
        run = train_here(tmp_path / "000-run", *JOB, stop_at=stop_at)
        sessions.append(summary(run))
    parts = [one["spent"] for one in sessions]
    for key in ("hours", "images", "training_seconds"):
        assert 0 < parts[0][key] < parts[1][key] < parts[2][key]
    assert [part["images"] for part in parts] == [700, 700 + 1300 - 58, IMAGES]
    last, spent = sessions[-1], parts[-1]
    assert last["seconds"] == pytest.approx(3600 * spent["hours"], abs=1e-3)
    assert last["img_per_s"] == pytest.approx(IMAGES / spent["training_seconds"], rel=1e-3)
    waits = 100 * spent["waiting_seconds"] / spent["training_seconds"]
    assert last["data_wait_pct"] == pytest.approx(waits, abs=1e-3)
    assert ("duration", format_duration(last["seconds"])) in facts_of(Run(run.path))["summary"]
    record = Record(number=0, overrides=(), folder=run.path.name)
    assert costs_of(Run(tmp_path / record.folder))["seconds"] == last["seconds"]
