"""Augmentations: the change of a sample depends on its key alone, and follows the augmentation's definition."""

import itertools
import re
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import ks_2samp
from torch import Tensor
from torch.nn import functional as F
from torchvision import transforms as v1
from torchvision.transforms import v2

from lockstep.config.options import classes_of
from lockstep.core.data_protocols import Augment
from lockstep.core.errors import InputError
from lockstep.core.fields import INTERPOLATIONS
from lockstep.core.model_card import FITS
from lockstep.core.rng import SampleRNG
from lockstep.data.datasets.folder import Folder
from lockstep.data.transforms import operations, policies
from lockstep.data.transforms.augment import Auto, CropFlip, NoAugment
from lockstep.data.transforms.crops import RandomResizedCrop, crops_together, resized_crops
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.data.transforms.policies import (
    AugMix,
    AutoAugment,
    RandAugment,
    ThreeAugment,
    TimmRandAugment,
    TrivialAugment,
)
from lockstep.precision import FP32

pytestmark = pytest.mark.numerics

CROPS: list[Augment] = [CropFlip(), CropFlip(reflect=True, alternate=True), CropFlip(pad=1, flip=0.0)]
CROPS += [RandomResizedCrop(), RandomResizedCrop(jitter=0.4, grey=0.2, blur=0.5, solarize=0.2)]
ALL: list[Augment] = [NoAugment(), *CROPS, RandAugment(crop="pad"), RandAugment(), TrivialAugment()]
ALL += [AutoAugment(crop="pad"), AugMix(), TimmRandAugment(fill=[7]), ThreeAugment()]


def images(n: int, *shape: int) -> Tensor:
    return torch.randint(256, (n, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def draws(n: int) -> SampleRNG:
    return SampleRNG(3, 1, torch.arange(100, 100 + n))


def some(of: SampleRNG, chosen: Tensor | slice) -> SampleRNG:
    """The random numbers of some of the examples."""
    return SampleRNG(of.seed, of.epoch, of.indices[chosen])


@pytest.mark.parametrize("augment", ALL, ids=repr)
@settings(max_examples=12)  # each has up to 20 samples
@given(st.lists(st.integers(0, 11), min_size=1, max_size=20), st.integers(0, 2**63 - 1), st.integers(0, 100))
def test_a_sample_is_changed_alike_in_any_batch_of_any_samples(
    augment: Augment, chosen: list[int], seed: int, epoch: int
) -> None:
    stored, indices = images(12, 2, 9, 11), torch.arange(12)
    whole = augment.apply(stored, SampleRNG(seed, epoch, indices), (7, 7))
    batch = torch.tensor(chosen)
    assert torch.equal(augment.apply(stored[batch], SampleRNG(seed, epoch, batch), (7, 7)), whole[batch])


def naive_crop_flip(image: Tensor, rng: SampleRNG, augment: CropFlip) -> Tensor:
    """The reference, for one image: pad, crop, mirror."""
    height, width = image.shape[-2:]
    top, left = (int(rng.uniform(n) * (2 * augment.pad + 1)) for n in (0, 1))
    mode = "reflect" if augment.reflect else "constant"
    padded = F.pad(image[None].float(), [augment.pad] * 4, mode=mode)[0].to(torch.uint8)
    crop = padded[:, top : top + height, left : left + width]
    mirror = rng.uniform(2) < augment.flip
    if augment.alternate:
        mirror = bool(rng.epoch_invariant(0) < augment.flip) != (rng.epoch == 1)
    return crop.flip(-1) if mirror else crop


@pytest.mark.parametrize("options", [{}, {"reflect": True}, {"alternate": True}], ids=str)
@pytest.mark.parametrize(("pad", "flip"), [(4, 0.5), (1, 0.0), (0, 1.0), (7, 0.3)])
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 12)])
def test_crop_flip_is_pad_crop_and_mirror(pad: int, flip: float, shape: tuple[int, ...], options: Any) -> None:
    options = options if pad else {**options, "reflect": False}  # with `reflect` it is refused
    batch, rng, augment = images(64, *shape), draws(64), CropFlip(pad=pad, flip=flip, **options)
    expected = [naive_crop_flip(image, some(rng, slice(at, at + 1)), augment) for at, image in enumerate(batch)]
    assert torch.equal(augment.apply(batch, rng, (9, 9)), torch.stack(expected))


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_image_is_mirrored_below_its_share_and_not_at_it(alternate: bool, epoch: int) -> None:
    numbers = torch.tensor([0.0, 0.25, 0.5])
    rng: Any = SimpleNamespace(epoch=epoch, uniform=lambda which: numbers, epoch_invariant=lambda which: numbers)
    for flip, below in ((0.0, [False] * 3), (0.25, [True, False, False]), (0.5, [True, True, False])):
        mirrored = CropFlip(flip=flip, alternate=alternate)._mirrored(rng).tolist()
        assert mirrored == [share != (alternate and epoch == 1) for share in below]


