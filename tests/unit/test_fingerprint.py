"""The fingerprint of a job: the facts that must be equal in a checkpoint and in the run that resumes from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import built
from lockstep.models import DigitNet, Timm
from lockstep.training.fingerprint import describe, fingerprint, plan_of, train_longer


def test_a_component_is_its_class_and_what_is_not_its_default() -> None:
    assert describe(DigitNet()) == "DigitNet()"
    assert describe(DigitNet(width=64, compile=True)) == "DigitNet(compile=True, width=64)"
    assert describe(DigitNet(width=64, compile=True), frozenset({"compile"})) == "DigitNet(width=64)"
    assert describe(Timm(options={"img_size": 64})) == "Timm(options={'img_size': 64})"


def test_how_a_job_is_run_is_not_what_it_is() -> None:
    words = ("model.compile=true", "model.channels_last=true", "epochs=99", "strategy=ddp", "precision=bf16")
    words += ("loader=streaming", "optimizer.lr=0.5", "train.micro_batches=4", "data_root=elsewhere")
    assert fingerprint(built(*words), 1442) == fingerprint(built(), 1442)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("model.width=64", "model"),
        ("model=resnet18", "model"),
        ("dataset.input_size=16", "input_shape"),
        ("batch=32", "batch"),
        ("seed=1", "seed"),
        ("optimizer=sgd", "optimizer"),
        ("train.ema=0.99", "average"),
        ("train.sampling=balanced", "sampling"),
        ("loss=focal", "loss"),
        ("input.mean=[0.5]", "normalisation"),
        ("input.std=[0.5]", "normalisation"),
        ("input.interpolation=bicubic", "interpolation"),
        ("strategy=strict", "repro"),
    ],
)
def test_what_a_checkpoint_depends_on_is_part_of_a_job(change: str, key: str) -> None:
    here, there = fingerprint(built(), 1442), fingerprint(built(change), 1442)
    assert [name for name in here if here[name] != there[name]] == [key]


def test_what_boxes_are_cut_from_is_part_of_a_job(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "1.png").touch()
    from_file, from_square = (
        fingerprint(built("dataset=folder", f"dataset.path={tmp_path}", f"dataset.crop_from={crop_from}"), 10)
        for crop_from in ("file", "square")
    )
    assert {key for key in from_file if from_file[key] != from_square[key]} == {"crop_from"}


def test_two_optimizers_of_timm_are_two() -> None:
    lamb, lion = (fingerprint(built("optimizer=timm", f"optimizer.opt={opt}"), 1442) for opt in ("lamb", "lion"))
    assert (lamb["optimizer"], lion["optimizer"]) == ("lamb", "lion")


def test_the_plan_of_a_job_is_in_steps() -> None:
    plan = plan_of(built("epochs=2", "checkpoint.every=50%"), 1442)
    assert (plan.steps_per_epoch, plan.total_steps, plan.eval_every, plan.save_every) == (23, 46, 23, 23)


def test_a_job_that_was_given_steps_is_lengthened_by_steps_also_where_they_are_whole_epochs() -> None:
    assert train_longer(built("epochs=20")) == "epochs=40"
    assert train_longer(built("epochs=20", "steps=46")) == "steps=92"


@pytest.mark.parametrize("words", [("steps=5",), ("steps=10",), ("epochs=1",), ("epochs=5",)])
@pytest.mark.parametrize("step", [4, 10, 11, 1000])
def test_the_override_that_a_run_is_told_takes_it_further(words: tuple[str, ...], step: int) -> None:
    job = built(*words, "batch=16")
    plan = plan_of(job, 64)
    longer = plan_of(built(*words, "batch=16", train_longer(job, plan, step)), 64)
    assert longer.total_steps > step
    assert plan_of(built("steps=46", "epochs=40"), 1442).total_steps == 46
