"""Defaults that depend on data, model and optimizer: augmentation, sizes, learning rate, normalisation."""

from pathlib import Path

import pytest

from helpers import ROOT, resolved
from lockstep.config import components
from lockstep.config.options import classes_of
from lockstep.core.errors import InputError
from lockstep.data.transforms import AugMix, CropFlip, NoAugment, RandomResizedCrop, ThreeAugment, TrivialAugment
from lockstep.training.resolved_job import ResolvedJob

TUNED = "model=vit_base_patch16_384 model.pretrained=true"
RESIZED, WHOLE = RandomResizedCrop(crop="resized"), RandomResizedCrop(crop="none")


@pytest.mark.parametrize(
    ("words", "augment"),
    [
        ("dataset=digits", CropFlip(pad=1, flip=0.0)),
        ("dataset=mnist", CropFlip(pad=1, flip=0.0)),
        ("dataset=fashion_mnist", CropFlip()),
        ("dataset=cifar10 dataset.input_size=224", CropFlip()),
        ("dataset=fake", NoAugment()),
        ("dataset=folder dataset.path=photos", RESIZED),
        ("dataset=folder dataset.path=photos dataset.decode_size=32", CropFlip()),
        ("dataset=folder dataset.path=photos dataset.decode_size=32 dataset.crop_from=file", RESIZED),
        ("dataset=imagenet", RESIZED),
        ("dataset=folder dataset.path=photos augment=none", NoAugment()),
        ("dataset=folder dataset.path=photos augment=trivialaugment", TrivialAugment(crop="resized")),
        ("dataset=cifar10 augment=trivialaugment", TrivialAugment(crop="pad")),
        ("dataset=cifar10 augment=augmix augment.crop=resized", AugMix(crop="resized")),
        ("dataset=folder dataset.path=photos dataset.fit=pad", WHOLE),
        ("dataset=folder dataset.path=photos dataset.fit=squash augment=trivialaugment", TrivialAugment(crop="none")),
        ("dataset=imagenet dataset.fit=pad augment=three_augment augment.crop=resized", ThreeAugment(crop="resized")),
        ("dataset=folder dataset.path=photos augment=shift", CropFlip(pad=1, flip=0.0)),
    ],
)
def test_the_data_set_says_how_it_is_augmented_unless_the_job_does(words: str, augment: object) -> None:
    job = resolved(*words.split())
    assert job.augment == augment
    assert components.plain(job)["augment"]["_target_"].endswith(f".{type(augment).__name__}")


def test_the_usual_augmentation_of_every_data_set_is_an_option() -> None:
    for cls in classes_of("dataset").values():
        usual = cls.usual_augment
        assert isinstance(usual, property) or (ROOT / "conf" / "augment" / f"{usual}.yaml").is_file()


def test_a_block_of_evaluation_has_a_number_of_pixels() -> None:
    blocks = {"dataset=digits": 256, "dataset=fake dataset.size=128": 256, "dataset=fake dataset.size=4096": 1}
    blocks |= {"dataset=imagenet": 83, "dataset=cifar10 dataset.input_size=336": 37}
    blocks |= {"dataset=imagenet train.eval_batch=500": 500}
    blocks |= {f"dataset=fake dataset.size={sides}": 4 for sides in ("[4096,256]", "[256,4096]")}
    assert {words: resolved(*words.split()).train.eval_batch for words in blocks} == blocks


