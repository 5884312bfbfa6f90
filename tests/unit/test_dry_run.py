"""The dry run before a run: its result, and that it does not change the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from helpers import losses, resolved, train_here
from lockstep.core.world import World
from lockstep.training import dry_run
from lockstep.training.dry_run import training_rate


@pytest.mark.parametrize(
    ("seconds", "tried", "rate"), [([0.1, 0.5], [8, 64], 64 / 0.5), ([0.2], [8], 8 / 0.2)], ids=["quick", "slow"]
)
def test_the_rate_is_that_of_a_full_micro_batch_unless_it_would_take_long(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], tried: list[int], rate: float
) -> None:
    examples: list[int] = []
    monkeypatch.setattr(dry_run, "dry_run_step", lambda job, world, count: examples.append(count))
    monkeypatch.setattr(dry_run, "_seconds", lambda step, world: seconds[len(examples) - 1])
    assert training_rate(resolved("batch=64"), World.solo()) == rate
    assert examples == tried


def test_a_model_that_is_compiled_is_not_tried() -> None:
    assert training_rate(resolved("model.compile=true"), World.solo()) is None


def test_a_trial_leaves_the_random_numbers_of_the_run_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    training_rate(resolved("model.dropout=0.5", "train.ema=0.9"), World.solo())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_whose_workers_were_chosen_by_trials_is_the_run_without_them_and_keeps_their_number(
    tmp_path: Path,
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 20, 3), dtype=np.uint8)
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for number, image in enumerate(pixels):
            Image.fromarray(image).save(tmp_path / split / "a" / f"{number}.jpg")
    job = ("dataset=folder", f"dataset.path={tmp_path}", "dataset.decode_size=16", "dataset.crop_from=file")
    job = (*job, "augment=standard", "batch=4", "steps=5", "model.dropout=0.5", "optimizer=sgd")
    tried = train_here(tmp_path / "tried", *job)
    configured = train_here(tmp_path / "configured", *job, "loader=streaming", "loader.workers=0")
    assert losses(tried) == losses(configured)
    loader = yaml.safe_load(tried.config.read_text())["loader"]
    assert loader.pop("workers") >= 1  # the number depends on the measured rates
    assert loader == {"_target_": "lockstep.data.loading.Streaming", "prefetch": 2}
