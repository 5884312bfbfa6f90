"""`lockstep export --to timm`: timm and Transformers, which read the folder alone, predict what the run predicts."""

from __future__ import annotations

import csv
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from helpers import train_here
from lockstep.core.model import probabilities
from lockstep.core.model_card import VALUES
from lockstep.inference import export as exporting
from lockstep.inference.predictor import Predictor, load_predictor
from lockstep.models import zoo
from lockstep.precision import FP32

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

SHAPES = ((60, 80), (81, 50), (57, 57), (120, 31))  # (height, width) of the photos
TASKS = {
    "classes": ("dataset.label_column=name",),
    "judged": ("dataset.label_column=name", "loss=bce"),
    "labels": ("task=multilabel", "dataset.label_columns=[odd,late,third]"),
    "one label": ("task=multilabel", "dataset.label_columns=[late]"),
    "values": ("task=regression", "dataset.label_columns=[level,aspect]"),
    "one value": ("task=regression", "dataset.label_column=level"),
}
# The names have published weights, whose sizes, crops and licence say nothing of these.
SIZES = {
    "square": ("model=resnet10t.c3_in1k", "dataset.decode_size=54", "dataset.input_size=48", "dataset.crop=0.875"),
    "oblong": ("model=test_vit.r160_in1k", "dataset.input_size=[48,32]", "input.interpolation=bicubic"),
    "whole": ("model=convnextv2_atto.fcmae_ft_in1k", "dataset.decode_size=[40,64]", "dataset.input_size=null"),
}
FITS = ("crop", "pad", "squash")
OWN = ("input.mean=[0.2,0.4,0.6]", "input.std=[0.3,0.2,0.25]")
# As timm's validate.py calls it: `vars(args)`, with the test sizes.
VALIDATE = {
    "args": {"input_size": None, "img_size": None, "crop_pct": None, "crop_mode": None},
    "use_test_size": True,
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    rows: list[list[Any]] = [["path", "name", "odd", "late", "third", "level", "aspect", "split"]]
    for number in range(24):
        (height, width), level = SHAPES[number % 4], 40 + 7 * number
        coarse = rng.integers(level - 40, level + 40, (height // 6, width // 6, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR).save(folder / f"{number}.png")
        facts = (("dark", "a <b> | c", "ümlaut")[number // 8], number % 2, int(number > 11), int(number % 3 > 0))
        rows.append([f"{number}.png", *facts, level / 100, width / height, "train" if number % 3 else "val"])
    with (folder / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder


def exported(photos: Path, place: Path, *words: str) -> tuple[Predictor, Path]:
    """A run of these words, and the folder that is exported of it."""
    usual = ("dataset=csv", f"dataset.path={photos / 'list.csv'}", "augment=none", "batch=8", "steps=3")
    run = train_here(place / "run", *usual, "optimizer.lr=0.01", *words)
    exporting.export(str(run.path), [], kind="timm", pixels="uint8", out=str(place / "timm"))
    return load_predictor(run.path, device="cpu", precision=FP32()), place / "timm"


def expected(ours: Predictor, photo: Path) -> list[float]:
    """The run's own prediction of a photo: its values, or the probability of each class or label."""
    if ours.card.targets == VALUES:
        return ours.values(photo)[0].tolist()
    return ours.predict(photo)[0].probabilities.tolist()


def data_configs(model: Any) -> Iterator[dict[str, Any]]:
    yield timm.data.resolve_model_data_config(model)
    yield timm.data.resolve_data_config(model=model, use_test_size=True)
    yield timm.data.resolve_data_config(model=model, **VALIDATE)


def assert_is_the_runs(ours: Predictor, folder: Path, photos: list[Path]) -> None:
    """Both libraries have the run's pixels, up to the rounding of Pillow's resizing, logits and predictions."""
    import transformers

    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    wrapped = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    pipeline = transformers.pipeline("image-classification", model=str(folder), device="cpu")
    rounding = (5.1 if ours.card.interpolation == "bicubic" else 2.1) / 255 / min(ours.card.std)
    for photo in photos:
        image, pixels = Image.open(photo), ours.preprocess(photo)
        seen: list[Tensor] = [processor(image)["pixel_values"]]
        seen += [timm.data.create_transform(**config)(image)[None] for config in data_configs(model)]
        with torch.no_grad():
            torch.testing.assert_close(wrapped(pixels).logits, ours.model(pixels), rtol=1e-4, atol=1e-5)
            for theirs in seen:
                torch.testing.assert_close(theirs, pixels, atol=rounding, rtol=0)
                shares = probabilities(model(theirs), ours.card.probabilities)[0]
                assert shares.tolist() == pytest.approx(expected(ours, photo), abs=0.02)
        scores = {row["label"]: row["score"] for row in pipeline(str(photo), top_k=99)}
        assert [*map(scores.get, ours.names)] == pytest.approx(shares.tolist(), abs=1e-5)


# Each task once, with a size and a fit in turn, and each size with each fit: what a target is changes no pixel.
CASES = [
    *((task, ("square", "oblong")[number % 2], FITS[number % 3]) for number, task in enumerate(TASKS)),
    *(("classes", size, fit) for size in SIZES for fit in FITS if (size, fit) != ("square", "crop")),
]


@pytest.mark.parametrize(("task", "size", "fit"), CASES)
def test_timm_and_transformers_predict_what_the_run_predicts(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, size: str, fit: str
) -> None:
    ours, folder = exported(photos, tmp_path, *TASKS[task], *SIZES[size], f"dataset.fit={fit}", *OWN)
    assert "predictions can differ" not in capsys.readouterr().out
    assert_is_the_runs(ours, folder, [photos / f"{number}.png" for number in range(4)])
    facts = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    assert not {"tag", "license", "origin_url", "paper_ids", "paper_name", "test_input_size", "notes"} & set(facts)


def test_an_average_of_weights_and_old_sizes_are_exported_as_they_are(photos: Path, tmp_path: Path) -> None:
    """Stored by before: 48 / 0.875 and 32 / 0.875, rounded, which another `crop_pct` says in timm's words."""
    sizes = ("dataset.decode_size=[55,37]", "dataset.input_size=[48,32]", "dataset.crop=0.875")
    words = (*TASKS["classes"], "model=test_resnet", *sizes, "train.ema=0.5")
    ours, folder = exported(photos, tmp_path, *words)
    assert ours.card.averaged
    assert_is_the_runs(ours, folder, [photos / "0.png", photos / "1.png"])


DIFFERENT = {
    "enlarged": (
        ("dataset.decode_size=24", "dataset.input_size=48"),
        "resizes a photo to 24x24 and its centre to 48x48",
    ),
    "twice": (
        ("dataset.decode_size=64", "dataset.input_size=32"),
        "resizes a photo to 64x64 and its centre to 32x32",
    ),
    "views": (("dataset.decode_size=48", "train.eval_views=2"), "averages 2 views of an image, this model takes one"),
    "grey": (
        ("dataset.decode_size=48", "dataset.channels=1"),
        "images have 1 channels, Transformers' pipeline makes",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_the_folder_cannot_say_is_said_on_the_terminal_and_in_the_card(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words, sentence = DIFFERENT[name]
    ours, folder = exported(photos, tmp_path, *TASKS["classes"], "model=test_resnet", *words)
    assert sentence in capsys.readouterr().out
    assert sentence in (folder / "README.md").read_text()
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    pixels = ours.preprocess(photos / "0.png")
    with torch.no_grad():
        assert torch.equal(model(pixels), ours.model(pixels))
    if name == "grey":
        image = Image.open(photos / "0.png").convert("L")
        for config in data_configs(model):
            theirs = timm.data.create_transform(**config)(image)[None]
            torch.testing.assert_close(theirs, pixels, atol=2.1 / 255 / ours.card.std[0], rtol=0)


def test_the_card_names_published_weights_only_where_the_training_started_from_them(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        *TASKS["classes"],
        "model=convnextv2_atto.fcmae_ft_in1k",
        "dataset.decode_size=32",
        "dataset.input_size=null",
    )
    _, folder = exported(photos, tmp_path / "own", *words)
    assert "Fine-tuned" not in (folder / "README.md").read_text()
    file = tmp_path / "published.safetensors"
    save_file(timm.create_model("convnextv2_atto").state_dict(), file)
    monkeypatch.setattr(zoo, "published_weights", lambda name: {"file": str(file), "custom_load": False})
    sizes = ("input.interpolation=bilinear", "dataset.fit=squash", "dataset.crop=1")
    _, folder = exported(photos, tmp_path / "tuned", *words, *sizes, "model.pretrained=true")
    text = (folder / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["base_model"] == "timm/convnextv2_atto.fcmae_ft_in1k"
    assert "cc-by-nc-4.0" in text  # the licence of the base, in its place: not of these weights
    assert "license" not in head | json.loads((folder / "config.json").read_text())["pretrained_cfg"]


@pytest.mark.parametrize(
    ("task", "sizes"),
    [
        ("labels", SIZES["square"]),
        ("values", (*SIZES["oblong"], "dataset.fit=pad")),
        (
            "classes",
            ("model=test_resnet", "dataset.decode_size=[40,64]", "dataset.input_size=32", "dataset.fit=squash"),
        ),
    ],
)
def test_an_onnx_file_and_the_code_beside_it_predict_what_the_run_predicts(
    photos: Path, tmp_path: Path, task: str, sizes: tuple[str, ...]
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    usual = ("dataset=csv", f"dataset.path={photos / 'list.csv'}", "augment=none", "batch=8", "steps=3")
    run = train_here(tmp_path / "run", *usual, *TASKS[task], *sizes, *OWN)
    exporting.export(str(run.path), [], kind="onnx", pixels="uint8", out=str(tmp_path / "model.onnx"))
    session, ours = onnxruntime.InferenceSession(tmp_path / "model.onnx"), load_predictor(run.path, device="cpu")
    preprocess = runpy.run_path(str(tmp_path / "preprocess.py"))["preprocess"]
    card = json.loads(session.get_modelmeta().custom_metadata_map["lockstep"])
    assert (card["probabilities"], tuple(card["class_names"])) == (ours.card.probabilities, ours.names)
    for number in range(4):
        photo = photos / f"{number}.png"
        pixels = preprocess(photo, card)
        (logits,) = session.run(["logits"], {"images": pixels})
        shares = probabilities(torch.from_numpy(logits), card["probabilities"])[0]
        assert shares.tolist() == pytest.approx(expected(ours, photo), abs=0.02)
