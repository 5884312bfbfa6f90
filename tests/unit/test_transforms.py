"""From stored bytes to the input of the model."""

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import kstest, norm
from timm.data import random_erasing
from timm.data.random_erasing import RandomErasing
from torch import Tensor
from torchvision.transforms.v2 import functional as T

from helpers import resolved
from lockstep.core.data_protocols import Shard
from lockstep.core.model_card import VIEWS
from lockstep.core.rng import CUTOUT, ERASE, SampleRNG, sample_keys, uniform
from lockstep.data.datasets import CIFAR10, Digits, Fake, Folder
from lockstep.data.transforms import AugMix, RandAugment, ThreeAugment, TimmRandAugment, TrivialAugment
from lockstep.data.transforms.augment import CropFlip, NoAugment
from lockstep.data.transforms.crops import RandomResizedCrop
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.data.transforms.mixing import Cutout, Erase, Mix
from lockstep.precision import BF16, FP32, FP64, BF16Pure
from lockstep.training.evaluate import weighted_views

pytestmark = pytest.mark.numerics

AUGMENTS = [NoAugment(), CropFlip(), RandomResizedCrop()]


def transforms(source: Any, augment: Any = None, **options: Any) -> DeviceTransforms:
    chosen = {"device": torch.device("cpu"), "precision": FP32(), "seed": 0, "cropped": source.crops_files, **options}
    return DeviceTransforms.of(source.preprocessing, augment or NoAugment(), **chosen)


def train(preprocessing: DeviceTransforms, images: Tensor, indices: Tensor, epoch: int = 0) -> Tensor:
    """The images of a batch, as in training."""
    return preprocessing.augmented(images, epoch, indices)


