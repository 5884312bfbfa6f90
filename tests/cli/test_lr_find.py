"""`lockstep lr-find`: a suggestion that trains, a picture, and sentences."""

from __future__ import annotations

import json
import math
import random
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from torch import nn

import lockstep
from helpers import NARROW
from lockstep.core.errors import InputError, StorageError
from lockstep.diagnostics import lr_find as module
from lockstep.diagnostics.lr_find import RangeTest, loss_chart, lr_find, range_test

JOB = (NARROW, "device=cpu", "launcher.threads=1", "train.micro_batches=2", "train.clip_norm=5")


@pytest.mark.numerics
def test_a_rate_is_suggested_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lr_find(JOB, steps=100, low=1e-5, high=100, out=str(tmp_path / "found.svg"))
    out = capsys.readouterr().out
    suggested = float(out.split("optimizer.lr=")[1].split()[0])
    assert 1e-4 < suggested < 0.1
    assert "(this job has 0.001)" in out
    assert " of 100, since the next one's loss was more than 4 times the lowest, from " in out
    picture = ET.parse(tmp_path / "found.svg").getroot()
    assert any(text.text == f"suggestion: {suggested:g}" for text in picture.iter("{http://www.w3.org/2000/svg}text"))
    assert (picture.attrib["width"], picture.attrib["height"]) == ("460.8pt", "288pt"), "6.4 x 4 inches"
    drawn = [path.attrib["d"].count("L") for path in picture.iter("{http://www.w3.org/2000/svg}path")]
    assert any(5 < points <= 100 for points in drawn)
    lr_find(JOB, steps=100, low=1e-5, high=100, out=str(tmp_path / "found.svg"), form="json")
    facts = json.loads(capsys.readouterr().out)
    assert (facts["suggestion"], facts["lr"]) == (suggested, 0.001)
    assert facts["lowest"] == facts["rates"][facts["losses"].index(min(facts["losses"]))]


def test_the_average_of_whole_batches_is_judged() -> None:
    """The rate rises from 1 to 10,000 in five steps, by a factor of ten."""
    losses = [8.0, 4.0, 2.0, 30.0, 65.0]
    optimizer, steps = SimpleNamespace(param_groups=[{"scale": 1.0}]), iter(losses)
    rates: list[float] = []

    def loss_of_step(shard: Any) -> float:
        rates.append(optimizer.param_groups[0]["lr"])
        return next(steps)

    shards = [SimpleNamespace(step=step, count=8 if step % 2 else 1) for step in range(1, 99)]
    parts: Any = SimpleNamespace(
        plan=SimpleNamespace(batch=8),
        model=nn.Identity(),
        transforms=SimpleNamespace(train=lambda groups: groups),
        loader=SimpleNamespace(train=lambda after: shards),
        optimizer=optimizer,
        set_learning_rate=lambda step: optimizer.param_groups[0].update(lr=7.0),  # of the schedule
        loss_of_step=loss_of_step,
    )
    test = range_test(parts, len(losses), 1, 1e4, lambda step: None)
    assert rates == pytest.approx([1, 10, 100, 1000, 10_000])
    assert test.losses == pytest.approx(averaged(losses[:4]))  # the fifth is 25, and the lowest 4.5
    assert (test.rates, test.lowest) == (rates[:4], 2)


def averaged(losses: list[float]) -> list[float]:
    """The average of the last losses, each with nine tenths of the weight of the one after it."""
    return [
        sum(0.9**age * loss for age, loss in enumerate(reversed(losses[:end]))) / sum(0.9**age for age in range(end))
        for end in range(1, len(losses) + 1)
    ]


def suggested(losses: list[float]) -> float | None:
    rates = [10 ** (-6 + 6 * step / len(losses)) for step in range(len(losses))]
    return RangeTest(rates=rates, losses=averaged(losses)).suggestion


@pytest.mark.parametrize(("steps", "noise"), [(40, 0.1), (200, 0.001)])
def test_a_flat_noisy_curve_has_no_suggestion(steps: int, noise: float) -> None:
    draws = [random.Random(seed) for seed in range(100)]
    suggestions = [suggested([0.7 + noise * draw.gauss(0, 1) for _ in range(steps)]) for draw in draws]
    assert sum(suggestion is not None for suggestion in suggestions) <= 8


