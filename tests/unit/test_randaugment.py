"""The operations of the policies: torchvision's and Pillow's to the bit, chosen by random numbers of each sample.

test_augment.py shows that the change of a sample does not depend on its batch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from scipy.stats import ks_2samp
from timm.data import auto_augment as timm
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision import transforms as T
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import _apply_op

from lockstep.core.rng import SampleRNG
from lockstep.data.transforms import geometry, operations, steps
from lockstep.data.transforms.augment import CropFlip
from lockstep.data.transforms.crops import RandomResizedCrop
from lockstep.data.transforms.geometry import IDENTITY
from lockstep.data.transforms.operations import BLUR, SOLARIZE_ADD, operate
from lockstep.data.transforms.policies import (
    AugMix,
    AutoAugment,
    Policy,
    RandAugment,
    ThreeAugment,
    TimmRandAugment,
    TrivialAugment,
)
from lockstep.data.transforms.steps import OP_OF_NAME, table

pytestmark = pytest.mark.numerics

SHAPES = [(3, 32, 32), (1, 28, 28), (3, 50, 37), (3, 2, 9)]
SPACES: dict[str, Callable[[tuple[int, int]], dict[str, tuple[Tensor, bool]]]] = {
    "randaugment": lambda size: T.RandAugment()._augmentation_space(31, size),
    "trivialaugment": lambda size: T.TrivialAugmentWide()._augmentation_space(31),
    "autoaugment": lambda size: T.AutoAugment()._augmentation_space(10, size),
    "augmix": lambda size: T.AugMix()._augmentation_space(10, size),
}
# torchvision's positions are a product of matrices: how positions half-way between two pixels are rounded depends on
# the CPU. So many pixels may be their neighbours, after operations that move pixels.
HALF_WAY = 0.05
MOVING = (geometry.SHEAR_X, geometry.SHEAR_Y, geometry.TRANSLATE_X, geometry.TRANSLATE_Y, geometry.ROTATE)


def draws(n: int) -> SampleRNG:
    return SampleRNG(3, 1, torch.arange(n))


def images(shape: tuple[int, int, int]) -> Tensor:
    """Noise, and images that are special cases for operations: few values, a narrow range, one value, black."""
    noise = torch.randint(256, (5, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ramp = (torch.arange(shape[2]) % 256).to(torch.uint8).expand(shape)
    return torch.stack([noise[0], noise[1] // 100 * 100, noise[2] // 4 + 40, ramp, noise[3] * 0 + 7, noise[4] * 0])


def theirs(image: Tensor, name: str, value: float) -> Tensor:
    return _apply_op(image, name, value, interpolation=InterpolationMode.NEAREST, fill=None)


@pytest.mark.parametrize("policy", SPACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_operation_is_torchvisions_to_the_bit(policy: str, shape: tuple[int, int, int]) -> None:
    stored, ours = images(shape), table(policy, shape[1:], torch.device("cpu"))
    space = SPACES[policy](shape[1:])
    assert {OP_OF_NAME[name] for name in space} == {*ours.ops.tolist()} - (
        {IDENTITY} - {OP_OF_NAME[name] for name in space}
    )
    for name, (magnitudes, signed) in space.items():
        place = torch.full((len(stored),), ours.ops.tolist().index(OP_OF_NAME[name]))
        for magnitude in range(0, ours.amounts.shape[1] if magnitudes.dim() else 1, 3):
            value = float(magnitudes[magnitude]) if magnitudes.dim() else 0.0
            for up in (True, False)[: 1 + signed]:
                expected = [theirs(image, name, value if up else -value) for image in stored]
                result = operate(stored, *ours.step(place, magnitude, torch.full((len(stored),), up)), "nearest")
                wrong = (result != torch.stack(expected)).float().mean().item()
                assert wrong <= HALF_WAY * (OP_OF_NAME[name] in MOVING), f"{name}, {magnitude}, up {up}: {wrong:.2%}"


def pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).contiguous().numpy())


def tensor(image: Image.Image) -> Tensor:
    pixels = torch.from_numpy(np.array(image))
    return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1)


FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
# Pillow's code for an operation and an amount, as timm calls it.
PILLOW: dict[int, Callable[..., Any]] = {
    geometry.SHEAR_X: timm.shear_x,
    geometry.SHEAR_Y: timm.shear_y,
    geometry.TRANSLATE_X: lambda image, pixels, **how: timm.translate_x_abs(image, -pixels, **how),
    geometry.TRANSLATE_Y: lambda image, pixels, **how: timm.translate_y_abs(image, -pixels, **how),
    geometry.ROTATE: timm.rotate,
    operations.BRIGHTNESS: lambda image, change, **_: ImageEnhance.Brightness(image).enhance(1 + change),
    operations.CONTRAST: lambda image, change, **_: ImageEnhance.Contrast(image).enhance(1 + change),
    operations.COLOR: lambda image, change, **_: ImageEnhance.Color(image).enhance(1 + change),
    operations.SHARPNESS: lambda image, change, **_: ImageEnhance.Sharpness(image).enhance(1 + change),
    operations.POSTERIZE: lambda image, bits, **_: ImageOps.posterize(image, int(bits)),
    operations.SOLARIZE: timm.solarize,
    SOLARIZE_ADD: lambda image, add, **_: timm.solarize_add(image, int(add)),
    operations.INVERT: lambda image, _, **__: ImageOps.invert(image),
    operations.AUTOCONTRAST: lambda image, _, **__: ImageOps.autocontrast(image),
    operations.EQUALIZE: lambda image, _, **__: ImageOps.equalize(image),
    BLUR: lambda image, sigma, **_: image.filter(ImageFilter.GaussianBlur(sigma)),
}
MOVES = dict.fromkeys((geometry.SHEAR_X, geometry.SHEAR_Y), (0.0, 0.137, -0.3, 0.99))
BLENDS = (operations.BRIGHTNESS, operations.CONTRAST, operations.COLOR, operations.SHARPNESS)
AMOUNTS: dict[int, tuple[float, ...]] = {
    **MOVES,
    **dict.fromkeys((geometry.TRANSLATE_X, geometry.TRANSLATE_Y), (0.0, 3.0, -3.7, 11.25)),
    **dict.fromkeys(BLENDS, (0.0, -1.0, -0.9, -0.312, 0.25, 0.9)),
    geometry.ROTATE: (0.0, 7.3, -30.0, 44.0, 90.0, -133.0),
    operations.POSTERIZE: (1.0, 4.0, 8.0),
    operations.SOLARIZE: (0.0, 26.0, 128.0, 256.0),
    SOLARIZE_ADD: (0.0, 99.0, 110.0),
    BLUR: (0.1, 0.7, 1.0, 1.4142, 1.99),
}


@pytest.mark.parametrize(
    ("op", "resample"), [*((op, "bilinear") for op in PILLOW), *((op, "bicubic") for op in MOVING)]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_operation_is_pillows_to_the_bit(op: int, shape: tuple[int, int, int], resample: str) -> None:
    stored, fill = images(shape), (124, 116, 104)[: shape[0]]
    how = {"resample": FILTERS[resample], "fillcolor": fill if len(fill) == 3 else fill[0]}
    for amount in AMOUNTS.get(op, (0.0,)):
        numbers = torch.full((len(stored),), op), torch.full((len(stored),), amount, dtype=torch.float64)
        expected = torch.stack([tensor(PILLOW[op](pillow(image), amount, **how)) for image in stored])
        result = operate(stored, *numbers, resample, fill)
        assert torch.equal(result, expected), f"amount {amount}: {(result != expected).sum()} of {result.numel()}"


def test_the_contrast_of_a_large_image_is_that_to_its_mean() -> None:
    """A sum of so many values is more than 31 bits."""
    white = torch.full((1, 1, 2048, 4128), 255, dtype=torch.uint8)
    numbers = torch.tensor([operations.CONTRAST]), torch.tensor([-0.5], dtype=torch.float64)
    assert (operate(white, *numbers, "nearest") == 255).all()


@pytest.mark.parametrize(("sides", "dtype"), [((4093, 4094), torch.float32), ((4094, 4094), torch.float64)])
def test_places_in_an_image_are_counted_in_a_format_that_has_them_all(
    sides: tuple[int, int], dtype: torch.dtype
) -> None:
    """With its frame of a pixel the larger one has 2^24 pixels, and float32 has no odd number beyond."""
    dtypes: list[torch.dtype] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.round_.default:
                dtypes.append(args[0].dtype)
            return func(*args, **(kwargs or {}))

    with Watched(), torch.device("meta"):
        images = torch.empty(1, 1, *sides, dtype=torch.uint8)
        moved = geometry.moved(images, torch.empty(1), torch.empty(1), (0,))
    assert moved.shape == images.shape
    assert dtypes == [dtype] * 2


def test_samples_of_one_batch_get_their_own_operations_and_signs() -> None:
    stored = images((3, 16, 16))[:1].expand(28, -1, -1, -1)
    op, up = torch.arange(28) % 14, torch.arange(28) < 14
    step = table("randaugment", (16, 16), torch.device("cpu")).step(op, 9, up)
    for n, result in enumerate(operate(stored, *step, "nearest")):
        assert torch.equal(result, operate(stored[:1], *(numbers[n : n + 1] for numbers in step), "nearest")[0])
    assert torch.equal(stored, images((3, 16, 16))[:1].expand(28, -1, -1, -1)), "the images themselves stay"


def test_every_operation_is_drawn_as_often_as_another_and_up_as_often_as_down() -> None:
    drawn = [(op, amount > 0) for op, amount in RandAugment().steps(draws(14_000), (32, 32))]
    signed = torch.tensor([*range(geometry.SHEAR_X, geometry.ROTATE + 1), *BLENDS])
    for op, up in drawn:
        assert bool(((torch.unique(op, return_counts=True)[1] - 1000).abs() < 130).all())
        assert bool(((torch.bincount(op[up], minlength=17)[signed] - 500).abs() < 100).all())
    (first, _), (second, _) = drawn
    assert (first == second).float().mean().item() == pytest.approx(1 / 14, abs=0.01)


@pytest.mark.parametrize("magnitude", [0, 9, 30])
def test_randaugment_has_torchvisions_amounts_at_its_magnitude(magnitude: int) -> None:
    space = SPACES["randaugment"]((40, 30))
    for op, amount in RandAugment(ops=3, magnitude=magnitude).steps(draws(600), (40, 30)):
        for name, (magnitudes, signed) in space.items():
            if magnitudes.dim():
                own = amount[op == OP_OF_NAME[name]].unique().tolist()
                expected = float(magnitudes[magnitude])
                assert own == sorted({-expected, expected} if signed else {expected}), name


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_timms_operations_come_with_their_probability(probability: float) -> None:
    for op, _ in TimmRandAugment(probability=probability).steps(draws(400), (20, 40)):
        assert ((op != IDENTITY) == bool(probability)).all()


def test_trivialaugment_draws_operations_signs_and_magnitudes_evenly() -> None:
    ((op, amount),) = TrivialAugment().steps(draws(31_000), (64, 48))
    assert bool(((torch.unique(op, return_counts=True)[1] - 31_000 / 14).abs() < 200).all())
    degrees = amount[op == geometry.ROTATE] / 4.5
    counts = torch.bincount((degrees.round() + 30).long(), minlength=61)
    assert counts[30] == pytest.approx(2 * counts[31:].float().mean(), abs=40), "0 has no sign"
    assert bool(((counts[counts != counts[30]] - 31_000 / 14 / 62).abs() < 30).all())


@pytest.mark.parametrize("name", ["imagenet", "cifar10", "svhn"])
def test_autoaugment_draws_torchvisions_pairs_with_their_probabilities(name: str) -> None:
    pairs = T.AutoAugment(T.AutoAugmentPolicy(name)).policies
    drawn = list(AutoAugment(policy=name).steps(draws(50_000), (32, 32)))
    space = SPACES["autoaugment"]((32, 32))
    for n, (op, amount) in enumerate(drawn):
        expected = torch.zeros(17)
        for pair in pairs:
            expected[OP_OF_NAME[pair[n][0]]] += pair[n][1] * 50_000 / 25
        expected[IDENTITY] = 50_000 - expected.sum()
        assert bool(((torch.bincount(op, minlength=17) - expected).abs() < 600).all())
        for name in {pair[n][0] for pair in pairs if pair[n][2] is not None and pair[n][1]}:
            bins = [space[name][0][pair[n][2]] for pair in pairs if pair[n][0] == name and pair[n][1]]
            assert {*amount[op == OP_OF_NAME[name]].abs().tolist()} == {abs(float(value)) for value in bins}, name
    (first, _), (second, _) = drawn
    both = (first != IDENTITY) & (second != IDENTITY)
    together = {*zip(first[both].tolist(), second[both].tolist(), strict=True)}
    assert together == {(OP_OF_NAME[one[0]], OP_OF_NAME[other[0]]) for one, other in pairs if one[1] * other[1]}


@pytest.mark.parametrize(("depth", "alpha", "width"), [(0, 1, 3), (2, 3, 3), (1, 2, 4)])
def test_augmix_is_torchvisions_with_the_same_draws(
    depth: int, alpha: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchvision mixes with the shares, and applies the operations, that our random numbers have chosen."""
    stored, rng, size = images((3, 24, 20)), draws(6), (24, 20)
    augment, number = AugMix(depth=depth, alpha=alpha, width=width), (width + 2) * alpha
    numbers = torch.arange(steps.FIRST_DRAW, steps.FIRST_DRAW + number)
    gamma = -torch.log1p(-rng.uniform(numbers)).view(6, alpha, width + 2).sum(1)
    firsts = [steps.FIRST_DRAW + number + n * (1 + 3 * (depth or 3)) for n in range(width)]
    chains = [[*augment.chain(rng, size, first)] for first in firsts]
    names = {op: name for name, op in OP_OF_NAME.items()}
    for n, result in enumerate(augment.operate(stored, rng)):
        chosen = iter([(names[int(op[n])], float(amount[n])) for chain in chains for op, amount in chain])
        shares = iter([part / part.sum(1, keepdim=True) for part in (gamma[n : n + 1, :2], gamma[n : n + 1, 2:])])
        transform = T.AugMix(chain_depth=depth or 3, mixture_width=width)
        monkeypatch.setattr(transform, "_sample_dirichlet", lambda _, shares=shares: next(shares))
        apply = lambda image, *_, chosen=chosen, **__: torch.stack([theirs(image[0], *next(chosen))])  # noqa: E731
        monkeypatch.setattr("torchvision.transforms.autoaugment._apply_op", apply)
        assert (result != transform(stored[n])).float().mean() <= HALF_WAY
    lengths = torch.stack([op != IDENTITY for op, _ in AugMix().chain(draws(3000), size, firsts[0])]).sum(0)
    counts = torch.bincount(lengths, minlength=4)
    assert counts[0] == 0
    assert bool(((counts[1:] - 1000).abs() < 120).all())


