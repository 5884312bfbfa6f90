"""`lockstep lr-find`: a suggestion that trains, a picture, and sentences."""

from __future__ import annotations

import json
import random
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import lockstep
from helpers import NARROW
from lockstep.core.errors import InputError, StorageError
from lockstep.diagnostics.lr_find import RangeTest, lr_find, range_test

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
    drawn = [path.attrib["d"].count("L") for path in picture.iter("{http://www.w3.org/2000/svg}path")]
    assert any(5 < points <= 100 for points in drawn)
    lr_find(JOB, steps=100, low=1e-5, high=100, out=str(tmp_path / "found.svg"), form="json")
    facts = json.loads(capsys.readouterr().out)
    assert (facts["suggestion"], facts["lr"]) == (suggested, 0.001)
    assert facts["lowest"] == facts["rates"][facts["losses"].index(min(facts["losses"]))]


def test_the_average_of_whole_batches_is_judged() -> None:
    """The rate rises from 1 to 10,000 in five steps, by a factor of ten."""
    losses = [8.0, 4.0, 2.0, 30.0, 900.0]
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
        set_learning_rate=lambda step: None,
        loss_of_step=loss_of_step,
    )
    test = range_test(parts, len(losses), 1, 1e4, lambda step: None)
    assert rates == pytest.approx([1, 10, 100, 1000, 10_000])
    assert test.losses == pytest.approx(averaged(losses[:4]))  # the fifth explodes
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
    job = (*words, "device=cpu", f"output_root={tmp_path}")
    usual, parts = lockstep.compose(job), lockstep.compose([*job, "batch=auto"])
    assert (parts.job.batch, parts.plan.batch) == (usual.job.batch, usual.plan.batch)
    assert parts.job.optimizer.lr == usual.job.optimizer.lr
    lr_find((*job, "batch=auto"), steps=12, low=1e-4, high=1e-2, out=None)
    assert [path.name for path in tmp_path.iterdir()] == ["lr-find.svg"]


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
    parts = lockstep.compose(["dataset=digits", "model=linear", "batch=100", "steps=7", "device=cpu"])
    assert repr(parts).splitlines() == [
        "Parts: Linear on cpu, 650 parameters",  # 64 weights and a bias of each of 10 classes
        "  data   Digits(input_size=None), 355 images to evaluate",
        "  steps  7 of global batch 100",
    ]


def test_a_model_with_dropout_can_be_called_in_a_loop_of_ones_own() -> None:
    parts = lockstep.compose([*JOB[:3], "model.dropout=0.5", "steps=2"])
    (_, images, _), (_, other_images, _) = parts.batches()
    assert parts.model(images).shape == parts.model(other_images).shape == (64, 10)
