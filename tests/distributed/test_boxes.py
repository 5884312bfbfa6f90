"""Boxes that are cut from files while they are read: the same pixels on any ranks, workers and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from helpers import Case, gang, losses, train_here

pytestmark = pytest.mark.slow


def seen(run: Path) -> list[tuple[int, ...]]:
    """(step, epoch, index, hash of the pixels) of every example that the ranks of a run have trained on."""
    files = sorted((run / "logs").glob("rank*.samples.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return sorted(tuple(line[key] for key in ("step", "epoch", "index", "hash")) for line in lines)


@pytest.mark.parametrize("repeats", [1, 2])
def test_two_ranks_with_workers_of_their_choice_see_what_one_without_sees_and_go_on_with_it(
    repeats: int, tmp_path: Path
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (14, 40, 60, 3), dtype=np.uint8)
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for number, image in enumerate(pixels):
            Image.fromarray(image[: 40 - number]).save(tmp_path / split / "a" / f"{number:02}.jpg")
    data = ("dataset=folder", f"dataset.path={tmp_path}", "dataset.decode_size=16", "dataset.crop_from=file")
    job = (*data, "augment=randaugment", "batch=6", "steps=8", "train.mixup=0.4", "telemetry.samples=true")
    job = (*job, f"train.repeats={repeats}")
    alone = train_here(tmp_path / "alone", *job, "loader=streaming", "loader.workers=0").path
    gang(tmp_path / "gang", 2, [Case(tmp_path / "two", job), Case(tmp_path / "resumed", job, stop_at=4)])
    train_here(tmp_path / "resumed", *job)
    assert len({line[3] for line in seen(alone)}) == len(seen(alone)) == 14 + 14 + 12
    assert seen(tmp_path / "two") == seen(tmp_path / "resumed") == seen(alone)
    loader = yaml.safe_load((tmp_path / "two" / "config.yaml").read_text())["loader"]
    assert loader.pop("workers") >= 1  # as many as the rates of this moment ask for
    assert loader == {"_target_": "lockstep.data.loading.Streaming", "prefetch": 2}


@pytest.mark.numerics
def test_images_of_five_channels_have_the_losses_of_one_rank_on_two_and_after_a_resume(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 40, 30, 5), dtype=np.uint8)
    for split in ("train", "val"):
        for number, image in enumerate(pixels):
            (folder := tmp_path / split / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
            np.save(folder / f"{number:02}.npy", image[: 40 - number])
    job = ("dataset=folder", f"dataset.path={tmp_path}", "dataset.channels=5", "dataset.decode_size=16")
    job = (*job, "dataset.crop_from=file", "augment=standard", "augment.blur=0.3", "train.mixup=0.4", "batch=6")
    job = (
        *job,
        "model=test_resnet",
        "precision=fp64",
        "optimizer=sgd",
        "steps=4",
        "loader=streaming",
        "strategy=ddp",
    )
    alone = losses(train_here(tmp_path / "alone", *job, "launcher.ranks=1"))
    gang(tmp_path / "gang", 2, [Case(tmp_path / "two", job)])
    train_here(tmp_path / "resumed", *job, "launcher.ranks=1", stop_at=2)
    assert losses(train_here(tmp_path / "resumed", *job, "launcher.ranks=1")) == alone
    assert len(alone) == 4
    assert losses(tmp_path / "two") == pytest.approx(alone, rel=1e-12)