def test_a_clear_fall_has_a_tenth_of_the_rate_where_the_loss_is_lowest() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        losses = [0.7 - 0.5 * min(1.0, max(0.0, (step - 30) / 40)) + 0.02 * draw.gauss(0, 1) for step in range(100)]
        rise = [loss + max(0, step - 80) / 10 for step, loss in enumerate(losses)]
        suggestion = suggested(rise)
        assert suggestion is not None
        assert 10 ** (-6 + 6 * 0.6) / 10 < suggestion < 10 ** (-6 + 6 * 0.95) / 10


@pytest.mark.parametrize("lowest", [11, 16, 17, 60])
def test_no_rate_is_suggested_that_was_not_tried(lowest: int) -> None:
    suggestion = suggested([2.0 - 0.02 * step if step <= lowest else 9.0 for step in range(100)])
    assert (suggestion is not None) == (lowest > 16), "a factor of ten is 16 steps here"


@pytest.mark.parametrize("words", [(), ("experiment=mnist_tutorial", "dataset=digits")], ids=["default", "recipe"])
def test_the_batch_of_batch_auto_is_that_without_it(words: tuple[str, ...], tmp_path: Path) -> None:
    runs = tmp_path / "of" / "mine"
    job = (*words, "device=cpu", f"output_root={runs}")
    usual, parts = lockstep.compose(job), lockstep.compose([*job, "batch=auto"])
    assert (parts.job.batch, parts.plan.batch) == (usual.job.batch, usual.plan.batch)
    assert parts.job.optimizer.lr == usual.job.optimizer.lr
    lr_find((*job, "batch=auto"), steps=12, low=1e-4, high=1e-2, out=None)
    assert [path.name for path in runs.iterdir()] == ["lr-find.svg"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 1}, "--steps is 1, expected from 2"),
        ({"low": 1.0, "high": 0.1}, "--low is 1 and --high is 0.1, expected 0 < low < high"),
        ({"out": "no/such/folder.svg"}, "--out is no/such/folder.svg"),
        ({"out": "found.png"}, "--out is found.png, expected a file whose name ends with .svg"),
        ({"low": 1e5, "high": 1e6}, "the loss explodes at 100000 already"),
    ],
)
def test_what_cannot_be_tried_is_refused(options: dict[str, object], says: str, tmp_path: Path) -> None:
    words = {"steps": 4, "low": 1e-5, "high": 1.0, "out": str(tmp_path / "found.svg"), **options}
    with pytest.raises(InputError, match=says):
        lr_find(JOB, **words)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="it needs a file system in which nobody makes a folder")
def test_a_picture_that_cannot_be_written_is_a_sentence() -> None:
    with pytest.raises(StorageError, match=r"/proc/none/lr-find\.svg cannot be written"):
        lr_find([*JOB, "output_root=/proc/none"], steps=12, low=1e-5, high=1, out=None)


def test_the_line_that_trained_a_run_can_be_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = ("steps=500", "++epochs=1", "schedule=step", "schedule.warmup=0", "launcher.ranks=2")
    lr_find([*JOB, *trained], steps=40, low=1e-5, high=1.0, out=str(tmp_path / "a.svg"))
    shown = capsys.readouterr()
    assert (
        f"lr-find trains --steps=40 steps at rising rates; ignored: launcher.threads=1 {' '.join(trained)}"
        in shown.err
    )
    lr_find(JOB, steps=40, low=1e-5, high=1.0, out=str(tmp_path / "a.svg"))
    assert capsys.readouterr().out == shown.out


def test_the_parts_of_a_job_are_shown_as_three_lines() -> None:
    parts = lockstep.compose(["dataset=digits", "model=linear", "batch=100", "steps=1200", "device=cpu"])
    assert repr(parts).splitlines() == [
        "Parts: Linear on cpu, 650 parameters",  # 64 weights and a bias of each of 10 classes
        "  data   Digits(input_size=None), 355 images to evaluate",
        "  steps  1,200 of global batch 100",
    ]


def test_a_model_with_dropout_can_be_called_in_a_loop_of_ones_own() -> None:
    parts = lockstep.compose([*JOB[:3], "model.dropout=0.5", "steps=2"])
    (_, images, _), (_, other_images, _) = parts.batches()
    assert parts.model(images).shape == parts.model(other_images).shape == (64, 10)


def test_the_criterion_is_the_loss_of_each_example_and_refuses_targets_without_logits() -> None:
    parts = lockstep.compose([*JOB[:3], "steps=2"])
    targets = torch.tensor([0, 3, 9])
    assert parts.criterion(torch.zeros(3, 10), targets).tolist() == pytest.approx([math.log(10)] * 3)
    with pytest.raises(ValueError, match="batch"):
        parts.criterion(torch.zeros(2, 10), targets)