@pytest.mark.parametrize("increasing", [True, False])
def test_timms_operations_probabilities_and_strengths_have_timms_distribution(increasing: bool) -> None:
    hints = {"translate_pct": 0.45, "magnitude_std": 2.0}
    options = timm.rand_augment_transform(f"rand-m7-n1-mstd2-inc{int(increasing)}", hints).ops
    ours = TimmRandAugment(ops=1, magnitude=7, magnitude_std=2, increasing=increasing)
    ((op, amount),) = ours.steps(draws(30_000), (20, 40))
    counts = torch.bincount(op, minlength=17)
    assert counts[IDENTITY] == pytest.approx(15_000, abs=400)
    for option in options:
        name = option.name.removesuffix("Increasing").removesuffix("Rel")
        number = SOLARIZE_ADD if name == "SolarizeAdd" else OP_OF_NAME[name]
        assert counts[number] == pytest.approx(1000, abs=130), name
        if option.level_fn:
            values: list[float] = []
            option.prob, option.aug_fn = 1, lambda _, value, values=values, **__: values.append(value)
            for _ in range(2000):
                option(None)
            # Many images have the strongest level: its last bit (0.9 + 1 is not 1.9) must not make two values of it.
            own = (amount[op == number].numpy() + (number in BLENDS)).round(9)
            side = {geometry.TRANSLATE_X: 40, geometry.TRANSLATE_Y: 20}.get(number, 1)
            assert ks_2samp(own, (np.array(values) * side).round(9)).pvalue > 1e-3, name


