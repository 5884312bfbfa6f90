"""What a run writes of itself at its end, in an incident, and after a resume: of which steps, which checkpoint."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_trainer import network, trainer_of

from helpers import FAKE, records, train_here
from lockstep.core.errors import InputError, NumericalError
from lockstep.core.model_card import CLASSES, LABELS
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.training import run_record
from lockstep.training.build_data import UNEQUAL, balance_note
from lockstep.training.run_record import Evidence, RunRecord, write_incident
from lockstep.training.trained import find_weights

JOB = (*FAKE, "augment=none", "dataset.examples=40", "batch=10", "model=linear", "device=cpu")
JOB = (*JOB, "train.eval_every=2", "telemetry.report=never", "steps=6")


def test_a_resume_adds_to_the_hours_of_all_parts_before(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", *JOB, stop_at=3)
    summary = json.loads(run.summary.read_text())
    assert summary["spent"]["hours"] < 1
    run.summary.write_text(json.dumps({**summary, "spent": {**summary["spent"], "hours": 7.0}}))
    train_here(run.path, *JOB)
    assert 7 < Run(run.path).summary["spent"]["hours"] < 8


@pytest.mark.parametrize("stop_at", [None, 4])
def test_the_evidence_at_the_end_has_the_steps_of_this_part_alone(
    tmp_path: Path, stop_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stop_at is not None:
        train_here(tmp_path / "run", *JOB, stop_at=stop_at)
    steps: list[int] = []

    def noted(**facts: Any) -> Evidence:
        steps.append(facts["steps"])
        return Evidence(**facts)

    monkeypatch.setattr(run_record, "Evidence", noted)
    train_here(tmp_path / "run", *JOB)
    assert steps == [6 - (stop_at or 0)]


@pytest.mark.parametrize("stop_at", [2, 3])
def test_a_resume_leaves_each_log_point_and_each_evaluation_in_the_files_once(tmp_path: Path, stop_at: int) -> None:
    def lines(run: RunDir) -> tuple[list[tuple[int, bool]], list[str]]:
        points = [(line["step"], "loss/val" in line) for line in records(run)]
        return points, [row.partition(",")[0] for row in run.table.read_text().splitlines()]

    job = (*JOB, "telemetry.interval=1")
    expected = lines(train_here(tmp_path / "whole", *job))
    assert len(expected[0]) == len({*expected[0]}) == 6 + 3
    train_here(tmp_path / "parts", *job, stop_at=stop_at)
    assert lines(train_here(tmp_path / "parts", *job)) == expected


@pytest.mark.parametrize("saved", [[], [2], [2, 10, 9]])
def test_an_incident_names_its_samples_as_the_split_does_and_the_newest_checkpoint(
    tmp_path: Path, saved: list[int]
) -> None:
    run = RunDir.at(tmp_path / "run")
    for step in saved:
        (run.checkpoints / f"step-{step:08d}").mkdir()
    trainer = trainer_of(network(), World.solo(), steps=20)
    trainer.progress.step = 14
    batch = trainer.loader.global_batch(11)
    again = replace(batch, indices=batch.indices + 10 * torch.arange(len(batch.indices)))  # drawn so many times
    trainer.loader = SimpleNamespace(global_batch={11: again}.get)  # type: ignore[assignment]
    write_incident(NumericalError("bad", step=11), trainer, dict(trainer.state.model.state_dict()), run)
    facts = json.loads((run.incident / "incident.json").read_text())
    assert facts["samples"] == batch.indices.tolist()
    assert (facts["step"], facts["epoch"], facts["seen_at_step"]) == (11, 5, 14)
    assert facts["checkpoint"] == (f"step-{max(saved):08d}" if saved else None)


@pytest.mark.parametrize("earlier", [True, False])
def test_an_incident_that_cannot_be_written_leaves_an_earlier_one_alone(
    earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, trainer = RunDir.at(tmp_path / "run"), trainer_of(network(), World.solo())
    trainer.checkpointer = SimpleNamespace(whole=list)  # type: ignore[assignment]
    if earlier:
        run.incident.mkdir()

    def fail(*arguments: object) -> None:
        run.incident.mkdir(exist_ok=True)
        raise OSError("the disk is full")

    monkeypatch.setattr(run_record, "write_incident", fail)
    RunRecord(run, World.solo()).keep_incident(NumericalError("bad", step=1), trainer)
    assert run.incident.exists() == earlier


def test_latest_without_weights_is_the_newest_run_or_job_that_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = Path("outputs")
    RunDir.at(root / "begun").mark_latest(root)
    with pytest.raises(InputError, match="there are no weights at"):
        find_weights("latest")
    for age, name in enumerate(("sweeps/s/000-a", "older", "sweeps/s/001-b", "oldest")):
        (path := root / name).mkdir(parents=True)
        (path / "model.safetensors").touch()
        os.utime(path / "model.safetensors", (1e9 - age, 1e9 - age))
    assert find_weights("latest") == root / "sweeps/s/000-a/model.safetensors"
    assert find_weights("outputs/latest") == root / "sweeps/s/000-a/model.safetensors"
    (root / "begun" / "model.safetensors").touch()
    os.utime(root / "begun" / "model.safetensors", (1e8, 1e8))
    assert find_weights("latest") == root / "begun/model.safetensors", "however old"


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ((UNEQUAL, 1), True),
        ((UNEQUAL - 1, 1), False),
        ((2 * UNEQUAL, 2, 30), True),
        ((2 * UNEQUAL, 3, 29), False),
        ((0, 5, 5), False),  # a class without images is not rare
        ((0, 1, UNEQUAL), True),
    ],
)
def test_a_class_with_a_tenth_of_the_images_of_the_largest_is_noted(counts: tuple[int, ...], says: bool) -> None:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = torch.cat([labels, torch.full((100,), -1)])  # broken images
    job: Any = SimpleNamespace(
        train=SimpleNamespace(sampling="shuffled"),
        loss=SimpleNamespace(balanced=False, class_weights=None),
        task=SimpleNamespace(targets=CLASSES),
        dataset=SimpleNamespace(classes=len(counts), class_names=()),
    )
    assert len(balance_note(job, labels)) == says == bool(says)
    for other in (
        {"train": SimpleNamespace(sampling="balanced")},
        {"loss": SimpleNamespace(balanced=True, class_weights=None)},
        {"loss": SimpleNamespace(balanced=False, class_weights=[1.0] * len(counts))},
        {"task": SimpleNamespace(targets=LABELS)},
    ):
        assert balance_note(SimpleNamespace(**{**vars(job), **other}), labels) == []  # type: ignore[arg-type]


def test_a_single_label_has_a_limit_of_its_loss(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", *JOB, "dataset.classes=1", "task=multilabel")
    assert Run(run.path).summary["status"] == "completed"


def test_a_resume_needs_no_weights_that_the_run_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = train_here(tmp_path / "began", *JOB).weights
    job = (*JOB, f"init_from={began}")
    train_here(tmp_path / "run", *job, stop_at=3)
    monkeypatch.setattr("lockstep.checkpoint.weights.load_start", None)  # the file may be gone by now
    assert Run(train_here(tmp_path / "run", *job).path).summary["status"] == "completed"
