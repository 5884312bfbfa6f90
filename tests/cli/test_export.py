"""`lockstep export`: files that other programs run, with the logits of the model."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import lockstep
from helpers import NARROW, Done, forked, train_here
from lockstep.core.errors import InputError, LockstepError
from lockstep.inference import export as exporting
from lockstep.inference.load import load
from lockstep.precision import FP32

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on digits with six views of a larger input, trained in bfloat16, and a photograph."""
    folder = tmp_path_factory.mktemp("export")
    words = ("train.eval_views=6", "dataset.input_size=12", "precision=bf16")
    train_here(folder / "outputs" / "digits", NARROW, "steps=3", "batch=64", *words)
    Image.fromarray(np.arange(3000, dtype=np.uint8).reshape(40, 25, 3)).save(folder / "photo.png")
    return folder


def exported(place: Path, *words: str) -> Done:
    return forked("lockstep", "export", *words, cwd=place)


def images(count: int) -> torch.Tensor:
    return torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def run_onnx(path: Path, pixels: np.ndarray) -> torch.Tensor:
    session = onnxruntime.InferenceSession(path)
    return torch.from_numpy(session.run(["logits"], {"images": pixels})[0])


@pytest.mark.numerics
def test_an_onnx_file_has_the_logits_of_the_model_for_any_number_of_pictures(place: Path) -> None:
    done = exported(place, "outputs/digits")
    assert done.code == 0, done.err
    assert "uint8 pixels of shape batch x 1x8x8 to logits of 10 classes; on 64 images" in done.out
    predictor = load(place / "outputs" / "digits", device="cpu", precision=FP32())
    file = place / "outputs" / "digits" / "model.onnx"
    for count in (1, 2, 7):
        difference = run_onnx(file, images(count).numpy()) - predictor.logits(images(count))
        assert difference.abs().max() <= 1e-4
    session = onnxruntime.InferenceSession(file)
    assert session.get_inputs()[0].shape == ["batch", 1, 8, 8]
    assert json.loads(session.get_modelmeta().custom_metadata_map["lockstep"])["classes"] == 10


@pytest.mark.numerics
def test_a_torch_program_needs_nothing_of_ours(place: Path, tmp_path: Path) -> None:
    shutil.copy(place / "outputs" / "digits" / "model.safetensors", tmp_path / "digits.safetensors")
    done = exported(tmp_path, "digits.safetensors", "--format", "torch", str(place / "photo.png"))
    assert done.code == 0, done.err
    texts = {"lockstep.json": ""}
    program = torch.export.load(tmp_path / "digits.pt2", extra_files=texts)
    predictor = load(place / "outputs" / "digits", device="cpu", precision=FP32())
    difference = program.module()(images(5)) - predictor.logits(images(5))
    assert difference.abs().max() <= 1e-4
    assert json.loads(texts["lockstep.json"])["input_shape"] == [1, 12, 12]


@pytest.mark.numerics
def test_pixels_from_0_to_1_are_the_same_pictures(place: Path, tmp_path: Path) -> None:
    predictor = load(place / "outputs" / "digits", device="cpu", precision=FP32())
    exporting.export(predictor, images(7), tmp_path / "model.onnx", kind="onnx", floats=True)
    outputs = run_onnx(tmp_path / "model.onnx", (images(3).float() / 255).numpy())
    assert (outputs - predictor.logits(images(3))).abs().max() <= 1e-4


@pytest.mark.numerics
def test_a_model_of_timm_is_exported_for_onnx(tmp_path: Path) -> None:
    """`test_timm_families.py` exports models of timm for torch."""
    data = ("dataset=fake", "dataset.classes=5", "dataset.examples=8", "dataset.size=32")
    run = train_here(tmp_path / "run", "model=timm", "model.name=test_vit", *data, "batch=8", "steps=1")
    predictor = load(run.path, device="cpu", precision=FP32())
    stored = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    target = tmp_path / "model.onnx"
    assert exporting.export(predictor, stored, target, kind="onnx", floats=False) <= 1e-4
    assert target.is_file()


def test_large_logits_may_differ_by_their_rounding(place: Path, tmp_path: Path) -> None:
    predictor = load(place / "outputs" / "digits", device="cpu", precision=FP32())
    with torch.no_grad():
        for parameter in predictor.model.parameters():
            parameter.mul_(1e6)
    assert predictor.logits(images(3)).abs().max() > 1e5
    exporting.export(predictor, images(3), tmp_path / "model.pt2", kind="torch", floats=False)


def test_an_export_that_differs_is_refused_and_not_written(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = load(place / "outputs" / "digits", device="cpu", precision=FP32())
    form = exporting.FORMATS["torch"]
    faulty = replace(form, read=lambda path: lambda images: form.read(path)(images) + 1e-3)
    monkeypatch.setitem(exporting.FORMATS, "torch", faulty)
    with pytest.raises(LockstepError, match=r"the logits of the exported model differ by .*; nothing was written"):
        exporting.export(predictor, images(3), tmp_path / "model.pt2", kind="torch", floats=False)
    assert list(tmp_path.iterdir()) == []


def test_packages_that_are_missing_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    there: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else there(name))
    with pytest.raises(InputError, match="does not have: pip install onnx onnxscript onnxruntime"):
        exporting.check_packages("onnx")
    exporting.check_packages("torch")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("alone.safetensors", "nowhere.png"), "nowhere.png: expected an image to compare on"),
        (("alone.safetensors", "--out", "nowhere/model.onnx"), "--out is nowhere/model.onnx, expected a file in"),
        (("alone.safetensors", "--out", "model.pt"), "--format onnx writes another kind of file: --format torch"),
    ],
    ids=["no such image", "no such folder", "another format"],
)
def test_what_cannot_be_exported_is_one_sentence(place: Path, words: tuple[str, ...], sentence: str) -> None:
    shutil.copy(place / "outputs" / "digits" / "model.safetensors", place / "alone.safetensors")
    done = exported(place, *words)
    assert done.code == 2
    assert sentence in done.err
    assert done.err.count("\n") == 1
    assert not (place / "alone.onnx").exists()
    assert lockstep.load(place / "alone.safetensors").card.classes == 10


@pytest.mark.numerics
def test_without_its_images_a_model_is_compared_on_random_ones(place: Path) -> None:
    shutil.copyfile(place / "outputs" / "digits" / "model.safetensors", place / "lone.safetensors")
    done = exported(place, "lone.safetensors", "--format", "torch")
    assert done.code == 0, done.err
    assert "on 64 images of random pixels, because a file of weights has no images, they differ by" in done.out
    assert (place / "lone.pt2").is_file()


@pytest.mark.numerics
def test_a_run_whose_photos_have_moved_is_exported(tmp_path: Path) -> None:
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (16, 16), (99, number, 0)).save(tmp_path / "photos" / name / f"{number}.png")
    photos = ("dataset=folder", f"dataset.path={tmp_path / 'photos'}", "dataset.input_size=16")
    train_here(tmp_path / "run", NARROW, "steps=1", "batch=4", *photos)
    (tmp_path / "photos").rename(tmp_path / "moved")
    done = exported(tmp_path, "run", "--format", "torch")
    assert done.code == 0, done.err
    assert "on 64 images of random pixels, because those of the run are not here (dataset" in done.out