@pytest.mark.parametrize("magnitude", [0, 10])
@pytest.mark.parametrize("increasing", [True, False])
def test_strengths_beyond_the_weakest_and_the_strongest_are_these(magnitude: int, increasing: bool) -> None:
    options = timm.rand_augment_transform(f"rand-m9-n1-inc{int(increasing)}", {"translate_pct": 0.45}).ops
    ours = TimmRandAugment(ops=1, magnitude=magnitude, magnitude_std=3, increasing=increasing, probability=1)
    ((op, amount),) = ours.steps(draws(7500), (20, 40))
    for option in options:
        if option.level_fn:
            name = option.name.removesuffix("Increasing").removesuffix("Rel")
            number = SOLARIZE_ADD if name == "SolarizeAdd" else OP_OF_NAME[name]
            side = {geometry.TRANSLATE_X: 40, geometry.TRANSLATE_Y: 20}.get(number, 1)
            theirs = {level: option.level_fn(level, option.hparams)[0] * side for level in (0, 10)}
            ends = {level: abs(value - (number in BLENDS)) for level, value in theirs.items()}
            own = amount[op == number].abs()
            assert own.max() <= max(ends.values()) + 1e-9, name
            assert ((own - ends[magnitude]).abs() < 1e-9).double().mean() > 0.4, name


