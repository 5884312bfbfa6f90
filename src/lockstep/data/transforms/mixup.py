"""Mixup and CutMix: each sample of a global batch with the one after it, by numbers of its own key.

Partner, share and box are functions of (seed, epoch, global batch), so neither ranks nor micro-batches change
them: a piece of a global batch needs one image more, the partner of its last sample.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.core.rng import uniform

CELLS = 4096


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019), with a share of its own for each sample.

    Fields:
        classes: of the data set.
        mixup, cutmix: alpha of the Beta(alpha, alpha) that the share of the sample's own image is drawn from;
            0 is off. With both on, a sample takes either with probability 1/2.
        label_smoothing: of the loss that the targets are for.
    """

    classes: int
    mixup: float
    cutmix: float
    label_smoothing: float = 0.0

    @property
    def on(self) -> bool:
        return self.mixup > 0 or self.cutmix > 0

    def apply(self, images: Tensor, labels: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Mix samples with their partners.

        A sample whose partner is a broken image (a negative label) stays as it is; one that is broken itself
        gets a row that adds nothing to the loss.

        Args:
            images: float (b + 1, C, H, W), each the partner of the one before it; or none at all.
            labels, keys: int64, of the images.

        Returns:
            Images (b, C, H, W) and class probabilities (b, classes), both of the images' dtype.
        """
        own, partners, broken, keys = images[:-1], images[1:], labels < 0, keys[:-1]
        cut = uniform(keys, 1) < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        drawn = uniform(keys, 0)
        share = torch.where(cut, beta(drawn, self.cutmix), beta(drawn, self.mixup)).masked_fill(broken[1:], 1.0)
        inside = box(share, keys, *images.shape[-2:]) & cut[:, None, None]
        blend = torch.where(cut, 1.0, share).to(images.dtype)[:, None, None, None]
        # Products and sum one by one: a fused operation may round another way at the end of a batch.
        mixed = torch.where(inside[:, None], partners, own * blend + partners * (1 - blend))
        area = images.shape[-2] * images.shape[-1]
        share = torch.where(cut, 1 - inside.sum((1, 2)) / area, share)
        kept = share.to(images.dtype)[:, None]
        each = (labels[:, None] == torch.arange(self.classes, device=labels.device)).to(images.dtype)
        # Negative, so that cross_entropy's label smoothing brings the row to exactly zero.
        nothing = -self.label_smoothing / (self.classes * (1 - self.label_smoothing))
        return mixed, (each[:-1] * kept + each[1:] * (1 - kept)).masked_fill(broken[:-1, None], nothing)


def beta(uniforms: Tensor, alpha: float) -> Tensor:
    """Numbers of Beta(alpha, alpha) from uniform ones, float32; all 1 for an alpha of 0.

    By linear interpolation in a table of quantiles: the distribution function is exact at the table's 4,097
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
    """CutMix's boxes as bool (b, height, width): of area 1 - share, around a uniform centre, cut at the border."""
    side = (1 - share).sqrt()

    def within(length: int, n: int) -> Tensor:
        centre, half = (uniform(keys, n) * length).long(), (side * length).long() // 2
        at = torch.arange(length, device=keys.device)
        return (at >= (centre - half)[:, None]) & (at < (centre + half)[:, None])

    return within(height, 2)[:, :, None] & within(width, 3)[:, None, :]
