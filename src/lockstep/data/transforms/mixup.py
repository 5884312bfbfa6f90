"""Mixup and CutMix: each sample of a global batch is mixed with the next one (its mix partner).

Partner, share and box are functions of (seed, epoch, global batch), so neither ranks nor micro-batches change
them. A piece of a global batch therefore has one image more: the partner of its last sample.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.core.rng import uniform

CELLS = 4096  # intervals of the table of quantiles


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019), with a separate share for each sample.

    Fields:
        mixup, cutmix: alpha of the Beta(alpha, alpha) from which the share of the sample's own image is drawn;
            0 is off. With both on, each sample gets one of them, with probability 1/2.
    """

    classes: int
    mixup: float
    cutmix: float

    @property
    def on(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def apply(self, images: Tensor, labels: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Mix samples with their partners.

        A broken image has a negative label. A sample whose partner is broken stays as it is. The target of a broken
        sample means nothing, because its loss does not count.

        Args:
            images: float (b + 1, C, H, W), each the partner of the one before it; or no images at all.
            labels, keys: int64 (b + 1,), of the images.

        Returns:
            Images (b, C, H, W) and class probabilities (b, classes), both of the images' dtype.
        """
        own, partners, broken, keys = images[:-1], images[1:], labels < 0, keys[:-1]
        cut = uniform(keys, 1) < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        quantile = uniform(keys, 0)
        share = torch.where(cut, beta(quantile, self.cutmix), beta(quantile, self.mixup))
        share = share.masked_fill(broken[1:], 1.0)
        inside = box(share, keys, *images.shape[-2:]) & cut[:, None, None]
        blend = torch.where(cut, 1.0, share).to(images.dtype)[:, None, None, None]
        # Separate products and sum: a fused operation may round differently at the end of a batch.
        mixed = torch.where(inside[:, None], partners, own * blend + partners * (1 - blend))
        area = images.shape[-2] * images.shape[-1]
        share = torch.where(cut, 1 - inside.sum((1, 2)) / area, share)
        share = share.to(images.dtype)[:, None]
        one_hot = (labels[:, None] == torch.arange(self.classes, device=labels.device)).to(images.dtype)
        targets = one_hot[:-1] * share + one_hot[1:] * (1 - share)
        return mixed, targets


def beta(uniforms: Tensor, alpha: float) -> Tensor:
    """Turn uniform numbers into numbers of Beta(alpha, alpha), float32; all are 1 for an alpha of 0.

    This interpolates linearly in a table of quantiles. The distribution function is exact at the table's 4,097
    points and off by less than 1/4096 between them.
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
    """The positions from centre - before up to, but not including, centre + after: bool (b, length).

    The centre is uniform: number `n` of each key's stream.
    """
    centre = (uniform(keys, n) * length).long()
    position = torch.arange(length, device=keys.device)
    return (position >= (centre - before)[:, None]) & (position < (centre + after)[:, None])