def test_reflection_repeats_in_an_image_smaller_than_the_padding() -> None:
    image = torch.tensor([[[[10, 20, 30]]]], dtype=torch.uint8)
    rng = SampleRNG(0, 0, torch.arange(500))
    seen = CropFlip(pad=5, reflect=True, flip=0.0).apply(image.expand(500, 1, 1, 3), rng, (1, 3))
    row = [30, 20, 10, 20, 30, 20, 10, 20, 30, 20, 10, 20, 30]
    left = (rng.uniform(1) * 11).long().tolist()
    # The shift is -5 to 5: pixel 0 of the image is pixel 5 of the padded row 20 30 20 10 20 ...
    padded = [20, 10, 20, 30, 20, *row[2:5], 20, 10, 20, 30, 20]
    assert seen[:, 0, 0].tolist() == [padded[at : at + 3] for at in left]


def test_alternating_mirrors_an_image_in_every_second_epoch() -> None:
    row = torch.arange(4, dtype=torch.uint8).expand(200, 1, 1, 4)
    augment = CropFlip(pad=0, alternate=True)
    epochs = [SampleRNG(0, epoch, torch.arange(200)) for epoch in range(4)]
    seen = torch.stack([augment.apply(row, rng, (1, 4))[:, 0, 0, 0] for rng in epochs])
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], 3 - seen[0])
    assert torch.equal(seen[1], seen[3])
    assert 60 < int((seen[0] == 0).sum()) < 140


def test_crop_flip_reaches_every_shift_and_both_sides() -> None:
    # One bright pixel in the middle shows how far each image was shifted.
    image = torch.zeros(2000, 1, 9, 9, dtype=torch.uint8)
    image[:, :, 4, 4] = 1
    seen = CropFlip(pad=2, flip=0.0).apply(image, draws(2000), (9, 9)).nonzero()[:, 2:]
    counts = torch.bincount((seen[:, 0] - 2) * 5 + seen[:, 1] - 2, minlength=25)
    assert bool((counts - 80).abs().max() < 45)
    row = torch.arange(9, dtype=torch.uint8).expand(2000, 1, 9, 9)
    mirrored = CropFlip(pad=0, flip=0.25).apply(row, draws(2000), (9, 9))[:, 0, 0, 0] == 8
    assert mirrored.float().mean().item() == pytest.approx(0.25, abs=0.04)


