"""Mixup, CutMix, random erasing and cutout: an image loses a part, or has a part of another one."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.core.model import is_broken
from lockstep.core.rng import uniform
from lockstep.data.transforms.crops import TRIES, first_box

CELLS = 4096  # intervals of the table of quantiles
# The area of a rectangle as a share of the image's, and the bounds of its aspect ratio, as in timm.
AREA, ASPECT = [0.02, 1 / 3], [0.3, 1 / 0.3]
FIRST_COLOUR = 1 + 4 * TRIES  # the number of an example's first colour: after the numbers of its rectangle


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019): mixes each sample of a global batch with the next one.

    Partner, share and box are functions of (seed, epoch, global batch), so neither ranks nor micro-batches change
    them. A piece of a global batch therefore has one image more: the mix partner of its last sample. torchvision
    pairs neighbours too. timm flips the batch of each rank, which in a global batch would need images of other ranks.

    Fields:
        mixup, cutmix: alpha of the Beta(alpha, alpha) from which the share of the sample's own image is drawn;
            0 is off. With both on, each sample gets one of them.
        by: `example`: each sample has its own choice, share and box; `batch`: a global batch has one, as in timm and
            torchvision.
        switch: the probability of CutMix with both on.
        prob: the probability of mixing at all.
        until: the last step that mixes. Later ones have targets of the same shape, which are not mixed.
    """

    classes: int
    mixup: float
    cutmix: float
    by: str = "example"
    switch: float = 0.5
    prob: float = 1.0
    until: float = math.inf

    def apply(self, images: Tensor, labels: Tensor, keys: Tensor, probability: float = 1.0) -> tuple[Tensor, Tensor]:
        """Mix samples with their partners: images (b, C, H, W) and targets (b, classes), in the images' dtype.

        `images` are floats (b + 1, C, H, W), each the partner of the one before it, or none; `labels` int64 (b + 1,)
        or floats (b + 1, classes), and `keys` int64 (b + 1,). A sample whose partner is broken (see `is_broken`)
        stays as it is; the loss of a broken one does not count.
        """
        own, partners, broken, keys = images[:-1], images[1:], is_broken(labels), keys[:-1]
        cut = uniform(keys, 1) < (self.switch if self.mixup and self.cutmix else float(self.cutmix > 0))
        quantile = uniform(keys, 0)
        share = torch.where(cut, beta(quantile, self.cutmix), beta(quantile, self.mixup))
        share = share.masked_fill(broken[1:], 1.0)
        if probability < 1:
            share = share.masked_fill(uniform(keys, 4) >= probability, 1.0)
        inside = box(share, keys, *images.shape[-2:]) & cut[:, None, None]
        blend = torch.where(cut, 1.0, share).to(images.dtype)[:, None, None, None]
        # Separate products and sum: a fused operation may round differently at the end of a batch.
        mixed = torch.where(inside[:, None], partners, own * blend + partners * (1 - blend))
        area = images.shape[-2] * images.shape[-1]
        share = torch.where(cut, 1 - inside.sum((1, 2)) / area, share)
        share = share.to(images.dtype)[:, None]
        shares = self.shares(labels).to(images.dtype)
        return mixed, shares[:-1] * share + shares[1:] * (1 - share)

    def shares(self, labels: Tensor) -> Tensor:
        """The targets before mixing, (n, classes), without NaN: a broken partner has a share of zero."""
        if labels.ndim == 1:
            return labels[:, None] == torch.arange(self.classes, device=labels.device)
        return labels.nan_to_num(0)


@dataclass(frozen=True)
class Cutout:
    """A square of the mean colour (DeVries and Taylor 2017), `side` pixels long, clipped at the border."""

    side: int

    def apply(self, pixels: Tensor, keys: Tensor) -> None:
        """Cut a square around a uniform centre out of normalised images (n, C, H, W), in place."""
        before, sizes = self.side // 2, pixels.shape[-2:]
        rows, columns = (interval(keys, n, length, before, self.side - before) for n, length in enumerate(sizes))
        pixels.masked_fill_((rows[:, :, None] & columns[:, None, :])[:, None], 0)