def test_the_usual_rate_fits_the_optimizer_and_the_batch() -> None:
    rates = {"batch=64": 1e-3, "batch=16": 5e-4, "optimizer=adam batch=256": 2e-3, "optimizer=sgd": 0.025}
    rates |= {"optimizer=sgd batch=1024": 0.4, "optimizer=sgd optimizer.lr=1": 1, "optimizer=muon": 0.02}
    rates |= {f"optimizer=timm optimizer.opt={opt}": rate for opt, rate in (("lion", 1e-4), ("adafactor", 1e-3))}
    rates["optimizer=timm optimizer.opt=sgdw batch=256"] = 0.1
    rates |= {
        "model=resnet18 model.pretrained=true": 1e-4,
        "model.pretrained=true optimizer.lr=0.5 model=resnet18": 0.5,
    }
    assert {words: resolved(*words.split()).optimizer.lr for words in rates} == pytest.approx(rates)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("", (256, 224, 0.875)),
        ("dataset.decode_size=64", (64, None, 1.0)),
        ("dataset.input_size=32", (256, 32, 1.0)),
        ("dataset.input_size=null", (256, None, 1.0)),
        ("dataset.crop=0.9", (256, 224, 0.9)),
        # Published crops at 224 pixels: 0.95 and 0.875. (At 288 pixels both take the whole image.)
        ("model=resnet50.a1_in1k model.pretrained=true", (256, 224, 0.95)),
        ("model=convnext_tiny.fb_in1k model.pretrained=true", (256, 224, 0.875)),
        ("model=vit_base_patch16_384 model.pretrained=true", (384, None, 1.0)),
        ("model=vit_base_patch16_384 model.pretrained=true dataset.input_size=224", (256, 224, 1.0)),
        ("model=vit_base_patch16_384", (256, 224, 0.875)),
        (
            "dataset.input_size=null dataset.decode_size=96 model=resnet50.a1_in1k model.pretrained=true",
            (96, None, 0.95),
        ),
        # timm's `Resize` to the size / 0.875, and its centre.
        ("dataset.input_size=[384,128]", ([438, 146], [384, 128], 0.875)),
        ("dataset.input_size=[384,128] dataset.crop=1", ([384, 128], [384, 128], 1.0)),
        ("dataset.input_size=[384,128] dataset.decode_size=[400,150]", ([400, 150], [384, 128], 1.0)),
        ("dataset.input_size=[64,64]", (73, [64, 64], 0.875)),
        ("dataset.fit=pad", (224, None, 1.0)),
        ("dataset.fit=squash dataset.input_size=[32,320]", ([32, 320], [32, 320], 1.0)),
        ("dataset.fit=pad dataset.decode_size=256", (256, None, 1.0)),
        ("dataset.fit=pad model=resnet50.a1_in1k model.pretrained=true", (224, None, 1.0)),
        ("dataset.input_size=[384,128] model=resnet50.a1_in1k model.pretrained=true", ([404, 134], [384, 128], 0.95)),
    ],
)
def test_photos_have_the_sizes_of_the_weights_or_the_usual_ones(
    words: str, sizes: tuple[int | list[int], int | list[int] | None, float]
) -> None:
    data = resolved("dataset=folder", "dataset.path=photos", *words.split()).dataset
    assert (data.decode_size, data.input_size, data.crop) == sizes  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("words", "mean", "interpolation"),
    [
        ("dataset=cifar10", [0.4914, 0.4822, 0.4465], "bilinear"),
        ("dataset=cifar10 model=vit_base_patch16_384", [0.4914, 0.4822, 0.4465], "bilinear"),
        ("dataset=cifar10 model=vit_base_patch16_384 model.pretrained=true", [0.5, 0.5, 0.5], "bicubic"),
        ("dataset=digits model=vit_base_patch16_384 model.pretrained=true", [0.5], "bicubic"),
        ("dataset=cifar10 model=vit_base_patch16_384 model.pretrained=true input.mean=[0,0,0]", [0, 0, 0], "bicubic"),
        (f"dataset=cifar10 {TUNED} input.interpolation=bilinear", [0.5, 0.5, 0.5], "bilinear"),
        ("dataset=cifar10 input.interpolation=bicubic", [0.4914, 0.4822, 0.4465], "bicubic"),
    ],
)
def test_pixels_are_normalised_and_resized_as_for_weights(words: str, mean: list[float], interpolation: str) -> None:
    chosen = resolved(*words.split()).input
    assert (chosen.mean, chosen.interpolation) == (mean, interpolation)


def test_a_mean_for_another_number_of_channels_is_refused() -> None:
    with pytest.raises(InputError, match=r"input\.mean is \[0\.5\], but the images have 3 channels"):
        resolved("dataset=fake", "input.mean=[0.5]")


def test_a_job_of_a_folder_is_written_with_what_was_chosen(tmp_path: Path) -> None:
    job = resolved("dataset=folder", f"dataset.path={tmp_path}", "dataset.decode_size=224")
    assert ResolvedJob.of(components.build_job(components.plain(job))) == job