@pytest.mark.parametrize("augment", ALL, ids=repr)
def test_no_random_number_of_an_image_decides_two_things(augment: Augment, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    uniform = SampleRNG.uniform

    def counted(rng: SampleRNG, n: int | Tensor) -> Tensor:
        numbers.extend(n.tolist() if isinstance(n, Tensor) else [n])
        return uniform(rng, n)

    monkeypatch.setattr(SampleRNG, "uniform", counted)
    augment.apply(images(2, 3, 9, 11), draws(2), (9, 11))
    assert len(numbers) == len({*numbers})
    assert bool(numbers) == (not isinstance(augment, NoAugment))


def boxes_in(batch: Tensor, augment: RandomResizedCrop) -> Tensor:
    return augment.boxes(draws(len(batch)), torch.tensor(batch.shape[-2:]).expand(len(batch), 2))


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize(
    "shape", [(3, 32, 32, 32, 32), (3, 96, 96, 12, 12), (1, 40, 30, 24, 16), (3, 9, 11, 40, 3), (3, 1, 1, 4, 4)]
)
def test_a_resized_crop_has_the_pixels_of_torchvision(shape: tuple[int, ...], interpolation: str) -> None:
    batch, size, augment = images(16, *shape[:3]), shape[3:], RandomResizedCrop(flip=0.0)
    mode = v2.InterpolationMode(interpolation)
    boxes = boxes_in(batch, augment).tolist()
    expected = [
        v2.functional.resized_crop(image, *box, list(size), interpolation=mode, antialias=True)
        for image, box in zip(batch, boxes, strict=True)
    ]
    crops = augment.apply(batch, draws(16), size, interpolation)
    # On a CPU without vector instructions, torchvision computes the bilinear ones in floats.
    floats = interpolation == "bilinear" and torch.backends.cpu.get_cpu_capability() == "DEFAULT"
    assert (crops.int() - torch.stack(expected).int()).abs().max() <= (1 if floats else 0)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("size", [(32, 32), (5, 9), (64, 48), (1, 1)])
@pytest.mark.parametrize("augment", [RandomResizedCrop(), RandomResizedCrop(scale=[1, 1], ratio=[1, 1])], ids=repr)
def test_crops_of_a_batch_on_a_gpu_or_of_one_pixel_have_the_pixels_of_pillow(
    size: tuple[int, int], interpolation: str, augment: RandomResizedCrop
) -> None:
    """The code of a GPU, on the CPU. No value is cut off, so the order of the axes changes only what is rounded."""
    batch = 64 + images(16, 3, 24, 31) // 2
    boxes = boxes_in(batch, augment)
    crops = crops_together(batch, boxes, size, interpolation)
    filter = Image.Resampling[interpolation.upper()]
    for image, (top, left, height, width), crop in zip(batch, boxes.tolist(), crops, strict=True):
        whole = Image.fromarray(image.permute(1, 2, 0).numpy()).crop((left, top, left + width, top + height))
        expected = torch.from_numpy(np.array(whole.resize(size[::-1], filter))).permute(2, 0, 1)
        difference = (crop.int() - expected.int()).double()
        assert difference.abs().max() <= 2
        assert difference.mean().abs() < 0.4 or size == (1, 1), "rounded, and not cut off"
    assert (crops.int() - resized_crops(batch, boxes, size, interpolation).int()).abs().max() <= 2
    some = torch.tensor([7, 3, 3])
    assert torch.equal(crops_together(batch[some], boxes[some], size, interpolation), crops[some])


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("augment", [RandomResizedCrop(), RandAugment(ops=0)], ids=repr)
def test_too_fine_stripes_are_grey_in_training_as_in_evaluation(augment: Augment, interpolation: str) -> None:
    source = Folder(path="nowhere", decode_size=256, input_size=32, crop=1)
    stripes = torch.tensor([0, 255], dtype=torch.uint8).repeat(128).expand(8, 3, 256, 256)
    form: Any = {"device": torch.device("cpu"), "precision": FP32(), "seed": 0}
    how = replace(source.preprocessing, mean=(0.0,) * 3, std=(1.0,) * 3, interpolation=interpolation)
    path = DeviceTransforms.of(how, augment, **form)
    seen, evaluated = path.augmented(stripes, 0, torch.arange(8)), path.eval(stripes)
    torch.testing.assert_close(seen, evaluated.expand_as(seen), atol=0.1, rtol=0)
    torch.testing.assert_close(seen, torch.full_like(seen, 0.5), atol=0.1, rtol=0)


def test_a_certain_mirror_of_the_whole_box_is_the_mirror_image() -> None:
    batch = images(8, 3, 20, 20)
    mirror = RandomResizedCrop(scale=[1.0, 1.0], ratio=[1.0, 1.0], flip=1.0)
    assert torch.equal(mirror.apply(batch, draws(8), (20, 20)), batch.flip(-1))


@dataclass(frozen=True)
class Noted(SampleRNG):
    """Keeps which of its numbers were drawn."""

    drawn: list[int] = field(default_factory=list)

    def uniform(self, n: int | Tensor) -> Tensor:
        self.drawn.extend(torch.as_tensor(n).view(-1).tolist())
        return super().uniform(n)


@pytest.mark.parametrize("augment", ALL, ids=repr)
def test_no_random_number_is_used_for_two_purposes(augment: Augment) -> None:
    noted = Noted(3, 1, torch.arange(4))
    augment.apply(images(4, 3, 9, 9), noted, (9, 9))
    assert len({*noted.drawn}) == len(noted.drawn)


SIZES = [(375, 500), (500, 375), (30, 300), (300, 20), (64, 64), (1, 1), (7, 1), (1, 7)]


@pytest.mark.parametrize("ratio", [[0.75, 1.33], [0.1, 0.2], [5.0, 10.0]], ids=str)  # as usual, and high, and wide
def test_boxes_lie_in_their_images_and_depend_on_the_example_alone(ratio: list[float]) -> None:
    sizes = torch.tensor(SIZES).repeat(200, 1)
    augment, rng = RandomResizedCrop(ratio=ratio), draws(len(sizes))
    boxes = augment.boxes(rng, sizes)
    assert boxes.dtype == torch.int64
    assert bool((boxes[:, :2] >= 0).all() and (boxes[:, 2:] >= 1).all())
    assert bool((boxes[:, :2] + boxes[:, 2:] <= sizes).all())
    for at in (0, 3, 500):
        alone = augment.boxes(some(rng, slice(at, at + 1)), sizes[at : at + 1])
        assert torch.equal(alone, boxes[at : at + 1])


@pytest.mark.parametrize("size", [SIZES[0], SIZES[2], SIZES[3]])
def test_the_boxes_of_whole_images_are_distributed_as_those_of_torchvision(size: tuple[int, int]) -> None:
    n, image = 3000, torch.empty(1, *size)
    augment = RandomResizedCrop(scale=[0.1, 0.9], ratio=[0.75, 1.1])  # and not the inverse of it
    ours = augment.boxes(draws(n), torch.tensor(size).expand(n, 2)).double()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = [v1.RandomResizedCrop.get_params(image, augment.scale, augment.ratio) for _ in range(n)]
    theirs = torch.tensor(drawn, dtype=torch.float64)
    for our_values, their_values in zip(ours.unbind(1), theirs.unbind(1), strict=True):
        # Two samples of the same distribution are less alike than this in one of ten thousand comparisons.
        assert ks_2samp(our_values, their_values, method="asymp").pvalue > 1e-4


@pytest.mark.parametrize("size", [(10, 20), (20, 10)])
def test_a_box_of_a_whole_side_is_at_every_place_along_the_other(size: tuple[int, int]) -> None:
    square = RandomResizedCrop(scale=[0.5, 0.5], ratio=[1.0, 1.0])
    boxes = square.boxes(draws(400), torch.tensor(size).expand(400, 2))
    along = 0 if size[0] > size[1] else 1
    assert {*boxes[:, along].tolist()} == {*range(11)}
    assert (boxes[:, 1 - along] == 0).all()
    assert (boxes[:, 2:] == 10).all()


RESIZING = [augment for augment in ALL if isinstance(augment, RandomResizedCrop) and augment.crop != "pad"]


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize("augment", RESIZING, ids=repr)
def test_boxes_are_resized_as_the_data_are_by_every_augmentation(augment: Any, interpolation: str) -> None:
    batch, rng, size = images(6, 3, 20, 16), draws(6), (9, 7)
    boxes = augment.boxes(rng, torch.tensor([20, 16]).expand(6, 2))
    expected = augment.after_crop(resized_crops(batch, boxes, size, interpolation), rng, size)
    assert torch.equal(augment.apply(batch, rng, size, interpolation), expected)
    assert torch.equal(augment.on_device(interpolation, cropped=False)(batch, rng, size), expected)


def test_after_crop_mirrors_the_same_images_as_the_whole_augmentation() -> None:
    batch, rng = images(64, 3, 8, 8), draws(64)
    for kind in (RandomResizedCrop, RandAugment):
        whole = kind(scale=[1.0, 1.0], ratio=[1.0, 1.0])
        expected = whole.apply(batch, rng, (8, 8))
        assert torch.equal(whole.after_crop(batch, rng, (8, 8)), expected)


@pytest.mark.parametrize(("key", "value"), [("scale", [0.5, 0.1]), ("scale", []), ("ratio", [1.0])])
def test_an_invalid_range_is_refused_by_its_key(key: str, value: list[float]) -> None:
    with pytest.raises(InputError, match=f"augment.{key} is"):
        RandomResizedCrop(**{key: value})


WORDS: list[tuple[Augment, str]] = [
    (NoAugment(), "none"),
    (CropFlip(), "shift by up to 4 pixels, flip"),
    (CropFlip(pad=1, flip=0.0), "shift by up to 1 pixel"),
    (CropFlip(pad=0, flip=0.25), "flip 25 %"),
    (CropFlip(pad=0, flip=0.0), "none"),
    (RandomResizedCrop(), "random resized crop, flip"),
    (RandomResizedCrop(crop="none", flip=1.0), "flip 100 %"),
    (RandomResizedCrop(crop="none", flip=0.0), "none"),
    (RandomResizedCrop(flip=0.0, jitter=0.4, grey=0.2), "random resized crop, jitter 0.4, grey 0.2"),
    (RandomResizedCrop(blur=0.1, solarize=1.0), "random resized crop, flip, blur 0.1, solarize 1"),
    (RandAugment(), "random resized crop, flip, RandAugment"),
    (RandAugment(crop="pad"), "shift by up to 4 pixels, flip, RandAugment"),
    (TrivialAugment(crop="pad", pad=1), "shift by up to 1 pixel, flip, TrivialAugment"),
    (ThreeAugment(crop="none"), "flip, jitter 0.3, ThreeAugment"),
]


@pytest.mark.parametrize(("augment", "words"), WORDS, ids=[words for _, words in WORDS])
def test_an_augmentation_says_what_it_does(augment: Augment, words: str) -> None:
    assert str(augment) == words


BOX, SHIFT = {"scale": [0.5, 0.5], "ratio": [1.0, 1.0]}, {"pad": 1, "reflect": True}
UNUSED = {"none": {**BOX, **SHIFT}, "pad": BOX, "resized": SHIFT, "auto": {}}


@pytest.mark.parametrize("crop", UNUSED)
def test_a_field_that_the_crop_does_not_use_is_refused_and_a_crop_that_is_typed_is_kept(crop: str) -> None:
    for name, value in {**BOX, **SHIFT}.items():
        if name not in UNUSED[crop]:
            assert getattr(RandAugment(crop=crop, **{name: value}), name) == value
            continue
        remedy = f"remove it or use augment.crop={'resized' if name in BOX else 'pad'}"
        with pytest.raises(InputError) as caught:
            RandAugment(crop=crop, **{name: value})
        assert str(caught.value) == f"augment.{name} is {value}, but augment.crop={crop} does not use it; {remedy}"
    for fit, usual in itertools.product(FITS, ("standard", "crop_flip", "shift", "none")):
        source: Any = SimpleNamespace(fit=fit, usual_augment=usual)
        of_fit = "resized" if fit == "crop" else "none"
        chosen = {"RandomResizedCrop": of_fit, "RandAugment": of_fit if usual == "standard" else "pad"}
        for kind in (RandomResizedCrop, RandAugment) if crop != "pad" else (RandAugment,):
            expected = chosen[kind.__name__] if crop == "auto" else crop
            assert kind(crop=crop).for_data(source) == kind(crop=expected)


def test_the_usual_augmentation_is_fitted_to_the_data_too() -> None:
    for fit, crop in (("crop", "resized"), ("pad", "none"), ("squash", "none")):
        source: Any = SimpleNamespace(fit=fit, usual_augment="standard")
        assert Auto().for_data(source) == RandomResizedCrop(crop=crop)
    source = SimpleNamespace(fit="crop", usual_augment="shift")
    assert Auto().for_data(source) == CropFlip(pad=1, flip=0.0)
    says = "augment.reflect is true, but augment.pad is 0, so nothing is padded; use augment.pad=4 or "
    with pytest.raises(InputError, match=f"^{re.escape(says)}augment.reflect=false$"):
        CropFlip(reflect=True, pad=0)
    assert CropFlip(reflect=True, pad=1).reflect


@pytest.mark.parametrize("options", [{"pad": 2, "flip": 0.3}, {"pad": 2, "reflect": True}, {"pad": 0, "flip": 1.0}])
def test_a_padded_policy_without_operations_is_the_padded_crop(options: dict[str, Any]) -> None:
    batch, rng = images(40, 3, 9, 11), draws(40)
    expected = CropFlip(**options).apply(batch, rng, (9, 11))
    assert torch.equal(RandAugment(crop="pad", ops=0, **options).apply(batch, rng, (9, 11)), expected)
    unpadded = ThreeAugment(crop="pad", pad=0, jitter=0.0, flip=0.0).apply(batch, rng, (9, 11))
    assert unpadded.shape == batch.shape, "reflection of nothing"


@pytest.mark.parametrize("name", ["jitter", "grey", "blur", "solarize"])
def test_each_change_of_colour_works_alone_and_is_compiled_where_that_is_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, rng, uncropped = images(16, 3, 12, 12), draws(16), {"crop": "none", "flip": 0.0}
    changed = RandomResizedCrop(**uncropped, **{name: 1.0}).apply(batch, rng, (12, 12))
    assert (changed != batch).flatten(1).any(1).sum() >= 15
    assert torch.equal(RandomResizedCrop(**uncropped).apply(batch, rng, (12, 12)), batch)
    compiled: list[bool] = []

    def operated(pixels: Tensor, steps: Any, **how: Any) -> Tensor:
        compiled.append(how["compiled"])
        return pixels

    for module in (operations, policies):
        monkeypatch.setattr(module, "operate_all", operated)
    for compile in (True, False):
        for augment in (RandomResizedCrop, RandAugment, ThreeAugment):
            augment(**uncropped, **{name: 1.0}, compile=compile).apply(batch, rng, (12, 12))
    assert compiled == [True] * 5 + [False] * 5


def test_a_range_may_be_one_number_and_has_two_ends() -> None:
    assert RandomResizedCrop(scale=[0.5, 0.5], ratio=[2.0, 2.0]).scale == [0.5, 0.5]
    for key, usual in (("scale", "[0.08,1]"), ("ratio", "[0.75,1.33]")):
        with pytest.raises(InputError, match=rf"expected two rising numbers: augment\.{key}={re.escape(usual)}$"):
            RandomResizedCrop(**{key: [0.1, 0.2, 0.3]})


@pytest.mark.parametrize(("channels", "have"), [(1, "1 channel"), (2, "2 channels"), (5, "5 channels")])
def test_changes_of_colour_say_which_channels_they_need_and_their_remedy(channels: int, have: str) -> None:
    for name, share in (("jitter", 0.4), ("solarize", 0.25), ("grey", 0.2)):
        augment = RandomResizedCrop(**{name: share})
        augment.check_channels(3)
        if channels == 1 and name != "grey":
            augment.check_channels(1)
            continue
        needs = "needs red, green and blue" if name == "grey" else "is defined for grey and RGB"
        sentence = f"augment.{name}={share} {needs}, but the images have {have}: augment.{name}=0"
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
            augment.check_channels(channels)


@pytest.mark.parametrize("name", ["randaugment", "trivialaugment", "autoaugment", "randaugment_timm", "augmix"])
def test_a_policy_takes_one_fill_or_one_for_each_channel(name: str) -> None:
    policy = classes_of("augment")[name]
    for fill, channels in (([7], 1), ([7], 3), ([1, 2, 3], 3)):
        policy(fill=fill).check_channels(channels)
    for fill, channels in (([], 3), ([1, 2], 3), ([1, 2, 3], 1), ([1, 2, 3, 4], 3)):
        remedy = f"give one value for all channels or one for each: augment.fill={(fill or [0])[:1]}"
        with pytest.raises(InputError) as caught:
            policy(fill=fill).check_channels(channels)
        have = f"the images have {channels} channel{'s' * (channels == 3)}"
        assert str(caught.value) == f"augment.fill is {fill}, but {have}; {remedy}"


@pytest.mark.parametrize("crop", UNUSED)
def test_a_default_that_is_typed_is_no_field_that_the_crop_does_not_use(crop: str) -> None:
    typed = RandAugment(crop=crop, scale=[0.08, 1.0], ratio=[3 / 4, 4 / 3], pad=4, reflect=False)
    assert typed == RandAugment(crop=crop)