def parts_of(losses: list[float], calls: list[Any]) -> Any:
    """The parts of a job whose steps on whole batches have these losses."""
    steps = iter(losses)
    model = nn.Linear(1, 1).eval()
    return SimpleNamespace(
        plan=SimpleNamespace(batch=8),
        model=model,
        transforms=SimpleNamespace(train=lambda groups: groups),
        loader=SimpleNamespace(train=lambda after: (SimpleNamespace(step=step, count=8) for step in range(1, 99))),
        optimizer=SimpleNamespace(param_groups=[{"scale": 1.0}]),
        set_learning_rate=lambda step: calls.append(("scheduled", step, model.training)),
        loss_of_step=lambda shard: next(steps),
    )


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ([1.0, 1.0, 1.0], 3),
        ([1.0, 1.0, math.nan], 2),
        ([1.0, 1.0, math.inf], 2),
        ([1.0, 1.0, 4 * 2.71 - 9 * 0.19], 3),  # the average is exactly four times the lowest one
        ([1.0, 1.0, 9.2], 2),
        ([1.0, 4.0, 6.0], 3),  # more than four times the lowest one only as a loss, not in the average
        ([1.0, 5.0, 24.0], 2),
    ],
)
def test_the_test_ends_before_an_average_above_four_times_the_lowest(losses: list[float], steps: int) -> None:
    calls: list[Any] = []
    test = range_test(parts_of(losses, calls), 3, 1.0, 100.0, lambda number: calls.append(number))
    assert len(test.losses) == len(test.rates) == steps
    assert [call for call in calls if isinstance(call, tuple)] == [
        ("scheduled", step, True) for step in range(1, 4 if len(losses) == 3 else 3)
    ]
    assert calls.count(1) == steps, "the progress is that of the steps that count"


@pytest.mark.parametrize("losses", [[1.0, math.nan], [math.nan], [math.inf], [1.0, 99.0]])
def test_a_loss_that_explodes_at_once_is_refused(losses: list[float]) -> None:
    with pytest.raises(InputError, match=r"lr-find: the loss explodes at 0\.5 already; use a lower --low"):
        range_test(parts_of(losses, []), 3, 0.5, 1.0, lambda number: None)


def test_a_suggestion_needs_a_fall_behind_the_first_ten_steps_that_is_larger_than_the_noise() -> None:
    def suggestion(losses: list[float], low: float = 1e-3) -> float | None:
        return RangeTest(rates=[low * 1.3**step for step in range(len(losses))], losses=losses).suggestion

    flat, fall = [5.0] * 10, [3.0, 2.9, 2.7, 2.5, 2.3, 2.1, 1.9, 1.7, 1.6, 1.7]
    assert suggestion(flat + fall) == pytest.approx(0.1 * 1e-3 * 1.3**18, rel=0.05)
    risen = [1.61, 3.0, 2.8, 2.62, 2.42, 2.24, 2.04, 1.86, 1.6, 1.7]
    assert suggestion(flat + risen) is not None, "it falls from the highest loss, not from the first"
    assert suggestion(fall) is None, "all of them rest on the first losses"
    assert suggestion([*flat, 3.0, 1.0]) is None, "two steps have no noise to compare with"
    assert suggestion([*flat, 1.0, 2.0, 3.0]) is None, "the first of them is the lowest"
    assert suggestion([9.0] * 10 + [2.0, 2.1] * 5 + [1.9]) is None, "the fall is within the noise"
    rates = RangeTest(rates=[0.001234567 * 1.3**step for step in range(20)], losses=flat + fall)
    assert rates.suggestion == float(f"{0.1 * 0.001234567 * 1.3**18:.1e}"), "two digits"
    rising = RangeTest(rates=rates.rates, losses=[1.0 + step for step in range(20)])
    assert (rising.lowest, rising.suggestion) == (0, None)


