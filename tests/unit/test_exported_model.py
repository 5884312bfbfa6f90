"""How far an exported model may differ from its original. `tests/cli/test_export.py` writes and runs real files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers import NARROW, train_here
from lockstep.core.errors import LockstepError
from lockstep.inference import export as exporting
from lockstep.inference.load import load
from lockstep.inference.predictor import Predictor
from lockstep.precision import FP32

CLASSES = 10
NAN = float("nan")
LARGEST = 1e38  # an exported model does not overflow
IMAGES = torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Pixels(nn.Module):
    """The first pixels are the logits."""

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :CLASSES]


class Amplifying(Pixels):
    """float32 has steps of 2 ** -10 at 10,000, so it rounds a logit by up to 2 ** -11: about 5e-4."""

    def forward(self, images: Tensor) -> Tensor:
        return (super().forward(images) + 10_000) - 10_000


class OnlyFloat32(Amplifying):
    """It multiplies by a tensor that the conversion to float64 does not reach."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) @ torch.eye(CLASSES)


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
    return load(run.path, device="cpu", precision=FP32())


def exported(predictor: Predictor, path: Path, monkeypatch: pytest.MonkeyPatch, *, fault: float) -> float:
    """Export a model in a format whose logits are the model's and a fault; returns how far they differ."""
    form = exporting.Format(
        ".file",
        lambda *arguments: arguments[-1].touch(),
        lambda _: lambda images: predictor.logits(images).clamp(max=LARGEST) + fault,
    )
    monkeypatch.setitem(exporting.FORMATS, "faulty", form)
    return exporting.export(predictor, IMAGES, path / "model.file", kind="faulty", floats=False)


@pytest.mark.numerics
def test_a_model_that_amplifies_roundings_may_differ_by_ten_of_them(
    digits: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    amplifying = replace(digits, model=Amplifying())
    assert exported(amplifying, tmp_path, monkeypatch, fault=2e-3) == pytest.approx(2e-3, rel=0.01)
    assert "this model amplifies roundings" in capsys.readouterr().out
    assert (tmp_path / "model.file").exists()


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("model", "fault"),
    [(Pixels(), 2e-3), (Amplifying(), 1e-2), (Amplifying(), NAN), (OnlyFloat32(), 2e-3), (Overflowing(), 0)],
    ids=["exact", "more than ten roundings", "not a number", "no rounding is known", "overflow"],
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