@dataclass(frozen=True)
class Erase:
    """Random erasing (Zhong et al. 2020) of normalised images, as timm's `RandomErasing` does it.

    An image loses a rectangle with a `probability`. It becomes zeros (mode `const`), one standard normal number for
    each channel (`rand`), or one for each pixel and channel (`pixel`).
    """

    probability: float
    mode: str = "const"

    def apply(self, pixels: Tensor, keys: Tensor) -> None:
        """Erase in images (n, C, H, W), in place, for each by its key, int64 (n,)."""
        boxes = self.boxes(keys, *pixels.shape[-2:])
        if pixels.is_cuda:
            self.together(pixels, keys, boxes)
            return
        numbers = self._numbers(pixels)  # a CPU draws for the rectangles only
        for image, own_key, (top, left, height, width) in zip(pixels, keys, boxes.tolist(), strict=True):
            if height:
                place = (slice(None), slice(top, top + height), slice(left, left + width))
                image[place] = self._colours(own_key, numbers[place] if self.mode == "pixel" else numbers)

    def together(self, pixels: Tensor, keys: Tensor, boxes: Tensor) -> None:
        """Like `apply`, with the same number of kernels for any boxes, and without waiting for the device."""
        top, left, height, width = boxes.unbind(1)
        rows, columns = span(top, top + height, pixels.shape[2]), span(left, left + width, pixels.shape[3])
        inside = (rows[:, :, None] & columns[:, None, :])[:, None]
        colours = self._colours(keys[:, None, None, None], self._numbers(pixels)).to(pixels.dtype)
        pixels.copy_(torch.where(inside, colours, pixels))

    def _numbers(self, pixels: Tensor) -> Tensor:
        """Which of an example's random numbers each colour is: int64 (C, H, W), or (C, 1, 1) for one a channel."""
        shape = (pixels.shape[1], *(pixels.shape[2:] if self.mode == "pixel" else (1, 1)))
        return FIRST_COLOUR + torch.arange(math.prod(shape), device=pixels.device).view(shape)

    def _colours(self, keys: Tensor, numbers: Tensor) -> Tensor:
        """The colours of these numbers: zeros, or standard normal by the inverse distribution function, float64."""
        if self.mode == "const":
            return torch.zeros_like(numbers, dtype=torch.float64)
        centred = 2 * uniform(keys, numbers).double() - (1 - 2.0**-24)  # in (-1, 1)
        return torch.erfinv(centred) * math.sqrt(2)

    def boxes(self, keys: Tensor, height: int, width: int) -> Tensor:
        """The rectangles as int64 (n, 4): top, left, height and width; of no size where nothing is erased."""
        numbers = uniform(keys[:, None], torch.arange(FIRST_COLOUR, device=keys.device))
        sizes = torch.stack([torch.full_like(keys, side) for side in (height, width)], 1)
        boxes, fits = first_box(numbers[:, 1:], sizes, AREA, ASPECT, most=sizes - 1)
        return (boxes * (fits & (numbers[:, :1] < self.probability))).long()


def beta(uniforms: Tensor, alpha: float) -> Tensor:
    """Uniform numbers as numbers of Beta(alpha, alpha), float32; all are 1 for an alpha of 0.

    Interpolated in a table of quantiles: the distribution function is off by less than 1/4096.
    """
    table = _quantiles(alpha, uniforms.device)
    place = uniforms * CELLS
    cell = place.long()
    low, high = table[cell], table[cell + 1]
    return low + (place - cell) * (high - low)


@functools.cache
def _quantiles(alpha: float, device: torch.device) -> Tensor:
    from scipy.special import betaincinv

    if alpha == 0:
        return torch.ones(CELLS + 1, device=device)
    points = torch.arange(CELLS + 1, dtype=torch.float64) / CELLS
    return torch.from_numpy(betaincinv(alpha, alpha, points.numpy())).float().to(device)


def box(share: Tensor, keys: Tensor, height: int, width: int) -> Tensor:
    """CutMix's boxes as bool (b, height, width): area 1 - share, around a uniform centre, clipped at the border."""
    side = (1 - share).sqrt()
    halves = [(side * length).long() // 2 for length in (height, width)]
    rows = interval(keys, 2, height, halves[0], halves[0])
    columns = interval(keys, 3, width, halves[1], halves[1])
    return rows[:, :, None] & columns[:, None, :]


def interval(keys: Tensor, n: int, length: int, before: Tensor | int, after: Tensor | int) -> Tensor:
    """The positions from centre - before to centre + after: bool (b, length). The centre is number `n` of a key."""
    centre = (uniform(keys, n) * length).long()
    return span(centre - before, centre + after, length)


def span(start: Tensor, stop: Tensor, length: int) -> Tensor:
    """The positions from `start` up to, but not including, `stop`: bool (n, length)."""
    position = torch.arange(length, device=start.device)
    return (position >= start[:, None]) & (position < stop[:, None])
