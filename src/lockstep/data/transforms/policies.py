"""Policies of operations, with torchvision's pixels for tensors (`resample=nearest`), otherwise Pillow's."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.config.options import option
from lockstep.core.data_protocols import Augment, Source
from lockstep.core.errors import InputError
from lockstep.core.fields import choice, ranged
from lockstep.core.model_card import INTERPOLATION
from lockstep.core.rng import SampleRNG
from lockstep.data.transforms import geometry as geo
from lockstep.data.transforms import operations as to
from lockstep.data.transforms.augment import CropFlip, phrase
from lockstep.data.transforms.crops import COLOURED, RandomResizedCrop, images_have
from lockstep.data.transforms.operations import Step, operate_all
from lockstep.data.transforms.steps import FIRST_DRAW, OP_OF_NAME, STRONGEST, ImageSize, integer, sigma, table

TIMM_STRONGEST = 10


@dataclass(frozen=True, kw_only=True)
class Policy(RandomResizedCrop):
    """A padded or a resized crop (`crop=auto`: by the data set), a mirror, a policy's operations, then colours."""

    # `pad`: a crop of the original size out of the padded image, as in `crop_flip`. `resized`: a crop of random area
    # and aspect ratio, as in `standard`. `none`: none. `auto`: `pad` if the data set does not usually have
    # `standard`, else `none` with `dataset.fit=pad` or `squash`, else `resized`
    crop: str = choice("auto", "auto", "pad", "resized", "none")
    pad: int = ranged(4, least=0, most=1024)  # pixels added on each side before the crop
    reflect: bool = False  # fill the added pixels with the mirrored image instead of black

    def __str__(self) -> str:
        crop, padded = super().__str__(), f"shift by up to {self.pad} pixel{'s' * (self.pad != 1)}"
        crop = crop.replace("random resized crop", padded) if self.crop == "pad" else crop
        return phrase(crop, type(self).__name__)

    def apply(
        self, images: Tensor, draws: SampleRNG, size: tuple[int, int], interpolation: str = INTERPOLATION
    ) -> Tensor:
        if self.crop != "pad":
            return super().apply(images, draws, size, interpolation)
        crop = CropFlip(pad=self.pad, reflect=self.reflect and self.pad > 0, flip=self.flip)
        return self.changed(crop.apply(images, draws, size), draws)

    def for_data(self, source: Source) -> Augment:
        padded = self.crop == "auto" and source.usual_augment != "standard"
        return replace(self, crop="pad") if padded else super().for_data(source)

    def check_channels(self, channels: int) -> None:
        if channels not in COLOURED:
            raise InputError(
                f"augment: the operations of {type(self).__name__} are defined for grey and RGB, but "
                f"{images_have(channels)}; use augment=standard or augment=crop_flip"
            )
        super().check_channels(channels)

    def operate(self, images: Tensor, draws: SampleRNG) -> Tensor:
        return self.operated(images, self.steps(draws, tuple(images.shape[2:])))

    def operated(self, images: Tensor, steps: Iterable[Step]) -> Tensor:
        return operate_all(images, steps, resample="bilinear", compiled=self.compile)

    def steps(self, draws: SampleRNG, size: ImageSize) -> Iterator[Step]:
        """The operations for images of a height and width."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _Moving(Policy):
    # how shears, shifts and rotations choose pixels. With `nearest` all operations are torchvision's for tensors;
    # with `bilinear` and `bicubic` they are Pillow's, as in the training scripts of torchvision and timm
    resample: str = choice("nearest", "nearest", "bilinear", "bicubic")
    # colour of pixels from outside the image: a value for all channels, or one for each
    fill: list[int] = ranged([0], least=0, most=255)

    def check_channels(self, channels: int) -> None:
        super().check_channels(channels)
        if len(self.fill) not in (1, channels):
            raise InputError(
                f"augment.fill is {self.fill}, but {images_have(channels)}; give one value for all channels or one "
                f"for each: augment.fill={(self.fill or [0])[:1]}"
            )

    def operated(self, images: Tensor, steps: Iterable[Step]) -> Tensor:
        return operate_all(images, steps, resample=self.resample, fill=tuple(self.fill), compiled=self.compile)


@option("augment", "randaugment")
class RandAugment(_Moving):
    """A crop and a mirror, then RandAugment (Cubuk et al. 2020): operations of one strength, as in torchvision, to
    the bit.
    """

    ops: int = ranged(2, least=0, most=100)  # operations per image, one after another
    magnitude: int = ranged(9, least=0, most=STRONGEST)  # strength of the operations

    def steps(self, draws: SampleRNG, size: ImageSize) -> Iterator[Step]:
        choices = table("randaugment", size, draws.indices.device)
        for n in range(FIRST_DRAW, FIRST_DRAW + 2 * self.ops, 2):
            yield choices.step(integer(draws.uniform(n), 14), self.magnitude, draws.uniform(n + 1) < 0.5)


@option("augment", "trivialaugment")
class TrivialAugment(_Moving):
    """A crop and a mirror, then TrivialAugment (Müller and Hutter 2021), wide: one operation of random strength, as
    in torchvision, to the bit.
    """

    def steps(self, draws: SampleRNG, size: ImageSize) -> Iterator[Step]:
        place, up, magnitude = (draws.uniform(FIRST_DRAW + n) for n in range(3))
        choices = table("trivialaugment", size, draws.indices.device)
        yield choices.step(integer(place, 14), integer(magnitude, STRONGEST + 1), up < 0.5)


@option("augment", "autoaugment")
class AutoAugment(_Moving):
    """A crop and a mirror, then a learnt policy of AutoAugment (Cubuk et al. 2019): two operations, as in
    torchvision, to the bit.
    """

    # data set on which the policy was learnt: `imagenet`, `cifar10` or `svhn`
    policy: str = choice("imagenet", "imagenet", "cifar10", "svhn")

    def steps(self, draws: SampleRNG, size: ImageSize) -> Iterator[Step]:
        choices = table("autoaugment", size, draws.indices.device)
        pairs = _pairs(self.policy, draws.indices.device)[integer(draws.uniform(FIRST_DRAW), 25)]
        for n in range(2):
            chance, up = (draws.uniform(FIRST_DRAW + 1 + 2 * n + k) for k in range(2))
            probability, place, magnitude = pairs[:, n].unbind(1)
            op, amount = choices.step(place.long(), magnitude.long(), up < 0.5)
            yield torch.where(chance < probability, op, geo.IDENTITY), amount


@functools.cache
def _pairs(policy: str, device: torch.device) -> Tensor:
    """torchvision's pairs of a policy, (25, 2, 3): probability, place in the table, magnitude."""
    from torchvision.transforms import AutoAugment, AutoAugmentPolicy  # takes a second, and few runs need it

    places = {name: place for place, name in enumerate(OP_OF_NAME)}
    pairs = AutoAugment(AutoAugmentPolicy(policy)).policies
    return torch.tensor([[(share, places[name], bin or 0) for name, share, bin in pair] for pair in pairs]).to(device)


