"""Each recipe for image files trains: two steps with the smallest network of its family, on one rank and on two."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers import ROOT, Case, Gang, losses, train_here

VIT = ("+model.options.depth=1", "+model.options.embed_dim=24", "+model.options.num_heads=2")
SWIN = ("+model.options.depths=[1,1]", "+model.options.embed_dim=8", "+model.options.num_heads=[1,1]")
SMALLEST = {
    "resnet50_v1": ("model=test_resnet",),
    "resnet50_v2": ("model=test_resnet", "train.size=24"),
    "mobilenet_v3_large": ("model=test_efficientnet",),
    "efficientnet_v2_s": ("model=test_efficientnet", "train.size=24"),
    "vit_b16": ("model=test_vit",),
    "convnext_t": ("model=test_convnext", "train.size=32"),
    "rsb_a1": ("model=test_resnet",),
    "rsb_a2": ("model=test_resnet",),
    "rsb_a3": ("model=test_resnet", "train.size=24"),
    "deit_s": VIT,
    "deit3_s": VIT,
    "bigvision_vit_s16": VIT,
    "photos": ("model=test_resnet", "model.pretrained=false", "train.freeze=[backbone]", "train.freeze_until=1"),
    "cifar10_wrn28_10": ("dataset=folder", "model.depth=10", "model.width=1"),
    "swin_t": (*SWIN, "+model.options.window_size=4"),
}
STEPS = ("resnet50_v1", "cifar10_wrn28_10")  # whose rates fall in steps
FILES = (ROOT / "conf" / "experiment").glob("*.yaml")
RECIPES = sorted(
    path.stem for path in FILES if re.search("/dataset: (imagenet|folder)|wide_resnet", path.read_text())
)
SMALL = (
    "train.patience=null",
    "dataset.decode_size=36",
    "dataset.input_size=32",
    "dataset.crop=0.9",
    "loader.workers=0",
    "precision=fp64",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty-four images of two classes to train on, and eight to evaluate."""
    path = tmp_path_factory.mktemp("images")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 40, 48, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        file = path / ("train" if number < 24 else "val") / f"class{number % 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    return path


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    with Gang(tmp_path_factory.mktemp("gang"), 2) as started:
        yield started


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_steps_of_a_recipe_are_the_same_on_two_ranks_that_stop_and_go_on(
    recipe: str, folder: Path, two_ranks: Gang, tmp_path: Path
) -> None:
    words = (
        f"experiment={recipe}",
        *SMALLEST[recipe],
        *SMALL,
        f"dataset.path={folder}",
        "train.patience=null",
        "batch=12",
        "epochs=1",
    )
    words = (*words, "schedule.milestones=[1]" if recipe in STEPS else "schedule.warmup=1")
    alone = losses(train_here(tmp_path / "one", *words))
    two_ranks.train(Case(tmp_path / "two", words, stop_at=1))
    two_ranks.train(Case(tmp_path / "two", words))
    assert len(alone) == 2
    assert np.isfinite(alone).all()
    assert losses(tmp_path / "two") == pytest.approx(alone, rel=1e-9)
