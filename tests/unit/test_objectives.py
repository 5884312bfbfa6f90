"""What a sweep compares its jobs by, and its trade-offs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.errors import InputError
from lockstep.core.monitor import Direction
from lockstep.core.run import State
from lockstep.sweep.ledger import Identity, Ledger
from lockstep.sweep.record import check_objectives, objectives_of, trade_offs
from lockstep.sweep.view import SweepView

NAMES = ("score", "seconds", "megabytes")
FIGURES = st.lists(st.integers(0, 4).map(float), min_size=3, max_size=3)


@settings(max_examples=50)
@given(st.dictionaries(st.integers(0, 20), FIGURES, max_size=8), st.sampled_from(Direction))
def test_the_trade_offs_are_the_jobs_that_no_other_beats(jobs: dict[int, list[float]], direction: Direction) -> None:
    sign = 1 if direction is Direction.maximize else -1

    def beats(one: list[float], other: list[float]) -> bool:
        gains = (sign * (one[0] - other[0]), other[1] - one[1], other[2] - one[2])
        return min(gains) >= 0 and max(gains) > 0

    expected = {number for number, job in jobs.items() if not any(beats(other, job) for other in jobs.values())}
    chosen = trade_offs(jobs, NAMES, direction)
    assert {*chosen} == expected
    scores = [jobs[number][0] for number in chosen]
    assert scores == sorted(scores, reverse=direction is Direction.maximize)


def sweep(folder: Path) -> Ledger:
    """Three jobs: a good one, a quick one, and one that is neither; and one that failed."""
    ledger = Ledger(folder)
    ledger.create(Identity(base={}, swept=("lr",), words=("lr=1,2,3,4",)))
    records = ledger.enter([([f"lr={number}"], f"lr={number}") for number in range(1, 5)])
    for record, score, milliseconds in zip(records, (90.0, 50.0, 40.0), (200, 10, 100), strict=False):
        path = folder / record.folder
        path.mkdir()
        lines = [f'{{"step": {step}, "perf/step_ms": {milliseconds}}}' for step in (20, 50)]
        (path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 50, "loss/val": 1}']) + "\n")
        (path / "model.safetensors").write_bytes(bytes(2_000_000))
        ledger.end(record, State.done, objective=score)
    ledger.end(records[3], State.failed, exit_code=2, error="it is wrong")
    return ledger


def test_the_table_names_the_trade_offs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = sweep(tmp_path)
    assert objectives_of(ledger.folder, ledger.records()[0], NAMES) == [90.0, pytest.approx(10.0), 2.0]
    assert objectives_of(ledger.folder, ledger.records()[3], NAMES) == []
    SweepView(ledger, ledger.records()).show_table(["score", "seconds"])
    out = capsys.readouterr().out
    assert re.search(r"^0 +lr=1 +90\.00 +10 +done *$", out, re.MULTILINE)
    assert "no other job is better in score and seconds than jobs 0, 1\n" in out
    SweepView(ledger, ledger.records()).show_table()
    assert "no other job" not in capsys.readouterr().out


def test_energy_is_an_objective_where_it_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = sweep(tmp_path)
    energies = ({"kwh": 0.5}, {"kwh": 0.25}, {"hours": 1.0})
    for record, energy in zip(ledger.records(), energies, strict=False):
        (tmp_path / record.folder / "summary.json").write_text(json.dumps({"spent": energy}))
    SweepView(ledger, ledger.records()).show_table(["score", "kwh"])
    out = capsys.readouterr().out
    assert "no other job is better in score and kwh than jobs 0, 1\n" in out
    assert (
        "kwh was not measured in job 2, which cannot be compared by it; leave it out: sweep.objectives=[score]" in out
    )


@pytest.mark.parametrize("names", [[], ["score", "score"], ["speed"], ["score", "energy"]])
def test_other_names_are_refused(names: list[str]) -> None:
    with pytest.raises(InputError, match=r"sweep\.objectives is \[.*\], expected some of score, seconds, megabytes"):
        check_objectives(names)
