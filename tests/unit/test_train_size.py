"""Training at another size than the evaluation (Touvron et al. 2019, FixRes)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lockstep
from helpers import FAKE, resolved, train
from lockstep.core.errors import InputError
from lockstep.job.validate import check_job

PHOTOS = (*FAKE, "dataset.channels=3", "dataset.size=32", "dataset.examples=40", "batch=20", "model=test_resnet")


@pytest.mark.parametrize(
    ("augment", "size"),
    [
        ("standard", "6"),
        ("none", "[6,4]"),
        ("shift", "[4,6]"),
        ("randaugment_imagenet", "[6,10]"),
        ("trivialaugment augment.crop=resized", "[6,4]"),
    ],
)
def test_training_images_are_those_of_a_job_with_this_size_for_both(augment: str, size: str) -> None:
    words = ["dataset=digits", *f"augment={augment}".split(), "train.cutout=4", "train.cutmix=1", "train.mixup=0.2"]
    words += ["batch=20", "train.erase=1", "model=digitnet"]
    apart, small = (lockstep.compose([*words, f"{key}={size}"]) for key in ("train.size", "dataset.input_size"))
    assert torch.equal(next(apart.batches())[1], next(small.batches())[1])
    assert next(apart.evaluation())[0].shape[1:] == (1, 8, 8)


def test_a_run_trains_small_and_evaluates_large(tmp_path: Path) -> None:
    done = train(*PHOTOS, "train.size=24", "steps=2", "launcher.ranks=2", "train.ema=0.9", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "3x32x32 (24x24 in training)" in done.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.size=[32,32]"], "train.size is 32, which is the size of the evaluation too"),
        (["train.size=[24,32]", "model=linear"], "this model takes images of 32x32 alone"),
        (["train.size=24", "model=test_vit"], "this model takes images of 32x32 alone"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        check_job(resolved(*PHOTOS, *words))
