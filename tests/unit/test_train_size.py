"""Training at another size than the evaluation (Touvron et al. 2019, FixRes)."""

from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from helpers import FAKE, losses, photos_of_two_classes, resolved, train_here, weights
from lockstep.config.schema import TrainBlock
from lockstep.core.errors import InputError
from lockstep.job.validate import check_job

PHOTOS = (*FAKE, "dataset.channels=3", "dataset.size=32", "dataset.examples=40", "batch=20", "model=test_resnet")


RESIZED = ("trivialaugment augment.crop=resized", "[6,4]")


@pytest.mark.parametrize(
    ("augment", "size"), [("standard", "6"), ("none", "[6,4]"), ("randaugment", "[6,10]"), RESIZED]
)
def test_training_images_are_those_of_a_job_with_this_size_for_both(augment: str, size: str) -> None:
    words = ["dataset=digits", *f"augment={augment}".split(), "train.cutout=4", "train.cutmix=1", "train.mixup=0.2"]
    words += ["batch=20", "train.erase=1", "model=digitnet"]
    apart, small = (lockstep.compose([*words, f"{key}={size}"]) for key in ("train.size", "dataset.input_size"))
    assert torch.equal(next(apart.batches())[1], next(small.batches())[1])
    assert next(apart.evaluation())[0].shape[1:] == (1, 8, 8)


PROGRESSIVE = "train.sizes={0: 16, 2: [24,16], 75%: 32}"  # of 8 steps, 2 an epoch


@pytest.mark.parametrize(
    "loader", ["resident", "streaming loader.workers=2 loader.prefetch=4 dataset.crop_from=file"]
)
def test_each_step_has_the_images_of_a_run_with_its_size_alone(tmp_path: Path, loader: str) -> None:
    data = photos_of_two_classes(tmp_path, 40, "png") / "photos"
    words = f"dataset=folder dataset.path={data} dataset.decode_size=40 batch=27 steps=8 train.mixup=0.2".split()
    words += f"model=test_resnet augment=standard dataset.input_size=48 loader={loader}".split()
    jobs = {size: lockstep.compose([*words, f"train.size={size}"]) for size in ("16", "[24,16]", "32")}
    alone = {size: [images for _, images, _ in job.batches()] for size, job in jobs.items()}
    job = lockstep.compose([*words, PROGRESSIVE])
    for after in (0, 1, 2, 6, 7):
        batches = [*job.batches(after)]
        assert [step for step, _, _ in batches] == [*range(after + 1, 9)]
        for step, images, _ in batches:
            size = "16" if step <= 2 else "[24,16]" if step <= 6 else "32"
            assert torch.equal(images, alone[size][step - 1])


@pytest.mark.numerics
def test_a_run_of_several_sizes_is_resumed_to_the_bit(tmp_path: Path) -> None:
    words = (*PHOTOS, PROGRESSIVE, "steps=8", "train.micro_batches=2", "telemetry.interval=1")
    whole = train_here(tmp_path / "whole", *words)
    train_here(tmp_path / "parts", *words, stop_at=3)
    parts = train_here(tmp_path / "parts", *words)
    assert losses(whole) == losses(parts)
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(parts)[name], tensor)


def test_a_run_trains_small_and_evaluates_large(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_here(tmp_path / "run", *PHOTOS, "train.size=24", "steps=2", "train.ema=0.9")
    assert "3x32x32 (24x24 in training)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train.size=[32,32]"], "train.size is 32, which is the size of the evaluation too"),
        (["train.size=24", "train.sizes={0: 24}"], "train.size and train.sizes both choose"),
        (["train.sizes={0: 32, 50%: 32}"], "train.sizes is 32, which is the size of the evaluation too"),
        (["train.sizes={0: 24, 1ep: [16,24]}", "model=linear"], "train.sizes is 24, which this model for images of"),
        (["train.sizes={0: 24, 50%: 2}", "model=digitnet"], "train.sizes is 2, which this model for images of"),
        (["train.sizes={0: 24, 50%: 32}", "train.cuda_graph=true"], "the recorded step takes images of one size"),
        (["train.size=[24,32]", "model=linear"], "which this model for images of 32x32 does not take"),
        (["train.size=24", "model=test_vit"], "which this model for images of 32x32 does not take"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        check_job(resolved(*PHOTOS, *words))


@pytest.mark.parametrize(
    ("words", "shapes"),
    [
        ((), [(1, 8, 8)]),
        (("dataset.input_size=12",), [(1, 12, 12)]),
        (("dataset.input_size=12", "train.size=[6,10]"), [(1, 6, 10)]),
        (("dataset.input_size=12", "train.sizes={0: 6, 3: [10,6]}"), [(1, 6, 6), (1, 10, 6)]),
    ],
)
def test_a_job_says_the_shapes_of_its_training_images(words: tuple[str, ...], shapes: list[tuple[int, ...]]) -> None:
    job = resolved("dataset=digits", *words)
    assert job.train_shapes == shapes
    assert job.train_shape == shapes[-1]
    assert job.dataset.image_shape == (1, 8, 8)


def test_the_largest_shape_of_training_has_the_most_pixels_wherever_it_stands() -> None:
    job = resolved("dataset=digits", "dataset.input_size=12", "train.sizes={0: [5,5], 2: [10,2], 3: [2,4]}")
    assert (job.train_shapes, job.train_shape) == ([(1, 5, 5), (1, 10, 2), (1, 2, 4)], (1, 5, 5))
    job = resolved("dataset=digits", "dataset.input_size=[4,6]", "train.sizes={0: [2,2], 2: [4,6]}")
    assert job.train_shape == (1, 4, 6)
    job = resolved("dataset=digits", "dataset.input_size=12", "train.sizes={0: 6, 3: 8, 5: 6}")
    assert job.train_shapes == [(1, 6, 6), (1, 8, 8), (1, 6, 6)], "one for each start, also of an earlier size"


def test_a_job_averages_its_weights_in_one_of_two_ways_and_counts_its_passes() -> None:
    blocks = (TrainBlock(), TrainBlock(ema=0.9), TrainBlock(swa_from="50%"))
    assert [block.averages for block in blocks] == [False, True, True]
    passes: dict[Any, int] = {1: 1, 4: 4, "8": 8, "auto": 1}
    assert {number: TrainBlock(micro_batches=number).passes for number in passes} == passes
