"""What an evaluation sees of a photo, for every fit and size, against `timm.data.create_transform`."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.utils.agc import adaptive_clip_grad
from torch import Tensor

import lockstep
from helpers import NARROW, command, train_here
from lockstep.callbacks import AGC
from lockstep.checkpoint.weights import read_card
from lockstep.core.model_card import ModelCard
from lockstep.data.datasets import files
from lockstep.data.datasets.folder import Folder
from lockstep.data.datasets.preprocess import preprocess
from lockstep.data.datasets.sizes import with_sizes
from lockstep.data.transforms.augment import NoAugment
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.inference.evaluate import split_for
from lockstep.inference.export import _facts
from lockstep.inference.predictor import Predictor
from lockstep.precision import FP32
from lockstep.training.resolved_job import load_job

pytestmark = pytest.mark.numerics

CROP_MODES = {"crop": "center", "pad": "border", "squash": "squash"}
# (height, width) of the photos: square, oblong, odd, tiny, and a strip.
PHOTOS = ((40, 40), (37, 53), (101, 20), (7, 5), (1, 9), (211, 97), (150, 200), (64, 73), (73, 64))
INPUTS: tuple[Any, ...] = ([48, 32], [32, 64], [64, 64], [9, 25], [33, 47])
CROPS = ("auto", 1, 0.9, 0.7)
# Pillow, which timm uses, and torch round a resize differently; one pixel beside is 70 and more in this noise.
ROUNDING = {"bilinear": 2, "bicubic": 5}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, label in itertools.product(("train", "val"), "ab"):
        (folder / split / label).mkdir(parents=True)
        for height, width in PHOTOS:
            noise = Image.fromarray(rng.integers(0, 256, (-(-height // 2), -(-width // 2), 3), dtype=np.uint8))
            noise.resize((width, height), Image.Resampling.BILINEAR).save(
                folder / split / label / f"{height}x{width}.png"
            )
    return folder


def of_timm(path: Path | str, card: ModelCard | Folder, interpolation: str) -> Tensor:
    """The pixels by timm, without normalisation, uint8 (C, H, W)."""
    transform = timm.data.create_transform(
        card.input_shape,
        crop_pct=card.eval_crop,
        crop_mode=CROP_MODES[card.fit],
        interpolation=interpolation,
        mean=card.mean,
        normalize=False,
    )
    pixels: Tensor = transform(Image.open(path))
    return pixels


def evaluated(data: Folder, interpolation: str, indices: list[int]) -> Tensor:
    """The pixels that an evaluation of the data set sees: (B, C, H, W), from 0 to 255."""
    how = replace(data.preprocessing, interpolation=interpolation)
    stored, raw = data.read_as(data.eval(), how).fetch(indices), replace(how, mean=(0, 0, 0), std=(1, 1, 1))
    cpu = torch.device("cpu")
    return 255 * DeviceTransforms.of(raw, NoAugment(), device=cpu, precision=FP32(), seed=0).eval(stored)


@pytest.mark.parametrize("fit", CROP_MODES)
@pytest.mark.parametrize("size", INPUTS, ids=str)
def test_an_evaluation_sees_the_pixels_of_timm(photos: Path, size: Any, fit: str) -> None:
    for crop, interpolation in itertools.product(CROPS, ROUNDING):
        data: Any = with_sizes(Folder(path=str(photos), input_size=size, fit=fit, crop=crop), None)
        paths = list(data.eval().paths)[: len(PHOTOS)]
        for path, pixels in zip(paths, evaluated(data, interpolation, [*range(len(paths))]), strict=True):
            difference = (pixels - of_timm(path, data, interpolation)).abs().max()
            assert difference <= ROUNDING[interpolation], f"{path} {crop} {data.image_shape}"


@pytest.mark.parametrize("stored", [54, 55, 248, 256])
def test_a_stored_square_is_cut_as_by_timm_where_its_size_follows_from_the_input(photos: Path, stored: int) -> None:
    seen, crop = {54: (48, 0.875), 55: (48, 0.86), 248: (224, 0.9), 256: (224, 0.875)}[stored]
    data: Any = with_sizes(Folder(path=str(photos), decode_size=stored, input_size=seen, crop=crop), None)
    for index, pixels in enumerate(evaluated(data, "bilinear", [*range(len(PHOTOS))])):
        assert (pixels - of_timm(str(data.eval().paths[index]), data, "bilinear")).abs().max() <= 2


def predictor_of(card: ModelCard) -> Predictor:
    transforms = DeviceTransforms.of(card, NoAugment(), device=torch.device("cpu"), precision=FP32(), seed=0)
    return Predictor(
        card=card,
        model=torch.nn.Identity(),
        precision=FP32(),
        device=torch.device("cpu"),
        memory_format=torch.contiguous_format,
        transforms=transforms,
    )


@pytest.fixture(scope="module")
def card(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    data = ("dataset=folder", f"dataset.path={photos}", "dataset.input_size=[48,32]", "augment=none")
    run = train_here(tmp_path_factory.mktemp("run") / "run", *data, NARROW, "steps=1", "batch=4")
    card = read_card(run.weights)
    assert card.image_shape == (3, 54, 36)
    return card


# Stored sizes by which the input follows, larger ones, and one of before: 48 / 0.875 and 32 / 0.875, rounded.
STORED: tuple[tuple[tuple[int, int], tuple[int, int], float], ...] = (
    ((54, 36), (48, 32), 0.875),
    ((55, 37), (48, 32), 0.875),
    ((73, 73), (64, 64), 0.875),
    ((256, 256), (224, 224), 0.95),
    ((64, 64), (32, 32), 1.0),
    ((28, 28), (32, 32), 1.0),
    ((24, 24), (32, 32), 0.8),
    ((32, 32), (32, 32), 0.9),
    ((40, 32), (40, 28), 0.8),  # the longer sides are equal
)


def assert_alike(chosen: ModelCard, paths: Iterable[Path]) -> None:
    """The copy of `preprocess.py` beside an exported model makes of photos what the model is evaluated on."""
    predictor, size = predictor_of(chosen), chosen.input_shape[1:]
    enlarged = max(size) >= max(chosen.image_shape[1:])  # then the exported model takes the stored images
    for path in paths:
        expected = predictor.stored(path) if enlarged else predictor.cropped(predictor.stored(path))
        pixels = preprocess(path, vars(chosen))
        assert (pixels.shape, pixels.dtype) == (expected.shape, np.uint8)
        assert np.abs(pixels.astype(int) - expected.int().numpy()).max() <= 1, path


@pytest.mark.parametrize("fit", CROP_MODES)
@pytest.mark.parametrize("sizes", STORED, ids=str)
def test_the_file_beside_an_exported_model_prepares_photos_like_predict(
    photos: Path, card: ModelCard, sizes: tuple[tuple[int, int], tuple[int, int], float], fit: str
) -> None:
    stored, seen, crop = sizes
    chosen = replace(card, image_shape=(3, *stored), input_shape=(3, *seen), eval_crop=crop, fit=fit)
    assert_alike(chosen, sorted((photos / "val" / "a").iterdir()))


@pytest.mark.parametrize("fit", CROP_MODES)
@pytest.mark.parametrize("size", [(100, 20), (20, 100)])
def test_the_file_beside_an_exported_model_resizes_noise_in_the_order_of_predict(
    card: ModelCard, tmp_path: Path, size: tuple[int, int], fit: str
) -> None:
    """Values that are cut off after the first of two directions differ by the order of these.

    A smaller input is resized once more, from whole numbers to values beyond black and white.
    """
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    for seen in ((80, 90), (60, 70)):
        shape = {"image_shape": (3, 80, 90), "input_shape": (3, *seen), "eval_crop": 1.0}
        assert_alike(replace(card, interpolation="bicubic", fit=fit, **shape), [tmp_path / "noise.png"])


@pytest.mark.parametrize("fit", CROP_MODES)
@pytest.mark.parametrize("interpolation", ROUNDING)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_file_beside_an_exported_model_prepares_photos_of_every_kind_like_predict(
    card: ModelCard, tmp_path: Path, channels: int, interpolation: str, fit: str
) -> None:
    photo = Image.effect_mandelbrot((280, 160), (-2, -1, 1, 1), 50)
    rgb = Image.merge("RGB", [photo, photo.rotate(90), photo.rotate(180)])
    rgba = Image.merge("RGBA", [*rgb.split(), photo.rotate(30)])
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        rgba.convert(mode).save(tmp_path / f"{mode}.png")
    for mode in ("L", "RGB", "CMYK"):
        rgb.convert(mode).save(tmp_path / f"{mode}.jpg")
    for orientation in range(1, 9):
        (exif := Image.Exif())[0x0112] = orientation
        for suffix in ("jpg", "png", "tif", "webp"):
            rgb.save(tmp_path / f"turned{orientation}.{suffix}", exif=exif)
    (tmp_path / "damaged.jpg").write_bytes(
        (tmp_path / "turned6.jpg").read_bytes().replace(b"Exif\0\0MM", b"Exif\0\0XX")
    )
    rgb.save(tmp_path / "progressive.jpg", progressive=True, subsampling=0)
    rgb.quantize(16).save(tmp_path / "clear_colour.png", transparency=3)
    rgb.quantize(16).save(tmp_path / "colours.png", transparency=bytes(range(0, 160, 10)))
    rgb.save(tmp_path / "clear_rgb.png", transparency=rgb.getpixel((0, 0)))
    photo.save(tmp_path / "clear_grey.png", transparency=photo.getpixel((9, 9)))
    rgba.save(tmp_path / "frames.gif", save_all=True, append_images=[rgb])
    rgba.save(tmp_path / "frames.webp", save_all=True, append_images=[rgb], lossless=True)
    rgb.convert("CMYK").save(tmp_path / "cmyk.tif")
    wide = np.asarray(photo).astype(np.uint16) * 257 - 99
    for suffix in ("png", "tif", "pgm"):
        Image.fromarray(wide if suffix != "pgm" else wide.astype(np.int32)).save(tmp_path / f"wide.{suffix}")
    colour = {"image_shape": (channels, 54, 36), "input_shape": (channels, 48, 32)}
    chosen = replace(card, **colour, mean=card.mean[:channels], std=card.std[:channels])
    assert_alike(replace(chosen, interpolation=interpolation, fit=fit), sorted(tmp_path.iterdir()))


def test_the_file_beside_an_exported_model_needs_numpy_and_pillow_alone(tmp_path: Path, photos: Path) -> None:
    shutil.copy(preprocess.__globals__["__file__"], tmp_path)
    path = photos / "val" / "a" / "37x53.png"
    facts = {"image_shape": [3, 40, 40], "input_shape": [3, 32, 32], "eval_crop": 0.8, "fit": "crop"}
    facts |= {"mean": [0.5, 0.5, 0.5], "interpolation": "bilinear"}
    code = f"""import sys; sys.modules |= dict.fromkeys(["torch", "torchvision", "lockstep", "simplejpeg"])
