"""`lockstep export`: files that other programs run, with the logits of the model."""

from __future__ import annotations

import importlib.util
import json
import runpy
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import lockstep
from helpers import NARROW, ROOT, Done, forked, train_here
from lockstep.core.errors import InputError
from lockstep.inference import export as exporting
from lockstep.inference.predictor import load_predictor
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
    predictor = load_predictor(place / "outputs" / "digits", device="cpu", precision=FP32())
    file = place / "outputs" / "digits" / "model.onnx"
    for count in (1, 2, 7):
        difference = run_onnx(file, images(count).numpy()) - predictor.logits(images(count))
        assert difference.abs().max() <= 1e-4
    session = onnxruntime.InferenceSession(file)
    assert session.get_inputs()[0].shape == ["batch", 1, 8, 8]
    assert json.loads(session.get_modelmeta().custom_metadata_map["lockstep"])["classes"] == 10


@pytest.mark.numerics
def test_a_torch_program_of_pixels_from_0_to_1_needs_nothing_of_ours(place: Path, tmp_path: Path) -> None:
    shutil.copy(place / "outputs" / "digits" / "model.safetensors", tmp_path / "digits.safetensors")
    words = ("digits.safetensors", "--format", "torch", "--pixels", "float", str(place / "photo.png"))
    done = exported(tmp_path, *words)
    assert done.code == 0, done.err
    texts = {"lockstep.json": ""}
    program = torch.export.load(tmp_path / "digits.pt2", extra_files=texts)
    predictor = load_predictor(place / "outputs" / "digits", device="cpu", precision=FP32())
    difference = program.module()(images(5).float() / 255) - predictor.logits(images(5))
    assert difference.abs().max() <= 1e-4
    assert json.loads(texts["lockstep.json"])["input_shape"] == [1, 12, 12]


@pytest.mark.parametrize("form", ["onnx", "torch"])
def test_an_exported_model_does_not_say_where_the_sources_lie(place: Path, tmp_path: Path, form: str) -> None:
    file = tmp_path / f"model{exporting.EXPORT_FORMATS[form].suffix}"
    exporting.export(str(place / "outputs" / "digits"), [], kind=form, pixels="uint8", out=str(file))
    content = file.read_bytes()
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as zipped:
            content = b"".join(map(zipped.read, zipped.namelist()))
    assert b"lockstep" in content
    assert [
        path for path in (ROOT, sys.prefix, Path(torch.__file__).parent, place) if str(path).encode() in content
    ] == []


def test_preprocess_py_is_beside_a_model_of_photos_and_replaces_no_file_of_somebody_else(
    place: Path, tmp_path: Path
) -> None:
    words = ("outputs/digits", "--to", "torch", "--out", str(tmp_path / "digits.pt2"))
    for _ in range(2):
        done = exported(place, *words)
        assert done.code == 0, done.err
        assert f"wrote {tmp_path / 'preprocess.py'}" in done.out
    card = json.loads(load_predictor(place / "outputs" / "digits", device="cpu").card.metadata()["lockstep"])
    pixels = runpy.run_path(str(tmp_path / "preprocess.py"))["preprocess"](place / "photo.png", card)
    assert np.array_equal(pixels, lockstep.load(place / "outputs" / "digits").stored(place / "photo.png").numpy())
    (tmp_path / "preprocess.py").write_text("mine")
    done = exported(place, *words)
    assert (done.code, (tmp_path / "preprocess.py").read_text()) == (2, "mine")
    assert "preprocess.py is not of lockstep export; rename it, or name another folder" in done.err


def test_packages_that_are_missing_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    there: Any = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else there(name))
    with pytest.raises(InputError, match=r"--to onnx needs the package onnx,.* pip install 'lockstep\[export\]'"):
        exporting.export("latest", [], kind="onnx", pixels="uint8", out=None)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("alone.safetensors", "nowhere.png"), "nowhere.png: there is no such file"),
        (("alone.safetensors", "--out", "nowhere/model.onnx"), "--out is nowhere/model.onnx, expected a file in"),
        (("alone.safetensors", "--out", "model.pt"), "--to onnx writes another kind of file: --to torch"),
    ],
    ids=["no such image", "no such folder", "another format"],
)
def test_what_cannot_be_exported_is_one_sentence(place: Path, words: tuple[str, ...], sentence: str) -> None:
    shutil.copy(place / "outputs" / "digits" / "model.safetensors", place / "alone.safetensors")
    done = exported(place, *words)
    assert done.code == 2
    assert sentence in done.err
    assert done.err.count("lockstep: ") == 1
    assert not (place / "alone.onnx").exists()
    assert lockstep.load(place / "alone.safetensors").card.classes == 10
