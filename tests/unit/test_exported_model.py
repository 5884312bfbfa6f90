"""How far an exported model may differ from its original. `tests/cli/test_export.py` writes and runs real files."""

import errno
import itertools
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn

from helpers import NARROW, train_here
from lockstep.core import log
from lockstep.core.errors import InputError, LockstepError, StorageError
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


class Tiny(Pixels):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * 1e-3


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
    [(Pixels(), 2e-2), (Pixels(), -2e-2), (Large(), 1e3), (Tiny(), 2e-4), (Pixels(), NAN), (Overflowing(), 0)],
    ids=["small logits", "a fault below", "large logits", "tiny logits", "not a number", "overflow"],
)
def test_a_larger_difference_is_refused(
    digits: Predictor, model: nn.Module, fault: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LockstepError, match="the logits of the exported model differ by"):
        exported(replace(digits, model=model), tmp_path, monkeypatch, fault=fault)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.numerics
def test_tiny_logits_may_differ_by_more_than_a_share_of_them(
    digits: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.no_grad():
        tiny = replace(digits, model=Tiny())
        assert tiny.logits(IMAGES).abs().max() < 0.01
        assert exported(tiny, tmp_path, monkeypatch, fault=-5e-5) == pytest.approx(5e-5, rel=0.01)
    assert not capsys.readouterr().out


def test_the_packages_of_onnx_are_looked_for_before_the_weights_and_for_onnx_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find_weights(path: str) -> Path:
        raise InputError("there are no weights")

    needed: list[Any] = []
    monkeypatch.setattr(exporting, "find_weights", find_weights)
    monkeypatch.setattr(exporting, "check_installed", lambda *words, **extra: needed.append((*words, extra)))
    for kind in ("torch", "timm", "onnx"):
        assert needed == []
        with pytest.raises(InputError, match="there are no weights"):
            exporting.export("run", [], kind=kind, pixels="uint8", out=None)
    expected = ("onnx", "onnxscript", "onnxruntime")
    assert needed == [(package, "--to onnx", {"extra": "export"}) for package in expected]


def test_both_models_get_the_same_batches(digits: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = replace(digits, model=CountingBatch())
    assert exported(counting, tmp_path, monkeypatch, fault=0) == 0


def test_what_is_written_has_the_parameters_of_the_model(
    digits: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = list[nn.Module]()

    def write(module: nn.Module, example: Tensor, metadata: dict[str, str], path: Path) -> None:
        modules.append(module)
        path.touch()

    monkeypatch.setitem(exporting.EXPORT_FORMATS, "kept", exporting.Format(".file", write, lambda _: digits.logits))
    exporting.write_export(digits, IMAGES, tmp_path / "model.file", kind="kept", floats=False)
    assert {*modules[0].parameters()} == {*digits.model.parameters()}
    assert {*modules[0].buffers()} >= {*digits.model.buffers()}


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


def test_a_model_that_its_format_cannot_have_is_one_sentence_and_leaves_nothing(
    digits: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: Any) -> None:
        raise RuntimeError("no such operator\nin line 3")

    monkeypatch.setitem(exporting.EXPORT_FORMATS, "faulty", exporting.Format(".file", write, lambda _: digits.logits))
    with pytest.raises(InputError, match=r"--to faulty: this model cannot be exported \(no such operator[^\n]*\)$"):
        exporting.write_export(digits, IMAGES, tmp_path / "model.file", kind="faulty", floats=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("images", "pixels"), [(["photo.png"], "uint8"), ([], "float32")])
def test_the_network_alone_is_neither_compared_nor_of_other_pixels(
    tmp_path: Path, images: list[str], pixels: str
) -> None:
    (weights := tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError, match="--to timm writes the network alone: remove --pixels and images"):
        exporting.export(str(weights), images, kind="timm", pixels=pixels, out=None)


def without_reading(monkeypatch: pytest.MonkeyPatch, weights: Path, load: Callable[..., Any]) -> None:
    """Have an export find these weights, whatever it is asked for, and load their model by `load`."""
    monkeypatch.setattr(exporting, "find_weights", lambda path: weights)
    monkeypatch.setattr(exporting, "load_predictor", load)
    monkeypatch.setattr(exporting, "say_which", lambda file, card: log.note(f"of {file.name}"))


def test_a_file_and_its_sentence_follow_from_what_is_asked_for(
    digits: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, calls = tmp_path / "digits.safetensors", list[Any]()

    def load(file: Path, **how: Any) -> Predictor:
        assert (file, how) == (weights, {"device": "cpu", "precision": FP32()})
        return digits

    def write_export(_: Predictor, images: Tensor, path: Path, **how: Any) -> float:
        calls.append((len(images), path, how))
        return 0.00025

    without_reading(monkeypatch, weights, load)
    monkeypatch.setattr(exporting, "write_export", write_export)
    code = tmp_path / "preprocess.py"
    (installed := tmp_path / "installed").mkdir()
    (installed / code.name).symlink_to(exporting.PREPROCESS)  # as some installers put a package
    monkeypatch.setattr(exporting, "PREPROCESS", installed / code.name)
    for kind, pixels, out, path in (
        ("torch", "uint8", None, weights.with_suffix(".pt2")),
        ("onnx", "float", None, weights.with_suffix(".onnx")),
        *(("torch", "uint8", str(tmp_path / name), tmp_path / name) for name in ("a.pt", "a.pth", "a.bin")),
    ):
        exporting.export("digits", [], kind=kind, pixels=pixels, out=out)
        assert calls.pop() == (64, path, {"kind": kind, "floats": pixels == "float"})
        inputs = "float32 pixels from 0 to 1" if pixels == "float" else "uint8 pixels"
        printed = capsys.readouterr()
        assert printed.err == "of digits.safetensors\n"
        shown, beside = printed.out.splitlines()
        assert shown.startswith(
            f"wrote {path}: {inputs} of shape batch x 1x8x8 to logits of 10 classes; on 64 images"
        )
        assert shown.endswith("they differ by at most 2.5e-04 from the model's")
        assert beside == f"wrote {code}: its input for a photo"
        assert code.read_bytes() == exporting.PREPROCESS.read_bytes()
    for kind, name, usual in (("onnx", "a.pt2", "torch"), ("onnx", "a.pth", "torch"), ("torch", "a.onnx", "onnx")):
        with pytest.raises(InputError, match=f"--to {kind} writes another kind of file: --to {usual}$"):
            exporting.export("digits", [], kind=kind, pixels="uint8", out=str(tmp_path / name))
    with pytest.raises(InputError, match=r"^--out is .*no/a\.pt2, expected a file in a folder that exists"):
        exporting.export("digits", [], kind="torch", pixels="uint8", out=str(tmp_path / "no" / "a.pt2"))
    first, _, code_below = code.read_text().partition("\n")
    code.write_text(f"{first} of an older version\n")
    exporting.export("digits", [], kind="torch", pixels="uint8", out=None)
    code.rename(tmp_path / "elsewhere.py")
    code.symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(InputError, match=r"^--out is .*preprocess\.py, "):
        exporting.export("digits", [], kind="torch", pixels="uint8", out=None)
    code.unlink()
    code.write_text(f"mine\n{first}\n{code_below}")
    with pytest.raises(InputError, match=r"preprocess\.py is not of lockstep export; rename it"):
        exporting.export("digits", [], kind="torch", pixels="uint8", out=None)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_random_images_have_the_mean_and_the_deviation_of_the_card(digits: Predictor, channels: int) -> None:
    mean, std = (0.3, 0.4, 0.5, 0.6)[:channels], (0.02, 0.04, 0.06, 0.08)[:channels]
    card = replace(digits.card, image_shape=(channels, 20, 30), mean=mean, std=std)
    images = exporting._random_images(card)
    assert (images.dtype, images.shape) == (torch.uint8, (64, channels, 20, 30))
    pixels = images.double() / 255
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(mean).double(), atol=4e-3, rtol=0)
    torch.testing.assert_close(pixels.std((0, 2, 3)), torch.tensor(std).double(), atol=2e-3, rtol=0)
    torch.manual_seed(7)
    assert torch.equal(exporting._random_images(card), images)
    wide = exporting._random_images(replace(card, std=(9.0,) * channels))
    for end in (0, 255):
        share = (wide == end).double().mean()
        assert share == pytest.approx(0.48, abs=0.03), "what is too dark is black, and what is too bright is white"


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_model_is_compared_alone_and_in_a_batch_of_all(number: int) -> None:
    images, batches = torch.rand(number, 3, 4, 4), list[Tensor]()

    def logits(batch: Tensor) -> Tensor:
        batches.append(batch)
        return batch.flatten(1)

    assert len(exporting._compared(logits, images)) == 1 + number
    assert [*map(len, batches)] == [1, number]
    assert torch.equal(batches[1], images)


def test_a_model_is_compared_on_the_first_images_that_are_named_and_that_it_can_take(
    digits: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "COMPARED", 3)
    monkeypatch.setattr(Predictor, "stored", lambda _, paths: paths)
    for folder, number in (("b", 2), ("a", 2)):
        (tmp_path / folder).mkdir()
        for name in (f"{at}.{suffix}" for at in range(number) for suffix in ("npy", "png")):
            (tmp_path / folder / name).touch()
    for channels, suffix in ((1, "png"), (3, "png"), (4, "npy")):
        card = replace(digits.card, image_shape=(channels, 8, 8))
        named = [str(tmp_path / "b"), str(tmp_path / "a")]
        paths, origin = exporting._images(replace(digits, card=card), tmp_path / "alone.safetensors", named)
        expected = [tmp_path / f"{name}.{suffix}" for name in ("b/0", "b/1", "a/0")]
        assert (paths, origin) == (expected, "")  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("floats", [False, True])
def test_what_is_traced_takes_bytes_or_numbers_from_0_to_1_in_an_evaluation(
    digits: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, floats: bool
) -> None:
    modules, synced = list[nn.Module](), list[Path]()

    def write(module: nn.Module, example: Tensor, metadata: dict[str, str], path: Path) -> None:
        warnings.warn("the exporter's own code is old", DeprecationWarning, stacklevel=1)
        assert not any(part.training for part in module.modules())
        assert torch.equal(example, images[:1].repeat(2, 1, 1, 1)), "of two images, the number is a variable"
        assert not torch.is_grad_enabled()
        assert metadata == digits.card.metadata()
        modules.append(module)
        path.touch()

    images = IMAGES.float() / 255 if floats else IMAGES
    monkeypatch.setitem(exporting.EXPORT_FORMATS, "traced", exporting.Format(".file", write, lambda _: modules[0]))
    monkeypatch.setattr(exporting, "sync", lambda path: synced.append(path) or path.stat())
    path = tmp_path / "model.file"
    difference = exporting.write_export(digits, IMAGES, path, kind="traced", floats=floats)
    assert difference <= 1e-5
    torch.testing.assert_close(modules[0](images), digits.logits(IMAGES))
    if floats:
        between, card = images * 0.9, digits.card
        normal = (between - torch.tensor(card.mean).view(-1, 1, 1)) / torch.tensor(card.std).view(-1, 1, 1)
        torch.testing.assert_close(modules[0](between), digits.model(normal), atol=1e-4, rtol=0)
    assert [at.name for at in synced] == ["model.file"], "it is on the disk before it has its name"
    assert synced[0].parent != tmp_path
    assert [*tmp_path.iterdir()] == [path]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(exporting.EXPORT_FORMATS, "full", exporting.Format(".file", full, lambda _: digits.logits))
    with pytest.raises(StorageError, match="No space left"):
        exporting.write_export(digits, IMAGES, path, kind="full", floats=floats)


@pytest.mark.parametrize(
    ("stored", "seen", "crop", "share"),
    [
        (256, 224, 0.875, 0.875),
        (235, 224, 0.95, 0.95),
        (224, 224, 1.0, 1.0),
        (256, 192, 0.75, 0.75),
        *((stored, 224, 224 / stored, 224 / stored) for stored in range(225, 300, 7)),
        (256, 224, 0.876, 0.875),  # the same pixels
        (256, 224, 0.9, None),
        (256, 224, 1.0, None),
        (256, 128, 0.875, None),
    ],
)
def test_a_share_of_timm_is_one_by_which_it_resizes_and_cuts_alike(
    digits: Predictor, stored: int, seen: int, crop: float, share: float | None
) -> None:
    card = replace(digits.card, image_shape=(1, stored, stored), input_shape=(1, seen, seen), eval_crop=crop)
    own = exporting.timm_share(card)
    assert own == (share if share is None else pytest.approx(share, rel=1e-12))
    facts, differences = exporting._facts(card, {}), exporting._differences(card)
    assert facts["crop_pct"] == (own or crop)
    assert any(
        f"resizes a photo to {stored}x{stored} and its centre to {seen}x{seen}" in of for of in differences
    ) == (share is None)
    if own is not None:
        transform = timm.data.create_transform((1, seen, seen), crop_pct=own)
        assert transform.transforms[0].size == stored


def test_what_is_said_of_other_channels_and_of_sizes_of_two_sides(digits: Predictor) -> None:
    for channels in (1, 2, 3, 4):
        shape = (channels, 8, 8)
        differences = exporting._differences(
            replace(digits.card, image_shape=shape, input_shape=shape, eval_crop=1.0)
        )
        assert differences == [f"images have {channels} channels, Transformers' pipeline makes them RGB"] * (
            channels != 3
        )
    oblong = replace(digits.card, image_shape=(3, 64, 40), input_shape=(3, 56, 35), eval_crop=0.875)
    assert exporting.timm_share(oblong) == 0.875
    assert exporting.timm_share(replace(oblong, image_shape=(3, 64, 41))) is None
    longer = replace(oblong, image_shape=(3, 65, 41), eval_crop=0.86)  # of which 56 and 35 are 0.862 and 0.854
    assert exporting.timm_share(longer) == pytest.approx(35 / 41, rel=1e-12)


CARD = """---
library_name: timm
pipeline_tag: image-classification
tags: [image-classification, timm]
{base_model}---

# own\\_name

`DigitNet`, trained on {data} with Lockstep 9.9, step 1,234{averaged}.
{tuned}
Data: 5 images in the training split, 2 images in the evaluation split.

{classes}On the evaluation split:

- 91.50 % top-1

Images: 1x8x8 (channels, height, width), crop, the central 87.5 %, bilinear; mean [0.25], standard deviation [0.5]. \
Outputs: {number} classes (softmax).
{differences}
{command}```python
import timm

model = timm.create_model('local-dir:own_name', pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
```
"""


@pytest.mark.parametrize("number", [100, 101])
@pytest.mark.parametrize("tuned", [False, True])
def test_the_model_card_has_each_fact_in_its_place(
    digits: Predictor, tmp_path: Path, number: int, tuned: bool
) -> None:
    run = RunDir.at(tmp_path / "run") if tuned else None
    names = tuple(f"n{at}" for at in range(number))
    card = replace(
        digits.card,
        eval_crop=0.875,
        mean=(0.25,),
        std=(0.5,),
        step=1234,
        averaged=tuned,
        lockstep="9.9",
        scores={"top1": 91.5},
        classes=number,
        class_names=names,
        trained_on={"_target_": "lockstep.data.datasets.Folder", "images": {"train": 5, "val": 2}},
    )
    if run is not None:
        run.overrides.write_text('["steps=2"]')
        run.composed.write_text("dataset: {path: /data/photos}\n")
        run.write_summary(best_step=1234, test={"top1": None})
    base = {"hf_hub_id": "timm/x", "license": "mit", "origin_url": "a"} if tuned else {}
    expected = CARD.format(
        base_model='base_model: "timm/x"\n' if tuned else "",
        data="photos (Folder)" if tuned else "Folder",
        averaged=", averaged weights" * tuned,
        tuned="Fine-tuned from timm/x, mit, a.\n" if tuned else "",
        classes=f"Classes: {', '.join(names)}.\n\n" if number == 100 else "",
        number=number,
        differences="".join(f"Predictions can differ from the run's: {of}.\n" for of in ("one", "two")) * tuned,
        command="```bash\nlockstep train steps=2\n```\n\n" if tuned else "",
    )
    assert exporting.readme(card, run, "own_name", ["one", "two"] if tuned else [], base) == expected


def test_a_folder_of_timm_has_the_model_and_the_facts_of_the_card(
    digits: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    synced, sync, target = list[str](), exporting.sync, tmp_path / "folder"
    model = timm.create_model("test_resnet", num_classes=10, in_chans=1).eval()
    card = replace(digits.card, model={"_target_": "lockstep.models.Timm", "options": {"drop_rate": 0.5}})
    predictor = replace(digits, model=model, card=card)
    monkeypatch.setattr(exporting, "sync", lambda path: synced.append(path.name) or sync(path))
    exporting.export_folder(predictor, None, target)
    assert synced == ["model.safetensors", "folder"]
    assert sorted(path.name for path in target.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    config = json.loads((target / "config.json").read_text())
    assert config["model_args"] == {"drop_rate": 0.5, "in_chans": 1, "global_pool": "avg"}
    assert (config["num_classes"], config["label_names"]) == (10, [*map(str, range(10))])
    assert config["problem_type"] == "single_label_classification"
    assert config["pretrained_cfg"]["input_size"] == [1, 8, 8]
    assert "own_sha256" in safe_open(target / "model.safetensors", "pt").metadata()
    assert (target / "model.safetensors").stat().st_mode == (target / "config.json").stat().st_mode
    shown = capsys.readouterr().out
    assert (
        "warning: --to timm: images have 1 channels, Transformers' pipeline makes them RGB: predictions can" in shown
    )
    assert f'wrote {target}: timm.create_model("local-dir:{target}", pretrained=True) has the logits' in shown
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("nowhere")
    for name in ("folder", "link", "no/where"):
        with pytest.raises(InputError, match=f"--out is {name}, expected a new folder in a folder that exists"):
            exporting.export_folder(predictor, None, Path(name))
    with pytest.raises(InputError, match=r"this model is no model of timm \(lockstep.models.Timm\); use --to onnx"):
        exporting.export_folder(replace(predictor, model=Pixels()), None, Path("other"))
    changed = timm.create_model("test_resnet", num_classes=10, in_chans=1).eval()
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: changed)
    with pytest.raises(LockstepError, match="the model that timm builds has other logits; nothing was written"):
        exporting.export_folder(predictor, None, Path("other"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link"]


def test_a_model_is_compared_on_the_evaluation_split_of_its_run(
    digits: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits: list[Any] = []

    def split_for(predictor: Predictor, run: RunDir, words: tuple[str, ...], split: str) -> Any:
        splits.append((predictor, run, words, split))
        return SimpleNamespace(examples="examples"), None

    run = RunDir.at(tmp_path / "run")
    run.config.write_text("{}")
    monkeypatch.setattr(exporting, "split_for", split_for)
    monkeypatch.setattr(exporting, "sample", lambda examples, number: (examples, number))
    assert exporting._images(digits, run.weights, []) == (("examples", exporting.COMPARED), "")  # type: ignore[comparison-overlap]
    assert splits == [(digits, run, (), "val")]


@pytest.mark.parametrize(
    ("sides", "crops"), [((7, 5), True), ((8, 5), False), ((9, 5), False), ((5, 7), True), ((5, 9), False)]
)
def test_an_exported_model_takes_what_the_evaluation_sees_where_that_is_smaller(
    digits: Predictor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    sides: tuple[int, int],
    crops: bool,
) -> None:
    exported_models: list[Any] = []
    card = replace(digits.card, input_shape=(1, *sides), eval_crop=0.875)
    predictor = replace(digits, card=card, transforms=replace(digits.transforms, preprocessing=card))
    without_reading(monkeypatch, tmp_path / "w.safetensors", lambda file, **how: predictor)
    monkeypatch.setattr(exporting, "write_export", lambda *words, **_: exported_models.append(words) or 0.0)
    exporting.export("w", [], kind="torch", pixels="uint8", out=None)
    ((model, stored, _),) = exported_models
    height, width = sides if crops else (8, 8)
    assert stored.shape == (64, 1, height, width)
    assert f"uint8 pixels of shape batch x 1x{height}x{width} to" in capsys.readouterr().out
    assert model.transforms.preprocessing.eval_crop == (1.0 if crops else 0.875)


def test_an_onnx_file_is_computed_on_the_cpu_as_the_model_that_it_is_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    onnxruntime, opened = pytest.importorskip("onnxruntime"), list[Any]()
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda path, **options: opened.append((path, options)))
    exporting.EXPORT_FORMATS["onnx"].read(Path("model.onnx"))
    assert opened == [(Path("model.onnx"), {"providers": ["CPUExecutionProvider"]})]


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_the_file_for_photos_is_beside_models_of_photos_alone(
    digits: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, channels: int
) -> None:
    shape, numbers = (channels, 8, 8), (0.5,) * channels
    card = replace(digits.card, image_shape=shape, input_shape=shape, eval_crop=1.0, mean=numbers, std=numbers)
    without_reading(monkeypatch, tmp_path / "w.safetensors", lambda file, **how: replace(digits, card=card))
    monkeypatch.setattr(exporting, "write_export", lambda *_, **__: 0.0)
    exporting.export("w", [], kind="torch", pixels="uint8", out=None)
    assert (tmp_path / "preprocess.py").exists() is (channels in (1, 3))


def test_a_folder_of_timm_is_beside_its_weights_or_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders: list[Any] = []
    weights = tmp_path / "run" / "model.safetensors"
    without_reading(monkeypatch, weights, lambda file, **how: SimpleNamespace(card=None, how=how))
    monkeypatch.setattr(exporting, "run_of", lambda file: "the run")
    monkeypatch.setattr(exporting, "export_folder", lambda *words: folders.append(words))
    for out, target in ((None, weights.with_name("timm")), ("other", Path("other"))):
        exporting.export("run", [], kind="timm", pixels="uint8", out=out)
        predictor, run, folder = folders.pop()
        assert (predictor.how, run, folder) == ({"device": "cpu", "precision": FP32()}, "the run", target)
        assert capsys.readouterr().err == "of model.safetensors\n"


@pytest.mark.parametrize("pretrained", [True, False])
def test_a_folder_of_a_model_of_one_size_has_it_and_names_what_it_was_tuned_from(
    digits: Predictor, tmp_path: Path, pretrained: bool
) -> None:
    model = timm.create_model("test_vit", num_classes=10, img_size=(32, 64)).eval()
    model.pretrained_cfg = {**model.pretrained_cfg, "hf_hub_id": "timm/base", "license": "mit"}
    shape, numbers = (3, 32, 64), (0.5,) * 3
    sizes: dict[str, Any] = {"image_shape": shape, "input_shape": shape, "eval_crop": 1.0, "mean": numbers}
    card = replace(digits.card, **sizes, std=numbers, probabilities="sigmoid", targets="labels")
    card = replace(card, model={"_target_": "lockstep.models.Timm"})
    run = RunDir.at(tmp_path / "run")
    run.config.write_text(f"model: {{pretrained: {str(pretrained).lower()}}}\n")
    run.overrides.write_text("[]")
    exporting.export_folder(replace(digits, model=model, card=card), run, tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["model_args"]["img_size"] == [32, 64]
    assert config["problem_type"] == "multi_label_classification"
    assert ("Fine-tuned from timm/base, mit" in (tmp_path / "folder" / "README.md").read_text()) is pretrained


@pytest.mark.parametrize("where", ["build", "run"])
def test_a_model_that_timm_cannot_build_again_is_one_sentence_and_leaves_nothing(
    digits: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise RuntimeError("sizes do not fit\nin layer 3")

    model = timm.create_model("test_resnet", num_classes=10, in_chans=1).eval()
    card = replace(digits.card, model={"_target_": "lockstep.models.Timm"})
    broken = SimpleNamespace(eval=lambda: fail) if where == "run" else None
    monkeypatch.setattr(timm, "create_model", fail if broken is None else lambda *_, **__: broken)
    with pytest.raises(InputError, match=r"^--to timm: timm cannot build this model \(sizes do not fit.*; use --"):
        exporting.export_folder(replace(digits, model=model, card=card), None, tmp_path / "folder")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("fixed", [True, False])
def test_what_timm_is_told_is_of_the_card_and_of_the_network_and_of_no_published_weights(
    digits: Predictor, fixed: bool
) -> None:
    of_timm = {"fixed_input_size": fixed, "first_conv": "conv1", "classifier": "head", "tag": "in1k", "url": "x"}
    shape, numbers = (3, 32, 48), {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    card = replace(
        digits.card,
        **numbers,  # type: ignore[arg-type]
        image_shape=(3, 40, 60),
        input_shape=shape,
        eval_crop=0.8,
        fit="squash",
        interpolation="bicubic",
    )
    assert exporting._facts(card, of_timm) == {
        "fixed_input_size": fixed,
        "first_conv": "conv1",
        "classifier": "head",
        "num_classes": 10,
        "input_size": shape,
        **numbers,
        "interpolation": "bicubic",
        "crop_pct": 0.8,
        "crop_mode": "squash",
    }
    assert exporting._facts(card, {})["classifier"] is None


class Halves(nn.Module):
    """The sums of the left and of the right half of each image."""

    def forward(self, images: Tensor) -> Tensor:
        return images.float().flatten(1).unflatten(1, (2, -1)).sum(2)


@pytest.mark.parametrize("kind", exporting.EXPORT_FORMATS)
def test_each_format_takes_any_number_of_images_and_has_the_metadata(kind: str, tmp_path: Path) -> None:
    for package in exporting.ONNX_PACKAGES if kind == "onnx" else ():
        pytest.importorskip(package)
    form, path = exporting.EXPORT_FORMATS[kind], tmp_path / f"model{exporting.EXPORT_FORMATS[kind].suffix}"
    images = torch.arange(7 * 32).remainder(256).to(torch.uint8).view(7, 1, 4, 8)
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        form.write(Halves().eval(), images[:2], {"lockstep": '{"a": 1}'}, path)
        logits = form.read(path)
        for number in (1, 2, 7):
            assert torch.equal(logits(images[:number]), Halves()(images[:number]))
    assert [*tmp_path.iterdir()] == [path], "one file has all"
    if kind == "torch":
        texts = {"lockstep.json": ""}
        program = torch.export.load(path, extra_files=texts)
        assert texts == {"lockstep.json": '{"a": 1}'}
        assert not any("stack_trace" in node.meta for node in program.graph.nodes)
        return
    import onnx

    model = onnx.load(path)
    assert {entry.key: entry.value for entry in model.metadata_props} == {"lockstep": '{"a": 1}'}
    assert not any(node.metadata_props for node in model.graph.node)
    (graph_input,), (output,) = model.graph.input, model.graph.output
    assert (graph_input.name, output.name) == ("images", "logits")
    assert graph_input.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 20
