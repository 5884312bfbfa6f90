"""RandAugment: torchvision's operations to the bit, chosen by random numbers of each sample.

test_augment.py shows that the change of a sample does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import RandAugment as Torchvision
from torchvision.transforms.autoaugment import _apply_op

from lockstep.core.rng import SampleRNG
from lockstep.data.transforms import randaugment
from lockstep.data.transforms.augment import CropFlip, RandAugment, RandAugmentResized, RandomResizedCrop
from lockstep.data.transforms.randaugment import operate

pytestmark = pytest.mark.numerics

# Torchvision's names, in the order of our numbers.
NAMES = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Contrast"),
    *("Posterize", "Solarize", "AutoContrast", "Equalize", "Color", "Sharpness"),
)


def draws(n: int) -> SampleRNG:
    return SampleRNG(3, 1, torch.arange(n))


def images(shape: tuple[int, int, int]) -> Tensor:
    """Noise, and images that are special cases for operations: few values, a narrow range, one value, black."""
    noise = torch.randint(256, (5, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ramp = (torch.arange(shape[2]) % 256).to(torch.uint8).expand(shape)
    return torch.stack([noise[0], noise[1] // 100 * 100, noise[2] // 4 + 40, ramp, noise[3] * 0 + 7, noise[4] * 0])


def theirs(image: Tensor, name: str, up: bool, magnitude: int) -> Tensor:
    """Torchvision's operation at the same magnitude, and with the same sign where it has one."""
    values, signed = Torchvision()._augmentation_space(31, image.shape[1:])[name]
    value = float(values[magnitude]) if values.dim() else 0.0
    value = -value if signed and not up else value
    return _apply_op(image, name, value, interpolation=InterpolationMode.NEAREST, fill=None)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 50, 37), (3, 2, 9)], ids=str)
def test_an_operation_is_torchvisions_to_the_bit(name: str, shape: tuple[int, int, int]) -> None:
    stored = images(shape)
    op = torch.full((len(stored),), NAMES.index(name))
    for magnitude in (0, 1, 9, 17, 30):
        for up in (True, False):
            ours = operate(stored, op, torch.full((len(stored),), up), magnitude)
            expected = torch.stack([theirs(image, name, up, magnitude) for image in stored])
            assert torch.equal(ours, expected), f"magnitude {magnitude}, up {up}"


def test_samples_of_one_batch_get_their_own_operations_and_signs() -> None:
    stored = images((3, 16, 16))[:1].expand(28, -1, -1, -1)
    op, up = torch.arange(28) % 14, torch.arange(28) < 14
    ours = operate(stored, op, up, 9)
    for image, name, sign, result in zip(stored, NAMES * 2, up.tolist(), ours, strict=True):
        assert torch.equal(result, theirs(image, name, sign, 9)), name
    assert torch.equal(stored, images((3, 16, 16))[:1].expand(28, -1, -1, -1)), "the images themselves stay"


def test_every_operation_is_drawn_as_often_as_another_and_up_as_often_as_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[tuple[Tensor, Tensor]] = []

    def noted(images: Tensor, op: Tensor, up: Tensor, magnitude: int) -> Tensor:
        drawn.append((op, up))
        return images

    monkeypatch.setattr(randaugment, "operate", noted)
    randaugment.randaugment(torch.zeros((14_000, 1, 1, 1), dtype=torch.uint8), draws(14_000), ops=2, magnitude=9)
    for op, up in drawn:
        assert bool(((torch.bincount(op, minlength=14) - 1000).abs() < 130).all())
        assert up.float().mean().item() == pytest.approx(0.5, abs=0.02)
        assert bool(((torch.bincount(op[up], minlength=14) - 500).abs() < 100).all()), "also of each operation"
    (first, _), (second, _) = drawn
    assert (first == second).float().mean().item() == pytest.approx(1 / 14, abs=0.01)


def test_the_crop_comes_first_and_is_that_of_the_augmentation_without_operations() -> None:
    stored = images((3, 12, 12))
    assert torch.equal(
        RandAugment(ops=0).apply(stored, draws(6), (12, 12)), CropFlip().apply(stored, draws(6), (12, 12))
    )
    resized = RandAugmentResized(ops=0).apply(stored, draws(6), (9, 9))
    assert resized.dtype == torch.uint8
    assert torch.equal(resized, RandomResizedCrop().apply(stored, draws(6), (9, 9)))
    cropped = CropFlip().apply(stored, draws(6), (12, 12))
    expected = randaugment.randaugment(cropped, draws(6), ops=3, magnitude=5)
    assert torch.equal(RandAugment(ops=3, magnitude=5).apply(stored, draws(6), (12, 12)), expected)
    assert not torch.equal(expected, cropped)


def test_a_gpus_way_is_one_graph_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU an operation is computed for all samples, and can be compiled. Here it is traced and not compiled."""

    def everywhere(chosen: Tensor, change: Callable[..., Tensor], images: Tensor, *arguments: Tensor) -> Tensor:
        return torch.where(chosen.view(-1, *[1] * (images.dim() - 1)), change(*arguments), images)

    stored = torch.randint(256, (56, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    op, up = torch.arange(56) % 14, torch.arange(56) < 28
    expected = operate(stored, op, up, 9)
    monkeypatch.setattr(randaugment, "_where", everywhere)
    traced = torch.compile(operate, fullgraph=True, dynamic=False, backend="eager")
    assert torch.equal(traced(stored, op, up, 9), expected)
