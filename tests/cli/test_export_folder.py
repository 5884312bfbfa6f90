"""`lockstep export --to timm`: a folder from which timm and Transformers build the model, with its logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch

from helpers import FAKE, Done, forked, photos_of_two_classes, train_here
from lockstep.inference.predictor import load_predictor
from lockstep.precision import FP32

pytestmark = pytest.mark.slow

COLOUR = ("dataset.channels=3", "dataset.size=32")
JOBS = {
    "normed": ("model=test_resnet", *COLOUR, "train.ema=0.9"),
    "grey": ("model=test_resnet", "dataset.size=16"),
    "attention": ("model=test_vit", "dataset.channels=3", "dataset.size=64"),
    "oblong": ("model=test_vit", "dataset.channels=3", "dataset.size=[32,64]"),
    "labels": ("model=test_convnext", *COLOUR, "task=multilabel"),
    "options": ("model=test_resnet", *COLOUR, "+model.options.stem_width=16"),
    "cifar": ("model=resnet34", "model.stem=cifar", *COLOUR),
    "own": ("model=linear",),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    for name, words in JOBS.items():
        train_here(folder / "outputs" / name, *FAKE, "dataset.examples=20", "batch=10", "steps=2", *words)
    return folder


def exported(place: Path, *words: str) -> Done:
    return forked("lockstep", "export", *words, cwd=place)


@pytest.mark.parametrize("name", ["normed", "grey", "attention", "oblong", "labels", "options"])
def test_timm_builds_the_model_with_its_logits_names_and_images(runs: Path, name: str) -> None:
    done = exported(runs, f"outputs/{name}", "--to", "timm", "--out", name)
    assert done.code == 0, done.err
    model = timm.create_model(f"local-dir:{runs / name}", pretrained=True).eval()
    ours = load_predictor(runs / "outputs" / name, device="cpu", precision=FP32())
    images = torch.rand(3, *ours.card.input_shape)
    with torch.no_grad():
        assert torch.equal(model(images), ours.model(images))
    usual = timm.data.resolve_model_data_config(model)
    assert usual["input_size"] == ours.card.input_shape
    assert (list(usual["mean"]), list(usual["std"])) == (list(ours.card.mean), list(ours.card.std))
    assert (usual["interpolation"], usual["crop_pct"]) == (ours.card.interpolation, ours.card.eval_crop)
    assert json.loads((runs / name / "config.json").read_text())["label_names"] == list(ours.card.names)


def test_the_card_in_markdown_has_scores_data_and_the_command(runs: Path) -> None:
    exported(runs, "outputs/normed", "--to", "timm", "--out", "carded")
    text = (runs / "carded" / "README.md").read_text()
    card = load_predictor(runs / "outputs" / "normed", device="cpu").card
    assert f"- {card.scores['top1']:.2f} % top-1" in text
    assert "`test_resnet`, trained on Fake" in text
    assert "averaged weights" in text
    assert "lockstep train" in text
    assert "dataset.size=32 train.ema=0.9" in text


def test_the_card_of_photos_has_their_classes_their_numbers_and_the_test_score(tmp_path: Path) -> None:
    photos_of_two_classes(tmp_path, 16, "jpg")
    data = ("dataset=folder", f"dataset.path={tmp_path / 'photos'}", "dataset.test_share=0.2")
    sizes = ("dataset.decode_size=16", "dataset.input_size=null", "augment=none")
    run = train_here(tmp_path / "run", *data, *sizes, "model=test_resnet", "epochs=1", "batch=10")
    assert exported(tmp_path, "run", "--to", "timm", "--out", "timm").code == 0
    text, summary = (tmp_path / "timm" / "README.md").read_text(), run.read_summary()
    counts = load_predictor(run.path, device="cpu").card.trained_on["images"]
    assert sum(counts.values()) == len([*(tmp_path / "photos").rglob("*.jpg")])
    train, val, test = counts.values()
    assert "trained on photos (Folder) with Lockstep" in text
    assert f"Data: {train} images in the training split, {val} images in the evaluation split, {test} images" in text
    assert "Classes: lamp, mug." in text
    (_, tested) = text.split("On the test split:")
    assert f"- {summary['test']['top1']:.2f} % top-1" in tested
    assert "top-5" not in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("outputs/own",), "this model is no model of timm (lockstep.models.Linear); use --to onnx"),
        (("outputs/cifar",), "timm cannot build this model"),
        (("outputs/normed", "--out", "outputs"), "--out is outputs, expected a new folder"),
        (("outputs/normed", "--out", "no/where"), "--out is no/where, expected a new folder"),
        (("outputs/normed", "--pixels", "float"), "remove --pixels"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(
    runs: Path, words: tuple[str, ...], sentence: str
) -> None:
    before = sorted(runs.rglob("*"))
    done = exported(runs, *words, "--to", "timm")
    assert done.code == 2
    assert sentence in done.err
    assert sorted(runs.rglob("*")) == before


def test_transformers_takes_the_folder(runs: Path) -> None:
    transformers = pytest.importorskip("transformers")
    exported(runs, "outputs/normed", "--to", "timm", "--out", "wrapped")
    model = transformers.AutoModelForImageClassification.from_pretrained(runs / "wrapped").eval()
    ours = load_predictor(runs / "outputs" / "normed", device="cpu", precision=FP32())
    images = torch.rand(3, *ours.card.input_shape)
    with torch.no_grad():
        assert torch.equal(model(images).logits, ours.model(images))
