"""What a sweep compares its jobs by, and its trade-offs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from helpers import view_of
from lockstep.core.errors import InputError
from lockstep.core.run import State
from lockstep.core.tags import Direction
from lockstep.records.ledger import Identity, Ledger
from lockstep.records.record import check_objectives, directions, objectives_of, trade_offs
from lockstep.report.sweep_page import write_sweep_report

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
        # Of the same size, with other words before the tensors.
        save_file({"weight": torch.zeros(500_000)}, path / "model.safetensors", {"score": str(score) * record.number})
        ledger.end(record, State.done, objective=score)
    ledger.end(records[3], State.failed, exit_code=2, error="it is wrong")
    return ledger


@pytest.mark.parametrize("best", [1, 2])
def test_the_page_of_a_sweep_over_seeds_begins_with_the_mean_and_spread_of_the_best_setting(
    tmp_path: Path, best: int
) -> None:
    scores = {best: (80.0, 84.0, 85.0), 3 - best: (90.0, 60.0, 60.0)}
    ledger = Ledger(tmp_path)
    ledger.create(Identity(base={}, swept=("lr", "seed"), words=("lr=1,2", "seed=0,1,2"), figure="top1"))
    jobs = [((f"lr={lr}", f"seed={seed}"), f"lr={lr},seed={seed}") for lr in (1, 2) for seed in (0, 1, 2)]
    for record, score in zip(ledger.enter(jobs), (*scores[1], *scores[2]), strict=True):
        (tmp_path / record.folder).mkdir()
        ledger.end(record, State.done, objective=score)
    headline = f'<p class="headline">83.00 ± 2.65 % top-1, 3 seeds, lr={best}</p>'
    assert headline in write_sweep_report(ledger).read_text()
    assert "headline" not in write_sweep_report(sweep(tmp_path / "of one seed")).read_text().partition("<body>")[2]


def test_the_table_names_the_trade_offs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = sweep(tmp_path)
    assert objectives_of(ledger.folder, ledger.records()[0], NAMES) == [90.0, pytest.approx(10.0), 2.0]
    assert objectives_of(ledger.folder, ledger.records()[3], NAMES) == []
    view_of(ledger).show_table(["score", "seconds"])
    out = capsys.readouterr().out
    assert re.search(r"^ *0 +1 +90\.00 +10 +done *$", out, re.MULTILINE)
    assert "no other job is better in score and seconds than jobs 0, 1\n" in out
    view_of(ledger).show_table()
    assert "no other job" not in capsys.readouterr().out


def test_equal_networks_have_equal_megabytes_and_no_worse_one_is_a_trade_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = sweep(tmp_path)
    sizes = {(tmp_path / record.folder / "model.safetensors").stat().st_size for record in ledger.records()[:3]}
    assert len(sizes) > 1
    assert [objectives_of(ledger.folder, record, ["megabytes"]) for record in ledger.records()[:3]] == [[2.0]] * 3
    view_of(ledger).show_table(["score", "megabytes"])
    assert "no other job is better in score and megabytes than job 0\n" in capsys.readouterr().out


def test_the_trade_offs_are_settings_with_the_means_of_their_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = Ledger(tmp_path)
    ledger.create(Identity(base={}, swept=("lr", "seed"), words=("lr=1,2,3", "seed=0,1"), figure="top1"))
    jobs = [((f"lr={lr}", f"seed={seed}"), f"lr={lr},seed={seed}") for lr in (1, 2, 3) for seed in (0, 1)]
    # The best single score is of the setting that is worse than another one in both means.
    figures = [(80.0, 0.2), (80.0, 0.2), (95.0, 0.1), (60.0, 0.5), (40.0, 0.1), (40.0, 0.1)]
    for record, (score, kwh) in zip(ledger.enter(jobs), figures, strict=True):
        (path := tmp_path / record.folder).mkdir()
        (path / "summary.json").write_text(json.dumps({"spent": {"kwh": kwh}}))
        ledger.end(record, State.done, objective=score)
    view_of(ledger).show_table(["score", "kwh"])
    assert "is better in val top-1 and kwh than jobs 0, 1, 4, 5\n" in capsys.readouterr().out


def test_energy_is_an_objective_where_it_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = sweep(tmp_path)
    energies = ({"kwh": 0.5}, {"kwh": 0.25}, {"hours": 1.0})
    for record, energy in zip(ledger.records(), energies, strict=False):
        (tmp_path / record.folder / "summary.json").write_text(json.dumps({"spent": energy}))
    view_of(ledger).show_table(["score", "kwh"])
    out = capsys.readouterr().out
    assert "no other job is better in score and kwh than jobs 0, 1\n" in out
    assert "kwh was not measured in job 2, which cannot be compared by it; remove it: sweep.objectives=[score]" in out


@pytest.mark.parametrize(
    ("monitor", "objectives", "sentence"),
    [
        (
            "map",
            ["score"],
            "monitor has map, which an evaluation of this job does not log, expected loss, top1, recall",
        ),
        ("top1", ["speed"], "objectives has speed, .* expected score, seconds, megabytes, kwh, loss, top1, recall;"),
        ("top1", ["score", "-f1"], "sweep.objectives has f1, "),
    ],
)
def test_a_figure_not_logged_is_no_score_and_no_objective(monitor: str, objectives: list[str], sentence: str) -> None:
    logged = ["loss", "top1", "recall"]
    check_objectives(logged, "-loss", ["score", "seconds", "-loss", "recall/9"])
    check_objectives((), monitor, objectives)  # an app that does not say what it logs
    with pytest.raises(InputError, match=sentence):
        check_objectives(logged, monitor, objectives)


def test_a_figure_is_an_objective_with_its_own_direction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger, names = sweep(tmp_path), ["score", "-loss", "f1"]
    for record, loss in zip(ledger.records(), (3.0, 0.0, 2.5), strict=False):
        scores = {"loss": loss, "f1": 0.51234, "top1": 1.0}
        (tmp_path / record.folder / "summary.json").write_text(json.dumps({"scores": scores}))
    assert directions(names, Direction.maximize) == ["maximize", "minimize", "maximize"]
    view_of(ledger).show_table(names)
    out = capsys.readouterr().out
    assert re.search(r"^job +lr +score +val loss +val f1 +state +to the best", out, re.MULTILINE)
    assert re.search(r"^ *1 +2 +50\.00 +0 +0\.5123 +done +-40\.00$", out, re.MULTILINE)
    assert "no other job is better in score and val loss and val f1 than jobs 0, 1\n" in out


@pytest.mark.parametrize("name", ["f1", "-f1"])
def test_a_metric_that_is_an_objective_has_one_column(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = sweep(tmp_path)
    for record in ledger.records()[:2]:
        folder = tmp_path / record.folder
        (folder / "summary.json").write_text(json.dumps({"scores": {"f1": 0.51234, "top1": 1.0}}))
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "config.yaml").write_text("metric: {f1: {}}")
    view_of(ledger).show_table(["score", name])
    assert re.search(r"^job +lr +score +val f1 +state ", capsys.readouterr().out, re.MULTILINE)


def test_the_table_names_the_figure_and_has_a_column_for_each_metric_and_the_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = sweep(tmp_path)
    ledger.create(replace(ledger.identity(), figure="loss", direction=Direction.minimize))
    scores = {"loss": 90.0, "top1": 1.0, "f1": 0.51234, "mcc": None, "recall/cat": 0.1}
    folder = tmp_path / ledger.records()[0].folder
    summary = {"monitor": "-loss", "objective": 90.0, "scores": scores, "test": {"loss": 91.5, "top1": 2.0}}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text("metric: {f1: {}, mcc: {}, recall: {}}")
    view_of(ledger).show_table()
    out = capsys.readouterr().out
    assert re.search(r"^job +lr +val loss +val f1 +test +state +to the best", out, re.MULTILINE)
    assert re.search(r"^ *0 +1 +90 +0\.5123 +91\.5 +done +\+50$", out, re.MULTILINE)
    assert "best: job 2 with loss 40, " in out
    page = write_sweep_report(ledger).read_text()
    assert re.findall("<th.*?>(.*?)</th>", page) == ["job", "state", "lr", "val loss", "val f1", "test"]
