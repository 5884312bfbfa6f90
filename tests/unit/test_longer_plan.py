"""What a longer plan would have decided otherwise before a resume is computed again, refused, or said."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from helpers import ROOT, created, resolved, train_here
from lockstep.checkpoint.files import read_state
from lockstep.checkpoint.reading import undamaged_facts
from lockstep.config.options import classes_of
from lockstep.config.schema import BLOCKS, GROUPS
from lockstep.core.errors import InputError
from lockstep.core.fields import rule_of
from lockstep.core.plan import Averaging
from lockstep.core.run import candidates
from lockstep.training.resolved_job import averaging_of, decisions, plan_of, train_longer

DATA = (
    "dataset=fake",
    "dataset.examples=115",
    "dataset.size=8",
    "dataset.classes=4",
    "batch=10",
)  # 12 steps an epoch
JOB = (*DATA, "model=linear", "precision=fp64", "optimizer=sgd", "optimizer.lr=0.05", "schedule=constant")


def durations() -> set[str]:
    """Each key that is a duration, of the job and of every option."""
    owners: list[tuple[str, type[Any]]] = [*BLOCKS.items()]
    for group in GROUPS:
        owners += [(group, cls) for cls in classes_of(group).values()]
    named = ((f"{group}.{field.name}", rule_of(cls, field.name)) for group, cls in owners for field in fields(cls))
    return {key for key, rule in named if rule is not None and rule.durations}


def newest(path: Path) -> Path:
    return candidates(path / "checkpoints")[0]


def test_the_document_and_the_test_below_have_every_duration() -> None:
    rows = [line for line in (ROOT / "docs" / "resuming.md").read_text().splitlines() if line.startswith("|")]
    assert [key for key in sorted(durations()) if not any(f"`{key}`" in row for row in rows)] == []
    assert durations() == {*SAID} - {"schedule.parts"}


# A value for each, with what it needs: its steps in a run of 24 and in one of 48.
SAID = {
    "train.mix_until": ("50% train.mixup=0.2", "[24] (not [12])"),
    "train.freeze_until": ("50% train.freeze=['0'] model=digitnet model.width=8", "[24] (not [12])"),
    "train.sizes": ("{0:8,25%:16} model=test_resnet dataset.size=24", "[0, 12] (not [0, 6])"),
    "train.swa_from": ("60%", "[29] (not [14])"),
    "train.swa_every": ("25% train.swa_from=60%", "[12] (not [6])"),
    "train.patience": ("50%", "[24] (not [12])"),
    "train.eval_every": ("25%", "[12] (not [6])"),
    "checkpoint.every": ("25%", "[12] (not [6])"),
    "telemetry.interval": ("25%", "[12] (not [6])"),
    "schedule.warmup": ("50%", "[24] (not [12])"),
    "schedule.milestones": ("[25%,75%] schedule=step", "[12, 36] (not [6, 18])"),
    "schedule.parts": ("[constant:50%,step:20%:gamma:0.5,cosine] schedule=chain", "another learning rate"),
}


@pytest.mark.parametrize("key", SAID)
def test_a_longer_run_says_what_it_would_have_decided_otherwise(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value, steps = SAID[key]
    words = [f"{key}={value.split()[0]}", *value.split()[1:]]
    own = [word for word in JOB if word.partition("=")[0] not in {word.partition("=")[0] for word in words}]
    train_here(tmp_path / "run", *own, *words, "epochs=2")
    capsys.readouterr()
    created(f"resume={tmp_path / 'run'}", "epochs=4")
    text = capsys.readouterr().err
    assert "resume: a run of 48 steps would have had until step 24" in text
    assert (steps if key == "schedule.parts" else f"{key} {steps}") in text


@pytest.mark.parametrize(
    "schedule", ["cosine", "linear", "polynomial", "chain", "constant", "exponential", "plateau"]
)
def test_a_learning_rate_that_falls_by_the_length_is_said(
    tmp_path: Path, schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(tmp_path / "run", *JOB[:-1], f"schedule={schedule}", "epochs=2")
    capsys.readouterr()
    created(f"resume={tmp_path / 'run'}", "epochs=4")
    falls = schedule in ("cosine", "linear", "polynomial", "chain")
    assert ("another learning rate" in capsys.readouterr().err) == falls


# In the long run the average begins after the resume, with it, or where it did; with batch norm, whose statistics
# are computed again; and a run that was stopped before its average began.
LATER = [
    ("epochs=2", "epochs=4", "swa_from=50%"),
    ("epochs=2", "epochs=5", "swa_from=60%"),
    ("epochs=2", "epochs=4", "swa_from=100%"),
    ("epochs=2", "epochs=4", "swa_from=50% model=test_resnet dataset.size=16"),
    ("steps=20", "steps=40", "swa_from=50% train.swa_every=10%"),
    ("steps=24", "steps=40", "swa_from=12 train.swa_every=6"),
    ("epochs=4", "epochs=2", "swa_from=1ep"),
]


@pytest.mark.parametrize(("before", "after", "words"), LATER)
def test_a_longer_run_has_the_average_of_one_that_was_never_short(
    tmp_path: Path, before: str, after: str, words: str
) -> None:
    job = [*JOB, *f"train.{words}".split()]
    stop = 18 if before > after else None
    train_here(tmp_path / "run", *job, before, stop_at=stop)
    train_here(tmp_path / "run", *job, after)
    train_here(tmp_path / "whole", *job, after)
    for name in ("model", "ema"):
        run, whole = (load_file(newest(tmp_path / folder) / f"{name}.safetensors") for folder in ("run", "whole"))
        assert all(torch.equal(run[key], tensor) for key, tensor in whole.items())


@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 13), st.integers(0, 13))
def test_the_steps_of_an_average_are_those_at_which_it_is_updated(
    start: int, every: int, last: int, step: int
) -> None:
    average = Averaging(start, every, last)
    assert average.until(step) == {at for at in range(1, step + 1) if average.due(at)}


def test_a_mean_of_one_step_is_other_unless_that_is_the_step_of_its_checkpoint() -> None:
    average = Averaging(6, 6, 40)
    assert average.remedies(Averaging(8, 1, 10), 10) == ["train.swa_from=8 train.swa_every=1", "train.swa_from=11"]
    assert average.remedies(Averaging(5, 1, 6), 6) == []
    assert average.remedies(2, 10) == ["train.swa_from=11"]
    assert average.remedies(1, 10) == []


# By a share of a run that is a little longer; by an earlier start; and by a last step that no other run averages.
OTHERWISE = [
    ("epochs=4", "epochs=5", "swa_from=50%", "train.swa_from=24 train.swa_every=12"),
    ("epochs=4", "epochs=8 train.swa_from=2ep", "swa_from=75%", "train.swa_from=36 train.swa_every=12"),
    ("steps=40", "steps=80", "swa_from=25%", "train.swa_from=41"),
]


@pytest.mark.parametrize(("before", "after", "words", "works"), OTHERWISE)
def test_an_average_of_other_steps_is_refused_with_overrides_that_work(
    tmp_path: Path, before: str, after: str, words: str, works: str
) -> None:
    train_here(tmp_path / "run", *JOB, f"train.{words}", before)
    with pytest.raises(InputError, match="average cannot be taken apart") as raised:
        created(f"resume={tmp_path / 'run'}", *after.split())
    remedies = [
        remedy.split()
        for remedy in re.findall(r"(train\S+?(?: train\S+)?)(?= to|$)", str(raised.value).partition("; use ")[2])
    ]
    assert works.split() == remedies[0]
    for remedy in remedies:
        created(f"resume={tmp_path / 'run'}", after.split()[0], *remedy)


@pytest.mark.parametrize(("after", "has_others"), [("5", True), ("4", False), ("8", False), ("16", False)])
def test_a_checkpoint_of_an_earlier_version_says_by_its_number_of_steps_which_it_averages(
    tmp_path: Path, after: str, has_others: bool
) -> None:
    typed = (*JOB, "train.swa_from=50%")
    train_here(tmp_path, *typed, "epochs=4")
    averaged = read_state(newest(tmp_path))["ema_updates"]

    def resume(*words: str) -> None:
        job = resolved(*words, f"epochs={after}")
        averaging_of(decisions(job, plan_of(job, 115))).check_resumed(averaged, 48, job.train.swa_from or 0)

    if has_others:
        with pytest.raises(InputError, match=r"use train\.swa_from=49$"):
            resume(*typed)
        typed = (*JOB, "train.swa_from=49")
    resume(*typed)


def test_an_interval_of_time_is_no_number_of_steps() -> None:
    words = ("checkpoint.every=10min", "train.eval_every=3", "telemetry.interval=2", "epochs=4")
    job = resolved(*JOB, *words)
    decided = decisions(job, plan_of(job, 115))
    assert "checkpoint.every" not in decided
    assert (decided["train.eval_every"], decided["telemetry.interval"], decided["steps"]) == ([3], [2], [48])


def test_an_average_begins_with_the_first_step_at_the_earliest_and_has_every_step_at_most() -> None:
    job = resolved(*JOB, "train.swa_from=1%", "train.swa_every=1%", "steps=7")
    assert averaging_of(decisions(job, plan_of(job, 115))) == Averaging(1, 1, 7)


@pytest.mark.parametrize("length", ["epochs=4", "steps=40"])
@pytest.mark.parametrize("words", ["25%", "50%", "7 train.swa_every=10%", "25% train.swa_every=10%", "90%"])
def test_the_command_that_trains_longer_fits_the_average(length: str, words: str) -> None:
    typed = (*JOB, *f"train.swa_from={words} {length}".split())
    job = resolved(*typed)
    plan = plan_of(job, 115)
    later = resolved(*typed, *train_longer(job, plan, plan.total_steps).split())
    plans = [averaging_of(decisions(job, plan)), averaging_of(decisions(later, plan_of(later, 115)))]
    assert plans[1].remedies(plans[0], plan.total_steps) == []


def test_the_evaluation_at_the_end_of_a_shorter_run_counts_for_no_patience(tmp_path: Path) -> None:
    job = (*JOB, "train.eval_every=10", "train.patience=100", "schedule=plateau", "schedule.patience=0")
    train_here(tmp_path / "run", *job, "steps=24", "train.patience=null")
    train_here(tmp_path / "run", *job, "steps=40", "train.patience=null")
    train_here(tmp_path / "whole", *job, "steps=40", "train.patience=null")
    progress = [undamaged_facts(newest(tmp_path / folder))["progress"] for folder in ("run", "whole")]
    assert progress[0]["scores"] == progress[1]["scores"]