def test_colour_changes_are_pillows_as_torchvision_and_timm_apply_them() -> None:
    stored, rng = images((3, 32, 32)).repeat(4, 1, 1, 1), draws(24)
    augment = RandomResizedCrop(scale=[1, 1], ratio=[1, 1], flip=0, jitter=0.4, grey=0.3, blur=0.5, solarize=0.5)
    three = ThreeAugment(crop="none", flip=0, jitter=0.4, grey=0.3, blur=0.5, solarize=0.5)
    colours = [*steps.colours(rng, jitter=0.4, grey=0.3, blur=0.5, solarize=0.5)]
    for whole, changes in ((augment, colours), (three, [*three.steps(rng, (32, 32)), *colours])):
        expected = [pillow(image) for image in stored]
        for op, amount in changes:
            for n, image in enumerate(expected):
                if op[n] != IDENTITY:
                    expected[n] = PILLOW[int(op[n])](image, float(amount[n]))
        assert torch.equal(whole.apply(stored, rng, (32, 32)), torch.stack([tensor(image) for image in expected]))


def test_colour_changes_are_drawn_as_by_colorjitter_and_by_their_probabilities() -> None:
    drawn = list(steps.colours(draws(12_000), jitter=0.3, grey=0.2, blur=0.1, solarize=0.25))
    orders = torch.stack([op for op, _ in drawn[:3]], 1)
    assert bool(((torch.unique(orders, dim=0, return_counts=True)[1] - 2000).abs() < 180).all())
    for _, amount in drawn[:3]:
        assert ks_2samp(amount, np.linspace(-0.3, 0.3, 12_000)).pvalue > 1e-4
    kinds = (operations.BRIGHTNESS, operations.CONTRAST, operations.COLOR)
    strengths = [sum(torch.where(op == kind, amount, 0.0) for op, amount in drawn[:3]) for kind in kinds]
    assert torch.corrcoef(torch.stack(strengths)).fill_diagonal_(0).abs().max() < 0.05, "each has its own"
    shares = [(op != IDENTITY).float().mean().item() for op, _ in drawn[3:]]
    assert shares == pytest.approx([0.2, 0.1, 0.25], abs=0.015)
    assert [int(op.max()) for op, _ in drawn[3:]] == [operations.COLOR, BLUR, operations.SOLARIZE]
    assert [amount.unique().tolist() for _, amount in (drawn[3], drawn[5])] == [[-1.0], [128.0]], "grey, and half"
    numbers = [*(amount for _, amount in [*drawn[:3], drawn[4]]), *((op != IDENTITY).double() for op, _ in drawn[3:])]
    related = torch.corrcoef(torch.stack(numbers)).fill_diagonal_(0).abs()
    assert related[3:].max() < 0.05, "the strengths and the choices depend on nothing else"
    assert not list(steps.colours(draws(4), jitter=0, grey=0, blur=0, solarize=0)), "off costs nothing"
    off = {"jitter": 0.0, "grey": 0.0, "blur": 0.0, "solarize": 0.0}
    for name, probability, together in (
        ("grey", 0.2, drawn[3]),
        ("blur", 0.1, drawn[4]),
        ("solarize", 0.25, drawn[5]),
    ):
        (alone,) = steps.colours(draws(12_000), **{**off, name: probability})
        assert all(map(torch.equal, alone, together)), "the same images, whatever else is on"


