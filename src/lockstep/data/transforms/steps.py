"""Which operations the samples get, and how strong, from their own random numbers."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.core.rng import SampleRNG
from lockstep.data.transforms import geometry as geo
from lockstep.data.transforms import operations as to
from lockstep.data.transforms.operations import Step

ImageSize = tuple[int, ...]  # height and width
STRONGEST = 30  # the last of torchvision's 31 magnitudes
FIRST_DRAW = 16  # the crop uses the sample's numbers before this one
COLOUR_DRAW = 2**16  # changes of colour use those from here on
SIGNED = {*range(geo.SHEAR_X, geo.ROTATE + 1), to.BRIGHTNESS, to.CONTRAST, to.COLOR, to.SHARPNESS}
# torchvision's names, in the order of its RandAugment and TrivialAugment.
_NAMES = (
    "Identity ShearX ShearY TranslateX TranslateY Rotate Brightness Contrast Posterize Solarize AutoContrast Equalize"
)
_OPS = (*range(geo.IDENTITY, to.SOLARIZE + 1), to.AUTOCONTRAST, to.EQUALIZE, to.COLOR, to.SHARPNESS, to.INVERT)
OP_OF_NAME = dict(zip([*_NAMES.split(), "Color", "Sharpness", "Invert"], _OPS, strict=True))


class Table(NamedTuple):
    """The operations of a policy: int64 (n,), float64 (n, magnitudes), and which have a sign, bool (n,)."""

    ops: Tensor
    amounts: Tensor
    signed: Tensor

    def step(self, place: Tensor, magnitude: Tensor | int, up: Tensor) -> Step:
        """The operation at a place (B,), upwards or downwards."""
        amount = self.amounts[place, magnitude]
        return self.ops[place], torch.where(up | ~self.signed[place], amount, -amount)


@functools.cache
def table(policy: str, size: ImageSize, device: torch.device) -> Table:
    """torchvision's magnitudes for images of a height and width. It computes them in float32."""
    (height, width), wide, mixed = size, policy == "trivialaugment", policy == "augmix"
    bins = 10 if policy in ("autoaugment", "augmix") else STRONGEST + 1
    x, y = (32, 32) if wide else (side / 3 if mixed else 150 / 331 * side for side in (width, height))
    last = {
        **dict.fromkeys((geo.SHEAR_X, geo.SHEAR_Y), 0.99 if wide else 0.3),
        geo.TRANSLATE_X: x,
        geo.TRANSLATE_Y: y,
        geo.ROTATE: 135 if wide else 30,
        **dict.fromkeys((to.BRIGHTNESS, to.CONTRAST, to.COLOR, to.SHARPNESS), 0.99 if wide else 0.9),
    }
    amounts = {op: torch.linspace(0, last.get(op, 0), bins) for op in OP_OF_NAME.values()}
    amounts[to.POSTERIZE] = (4 if mixed else 8) - (torch.arange(bins) / ((bins - 1) / (6 if wide else 4))).round()
    amounts[to.SOLARIZE] = torch.linspace(255, 0, bins)
    left_out = {"autoaugment": (), "augmix": (geo.IDENTITY, to.INVERT)}.get(policy, (to.INVERT,))
    ops = [op for op in amounts if op not in left_out]
    signed = torch.tensor([op in SIGNED for op in ops])
    stacked = torch.stack([amounts[op] for op in ops]).double()
    return Table(torch.tensor(ops).to(device), stacked.to(device), signed.to(device))


def colours(draws: SampleRNG, *, jitter: float, grey: float, blur: float, solarize: float) -> Iterator[Step]:
    """Jitter (brightness, contrast and colour in random order, as torchvision), then grey, blur and solarize."""
    uniform = draws.uniform(torch.arange(COLOUR_DRAW, COLOUR_DRAW + 10, device=draws.indices.device)).double()
    if jitter:
        amounts = jitter * (2 * uniform[:, :3] - 1)
        for place in uniform[:, 3:6].argsort(dim=1, stable=True).unbind(1):
            op = torch.where(place == 0, to.BRIGHTNESS, torch.where(place == 1, to.CONTRAST, to.COLOR))
            yield op, amounts.gather(1, place[:, None])[:, 0]
    ones = torch.ones_like(uniform[:, 6])
    changes = ((grey, to.COLOR, -ones), (blur, to.BLUR, sigma(uniform[:, 6])), (solarize, to.SOLARIZE, 128 * ones))
    for n, (probability, number, amount) in enumerate(changes, start=7):
        if probability:
            yield torch.where(uniform[:, n] < probability, number, geo.IDENTITY), amount


def integer(uniform: Tensor, number: int) -> Tensor:
    return (uniform * number).long()


def sigma(uniform: Tensor) -> Tensor:
    """The standard deviation of a blur, as DeiT III and others draw it."""
    return 0.1 + uniform.double() * (to.MOST_BLUR - 0.1)
