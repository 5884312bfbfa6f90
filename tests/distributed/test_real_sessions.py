"""A run of several real sessions, one of them killed: what it cost, which options it has, and which weights."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from helpers import records, train
from processes import INLINE, LONG, ended, running, start, steps_done, summary, wait_for

pytestmark = pytest.mark.slow


def number(folder: Path, key: str) -> float:
    """A number of the summary."""
    return float(str(summary(folder)[key]))


def test_the_seconds_of_a_run_are_those_that_its_sessions_took(tmp_path: Path) -> None:
    folder, job = tmp_path / "run", (*INLINE, *LONG, "checkpoint.every=1")
    began = time.monotonic()
    process = running(folder, *job, steps=8)
    process.send_signal(signal.SIGKILL)
    ended(process)
    killed = number(folder, "seconds")
    assert 0 < killed <= time.monotonic() - began

    again, done = time.monotonic(), steps_done(folder)
    process = start(folder, *job)
    wait_for(
        lambda: process.poll() is not None or (summary(folder)["status"] == "running" and number(folder, "step"))
    )
    trains = time.monotonic()
    wait_for(lambda: process.poll() is not None or steps_done(folder) >= done + 20)
    least = time.monotonic() - trains
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 75
    stopped = number(folder, "seconds")
    assert least <= stopped - killed <= time.monotonic() - again

    last = time.monotonic()
    done = int(number(folder, "step"))
    resumed = train("resume=latest", f"steps={done + 3}", f"output_root={tmp_path}", "telemetry.report=always")
    assert resumed.code == 0, resumed.err
    assert 0 < number(folder, "seconds") - stopped <= time.monotonic() - last
    assert "duration" in (folder / "report.html").read_text()
    assert [line["step"] for line in records(folder) if "loss/train" in line] == [*range(1, done + 4)]