@option("augment", "randaugment_timm")
class TimmRandAugment(_Moving):
    """A crop and a mirror, then timm's variant of RandAugment with Pillow's operations, to the bit. The defaults are
    timm's `rand-m9-mstd0.5-inc1`.

    Each operation has its own probability and magnitude, from 0 to 10.
    """

    ops: int = ranged(2, least=0, most=100)  # operations per image, one after another
    magnitude: int = ranged(9, least=0, most=TIMM_STRONGEST)  # mean strength of the operations, of 10
    magnitude_std: float = ranged(0.5, least=0, most=100)  # standard deviation of the strength
    increasing: bool = True  # all operations are stronger at a higher magnitude (timm's `inc`)
    probability: float = ranged(0.5, least=0, most=1)  # probability of each of the operations
    resample: str = choice("bicubic", "bilinear", "bicubic")  # how shears, shifts and rotations mix pixels
    fill: list[int] = ranged([124, 116, 104], least=0, most=255)

    def steps(self, draws: SampleRNG, size: ImageSize) -> Iterator[Step]:
        ops, start, slope, truncated, signed = _timm(self.increasing, size, draws.indices.device)
        for n in range(FIRST_DRAW, FIRST_DRAW + 4 * self.ops, 4):
            place, up, chance, level = (draws.uniform(n + k) for k in range(4))
            index = integer(place, len(ops))
            normal = torch.special.ndtri(level.double() + 2.0**-25)  # the middle of one of 2**24 cells
            strength = (self.magnitude + self.magnitude_std * normal).clamp(0, TIMM_STRONGEST) / TIMM_STRONGEST
            change = slope[index] * strength
            amount = start[index] + torch.where(truncated[index], change.trunc(), change)
            amount = torch.where((up < 0.5) | ~signed[index], amount, -amount)
            yield torch.where(chance < self.probability, ops[index], geo.IDENTITY), amount


