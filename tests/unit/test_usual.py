"""What a job takes from its data where it does not choose: the augmentation, the size of an evaluation block."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import ROOT, built
from lockstep.config import components
from lockstep.config.schema import Job
from lockstep.data import datasets
from lockstep.data.transforms import CropFlip, NoAugment, RandomResizedCrop
from lockstep.job.resolve import resolve


def resolved(*overrides: str) -> Job:
    return resolve(built(*overrides), sweep=False)


@pytest.mark.parametrize(
    ("words", "augment"),
    [
        ("dataset=digits", CropFlip(pad=1, flip=0.0)),
        ("dataset=mnist", CropFlip(pad=1, flip=0.0)),
        ("dataset=fashion_mnist", CropFlip()),
        ("dataset=cifar10 dataset.input_size=224", CropFlip()),
        ("dataset=fake", NoAugment()),
        ("dataset=folder dataset.path=photos", RandomResizedCrop()),
        ("dataset=folder dataset.path=photos dataset.decode_size=32", CropFlip()),
        ("dataset=folder dataset.path=photos dataset.decode_size=32 dataset.crop_from=file", RandomResizedCrop()),
        ("dataset=imagenet", RandomResizedCrop()),
        ("dataset=folder dataset.path=photos augment=none", NoAugment()),
        ("dataset=folder dataset.path=photos augment=shift", CropFlip(pad=1, flip=0.0)),
    ],
)
def test_the_data_set_says_how_it_is_augmented_unless_the_job_does(words: str, augment: object) -> None:
    job = resolved(*words.split())
    assert job.augment == augment
    assert components.plain(job)["augment"]["_target_"].endswith(f".{type(augment).__name__}")


def test_the_usual_augmentation_of_every_data_set_is_an_option() -> None:
    for name in datasets.__all__:
        usual = getattr(datasets, name).usual_augment
        assert isinstance(usual, property) or (ROOT / "conf" / "augment" / f"{usual}.yaml").is_file()


@pytest.mark.parametrize(
    ("words", "block"),
    [
        ("dataset=digits", 256),
        ("dataset=cifar10", 256),
        ("dataset=fake dataset.size=128", 256),
        ("dataset=imagenet", 83),
        ("dataset=cifar10 dataset.input_size=336", 37),
        ("dataset=fake dataset.size=4096", 1),
        ("dataset=imagenet train.eval_batch=500", 500),
    ],
)
def test_a_block_of_evaluation_has_a_number_of_pixels(words: str, block: int) -> None:
    assert resolved(*words.split()).train.eval_batch == block


def test_a_job_of_a_folder_is_written_with_what_was_chosen(tmp_path: Path) -> None:
    job = resolved("dataset=folder", f"dataset.path={tmp_path}", "dataset.decode_size=224")
    assert components.build_job(components.plain(job)) == job
