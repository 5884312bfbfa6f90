"""How far an exported model may differ from its original. `tests/cli/test_export.py` writes and runs real files."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from helpers import NARROW, train_here
from lockstep.core.errors import LockstepError
from lockstep.core.model_card import FITS, VIEWS
from lockstep.core.run_dir import RunDir
from lockstep.inference import export as exporting
from lockstep.inference.predictor import Predictor, load_predictor
from lockstep.precision import FP32

CLASSES = 10
NAN = float("nan")
LARGEST = 1e38  # an exported model does not overflow
IMAGES = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Pixels(nn.Module):
    """The first pixels are the logits."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :CLASSES]


class Large(Pixels):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * 1e5


class Overflowing(Pixels):
    """Its logits are infinite in float32 alone."""

    def forward(self, images: Tensor) -> Tensor:
        return (super().forward(images) + 10) * 1e30 * 1e30


class CountingBatch(Pixels):
    """The logits depend on the number of images, as a much exaggerated rounding."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + len(images)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    run = train_here(tmp_path_factory.mktemp("export") / "run", NARROW, "steps=1", "batch=64")
    return load_predictor(run.path, device="cpu", precision=FP32())


def exported(predictor: Predictor, path: Path, monkeypatch: pytest.MonkeyPatch, *, fault: float) -> float:
    """Export a model in a format whose logits are the model's and a fault; returns how far they differ."""
    logits = lambda images: predictor.logits(images).clamp(max=LARGEST) + fault  # noqa: E731
    form = exporting.Format(".file", lambda *arguments: arguments[-1].touch(), lambda _: logits)
    monkeypatch.setitem(exporting.EXPORT_FORMATS, "faulty", form)
    return exporting.write_export(predictor, IMAGES, path / "model.file", kind="faulty", floats=False)


@pytest.mark.numerics
@pytest.mark.parametrize(("fault", "warns"), [(0.5, False), (50.0, True)])
def test_large_logits_may_differ_by_a_share_of_the_largest(
    digits: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, fault: float, warns: bool
) -> None:
    with torch.no_grad():
        large = replace(digits, model=Large())
        assert large.logits(IMAGES).abs().max() > 1e5
        assert exported(large, tmp_path, monkeypatch, fault=fault) == pytest.approx(fault, rel=0.1)
    assert ("this model amplifies roundings" in capsys.readouterr().out) == warns


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("model", "fault"),
    [(Pixels(), 2e-2), (Large(), 1e3), (Pixels(), NAN), (Overflowing(), 0)],
    ids=["small logits", "large logits", "not a number", "overflow"],
)
def test_a_larger_difference_is_refused(
    digits: Predictor, model: nn.Module, fault: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LockstepError, match="the logits of the exported model differ by"):
        exported(replace(digits, model=model), tmp_path, monkeypatch, fault=fault)
    assert list(tmp_path.iterdir()) == []


def test_both_models_get_the_same_batches(digits: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = replace(digits, model=CountingBatch())
    assert exported(counting, tmp_path, monkeypatch, fault=0) == 0


def stub(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `--format torch` write an empty file, which has the logits of the weights in `model`."""
    predictor = load_predictor(model, device="cpu", precision=FP32())
    form = exporting.Format(".pt2", lambda *arguments: arguments[-1].touch(), lambda _: predictor.logits)
    monkeypatch.setitem(exporting.EXPORT_FORMATS, "torch", form)


def test_without_its_images_a_model_is_compared_on_random_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (16, 16), (99, number, 0)).save(tmp_path / "photos" / name / f"{number}.png")
    photos = ("dataset=folder", f"dataset.path={tmp_path / 'photos'}", "dataset.input_size=16")
    run = train_here(tmp_path / "run", NARROW, "steps=1", "batch=4", *photos)
    (tmp_path / "photos").rename(tmp_path / "moved")
    shutil.copy(run.weights, tmp_path / "alone.safetensors")
    lost, alone = "the run's are not here (", "a weights file has no images"
    for path, reason in ((run.weights, lost), (tmp_path / "alone.safetensors", alone)):
        stub(path, monkeypatch)
        exporting.export(str(path), [], kind="torch", pixels="uint8", out=str(tmp_path / "model.pt2"))
        assert f"on 64 images of random pixels, because {reason}" in capsys.readouterr().out
        assert (tmp_path / "model.pt2").is_file()


@pytest.mark.parametrize(("best_step", "is_tested"), [(1, True), (2, False)])
def test_the_model_card_has_the_test_scores_of_its_own_step_alone(
    digits: Predictor, tmp_path: Path, best_step: int, is_tested: bool
) -> None:
    run = RunDir.at(tmp_path / "run")
    run.overrides.write_text("[]")
    run.config.write_text("dataset: {path: photos}\n")
    run.write_summary(best_step=best_step, test={"top1": 12.5})
    text = exporting.readme(replace(digits.card, step=1), run, "digits", [], {})
    assert ("On the test split:\n\n- 12.50 % top-1" in text) == is_tested
    assert "On the evaluation split:" in text


@pytest.mark.parametrize(("fit", "views"), [*itertools.product(FITS, VIEWS)])
def test_more_than_one_view_is_said_to_differ_with_every_fit(digits: Predictor, fit: str, views: int) -> None:
    differences = exporting._differences(replace(digits.card, fit=fit, eval_views=views))
    assert any(f"averages {views} views of an image" in difference for difference in differences) == (views > 1)


@pytest.mark.parametrize(("stored", "side"), [(20, 16), (16, 16), (12, 12)])
def test_an_exported_model_of_enlarged_images_takes_them_as_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stored: int, side: int
) -> None:
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / name).mkdir(parents=True)
        noise = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / name / "0.png")
    sizes = ("dataset.input_size=16", f"dataset.decode_size={stored}", "dataset.crop=0.8")
    run = train_here(
        tmp_path / "run", NARROW, "steps=1", "batch=2", "dataset=folder", f"dataset.path={tmp_path}", *sizes
    )
    predictor, exports = load_predictor(run.weights, device="cpu", precision=FP32()), list[Tensor]()

    def write_export(changed: Predictor, images: Tensor, *_: Any, **options: Any) -> float:
        torch.testing.assert_close(changed.logits(images), predictor.logits(whole), rtol=0, atol=0.05)
        exports.append(images)
        return 0.0

    whole = predictor.stored(sorted(tmp_path.glob("[tv]*/*/0.png")))
    monkeypatch.setattr(exporting, "write_export", write_export)
    folders = [str(tmp_path / "train"), str(tmp_path / "val")]
    exporting.export(str(run.path), folders, kind="torch", pixels="uint8", out=str(tmp_path / "model.pt2"))
    (images,) = exports
    assert images.shape == (4, 3, side, side)
    assert torch.equal(images, whole) == (stored <= 16)
    assert "on 4 images they differ" in capsys.readouterr().out