from preprocess import preprocess
print(preprocess({str(path)!r}, {facts}).tobytes().hex())"""
    done = command(sys.executable, "-c", code, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.strip() == preprocess(path, facts).tobytes().hex()


def test_a_run_of_before_resumes_and_evaluates_with_the_size_that_it_stored(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = ("dataset=folder", f"dataset.path={photos}", "dataset.input_size=[48,32]")
    with monkeypatch.context() as before:
        before.setattr(files, "stored_side", lambda seen, crop: round(seen / crop))
        run = train_here(tmp_path / "run", *data, "augment=none", NARROW, "steps=1", "batch=4")
    lockstep.train([f"resume={run.path}", "steps=2"])
    assert load_job(run.config).dataset.image_shape == (3, 55, 37)
    predictor = lockstep.load(run.path, device="cpu")
    assert predictor.card.image_shape == (3, 55, 37)
    for own in (None, run):
        assert split_for(predictor, own, data, "val")[1].image_shape == (3, 55, 37)


def test_loaded_weights_crop_as_timm_and_those_of_before_as_they_were_trained(photos: Path, card: ModelCard) -> None:
    old = predictor_of(replace(card, image_shape=(3, 55, 37)))
    for path in sorted((photos / "val" / "a").iterdir()):
        pixels = predictor_of(card).cropped(predictor_of(card).stored(path))[0].int()
        assert (pixels - of_timm(path, card, card.interpolation).int()).abs().max() <= 2
        assert old.cropped(old.stored(path)).shape == (1, 3, 48, 32)  # not resized again: 48 of 55 and 32 of 37
    stored = torch.arange(55 * 37).remainder(256).to(torch.uint8).view(1, 1, 55, 37).repeat(1, 3, 1, 1)
    assert torch.equal(old.cropped(stored), stored[..., 4:52, 2:34])


@pytest.mark.parametrize("fit", CROP_MODES)
def test_photos_are_fitted_as_for_the_weights_unless_the_job_says_how(
    card: ModelCard, photos: Path, fit: str
) -> None:
    fitted = {
        own: with_sizes(Folder(path=str(photos), fit=own), replace(card, fit=fit)) for own in ("auto", "squash")
    }
    assert {own: source.fit for own, source in fitted.items()} == {"auto": fit, "squash": "squash"}


@pytest.mark.parametrize("fit", CROP_MODES)
@pytest.mark.parametrize("own", CROP_MODES)
def test_the_size_that_weights_stored_is_for_photos_of_the_same_fit_alone(
    card: ModelCard, photos: Path, fit: str, own: str
) -> None:
    trained = replace(card, fit=fit, image_shape=(3, 60, 44))
    shape = with_sizes(Folder(path=str(photos), fit=own), trained).image_shape
    alone = with_sizes(Folder(path=str(photos), fit=own), replace(trained, image_shape=None)).image_shape
    assert alone != (3, 60, 44)
    assert shape == ((3, 60, 44) if own == fit else alone)


def test_an_export_names_the_ways_to_fit_as_timm_does(card: ModelCard) -> None:
    facts = {fit: _facts(replace(card, fit=fit), {}) for fit in CROP_MODES}
    assert {fit: of["crop_mode"] for fit, of in facts.items()} == CROP_MODES
    assert all(of["input_size"] == card.input_shape and of["num_classes"] == card.classes for of in facts.values())


@pytest.mark.parametrize("scale", [1e-9, 1e-7, 1e-5, 1e-4, 1e-3, 0.02, 1.0, 1e3])
@pytest.mark.parametrize("share", [0.05, 1e-7])
def test_adaptive_clipping_is_as_in_timm(scale: float, share: float) -> None:
    layers = [torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4, 6), torch.nn.Linear(6, 5)]
    model = torch.nn.Sequential(*layers).double()
    with torch.no_grad():
        model[0].weight[1], model[0].bias[:], model[2].weight[3] = 0, 0, 1e-5
    before = [scale * torch.randn_like(parameter) for parameter in model.parameters()]
    before[0][2] = 0
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient.clone()
    model[2].bias.grad = None  # frozen
    AGC(clipping=share).after_backward(SimpleNamespace(model=model))  # type: ignore[arg-type]
    own = [parameter.grad for parameter in model.parameters()]
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient.clone()
    model[2].bias.grad = None
    adaptive_clip_grad([*model.parameters()][:-2], clip_factor=share)
    expected = [parameter.grad for parameter in model.parameters()]
    assert own.pop(3) is expected.pop(3) is None
    torch.testing.assert_close(own, expected, rtol=1e-9, atol=0)
    assert torch.equal(own[-2], before[-2]), "the head is not clipped"
    assert AGC.every_rank, "each rank has its own gradients"


@pytest.mark.parametrize(
    ("image", "seen", "typed", "stored"),
    [
        ((60, 44), (48, 32), "auto", (60, 44)),
        ((60, 44), (48, 32), [48, 32], (60, 44)),
        ((60, 44), (48, 32), [32, 48], (36, 54)),
        ((60, 44), (48, 32), [40, 32], (45, 36)),
        ((70, 70), (64, 64), 64, (70, 70)),
        ((70, 70), (64, 64), 48, (70, 70)),
        (None, (64, 64), 48, (256, 256)),
        (None, (64, 64), 336, (384, 384)),
        (None, (64, 64), None, (292, 292)),
        (None, (48, 32), "auto", (54, 36)),
    ],
)
def test_images_are_stored_as_for_the_weights_where_the_input_is_theirs_and_large_enough_elsewhere(
    card: ModelCard, photos: Path, image: Any, seen: tuple[int, int], typed: Any, stored: tuple[int, int]
) -> None:
    """The evaluated share of these weights is 0.875."""
    trained = replace(card, image_shape=image and (3, *image), input_shape=(3, *seen), eval_crop=0.875)
    source = with_sizes(Folder(path=str(photos), input_size=typed, fit="crop"), trained)
    assert source.image_shape[1:] == stored


@pytest.mark.parametrize(
    ("own", "fit", "share"),
    [
        ("pad", "pad", 0.8),
        ("squash", "squash", 0.8),
        ("crop", "pad", 0.8),
        ("pad", "crop", 1.0),
        ("squash", "pad", 1.0),
    ],
)
def test_the_share_that_weights_are_evaluated_on_is_for_whole_photos_of_the_same_fit_alone(
    card: ModelCard, photos: Path, own: str, fit: str, share: float
) -> None:
    trained = replace(card, fit=fit, eval_crop=0.8)
    assert with_sizes(Folder(path=str(photos), fit=own), trained).eval_crop == share
    assert with_sizes(Folder(path=str(photos), fit=own, crop=0.9), trained).eval_crop == 0.9


@pytest.mark.parametrize("seen", [(64, 48), (48, 64), (64, 64)])
def test_an_input_of_weights_that_equals_the_stored_size_in_one_side_is_kept(
    card: ModelCard, photos: Path, seen: tuple[int, int]
) -> None:
    trained = replace(card, input_shape=(3, *seen))
    source: Any = with_sizes(Folder(path=str(photos), decode_size=64), trained)
    assert source.input_shape == (3, *seen)
    assert (source.input_size is None) == (seen == (64, 64))


def test_whole_photos_without_a_size_are_stored_as_they_are_usually_seen() -> None:
    for fit, side in (("pad", 224), ("squash", 224), ("crop", 256)):
        for size in ("auto", None):
            assert Folder(path="nowhere", fit=fit, input_size=size).image_shape == (3, side, side)
