"""From stored uint8 images to what the model takes: augmented, resized, normalised, all on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.core.data_protocols import Augment, BoxAugment, Source
from lockstep.core.protocols import Precision
from lockstep.core.rng import CUTOUT, MIX, SampleRNG, sample_keys, uniform
from lockstep.data.datasets.folder import crops_files
from lockstep.data.loading.shards import BatchGroup, Shard
from lockstep.data.transforms.mixup import Mix


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The path of a batch of one data set, the same for both loaders.

    Images are normalised in the format of `scale` and `shift`, and given in `dtype`, the format of the step.
    `cutout` is the side in pixels of a square of the mean colour (DeVries and Taylor 2017); 0 is none.
    """

    augment: Augment
    input_shape: tuple[int, int, int]
    eval_crop: float
    scale: Tensor
    shift: Tensor
    dtype: torch.dtype
    memory_format: torch.memory_format
    seed: int
    cutout: int = 0
    mix: Mix | None = None

    @classmethod
    def of(
        cls,
        source: Source,
        augment: Augment,
        *,
        device: torch.device,
        precision: Precision,
        memory_format: torch.memory_format = torch.contiguous_format,
        seed: int,
        cutout: int = 0,
        mix: Mix | None = None,
    ) -> Pipeline:
        """The pipeline of `source`; normalisation is one multiplication and one addition per pixel."""
        mean, std = (
            torch.tensor(each, device=device, dtype=precision.sums).view(1, -1, 1, 1)
            for each in (source.mean, source.std)
        )
        if crops_files(source):
            assert isinstance(augment, BoxAugment)
            augment = augment.rest
        return cls(
            augment=augment,
            input_shape=source.input_shape,
            eval_crop=source.eval_crop,
            scale=1 / (255 * std),
            shift=-mean / std,
            dtype=precision.dtype,
            memory_format=memory_format,
            seed=seed,
            cutout=cutout,
            mix=mix,
        )

    def train(self, strides: Iterable[BatchGroup]) -> Iterator[Shard]:
        """The shards of `strides`, their images augmented and normalised."""
        for stride in strides:
            yield from stride.shards(self.augmented(stride.images, stride.epoch, stride.indices))

    def mixed(self, micro: Shard) -> tuple[Tensor, Tensor]:
        """The images (b, C, H, W) of a micro-batch of `train`, mixed where samples are, and their targets.

        Targets are int64 labels (b,), or class probabilities (b, classes) where samples are mixed.
        """
        if self.mix is None:
            return micro.images, micro.labels
        keys = sample_keys(self.seed, micro.epoch, micro.indices, MIX)
        images, targets = self.mix.apply(micro.images, micro.known_labels, keys)
        return images.to(self.dtype, memory_format=self.memory_format), targets

    def augmented(self, images: Tensor, epoch: int, indices: Tensor) -> Tensor:
        """uint8 (n, C, H, W) as the model takes them in an epoch of training: (n, C, h, w)."""
        if len(images) == 0:
            return images.new_empty((0, *self.input_shape), dtype=self.scale.dtype if self.mix else self.dtype)
        height, width = self.input_shape[1:]
        seen = self._finish(self.augment.apply(images, SampleRNG(self.seed, epoch, indices), (height, width)))
        if self.cutout:
            seen.masked_fill_(self._cut_out(epoch, indices), 0)
        return seen if self.mix else seen.to(self.dtype)  # blends are made in the wider format

    def _cut_out(self, epoch: int, indices: Tensor) -> Tensor:
        """A square around a uniform centre for each image, cut at the border: bool (n, 1, h, w)."""
        keys = sample_keys(self.seed, epoch, indices, CUTOUT)

        def within(length: int, n: int) -> Tensor:
            start = (uniform(keys, n) * length).long()[:, None] - self.cutout // 2
            at = torch.arange(length, device=keys.device)
            return (at >= start) & (at < start + self.cutout)

        height, width = self.input_shape[1:]
        return (within(height, 0)[:, :, None] & within(width, 1)[:, None, :])[:, None]

    def eval(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to the centre that the data set evaluates, normalised, in the format of `scale`."""
        height, width = images.shape[-2:]
        keep_h, keep_w = round(height * self.eval_crop), round(width * self.eval_crop)
        top, left = (height - keep_h) // 2, (width - keep_w) // 2
        return self._finish(images[..., top : top + keep_h, left : left + keep_w])

    def _finish(self, images: Tensor) -> Tensor:
        # A copy: an augmentation's own floats are not needed any more. One operation after the other: a fused one
        # may round another way at the end of a batch. Before the resizing, which mostly has images grow.
        pixels = images.to(self.scale.dtype).mul_(self.scale).add_(self.shift)
        if pixels.shape[-2:] != self.input_shape[1:]:
            pixels = F.interpolate(pixels, self.input_shape[1:], mode="bilinear", antialias=True)
        return pixels.contiguous(memory_format=self.memory_format)
