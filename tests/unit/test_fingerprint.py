"""The fingerprint of a job: the facts that must be equal in a checkpoint and in the run that resumes from it."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lockstep
from helpers import built
from lockstep.config import options
from lockstep.config.schema import Job
from lockstep.core.errors import InputError
from lockstep.core.fields import MOST_STEPS, Role, ranged, with_role
from lockstep.core.observer import Callback
from lockstep.core.world import World
from lockstep.models import DigitNet, Timm, Torchvision
from lockstep.tasks import Distill
from lockstep.training.objects import ModelObject
from lockstep.training.resolved_job import (
    ResolvedJob,
    card_of,
    check_same_data,
    chosen_options,
    describe,
    described,
    fingerprint,
    fingerprint_of,
    named,
    plan_of,
    step_settings,
    train_longer,
)
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
    orders = [{"examples": 10, "seed": 0}, {"seed": 0, "examples": 10}]
    ranks.run(lambda world: check_same_data(orders[world.rank % 2], world))
    facts = [("examples", 10), ("seed", 0)]  # in any order
    ranks.run(lambda world: check_same_data(dict(facts[:: -1 if world.rank else 1]), world))

    def refuse(world: World) -> None:
        with pytest.raises(InputError, match=f"rank {other} here has different data.*examples: here 9, there 10"):
            check_same_data({"examples": 9 if world.rank == other else 10}, world)

    ranks.run(refuse)


def test_a_task_is_part_of_a_job_by_its_values_and_by_what_its_files_are_wherever_they_lie(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Distill, "identity", lambda self: {"teacher": f"sha of {Path(self.teacher).name}"})
    shown = [
        facts_of(replace(built(), task=Distill(teacher=place, share=share)), 1442)["task"]
        for place, share in (("here/a", 0.9), ("there/a", 0.9), ("here/b", 0.9), ("here/a", 0.5))
    ]
    same = "Distill() teacher sha of a"
    assert shown == [same, same, "Distill() teacher sha of b", "Distill(share=0.5) teacher sha of a"]


def test_two_optimizers_of_timm_are_two() -> None:
    lamb, lion = (facts_of(built("optimizer=timm", f"optimizer.opt={opt}"), 1442) for opt in ("lamb", "lion"))
    assert (lamb["optimizer"], lion["optimizer"]) == ("lamb", "lion")


def test_a_job_that_was_given_steps_is_lengthened_by_steps_also_where_they_are_whole_epochs() -> None:
    jobs = built("epochs=20"), built("epochs=20", "steps=46")
    assert [train_longer(job, plan_of(job, 1442)) for job in jobs] == ["epochs=40", "steps=92"]
    # 23 steps an epoch: the run is in its second epoch, its 20th, its 21st, and at its end that
    further = [[train_longer(job, plan_of(job, 1442), step) for step in (24, 460, 461, 483)] for job in jobs]
    assert further == [
        ["epochs=40", "epochs=40", "epochs=42", "epochs=42"],
        [f"steps={2 * n}" for n in (46, 460, 461, 483)],
    ]


@pytest.mark.parametrize("words", [("steps=5",), ("steps=10",), ("epochs=1",), ("epochs=5",)])
@pytest.mark.parametrize("step", [4, 10, 11, 1000])
def test_the_override_that_a_run_is_told_takes_it_further(words: tuple[str, ...], step: int) -> None:
    job = built(*words, "batch=16")
    plan = plan_of(job, 64)
    longer = plan_of(built(*words, "batch=16", train_longer(job, plan, step)), 64)
    assert longer.total_steps > step
    assert plan_of(built("steps=46", "epochs=40"), 1442).total_steps == 46


def test_a_longer_run_has_at_most_as_many_steps_as_a_run_may_have() -> None:
    for words, longer in ((f"steps={MOST_STEPS}", "steps="), (f"epochs={MOST_STEPS // 2 + 1}", "epochs=")):
        job = built("batch=1442", words)
        assert train_longer(job, plan_of(job, 1442)) == f"{longer}{MOST_STEPS}"


class Watching(Callback):
    pass


@dataclass(frozen=True)
class Chosen(Callback):
    every: int = 3
    name: str = "a"
    library_name = None


def test_callbacks_are_described_by_their_values_or_by_their_class() -> None:
    callbacks = {"one": Watching(), "two": Chosen(every=4), "three": Chosen()}
    assert described(callbacks) == {"one": "Watching", "two": "Chosen(every=4)", "three": "Chosen()"}


def test_the_user_sees_the_name_of_a_librarys_model_and_no_empty_parentheses() -> None:
    names = {
        "DigitNet": DigitNet(),
        "DigitNet(width=64)": DigitNet(width=64),
        "resnet18": Timm(name="resnet18"),
        "resnet18(drop_rate=0.5)": Timm(name="resnet18", drop_rate=0.5),
        "resnet18(options={'block': 'Timm()'})": Timm(name="resnet18", options={"block": "Timm()"}),
        "Net": ModelObject(type="Net", module="own", weights="abc"),
    }
    assert {name: named(option) for name, option in names.items()} == {name: name for name in names}
    assert named(Timm(name="resnet18", drop_rate=0.5), frozenset({"drop_rate"})) == "resnet18"
    namesake: Any = dataclass(frozen=True)(type("ModelObject", (DigitNet,), {"__module__": "mine"}))
    assert named(namesake(width=64)) == "ModelObject(width=64)", "an option of a user's, which stands for no object"
    assert named(DigitNet(width=64, compile=True), frozenset({"width"})) == "DigitNet(compile=True)"


@pytest.mark.parametrize(
    ("batch", "ranks", "passes", "most"), [(64, 1, 1, 64), (65, 3, 1, 22), (10, 3, 3, 2), (9, 3, 3, 1)]
)
def test_a_micro_batch_is_the_largest_piece_of_a_batch(batch: int, ranks: int, passes: int, most: int) -> None:
    job = ResolvedJob.of(built(f"batch={batch}", f"train.micro_batches={passes}"))
    assert job.micro_batch(ranks) == most == max(len(part) for part in np.array_split(range(batch), ranks * passes))


def test_metrics_are_told_the_names_of_the_classes_or_their_numbers() -> None:
    one, two = (SimpleNamespace(notes=lambda names, at=at: [f"{at} {','.join(names)}"]) for at in "ab")
    for classes, names, seen in ((3, (), "0,1,2"), (2, ("cat", "dog"), "cat,dog")):
        dataset = SimpleNamespace(classes=classes, class_names=names)
        job: Any = replace(ResolvedJob.of(built()), metric={"one": one, "two": two}, dataset=dataset)  # type: ignore[dict-item, arg-type]
        assert job.metric_notes() == [f"a {seen}", f"b {seen}"]


def test_a_step_takes_what_its_job_says() -> None:
    words = ("optimizer=sam", "optimizer.lr=0.5", "train.clip_norm=0.25", "precision=fp64", "schedule=constant")
    job = ResolvedJob.of(built(*words))
    assert step_settings(job) == {
        "strategy": job.strategy,
        "precision": job.precision,
        "schedule": job.schedule,
        "lr": 0.5,
        "clip_norm": 0.25,
        "takes_closure": True,
    }
    assert not step_settings(ResolvedJob.of(built()))["takes_closure"]


def test_the_card_of_a_job_has_what_its_weights_need_and_no_path_of_the_machine(tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/1.png", "train/b/2.png", "val/a/1.png", "test/a/9.png", "test/b/9.png"):
        (file := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    words = ("dataset=folder", f"dataset.path={tmp_path}", "dataset.decode_size=8", "dataset.input_size=[6,7]")
    words += (
        "dataset.test_folder=test",
        "model=resnet18",
        "model.pretrained=false",
        "model.channels_last=true",
        "model.compile=true",
    )
    words += ("monitor=-loss", "train.eval_views=2", "train.eval_batch=9", "loss=bce", "precision=bf16")
    words += ("input.mean=[0.1,0.2,0.3]", "input.std=[1,2,3]", "input.interpolation=bicubic")
    job = ResolvedJob.of(built(*words))
    card = card_of(job, {"mine": "abc"})
    assert (card.image_shape, card.input_shape, card.interpolation) == ((3, 8, 8), (3, 6, 7), "bicubic")
    assert (card.mean, card.std) == ((0.1, 0.2, 0.3), (1, 2, 3))
    assert (card.classes, card.class_names, card.monitor) == (2, ("a", "b"), "-loss")
    assert (card.eval_views, card.eval_batch, card.probabilities, card.targets) == (2, 9, "sigmoid", "classes")
    assert (card.packages, card.lockstep) == ({"mine": "abc"}, lockstep.__version__)
    assert card_of(job).packages == {}
    assert (card.model["name"], card.model["channels_last"]) == ("resnet18", True)
    assert not {"compile", "pretrained"} & card.model.keys()
    assert str(card.precision["_target_"]).endswith("BF16")
    assert str(card.loss["_target_"]).endswith("BCE")
    trained_on = dict(card.trained_on)
    assert trained_on["images"] == {"train": 3, "val": 1, "test": 2}
    assert trained_on["sha256"] == fingerprint_of(job.dataset)
    assert str(tmp_path) not in json.dumps(trained_on)
    assert (trained_on["decode_size"], str(trained_on["_target_"]).rpartition(".")[2]) == (8, "Folder")


def test_the_card_of_a_users_model_has_a_value_that_is_null_where_the_default_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(options, "_DECLARED", {**options._DECLARED})

    @options.option("model")
    class Mine(DigitNet):
        depth: int | None = ranged(1, least=1, most=9)

    assert card_of(ResolvedJob.of(replace(built(), model=Mine(depth=None)))).model["depth"] is None


def test_the_hash_of_examples_is_that_of_what_identifies_them_in_any_order() -> None:
    facts = {"train": "a", "val": ["b", 2]}
    one, two = (SimpleNamespace(fingerprint=lambda own=own: own) for own in (facts, dict(reversed(facts.items()))))
    assert fingerprint_of(one) == fingerprint_of(two)  # type: ignore[arg-type]
    assert fingerprint_of(one) == hashlib.sha256(b'{"train": "a", "val": ["b", 2]}').hexdigest()  # type: ignore[arg-type]


def test_a_frame_is_part_of_a_job_and_a_word_in_one_key() -> None:
    words = ("dataset=folder", "dataset.path=photos", "dataset.decode_size=8")
    job = ResolvedJob.of(built(*words))
    own = SimpleNamespace(crops_files=False, classes=2, class_names=(), fingerprint=dict)
    how = job.preprocessing
    kinds = []
    for crops, fit in ((False, "crop"), (True, "crop"), (False, "pad"), (False, "squash")):
        own.crops_files, own.preprocessing = crops, replace(how, fit=fit)
        facts = fingerprint(replace(job, dataset=own), 10)  # type: ignore[arg-type]
        kinds.append(facts["crop_from"])
    assert kinds == ["square", "file", "square, fit=pad", "square, fit=squash"]


def test_other_data_on_a_machine_has_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(world: World) -> str:
        with pytest.raises(InputError) as refused:
            check_same_data({"examples": 10 - (world.rank == 1), "seed": 0}, world)
        return str(refused.value)

    assert (
        ThreadRanks(2, monkeypatch).run(refuse)
        == [
            "rank 1 here has different data from rank 0 (examples: here 9, there 10); all machines need the same "
            "files: copy them again, or name a folder that all of them see"
        ]
        * 2
    )


def test_the_options_of_a_job_are_those_of_all_groups_one_by_one() -> None:
    job = built("logger=[jsonl,tensorboard]", "metric=[f1,recall]", "optimizer=sgd")
    names = [type(option).__name__ for option in chosen_options(job)]
    assert {"DigitNet", "SGD", "JSONL", "TensorBoard", "F1", "Recall"} <= {*names}
    assert not any(isinstance(option, dict) for option in chosen_options(job))


def test_the_plan_of_a_job_has_each_of_its_durations() -> None:
    words = ("batch=10", "epochs=3", "train.micro_batches=2", "telemetry.interval=2", "train.eval_every=5")
    job = ResolvedJob.of(built(*words, "checkpoint.every=7"))
    plan = plan_of(job, 95)
    assert (plan.examples, plan.batch, plan.micro_batches, plan.total_steps) == (95, 10, 2, 30)
    assert (plan.log_every, plan.eval_every, plan.save_every) == (2, 5, 7)
    assert plan_of(replace(job, steps=4), 95).total_steps == 4