@pytest.mark.parametrize("suggested_rate", [True, False])
def test_the_picture_has_the_lowest_point_the_rate_of_the_job_and_the_suggestion(suggested_rate: bool) -> None:
    losses = [5.0] * 10 + [3.0, 2.9, 2.7, 2.5, 2.3, 2.1, 1.9, 1.7, 1.6, 1.7 if suggested_rate else 99.0]
    rates = [1e-3 * 1.3**step for step in range(20)]
    test = RangeTest(rates=rates, losses=losses if suggested_rate else losses[9:])
    axes = MagicMock()
    with patch("lockstep.diagnostics.lr_find.svg", lambda draw, *size: draw(axes)):
        loss_chart(RangeTest(rates=test.rates[: len(test.losses)], losses=test.losses), 0.25)
    (line, lowest), lines = axes.plot.call_args_list, axes.axvline.call_args_list
    assert line.args[1] == test.losses
    assert lowest.args[:2] == (rates[test.lowest], 1.6)
    assert lines[0].args == (0.25,)
    assert lines[0].kwargs["label"] == "this job: 0.25"
    assert len(lines) == 1 + suggested_rate
    assert not suggested_rate or lines[1].kwargs["label"] == f"suggestion: {lines[1].args[0]:g}"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 100_001}, "--steps is 100001, expected from 2 to 100,000"),
        ({"low": 0.0}, "--low is 0 and --high is 1, expected 0 < low < high"),
        ({"low": 1.0}, "--low is 1 and --high is 1, expected 0 < low < high"),
        ({"high": math.inf}, "--low is 1e-05 and --high is inf, expected"),
    ],
)
def test_the_borders_of_a_test_are_refused(options: dict[str, float], says: str) -> None:
    words: dict[str, Any] = {"steps": 4, "low": 1e-5, "high": 1.0, "out": None, **options}
    with pytest.raises(InputError, match=says):
        lr_find(JOB, **words)


@pytest.mark.parametrize("steps", [2, 100_000])
def test_the_fewest_and_the_most_steps_are_tried_on_twice_as_many(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Planned(Exception):
        pass

    def planned(job: Any) -> None:
        raise Planned(job.steps, job.resume, type(job.schedule).__name__)

    monkeypatch.setattr("lockstep.diagnostics.lr_find.build_parts", planned)
    with pytest.raises(Planned) as raised:
        lr_find(JOB, steps=steps, low=1e-5, high=1.0, out=None)
    assert raised.value.args == (2 * steps, None, "Constant")


FALL = [5.0] * 10 + [3.0, 2.9, 2.7, 2.5, 2.3, 2.1, 1.9, 1.7, 1.6, 1.7]
SUGGESTED = "a tenth of that: optimizer.lr=0.011 (this job has 0.001)"
NOTHING = "no suggestion: no fall is larger than the noise; more --steps may show one (this job has 0.001)"


@pytest.mark.parametrize(
    ("steps", "losses", "lines"),
    [
        (20, FALL, ["20 steps, from 0.001 to 0.15: the loss is lowest, 1.6, at 0.11", SUGGESTED]),
        (
            21,
            FALL,
            [
                "20 steps of 21, since the next one's loss was more than 4 times the lowest, from 0.001 to 0.15: the "
                "loss is lowest, 1.6, at 0.11",
                SUGGESTED,
            ],
        ),
        (
            3,
            [2.0, 1.23456, 3.0],
            ["3 steps, from 0.001 to 0.0017: the loss is lowest, 1.235, at 0.0013", NOTHING],
        ),
    ],
    ids=["all", "early", "nothing"],
)
def test_what_was_tried_is_said_in_three_lines_or_as_json(
    steps: int,
    losses: list[float],
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def test_of(job: Any, *facts: Any) -> RangeTest:
        calls.append((job.steps, *facts[:3]))
        return test

    def chart(test: RangeTest, rate: float) -> bytes:
        charts.append(rate)
        return b"a picture"

    test, calls = RangeTest(rates=[1e-3 * 1.3**step for step in range(len(losses))], losses=losses), list[Any]()
    charts = list[float]()
    monkeypatch.setattr(module, "loss_chart", chart)
    monkeypatch.setattr(module, "build_parts", lambda job: job)
    monkeypatch.setattr(module, "range_test", test_of)
    monkeypatch.chdir(tmp_path)
    lr_find(JOB, steps=steps, low=1e-3, high=1.0, out="a.svg")
    assert " ".join(capsys.readouterr().out.split()) == " ".join([*lines, "wrote a.svg"])
    lr_find(JOB, steps=steps, low=1e-3, high=1.0, out="a.svg", form="json")
    assert json.loads(capsys.readouterr().out) == {
        "lowest": test.rates[losses.index(min(losses))],
        "suggestion": 0.011 if len(losses) == 20 else None,
        "lr": 0.001,
        "picture": "a.svg",
        "rates": test.rates,
        "losses": losses,
    }
    assert calls == [(2 * steps, steps, 1e-3, 1.0)] * 2
    assert (charts, Path("a.svg").read_bytes()) == ([0.001] * 2, b"a picture"), "of the job's own rate"
