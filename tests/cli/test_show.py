"""`lockstep show`: the pixels of the picture are those that training gets."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import resolved
from lockstep.core.errors import InputError
from lockstep.diagnostics import show as show_module
from lockstep.diagnostics.show import LEAST, caption, show, stored_pixels
from lockstep.telemetry.pictures import LINE
from lockstep.training.experiment import Parts, build_parts

EPOCHS, IMAGES, SIDE = 3, 4, 16
DIGITS = ("device=cpu", "model.width=8", "batch=300")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    pixels = np.random.default_rng(0).integers(0, 256, (10, 20, 24, 3), dtype=np.uint8)
    for split in ("train", "val"):
        for number, image in enumerate(pixels):
            path = folder / split / ("cat", "dog")[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)
    return folder


def trained_images(parts: Parts) -> list[dict[int, torch.Tensor]]:
    """By epoch: the pixels (C, H, W) that training gets for each example, the first time in the epoch."""
    epochs: list[dict[int, torch.Tensor]] = [{} for _ in range(EPOCHS)]
    for shard in islice(parts.transforms.train(parts.loader.train(after=0)), EPOCHS * parts.plan.steps_per_epoch):
        images, _ = parts.transforms.mixed(shard)
        for image, index in zip(stored_pixels(images, parts.transforms), shard.indices.tolist(), strict=False):
            epochs[shard.epoch].setdefault(index % parts.plan.examples, image)
    return epochs


@pytest.mark.parametrize(
    "words",
    [
        ("augment=randaugment", "train.cutout=2"),
        ("train.mixup=0.4", "train.cutmix=1"),
        ("train.sampling=balanced", "train.mixup=0.4"),
        ("train.repeats=2", "train.mixup=0.4"),
        ("precision=bf16_pure",),
        ("dataset=folder", "batch=4", "dataset.crop_from=file", "augment=standard", "loader=streaming"),
    ],
    ids=" ".join,
)
def test_the_pixels_are_those_of_training(words: tuple[str, ...], photos: Path, tmp_path: Path) -> None:
    if "dataset=folder" in words:
        words = (*words, f"dataset.path={photos}", f"dataset.decode_size={SIDE}")
    show((*DIGITS, *words), images=IMAGES, epochs=EPOCHS, out=str(tmp_path / "show.png"))
    drawn = np.asarray(Image.open(tmp_path / "show.png"))
    parts = build_parts(resolved(*DIGITS, *words, f"epochs={EPOCHS}", "steps=null"))
    trained = trained_images(parts)
    side = parts.job.dataset.input_shape[1]
    zoom, lines = -(-LEAST // side), 2 if parts.transforms.mix else 1
    chosen = parts.loader.global_batch(1).indices[:IMAGES] % parts.plan.examples
    for row, example in enumerate(chosen.tolist()):
        for epoch in range(EPOCHS):
            top = LINE + 4 + row * (zoom * side + lines * LINE + 4)
            left = epoch * (zoom * side + 4)
            cell = drawn[top : top + zoom * side : zoom, left : left + zoom * side : zoom]
            if example in trained[epoch]:
                expected = trained[epoch][example].permute(1, 2, 0).expand(-1, -1, 3).numpy()
                assert np.array_equal(cell, expected), (row, epoch)
            else:  # balanced sampling or repeats leave it out
                assert (cell == 255).all()


def test_images_that_are_not_augmented_are_those_of_the_data(tmp_path: Path) -> None:
    show((*DIGITS, "augment=none"), images=1, epochs=1, out=str(tmp_path / "show.png"))
    job = resolved(*DIGITS)
    index = int(build_parts(job).loader.global_batch(1).indices[0])
    stored = job.dataset.train().fetch([index])[0, 0].numpy()
    side, zoom = stored.shape[0], LEAST // stored.shape[0]
    drawn = np.asarray(Image.open(tmp_path / "show.png"))[LINE + 4 :: zoom, ::zoom, 0]
    assert np.array_equal(drawn[:side, :side], stored)


def test_a_caption_names_the_classes_of_a_mixed_image() -> None:
    assert caption(torch.tensor([0.0, 1.0, 0.0]), ("cat", "dog", "bird")) == ["dog"]
    assert caption(torch.tensor([0.3, 0.7, 0.0]), ("cat", "d\x1bg", "bird")) == ["70 % d\\x1bg", "30 % cat"]
    assert caption(torch.tensor([1.0]), ("cat",)) == ["cat"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"images": 0}, "--images is 0, expected from 1 to 64: --images=4"),
        ({"images": 65}, "--images is 65, expected from 1 to 64: --images=4"),
        ({"epochs": 0}, "--epochs is 0, expected from 1 to 64: --epochs=4"),
        ({"epochs": 65}, "--epochs is 65, expected from 1 to 64"),
        ({"out": "no/such/show.png"}, "--out is no/such/show.png"),
        ({"out": "show.jpg"}, "--out is show.jpg, expected a file whose name ends with .png"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict[str, object], says: str, tmp_path: Path) -> None:
    words = {"images": 1, "epochs": 1, "out": str(tmp_path / "show.png"), **options}
    with pytest.raises(InputError, match=says):
        show(DIGITS, **words)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("shares", "targets", "lines"),
    [
        ([0.5, 1.0], "labels", ["50 % cat", "dog"]),
        ([0.0, 0.0], "labels", ["no label"]),
        ([1.0, 0.0], "labels", ["cat"]),
        ([0.5, -3.0], "values", ["cat 0.5", "dog -3"]),
        ([0.004, 0.996], "classes", ["dog"]),
        ([0.006, 0.994], "classes", ["99 % dog", "1 % cat"]),
    ],
)
def test_a_caption_is_that_of_its_kind(shares: list[float], targets: str, lines: list[str]) -> None:
    assert caption(torch.tensor(shares), ("cat", "dog"), targets) == lines


@pytest.mark.parametrize("targets", ["labels", "values"])
def test_a_caption_has_four_lines_at_most(targets: str) -> None:
    shown = caption(torch.ones(6), [*"abcdef"], targets)
    assert shown == [f"{name}{' 1' * (targets == 'values')}" for name in "abcd"]


def test_the_inputs_of_a_model_are_rounded_to_whole_pixels() -> None:
    transforms: Any = SimpleNamespace(shift=torch.tensor(1.0), scale=torch.tensor(0.5))
    values = torch.tensor([-9.0, 1.0, 1.4, 128.5, 999.0])
    assert stored_pixels(values, transforms).tolist() == [0, 0, 1, 255, 255]
    assert stored_pixels(values, transforms).dtype == torch.uint8


@pytest.mark.parametrize("images", [1, 64])
def test_a_picture_has_one_to_sixty_four_rows_and_its_usual_name(
    images: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("dataset=fake", "dataset.classes=2", "dataset.channels=4", "dataset.size=8", "dataset.examples=64")
    heads: list[Any] = []
    usual = show_module.sheet

    def sheet(*values: Any, **options: Any) -> bytes:
        heads.append((values[1], options))
        return usual(*values, **options)

    monkeypatch.setattr(show_module, "sheet", sheet)
    show(("device=cpu", "model=linear", "batch=64", *words, "augment=none"), images=images, epochs=1, out=None)
    assert (tmp_path / "show.png").is_file()
    ((captions, options),) = heads
    assert (len(captions), {*captions} <= {"0", "1"}, options["heads"]) == (images, True, ["epoch 1"])
    shown = f"wrote show.png: {images} images (the first three of 4 channels) in epochs 1 to 1, augmentation: "
    assert shown in capsys.readouterr().out


def test_an_image_that_an_epoch_leaves_out_has_no_caption_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ((torch.zeros(1, 8, 8, dtype=torch.uint8), shares) for shares in torch.eye(2))
    sheets: list[Any] = []
    monkeypatch.setattr(show_module, "cells_of", lambda *_: [[None, first], [second, None]])
    monkeypatch.setattr(show_module, "sheet", lambda *values, **options: sheets.append(values) or b"")
    words = ("dataset=fake", "dataset.classes=2", "dataset.channels=1", "dataset.size=8", "dataset.examples=64")
    show(("device=cpu", "model=linear", *words), images=2, epochs=2, out=str(tmp_path / "a.png"))
    ((pixels, captions),) = sheets
    assert [image is None for image in pixels] == [True, False, False, True]
    assert captions == ["", "0", "1", ""]


@pytest.mark.parametrize(("epochs", "longer"), [(2, 3), (64, 64)])
def test_the_epochs_of_a_picture_are_those_of_a_run_that_is_at_least_as_long(
    epochs: int, longer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs: list[Any] = []
    usual = show_module.build_data
    monkeypatch.setattr(show_module, "build_data", lambda job, world: jobs.append(job) or usual(job, world))
    monkeypatch.setattr(show_module, "sheet", lambda pixels, captions, **options: str(options["heads"]).encode())
    words = ("dataset=fake", "dataset.classes=2", "dataset.channels=1", "dataset.size=8", "dataset.examples=64")
    out = tmp_path / "a.png"
    show(("device=cpu", "model=linear", "batch=64", *words, "epochs=3"), images=2, epochs=epochs, out=str(out))
    ((epochs_of_job, steps, loader),) = ((job.epochs, job.steps, type(job.loader).__name__) for job in jobs)
    assert (epochs_of_job, steps, loader) == (longer, None, "Streaming")
    assert out.read_text() == str([f"epoch {number}" for number in range(1, epochs + 1)])
    assert f": 2 images in epochs 1 to {epochs}, augmentation: " in capsys.readouterr().out