@functools.cache
def _timm(increasing: bool, size: ImageSize, device: torch.device) -> tuple[Tensor, ...]:
    """timm's operations: amounts at 0, how much more at 10, whether that is truncated, and whether it has a sign."""
    blend = (0.0, 0.9, False, True) if increasing else (-0.9, 1.8, False, False)
    rows = {
        **dict.fromkeys((to.AUTOCONTRAST, to.EQUALIZE, to.INVERT), (0.0, 0.0, False, False)),
        to.POSTERIZE: (4.0, -4.0, True, False) if increasing else (0.0, 4.0, True, False),
        to.SOLARIZE: (256.0, -256.0, True, False) if increasing else (0.0, 256.0, True, False),
        to.SOLARIZE_ADD: (0.0, 110.0, True, False),
        **dict.fromkeys((to.COLOR, to.CONTRAST, to.BRIGHTNESS, to.SHARPNESS), blend),
        **dict.fromkeys((geo.SHEAR_X, geo.SHEAR_Y), (0.0, 0.3, False, True)),
        geo.TRANSLATE_X: (0.0, 0.45 * size[1], False, True),
        geo.TRANSLATE_Y: (0.0, 0.45 * size[0], False, True),
        geo.ROTATE: (0.0, 30.0, False, True),
    }
    start, slope, truncated, signed = zip(*rows.values(), strict=True)
    amounts = (torch.tensor(column, dtype=torch.float64, device=device) for column in (start, slope))
    flags = (torch.tensor(column, device=device) for column in (truncated, signed))
    return torch.tensor([*rows], device=device), *amounts, *flags


@option("augment", "augmix")
class AugMix(_Moving):
    """A crop and a mirror, then AugMix (Hendrycks et al. 2020): a mix of the image and of chains of operations, as in
    torchvision, to the bit.

    The shares are Dirichlet(alpha, ...): quotients of gamma numbers, which for a whole alpha are sums of `alpha`
    exponential ones.
    """

    severity: int = ranged(3, least=1, most=10)  # the strongest magnitude, of 10
    width: int = ranged(3, least=1, most=100)  # chains of operations that are mixed
    depth: int = ranged(0, least=0, most=100)  # operations in a chain; 0: 1 to 3 by chance
    # the shares of the chains are drawn from Dirichlet(alpha, ...), and the image's own share from Beta(alpha, alpha)
    alpha: int = ranged(1, least=1, most=100)

    def operate(self, images: Tensor, draws: SampleRNG) -> Tensor:
        first = FIRST_DRAW + self.alpha * (self.width + 2)
        uniform = draws.uniform(torch.arange(FIRST_DRAW, first, device=images.device))
        gamma = -torch.log1p(-uniform).view(len(images), self.alpha, -1).sum(1)
        own, shares = (part / part.sum(1, keepdim=True) for part in gamma.split([2, self.width], 1))
        shares = (shares * own[:, 1:])[..., None, None, None]
        mixed = own[:, 0, None, None, None] * images
        for chain in range(self.width):
            steps = self.chain(draws, tuple(images.shape[2:]), first + chain * (1 + 3 * (self.depth or 3)))
            mixed.add_(shares[:, chain] * self.operated(images, steps))
        return mixed.to(torch.uint8)

    def chain(self, draws: SampleRNG, size: ImageSize, first: int) -> Iterator[Step]:
        """The operations of a chain: `depth`, or 1 to 3. Its random numbers begin at `first`."""
        choices = table("augmix", size, draws.indices.device)
        length = self.depth or integer(draws.uniform(first), 3) + 1
        for n in range(self.depth or 3):
            place, up, magnitude = (draws.uniform(first + 1 + 3 * n + k) for k in range(3))
            op, amount = choices.step(integer(place, len(choices.ops)), integer(magnitude, self.severity), up < 0.5)
            yield torch.where(torch.as_tensor(n < length), op, geo.IDENTITY), amount


@option("augment", "three_augment")
class ThreeAugment(Policy):
    """A crop and a mirror, then 3-Augment of DeiT III (Touvron et al. 2022): grey, solarize or blur, and colour
    jitter, as in Pillow, to the bit.
    """

    jitter: float = ranged(0.3, least=0, most=1)
    reflect: bool = True

    def check_channels(self, channels: int) -> None:
        if channels == 1:
            have = images_have(channels)
            raise InputError(
                f"augment=three_augment needs red, green and blue, but {have}; use augment=trivialaugment"
            )
        super().check_channels(channels)

    def steps(self, draws: SampleRNG, size: ImageSize) -> Iterator[Step]:
        place, blur = integer(draws.uniform(FIRST_DRAW), 3), sigma(draws.uniform(FIRST_DRAW + 1))
        op = torch.where(place == 0, to.COLOR, torch.where(place == 1, to.SOLARIZE, to.BLUR))
        yield op, torch.where(place == 0, -1.0, torch.where(place == 1, 128.0, blur))
