"""From stored uint8 images to what the model takes: augmented, resized, normalised, all on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.data.loader import Shard
from lockstep.data.mix import Mix
from lockstep.data.rng import MIX, sample_keys
from lockstep.protocols import Augment, Source


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The path of a batch of one data set, the same for both loaders."""

    augment: Augment
    input_shape: tuple[int, int, int]
    eval_crop: float
    scale: Tensor
    shift: Tensor
    memory_format: torch.memory_format
    seed: int
    mix: Mix | None = None

    @classmethod
    def of(
        cls,
        source: Source,
        augment: Augment,
        *,
        device: torch.device,
        dtype: torch.dtype,
        channels_last: bool,
        seed: int,
        mix: Mix | None = None,
    ) -> Pipeline:
        """The pipeline of `source`; normalisation is one multiplication and one addition per pixel."""
        mean, std = (
            torch.tensor(each, device=device, dtype=dtype).view(1, -1, 1, 1) for each in (source.mean, source.std)
        )
        return cls(
            augment=augment,
            input_shape=source.input_shape,
            eval_crop=source.eval_crop,
            scale=1 / (255 * std),
            shift=-mean / std,
            memory_format=torch.channels_last if channels_last else torch.contiguous_format,
            seed=seed,
            mix=mix,
        )

    def train(self, micro: Shard) -> tuple[Tensor, Tensor]:
        """The images (b, C, H, W) of a micro-batch, augmented, normalised and mixed, and their targets.

        Targets are int64 labels (b,), or class probabilities (b, classes) where samples are mixed.
        """
        images = self._augmented(micro)
        if self.mix is None:
            return images, micro.labels
        keys = sample_keys(self.seed, micro.epoch, micro.indices, MIX)
        mixed, targets = self.mix.apply(images, micro.known_labels, keys)
        return mixed.contiguous(memory_format=self.memory_format), targets

    def _augmented(self, micro: Shard) -> Tensor:
        if len(micro.images) == 0:
            return micro.images.new_empty((0, *self.input_shape), dtype=self.scale.dtype)
        keys = sample_keys(self.seed, micro.epoch, micro.indices)
        height, width = self.input_shape[1:]
        return self._finish(self.augment.apply(micro.images, keys, (height, width)))

    def eval(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to the centre that the data set evaluates, normalised floats."""
        height, width = images.shape[-2:]
        keep_h, keep_w = round(height * self.eval_crop), round(width * self.eval_crop)
        top, left = (height - keep_h) // 2, (width - keep_w) // 2
        return self._finish(images[..., top : top + keep_h, left : left + keep_w])

    def _finish(self, images: Tensor) -> Tensor:
        pixels = images.to(self.scale.dtype)
        if pixels.shape[-2:] != self.input_shape[1:]:
            pixels = F.interpolate(pixels, self.input_shape[1:], mode="bilinear", antialias=True)
        return torch.addcmul(self.shift, pixels, self.scale).contiguous(memory_format=self.memory_format)