def test_a_blur_has_a_deviation_of_a_tenth_to_two_pixels() -> None:
    deviations = steps.sigma(torch.tensor([0.0, 0.5, 1.0]))
    torch.testing.assert_close(deviations, torch.tensor([0.1, 1.05, 2.0], dtype=torch.float64))


def test_three_augment_is_one_of_three_and_jitter() -> None:
    ((op, amount),) = ThreeAugment().steps(draws(9000), (8, 8))
    counts = {number: int((op == number).sum()) for number in (operations.COLOR, operations.SOLARIZE, BLUR)}
    assert all(count == pytest.approx(3000, abs=200) for count in counts.values())
    assert {*amount[op == operations.COLOR].tolist()} == {-1.0}
    assert {*amount[op == operations.SOLARIZE].tolist()} == {128.0}
    assert ks_2samp(amount[op == BLUR], np.linspace(0.1, 2, 3000)).pvalue > 1e-4
    assert ThreeAugment().jitter == 0.3


@pytest.mark.parametrize("policy", [RandAugment, TrivialAugment, AutoAugment, AugMix, TimmRandAugment, ThreeAugment])
def test_the_crop_comes_first_and_is_the_one_of_the_augmentation_without_operations(policy: type[Policy]) -> None:
    stored, rng = images((3, 12, 12)), draws(6)
    framed = [
        (policy(crop="pad", pad=3, flip=p), CropFlip(pad=3, reflect=policy().reflect, flip=p)) for p in (0.5, 1)
    ]
    for augment, crop in (*framed, (policy(), None)):
        size = (12, 12) if crop else (9, 9)
        cropped = (crop or RandomResizedCrop()).apply(stored, rng, size)
        assert torch.equal(augment.apply(stored, rng, size), augment.changed(cropped, rng))
        assert not torch.equal(augment.changed(cropped, rng), cropped)
    mirrored = CropFlip(pad=0).apply(stored, rng, (12, 12))
    for alone in (policy(crop="pad", pad=0), policy(crop="pad", pad=0, reflect=True)):
        assert torch.equal(alone.apply(stored, rng, (12, 12)), alone.changed(mirrored, rng))


