"""The fingerprint of a job: the facts that must be equal in a checkpoint and in the run that resumes from it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers import built
from lockstep.config import options
from lockstep.config.schema import Job
from lockstep.core.errors import InputError
from lockstep.core.fields import Role, ranged, with_role
from lockstep.core.world import World
from lockstep.models import DigitNet, Timm, Torchvision
from lockstep.training.resolved_job import ResolvedJob, check_same_data, describe, fingerprint, plan_of, train_longer
from thread_ranks import ThreadRanks


def facts_of(job: Job, examples: int) -> dict[str, Any]:
    return fingerprint(ResolvedJob.of(job), examples)


def test_a_component_is_its_class_and_what_is_not_its_default() -> None:
    assert describe(DigitNet()) == "DigitNet()"
    assert describe(DigitNet(width=64, compile=True)) == "DigitNet(compile=True, width=64)"
    assert describe(DigitNet(width=64, compile=True), frozenset({"compile"})) == "DigitNet(width=64)"
    assert describe(Timm(options={"img_size": 64})) == "Timm(options={'img_size': 64})"


def test_checkpoints_of_the_models_that_are_defaults_of_their_classes_have_no_name() -> None:
    """The config requires a name, but another default of the class would make these checkpoints another run's."""
    assert describe(Timm(name="resnet50d")) == "Timm()"
    assert describe(Torchvision(name="resnet50")) == "Torchvision()"


def test_how_a_job_is_run_is_not_what_it_is() -> None:
    words = ("model.compile=true", "model.channels_last=true", "epochs=99", "strategy=ddp", "precision=bf16")
    words += ("loader=streaming", "optimizer.lr=0.5", "train.micro_batches=4", "data_root=elsewhere")
    words += ("launcher.threads=1", "train.eval_batch=7", "cost.usd_per_gpu_hour=2", "telemetry.report=never")
    assert facts_of(built(*words), 1442) == facts_of(built(), 1442)


def test_a_resume_may_change_a_users_field_that_makes_no_other_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "_DECLARED", {**options._DECLARED})

    @options.option("model")
    class Mine(DigitNet):
        depth: int = ranged(1, least=1, most=9)
        fused: bool = with_role(Role.rounding, False)
        shown: bool = with_role(Role.display, False)

    facts = [
        facts_of(replace(built(), model=model), 1442)["model"] for model in (Mine(), Mine(fused=True, shown=True))
    ]
    assert facts == ["Mine()", "Mine()"]
    assert facts_of(replace(built(), model=Mine(depth=2)), 1442)["model"] == "Mine(depth=2)"


CHANGES = {"model": "model.width=64 model=resnet18", "input_shape": "dataset.input_size=16", "batch": "batch=32"}
CHANGES |= {"seed": "seed=1", "optimizer": "optimizer=sgd", "average": "train.ema=0.99 train.swa_from=50%"}
CHANGES |= {"sampling": "train.sampling=balanced train.repeats=2", "loss": "loss=focal", "repro": "strategy=strict"}
CHANGES |= {"normalisation": "input.mean=[0.5] input.std=[0.5]", "interpolation": "input.interpolation=bicubic"}


@pytest.mark.parametrize(("change", "key"), [(word, key) for key in CHANGES for word in CHANGES[key].split()])
def test_what_a_checkpoint_depends_on_is_part_of_a_job(change: str, key: str) -> None:
    here, there = facts_of(built(), 1442), facts_of(built(change), 1442)
    assert [name for name in here if here[name] != there[name]] == [key]


def test_no_two_averages_are_one_and_the_values_of_one_are_no_other_run() -> None:
    words = (("train.ema=null",), ("train.ema=0.9",), ("train.swa_from=50%",))
    kinds = [facts_of(built(*choice), 1442)["average"] for choice in words]
    assert kinds == [False, True, "mean"]
    assert facts_of(built("train.ema=0.99"), 1442)["average"] is True
    assert facts_of(built("train.swa_from=2ep", "train.swa_every=3"), 1442)["average"] == "mean"


def of_folder(path: Path, *files: str, crop_from: str = "square", examples: int = 10) -> dict[str, Any]:
    """The facts of a job whose two splits have these files."""
    for file in (path / split / file for split in ("train", "val") for file in files):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return facts_of(built("dataset=folder", f"dataset.path={path}", f"dataset.crop_from={crop_from}"), examples)


def test_the_examples_their_files_their_classes_and_their_boxes_are_part_of_a_job(tmp_path: Path) -> None:
    facts = of_folder(tmp_path / "here", "a/1.png", "b/1.png")
    by_changed_keys = {
        ("examples",): of_folder(tmp_path / "here", examples=11),
        ("crop_from",): of_folder(tmp_path / "here", crop_from="file"),
        ("train", "val"): of_folder(tmp_path / "files", "a/1.png", "b/2.png"),
        ("class_names", "train", "val"): of_folder(tmp_path / "classes", "a/1.png", "c/1.png"),
    }
    assert facts == of_folder(tmp_path / "there", "a/1.png", "b/1.png")
    for keys, other in by_changed_keys.items():
        assert {key for key in facts if facts[key] != other[key]} == {*keys}


@pytest.mark.parametrize("other", [1, 2])
def test_every_rank_is_told_which_rank_has_other_data(other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ThreadRanks(3, monkeypatch)
    ranks.run(lambda world: check_same_data({"examples": 10}, world))

    def refuse(world: World) -> None:
        with pytest.raises(InputError, match=f"rank {other} here has different data.*examples: here 9, there 10"):
            check_same_data({"examples": 9 if world.rank == other else 10}, world)

    ranks.run(refuse)


def test_two_optimizers_of_timm_are_two() -> None:
    lamb, lion = (facts_of(built("optimizer=timm", f"optimizer.opt={opt}"), 1442) for opt in ("lamb", "lion"))
    assert (lamb["optimizer"], lion["optimizer"]) == ("lamb", "lion")


def test_a_job_that_was_given_steps_is_lengthened_by_steps_also_where_they_are_whole_epochs() -> None:
    jobs = built("epochs=20"), built("epochs=20", "steps=46")
    assert [train_longer(job, plan_of(job, 1442)) for job in jobs] == ["epochs=40", "steps=92"]


@pytest.mark.parametrize("words", [("steps=5",), ("steps=10",), ("epochs=1",), ("epochs=5",)])
@pytest.mark.parametrize("step", [4, 10, 11, 1000])
def test_the_override_that_a_run_is_told_takes_it_further(words: tuple[str, ...], step: int) -> None:
    job = built(*words, "batch=16")
    plan = plan_of(job, 64)
    longer = plan_of(built(*words, "batch=16", train_longer(job, plan, step)), 64)
    assert longer.total_steps > step
    assert plan_of(built("steps=46", "epochs=40"), 1442).total_steps == 46
