"""What `experiment=photos` chooses by the number of images and by the weights that are there."""

from dataclasses import replace
from pathlib import Path

import pytest

import lockstep
from helpers import built, forked, photos_of_two_classes
from lockstep.core.run_dir import RunDir
from lockstep.job import auto_training
from lockstep.job.resolve import resolve
from lockstep.models import Timm
from lockstep.training.resolved_job import ResolvedJob, load_job

RECIPE = ("experiment=photos", "dataset.path=nowhere", "model=test_resnet.r160_in1k")
REASON = "the weights are not here"


@pytest.fixture(params=["", REASON], ids=["published", "random"])
def missing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why there are no published weights; empty if there are."""
    reason: str = request.param
    monkeypatch.setattr(Timm, "missing_weights", lambda self: reason)
    return reason


def chosen(*words: str, images: int) -> ResolvedJob:
    job = built(*RECIPE, *words)
    return auto_training.fitted(resolve(job, sweep=False), job, images)


@pytest.mark.parametrize(
    ("images", "epochs", "ema", "mixup"),
    [(80, 40, 0.99, 0), (499, 40, 0.99, 0), (500, 20, 0.99, 0), (5_000, 10, 0.999, 0), (20_000, 10, 0.999, 0.1)],
)
def test_the_images_and_the_weights_choose(images: int, epochs: int, ema: float, mixup: float, missing: str) -> None:
    job = chosen(images=images)
    assert (job.epochs, job.train.ema, job.train.mixup) == (epochs * (3 if missing else 1), ema, mixup)
    assert job.starts_trained == (not missing)
    assert (job.train.freeze, job.train.freeze_until) == (([], None) if missing else (["backbone"], "10%"))
    assert job.optimizer.lr == pytest.approx(1e-3 * (32 / 64) ** 0.5 * (1 if missing else 0.1))
    assert job.train.patience == "50%"
    assert chosen("epochs=3", images=images).train.patience is None
    assert job.dataset.input_shape[1] == (224 if missing else 160)


def test_what_is_typed_is_kept_and_every_choice_is_said(missing: str) -> None:
    job = built(*RECIPE)
    lines = auto_training.notes(job, chosen(images=80), 80)
    start = "epochs=120" if missing else "epochs=40 train.freeze=[backbone] train.freeze_until=10%"
    assert lines[1:] == [f"chosen for 80 images: {start} train.ema=0.99 train.patience=50%"]
    assert bool(missing) == any(REASON in line and "init_from=FILE" in line for line in lines)
    block = ("train.ema=null", "train.mixup=0", "train.freeze=[conv1]", "train.freeze_until=1ep", "train.patience=2")
    words = ("epochs=3", "model.pretrained=false", *block)
    typed = chosen(*words, images=80)
    assert auto_training.notes(built(*RECIPE, *words), typed, 80) == []
    assert (typed.epochs, typed.train.ema, typed.train.freeze, typed.starts_trained) == (3, None, ["conv1"], False)


def test_of_a_run_in_steps_no_epochs_are_chosen(missing: str) -> None:
    lines = auto_training.notes(built(*RECIPE, "steps=5"), chosen("steps=5", images=80), 80)
    assert "train.ema=0.99" in lines[-1]
    assert not [line for line in lines if " epochs=" in line]


def test_weights_of_a_file_take_the_place_of_published_ones(missing: str) -> None:
    start = auto_training.by_weights(replace(built(*RECIPE), init_from="file.safetensors"), None)
    assert (start.model, start.train.freeze) == (Timm(name="test_resnet.r160_in1k"), ["backbone"])


@pytest.mark.parametrize(
    ("pretrained", "init_from", "trained"),
    [(False, None, False), (True, None, True), ("auto", None, True), (False, "file.safetensors", True)],
)
def test_a_job_starts_trained_with_the_weights_of_a_file_or_of_its_model(
    pretrained: bool | str, init_from: str | None, trained: bool
) -> None:
    model = Timm(name="test_resnet.r160_in1k", pretrained=pretrained)
    assert replace(built(*RECIPE), model=model, init_from=init_from).starts_trained is trained


def test_a_resume_has_published_weights_if_its_run_had_them(missing: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for before in (True, False):
        run.config.write_text(f"model: {{pretrained: {str(before).lower()}}}\n")
        start = auto_training.by_weights(built(*RECIPE), run.checkpoints / "step-00000002")
        assert start.model.pretrained is before


def test_a_resume_keeps_the_choices_as_weights_come_or_go(tmp_path: Path) -> None:
    photos_of_two_classes(tmp_path, 8, "png")
    # In a process with one thread, which forks its ranks: fresh ones would each import torch.
    done = forked("test_auto_training:train_as_weights_come", cwd=tmp_path)
    assert done.code == 0, done.err
    (config,) = tmp_path.glob("outputs/2*/config.yaml")
    job = load_job(config)
    assert (job.starts_trained, job.train.freeze, job.epochs) == (False, [], 3)


def train_as_weights_come() -> None:
    """Start a run without published weights, and resume it with them."""
    Timm.missing_weights = lambda self: REASON  # type: ignore[method-assign]
    words = ("dataset.path=photos", "dataset.decode_size=32", "loader.workers=0", "device=cpu", "train.patience=null")
    words = (*words, "dataset.input_size=32")
    run = lockstep.train([*RECIPE[::2], *words, "epochs=2"]).folder
    Timm.missing_weights = lambda self: ""  # type: ignore[method-assign]
    lockstep.train([f"resume={run}", "epochs=3"])


def test_four_epochs_are_enough_for_patience_and_a_run_in_steps_has_none(missing: str) -> None:
    assert chosen("epochs=4", images=80).train.patience == "50%"
    assert chosen("steps=500", images=80).train.patience is None


@pytest.mark.parametrize(
    "layers", ["auto,conv1", "conv1,auto", "conv1,auto,layer1,layer2", "layer1,conv1,auto", "auto"]
)
def test_layers_that_are_named_beside_auto_are_frozen_too(missing: str, layers: str) -> None:
    train = chosen(f"train.freeze=[{layers}]", images=80).train
    named = [name for name in layers.split(",") if name != "auto"]
    assert train.freeze == [*named, *["backbone"] * (not missing)]
    assert train.freeze_until == ("10%" if train.freeze else None)


@pytest.mark.parametrize(("images", "epochs", "mixup"), [(4_999, 20, 0), (19_999, 10, 0), (20_001, 10, 0.1)])
def test_one_image_less_is_the_class_below(images: int, epochs: int, mixup: float, missing: str) -> None:
    job = chosen(images=images)
    assert (job.epochs, job.train.mixup) == (epochs * (3 if missing else 1), mixup)


def test_a_job_whose_images_are_not_known_has_the_choices_for_many(missing: str) -> None:
    job = resolve(built(*RECIPE), sweep=False)
    assert (job.epochs, job.train.ema, job.train.mixup) == (30 if missing else 10, 0.999, 0.1)


def test_what_is_typed_is_kept_in_the_job_too(missing: str) -> None:
    words = ("train.mixup=0.4", "train.ema=0.5", "train.patience=3", "train.freeze_until=2ep", "epochs=7")
    train = (job := chosen(*words, "train.freeze=[conv1]", images=80)).train
    assert (train.mixup, train.ema, train.patience, train.freeze_until) == (0.4, 0.5, 3, "2ep")
    assert (train.freeze, job.epochs) == (["conv1"], 7)
    assert chosen("train.freeze=[conv1]", images=80).train.freeze_until == "10%"
    assert chosen("train.freeze=[]", images=80).train.freeze_until is None
    assert chosen("train.mixup=0", images=10**6).train.mixup == 0


@pytest.mark.parametrize("config", [None, "{}", "model: {}", "model: {_target_: x}"])
def test_a_checkpoint_that_does_not_say_whether_its_run_had_weights_takes_those_that_are_there(
    missing: str, config: str | None, tmp_path: Path
) -> None:
    run = RunDir.at(tmp_path / "run")
    if config is not None:
        run.config.write_text(config)
    start = auto_training.by_weights(built(*RECIPE), run.checkpoints / "step-00000002")
    assert start.model.pretrained is (not missing)


@pytest.mark.parametrize("typed", [True, False])
def test_weights_that_are_typed_are_not_looked_for(missing: str, typed: bool, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.config.write_text(f"model: {{pretrained: {str(not typed).lower()}}}\n")
    job = built(*RECIPE, f"model.pretrained={str(typed).lower()}")
    start = auto_training.by_weights(job, run.checkpoints / "step-00000002")
    assert start.model.pretrained is typed
    assert auto_training.notes(job, resolve(job, sweep=False), 80)[0].startswith("chosen for 80 images: ")


def test_the_origin_of_the_weights_the_share_and_the_number_of_images_are_said(missing: str) -> None:
    job = built(*RECIPE)
    lines = auto_training.notes(job, chosen(images=12_345), 12_345)
    assert lines[-1].startswith("chosen for 12,345 images: epochs=")
    published = "model.pretrained is true: published weights are on this machine or can be downloaded"
    more = "Random weights need many more images: run this once with a network, or name a weights file with "
    assert lines[0] == (f"model.pretrained is false: {REASON}. {more}init_from=FILE" if missing else published)
    shared = replace(chosen(images=80), dataset=replace(job.dataset, val_share=0.25))
    assert "images: dataset.val_share=0.25 epochs=" in auto_training.notes(job, shared, 80)[-1]
    typed = auto_training.notes(
        built(*RECIPE, "dataset.val_share=0.2"), chosen("dataset.val_share=0.2", images=80), 80
    )
    assert "val_share" not in typed[-1]
    many = chosen("train.freeze=[auto,conv1]", images=10**6)
    words = ["train.freeze=[conv1]" if missing else "train.freeze=[conv1,backbone]", "train.freeze_until=10%"]
    said_of_many = auto_training.notes(built(*RECIPE, "train.freeze=[auto,conv1]"), many, 10**6)[-1]
    expected = ["chosen for 1,000,000 images:", f"epochs={30 if missing else 10}", *words]
    assert said_of_many == " ".join([*expected, "train.mixup=0.1 train.ema=0.999 train.patience=50%"])


def test_a_run_that_began_without_weights_says_so_although_they_are_there_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Timm, "missing_weights", lambda self: "")
    job = built(*RECIPE)
    random = replace(job, model=replace(job.model, pretrained=False))
    assert auto_training.notes(job, random, 80)[0].startswith(
        "model.pretrained is false: the run began without them. Random weights need"
    )
    of_file = replace(job, init_from="file.safetensors")
    for resolved in (random, auto_training.by_weights(of_file, None)):
        assert auto_training.notes(of_file, resolved, 80)[0] == "model.pretrained is false: init_from has the weights"