def test_a_gpus_way_is_one_graph_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU an operation is computed for all samples, and can be compiled. Here it is traced and not compiled."""

    def everywhere(chosen: Tensor, change: Callable[..., Tensor], images: Tensor, *arguments: Tensor) -> Tensor:
        return torch.where(chosen.view(-1, *[1] * (images.dim() - 1)), change(*arguments), images)

    stored = torch.randint(256, (68, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    op = torch.arange(68) % 17
    amount = torch.tensor([AMOUNTS.get(int(number), (0.0, 0.0))[1] for number in op], dtype=torch.float64)
    for how in ("nearest", "bicubic"):
        expected = operate(stored, op, amount, how)
        with monkeypatch.context() as patch:
            patch.setattr(operations, "_where", everywhere)
            traced = torch.compile(operate, fullgraph=True, dynamic=False, backend="eager")
            assert torch.equal(traced(stored, op, amount, how), expected)


def test_operations_are_compiled_once_in_one_piece_for_each_number_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: calls.append((function, how)) or "compiled")
    operations.compiled_operate.cache_clear()
    assert [operations.compiled_operate() for _ in range(2)] == ["compiled"] * 2
    operations.compiled_operate.cache_clear()
    assert calls == [(operate, {"fullgraph": True, "dynamic": False})]


@pytest.mark.parametrize("resample", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("fill", [[9], [200, 100, 50]], ids=str)
@pytest.mark.parametrize("policy", [RandAugment, TrivialAugment, AutoAugment])
def test_a_policy_moves_pixels_by_its_own_resampling_and_fills_with_its_own_colour(
    policy: Any, fill: list[int], resample: str
) -> None:
    stored, rng = torch.full((60, 3, 12, 40), 255, dtype=torch.uint8), draws(60)
    augment = policy(resample=resample, fill=fill)
    expected = stored
    for step in augment.steps(rng, (12, 40)):
        expected = operate(expected, *step, resample, tuple(fill))
    moved = augment.operate(stored, rng)
    assert torch.equal(moved, expected)
    ((op, amount), *_) = augment.steps(rng, (12, 40))
    far = (op == geometry.TRANSLATE_X) & (amount.abs() > 2)
    colours = (fill * 3)[:3]
    if policy is TrivialAugment:
        assert far.any()
        sides = moved[far].permute(0, 2, 3, 1)[:, 6, [0, 39]].tolist()
        assert all(colours in pair for pair in sides)


@pytest.mark.parametrize("fill", [[7.0], [124.0, 116.0, 104.0]], ids=str)
def test_the_frame_of_a_moved_image_has_the_colour_of_torchvision(fill: list[float]) -> None:
    stored = images((3, 20, 16))[:1]
    for name, value in (("TranslateX", 5.0), ("TranslateY", -4.0), ("ShearX", 0.3)):
        numbers = torch.tensor([OP_OF_NAME[name]]), torch.tensor([value], dtype=torch.float64)
        expected = _apply_op(stored[0], name, value, interpolation=InterpolationMode.NEAREST, fill=(fill * 3)[:3])
        result = operate(stored, *numbers, "nearest", tuple(map(int, fill)))[0]
        assert (result != expected).float().mean() <= HALF_WAY, name


@pytest.mark.parametrize("severity", [1, 3, 10])
def test_augmix_draws_magnitudes_below_its_severity(severity: int) -> None:
    space = SPACES["augmix"]((24, 20))["Rotate"][0].double()
    chain = [*AugMix(severity=severity, depth=2).chain(draws(4000), (24, 20), steps.FIRST_DRAW)]
    for op, amount in chain:
        degrees = amount[op == geometry.ROTATE].abs().unique()
        torch.testing.assert_close(degrees, space[:severity])


@pytest.mark.parametrize("resample", ["nearest", "bilinear"])
def test_many_images_are_changed_as_each_alone(resample: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU works on a few of them at a time."""
    stored = torch.randint(256, (23, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    chosen = [*RandAugment().steps(draws(23), (8, 8))]
    how = {"resample": resample, "compiled": False, "fill": (7,)}
    before, whole = stored.clone(), operations.operate_all(stored, chosen, **how)
    assert torch.equal(stored, before)
    for name in ("CPU_VALUES", "CPU_VALUES_PILLOW"):
        monkeypatch.setattr(operations, name, 5 * 3 * 8 * 8)
    assert torch.equal(operations.operate_all(stored, chosen, **how), whole)
    for at in range(23):
        own = [(op[at : at + 1], amount[at : at + 1]) for op, amount in chosen]
        assert torch.equal(operations.operate_all(stored[at : at + 1], own, **how), whole[at : at + 1])