def images(n: int, *shape: int) -> Tensor:
    return torch.randint(256, (n, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("precision", [FP32(), FP64()], ids=repr)
@pytest.mark.parametrize("source", [CIFAR10(), Digits(), Fake(size=8)], ids=repr)
def test_normalisation_is_that_of_torchvision(source: Any, precision: FP32) -> None:
    dtype = precision.dtype
    batch = images(5, *source.image_shape)
    expected = T.normalize(batch.to(dtype) / 255, list(source.mean), list(source.std))
    path = transforms(source, precision=precision)
    for actual in (train(path, batch, torch.arange(5)), path.eval(batch)):
        assert actual.dtype == dtype
        # The error is two or three roundings of numbers up to 1 / std.
        bound = 8 * torch.finfo(dtype).eps / min(source.std)
        torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("precision", [BF16(), BF16Pure()], ids=repr)
def test_images_are_normalised_wide_and_given_in_the_format_of_the_step(precision: FP32) -> None:
    batch, indices = images(5, 3, 32, 32), torch.arange(5)
    wide = train(transforms(CIFAR10()), batch, indices)
    short = transforms(CIFAR10(), precision=precision)
    assert torch.equal(train(short, batch, indices), wide.bfloat16())
    assert torch.equal(short.eval(batch), wide)  # still float32: the views are made from it


@pytest.mark.parametrize("precision", [FP32(), FP64(), BF16(), BF16Pure()], ids=repr)
@pytest.mark.parametrize("mix", [None, Mix(classes=3, mixup=1.0, cutmix=0.0)], ids=["alone", "mixed"])
@pytest.mark.parametrize("size", [None, (48, 40)])
def test_a_rank_without_a_part_of_the_batch_has_images_like_the_others(precision: Any, mix: Any, size: Any) -> None:
    path = transforms(CIFAR10(), precision=precision, mix=mix, train_sizes={} if size is None else {0: size})
    some, none = (path.augmented(images(2, 3, 32, 32)[:n], 0, torch.arange(n)) for n in (2, 0))
    assert (none.dtype, none.shape[1:], len(none)) == (some.dtype, some.shape[1:], 0)


@pytest.mark.parametrize("size", [80, 12, [32, 48], [20, 32]])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_images_are_resized_as_torchvision_does_it(size: Any, interpolation: str) -> None:
    source = CIFAR10(input_size=size)
    batch = images(3, 3, 32, 32)
    how = replace(source.preprocessing, interpolation=interpolation)
    path = replace(transforms(source, precision=FP64()), preprocessing=how)
    sides = [*source.input_shape[1:]]
    expected = T.resize(batch.double(), sides, T.InterpolationMode(interpolation), antialias=True)
    actual = path.eval(batch)
    expected = T.normalize(expected / 255, list(source.mean), list(source.std))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(actual, train(path, batch, torch.arange(3), 0))


def test_a_mean_and_a_deviation_that_are_given_come_before_those_of_the_data() -> None:
    batch, mean, std = images(2, 3, 32, 32), [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    how = resolved("dataset=cifar10", "device=cpu", f"input.mean={mean}", f"input.std={std}").preprocessing
    path = DeviceTransforms.of(how, NoAugment(), device=torch.device("cpu"), precision=FP64(), seed=0)
    expected = T.normalize(batch.double() / 255, mean, std)
    torch.testing.assert_close(path.eval(batch), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("augment", [RandomResizedCrop(), RandAugment(), TimmRandAugment()], ids=repr)
def test_boxes_are_resized_on_the_device_as_the_data_set_says(augment: Any, interpolation: str) -> None:
    batch, indices = images(6, 3, 40, 36), torch.arange(6)
    how = replace(CIFAR10().preprocessing, interpolation=interpolation)
    path = DeviceTransforms.of(how, augment, device=torch.device("cpu"), precision=FP32(), seed=3)
    crops = augment.apply(batch, SampleRNG(3, 2, indices), (32, 32), interpolation)
    assert torch.equal(train(path, batch, indices, 2), transforms(CIFAR10()).eval(crops))


def test_boxes_of_files_are_flipped_and_not_cut_once_more() -> None:
    source = Folder(path="nowhere", decode_size=32, input_size=32, crop=1.0, crop_from="file")
    batch = images(8, 3, 32, 32)
    path = transforms(source, RandomResizedCrop())
    seen, whole = train(path, batch, torch.arange(8)), path.eval(batch)
    flipped = [torch.equal(one, other.flip(-1)) for one, other in zip(seen, whole, strict=True)]
    same = [torch.equal(one, other) for one, other in zip(seen, whole, strict=True)]
    assert [a or b for a, b in zip(same, flipped, strict=True)] == [True] * 8
    assert any(same)
    assert any(flipped)


def test_evaluation_sees_the_centre_and_is_not_augmented() -> None:
    source = Folder(path="nowhere", decode_size=64, input_size=56, crop=0.875)
    batch = images(2, 3, 64, 64)
    expected = T.normalize(T.center_crop(batch, [56, 56]).double() / 255, list(source.mean), list(source.std))
    torch.testing.assert_close(transforms(source, precision=FP64()).eval(batch), expected, rtol=1e-12, atol=1e-12)
    batch = images(4, 3, 32, 32)
    assert torch.equal(transforms(CIFAR10(), CropFlip()).eval(batch), transforms(CIFAR10()).eval(batch))


@pytest.mark.parametrize(
    "augment",
    [
        *(*AUGMENTS, CropFlip(reflect=True), RandAugment(crop="pad"), RandAugment(), TrivialAugment(), AugMix()),
        *(TimmRandAugment(), ThreeAugment(crop="pad")),
    ],
    ids=repr,
)
@pytest.mark.parametrize("crop", [0.001, 0.3, 1.0])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_image_size_is_augmented_and_evaluated_in_any_crop_and_view(size: int, crop: float, augment: Any) -> None:
    for model_size in (1, 2, 5):
        source = Folder(path="nowhere", decode_size=size, input_size=model_size, crop=crop)
        path = transforms(source, augment, mix=Mix(classes=2, mixup=0.3, cutmix=1.0), cutout=Cutout(9))
        grey = torch.full((4, 3, size, size), 124, dtype=torch.uint8)
        assert train(path, grey, torch.arange(4)).shape == (4, *source.input_shape)
        evaluated = path.eval(grey)
        colour = T.normalize(grey[..., :1, :1] / 255, list(source.mean), list(source.std))
        for view in (evaluated, *(view for views in VIEWS for _, view in weighted_views(evaluated, views))):
            torch.testing.assert_close(view, colour.expand(4, *source.input_shape))


@pytest.mark.parametrize(("crop", "size"), [(0.9, (29, 18)), (0.5, (16, 10)), (0.7, (23, 14))])
def test_the_sides_of_the_evaluated_centre_are_rounded_each_on_its_own(crop: float, size: tuple[int, int]) -> None:
    batch = images(2, 3, 32, 20)
    one = torch.ones((1, 3, 1, 1))
    cut = replace(CIFAR10().preprocessing, eval_crop=crop, input_shape=(3, *size))
    whole = replace(transforms(CIFAR10()), preprocessing=cut, scale=one, shift=0 * one)
    assert torch.equal(whole.eval(batch), T.center_crop(batch, list(size)).float())


@pytest.mark.parametrize("augment", AUGMENTS, ids=repr)
@pytest.mark.parametrize("source", [CIFAR10(), CIFAR10(input_size=48)], ids=repr)
def test_an_empty_batch_passes_through(source: CIFAR10, augment: Any) -> None:
    no_indices = torch.empty(0, dtype=torch.int64)
    outputs = train(transforms(source, augment), images(0, 3, 32, 32), no_indices, 0)
    assert outputs.shape == (0, *source.input_shape)
    assert outputs.dtype == torch.float32


@pytest.mark.parametrize("augment", AUGMENTS, ids=repr)
@pytest.mark.parametrize("size", [None, 48])
def test_a_batch_cut_in_two_gives_the_same_pixels(augment: Any, size: int | None) -> None:
    whole = transforms(CIFAR10(input_size=size), augment)
    batch, indices = images(9, 3, 32, 32), torch.arange(30, 39)
    halves = [train(whole, batch[:4], indices[:4], 2), train(whole, batch[4:], indices[4:], 2)]
    assert torch.equal(train(whole, batch, indices, 2), torch.cat(halves))


def test_the_epoch_the_index_and_the_seed_change_what_is_seen() -> None:
    batch, indices = images(1, 3, 32, 32).expand(8, 3, 32, 32), torch.arange(8)
    here = train(transforms(CIFAR10(), CropFlip()), batch, indices, 0)
    assert len({tuple(image.flatten().tolist()) for image in here}) > 4
    assert not torch.equal(here, train(transforms(CIFAR10(), CropFlip()), batch, indices, 1))
    assert not torch.equal(here, train(transforms(CIFAR10(), CropFlip(), seed=1), batch, indices, 0))


@pytest.mark.parametrize(
    "options",
    [
        {"cutout": Cutout(8)},
        {"mix": Mix(classes=10, mixup=1.0, cutmix=0.0)},
        {"mix": Mix(classes=10, mixup=0.0, cutmix=1.0)},
    ],
)
def test_cutout_and_mixing_are_other_ones_in_each_epoch_and_for_each_seed(options: dict[str, Any]) -> None:
    def seen(epoch: int, seed: int = 0) -> Tensor:
        batch, indices = images(9, 3, 32, 32), torch.arange(9)
        chosen = transforms(CIFAR10(), seed=seed, **options)
        augmented = train(chosen, batch, indices, epoch)
        return chosen.mixed(Shard(1, epoch, augmented, indices, indices, 8, 0, 1, True))[0]

    assert torch.equal(seen(3), seen(3))
    for other in (seen(4), seen(3, seed=1)):
        assert all((here != there).any() for here, there in zip(seen(3)[:8], other[:8], strict=True))


@pytest.mark.parametrize("precision", [BF16(), BF16Pure()], ids=repr)
@pytest.mark.parametrize("mix", [Mix(classes=9, mixup=1.0, cutmix=0.0), Mix(classes=9, mixup=0.0, cutmix=1.0)])
def test_images_are_mixed_wide_and_given_in_the_format_of_the_step(mix: Mix, precision: FP32) -> None:
    batch, indices = images(9, 3, 32, 32), torch.arange(9)

    def mixed(path: DeviceTransforms) -> tuple[Tensor, Tensor]:
        return path.mixed(Shard(1, 0, train(path, batch, indices), indices, indices, 8, 0, 1, True))

    options = {"mix": mix, "memory_format": torch.channels_last}
    wide, shares = mixed(transforms(CIFAR10(), **options))
    short, targets = mixed(transforms(CIFAR10(), precision=precision, **options))
    assert short.dtype == torch.bfloat16
    assert short.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(short, wide.bfloat16())
    assert torch.equal(targets, shares)


def test_channels_last_changes_the_memory_and_not_the_pixels() -> None:
    batch, indices = images(4, 3, 32, 32), torch.arange(4)
    last = train(transforms(CIFAR10(), CropFlip(), memory_format=torch.channels_last), batch, indices, 0)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, train(transforms(CIFAR10(), CropFlip()), batch, indices, 0))


def test_the_numbers_of_cutout_and_of_mixing_are_not_those_of_the_augmentation() -> None:
    batch, indices = images(401, 3, 32, 32), torch.arange(401)
    blank = (train(transforms(CIFAR10(), cutout=Cutout(8)), batch, indices, 0)[:400] == 0).all(1).any(2)
    centres = (blank * torch.arange(32)).sum(1) / blank.sum(1)
    mixing = transforms(CIFAR10(), mix=Mix(classes=2, mixup=1.0, cutmix=0.0))
    _, targets = mixing.mixed(Shard(1, 0, train(mixing, batch, indices, 0), indices % 2, indices, 400, 0, 1, True))
    shares = targets[torch.arange(400), indices[:400] % 2]
    numbers = SampleRNG(0, 0, indices[:400])
    seen = torch.stack([centres, shares, *(numbers.uniform(n) for n in range(3))])
    assert (torch.corrcoef(seen) - torch.eye(5)).abs().max() < 0.2


@pytest.mark.parametrize("side", [7, 8])
def test_cutout_blanks_a_square_of_the_mean_colour_somewhere_in_each_image(side: int) -> None:
    batch, indices = images(400, 3, 32, 32), torch.arange(400)
    plain, cut = (train(transforms(CIFAR10(), cutout=own), batch, indices) for own in (None, Cutout(side)))
    blank = (cut == 0).all(1)
    assert torch.equal(torch.where(blank[:, None], 0, plain), cut)
    areas = (blank & (plain != 0).any(1)).sum((1, 2))
    assert int(areas.max()) == side**2
    assert int(areas.min()) >= 4 * 4 - 4  # at a corner only half of each side is inside the image
    assert all(int(blank.any(at).sum(0).min()) > 0 for at in (2, 1)), "at any row and column"
    assert torch.equal(train(transforms(CIFAR10(), cutout=Cutout(side)), batch[7:9], indices[7:9]), cut[7:9])


@pytest.mark.parametrize("side", [1, 7, 8])
def test_cutout_is_a_square_around_a_centre_that_is_anywhere_in_an_oblong_image(side: int) -> None:
    pixels, keys = torch.ones(60, 2, 9, 24), sample_keys(0, 0, torch.arange(60), CUTOUT)
    Cutout(side).apply(pixels, keys)
    for image, own_key in zip(pixels, keys, strict=True):
        row, column = int(uniform(own_key, 0) * 9), int(uniform(own_key, 1) * 24)
        expected = torch.ones(2, 9, 24)
        top, left = row - side // 2, column - side // 2
        expected[:, max(0, top) : top + side, max(0, left) : left + side] = 0
        assert torch.equal(image, expected)


class Drawn:
    """Stands for the module `random` in timm's random erasing, with the numbers of one of our images."""

    def __init__(self, numbers: list[float]) -> None:
        self.first, *of_tries = numbers
        self.tries = iter(zip(*[iter(of_tries)] * 4, strict=True))
        self.numbers: Iterator[float] = iter(())

    def random(self) -> float:
        return self.first

    def uniform(self, low: float, high: float) -> float:
        if low > 0:  # the area is the first number of a try
            self.numbers = iter(next(self.tries))
            return low + next(self.numbers) * (high - low)
        return -(low + next(self.numbers) * (high - low))  # the logarithm of height / width; ours is width / height

    def randint(self, low: int, high: int) -> int:
        return low + int(next(self.numbers) * (high - low + 1))


@pytest.mark.parametrize("size", [(32, 32), (9, 40), (7, 7)])
@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_rectangles_are_erased_as_by_timm(mode: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    batch, keys = torch.rand(300, 3, *size, dtype=torch.float64) + 9, sample_keys(0, 0, torch.arange(300), ERASE)
    erased, expected, operation = batch.clone(), batch.clone(), RandomErasing(0.6, mode=mode, device="cpu")
    Erase(0.6, mode).apply(erased, keys)
    together = batch.clone()
    Erase(0.6, mode).together(together, keys, Erase(0.6, mode).boxes(keys, *size))
    assert torch.equal(together, erased)
    for image, numbers in zip(expected, uniform(keys[:, None], torch.arange(1 + 4 * 10)).tolist(), strict=True):
        monkeypatch.setattr(random_erasing, "random", Drawn(numbers))
        operation(image)
    changed = erased != batch
    assert torch.equal(changed, expected != batch)
    assert changed.any((1, 2, 3)).double().mean().item() == pytest.approx(0.6, abs=0.1)
    if mode == "const":
        assert torch.equal(erased, expected)
    else:  # the colours of a rectangle, or of a pixel
        values = erased[changed] if mode == "pixel" else torch.cat([one[one < 8].unique() for one in erased])
        assert mode == "pixel" or len(values) == 3 * changed.any((1, 2, 3)).sum()
        assert kstest(values.numpy(), "norm").pvalue > 0.001
        # Their numbers come after the 1 + 4 * 10 of the rectangle, which they do not depend on.
        shape = (3, *size) if mode == "pixel" else (3, 1, 1)
        drawn = uniform(keys[:, None], 41 + torch.arange(math.prod(shape))).double() + 2.0**-25
        colours = torch.from_numpy(norm.ppf(drawn.numpy())).view(300, *shape).expand_as(batch)
        torch.testing.assert_close(erased, torch.where(changed, colours, batch), rtol=1e-5, atol=1e-5)


def test_on_a_gpu_the_rectangles_of_all_images_are_erased_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(Erase, "together", lambda erase, pixels, keys, boxes: seen.append(boxes))
    pixels: Any = SimpleNamespace(is_cuda=True, shape=(9, 3, 20, 32))
    keys = sample_keys(0, 0, torch.arange(9), ERASE)
    Erase(0.6).apply(pixels, keys)
    (boxes,) = seen
    assert torch.equal(boxes, Erase(0.6).boxes(keys, 20, 32))


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_what_is_erased_depends_on_seed_epoch_and_example_only(mode: str) -> None:
    batch, indices = images(9, 3, 32, 32), torch.arange(9)
    path = transforms(CIFAR10(), erase=Erase(1.0, mode), memory_format=torch.channels_last)
    erased = train(path, batch, indices)
    assert erased.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(train(path, batch[3:5], indices[3:5]), erased[3:5])
    for other in (train(path, batch, indices, epoch=1), train(replace(path, seed=1), batch, indices)):
        assert (other != erased).any((1, 2, 3)).all()


@pytest.mark.parametrize("epoch", [0, 3])
def test_a_square_and_a_rectangle_are_cut_out_of_an_image_each_by_its_own_numbers(epoch: int) -> None:
    batch, indices = images(40, 3, 32, 24), torch.arange(100, 140)
    expected = train(transforms(CIFAR10(input_size=[32, 24]), seed=5), batch, indices, epoch)
    whole = expected.clone()
    Cutout(7).apply(expected, sample_keys(5, epoch, indices, CUTOUT))
    squares = expected.clone()
    Erase(0.7, "rand").apply(expected, sample_keys(5, epoch, indices, ERASE))
    both = transforms(CIFAR10(input_size=[32, 24]), seed=5, cutout=Cutout(7), erase=Erase(0.7, "rand"))
    assert torch.equal(train(both, batch, indices, epoch), expected)
    assert not torch.equal(squares, whole)
    assert not torch.equal(squares, expected)
