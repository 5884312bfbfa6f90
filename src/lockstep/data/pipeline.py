"""From stored uint8 images to the model's input: augment, resize and normalise, all on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.core.data_protocols import Augment, BoxAugment, Source
from lockstep.core.model_card import INTERPOLATION, ModelCard
from lockstep.core.protocols import Precision
from lockstep.core.rng import CUTOUT, MIX, SampleRNG, sample_keys
from lockstep.data.datasets.files import crops_files
from lockstep.data.loading.shards import BatchGroup, Shard
from lockstep.data.transforms.mixup import Mix, interval


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The steps from the stored images of a data set to the model's input. Both loaders use the same ones.

    Fields:
        augment: changes training images; `apply` of the augmentation, or what is left of it after a crop.
        input_shape: (channels, height, width) of the model's input.
        eval_crop: the central share of a stored image's side that is evaluated.
        scale, shift: the normalisation, (1, C, 1, 1): pixel * scale + shift, computed in their dtype.
        dtype, memory_format: of the model's input in training.
        cutout: side in pixels of a square of the mean colour (DeVries and Taylor 2017); 0 is none.
        mix: mixup and CutMix; None is neither.
    """

    augment: Callable[[Tensor, SampleRNG, tuple[int, int]], Tensor]
    input_shape: tuple[int, int, int]
    eval_crop: float
    scale: Tensor
    shift: Tensor
    dtype: torch.dtype
    seed: int
    memory_format: torch.memory_format = torch.contiguous_format
    cutout: int = 0
    mix: Mix | None = None
    interpolation: str = INTERPOLATION

    @classmethod
    def of(
        cls,
        source: Source | ModelCard,
        augment: Augment,
        *,
        device: torch.device,
        precision: Precision,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        interpolation: str = INTERPOLATION,
        **options: Any,
    ) -> Pipeline:
        """The pipeline of a data set or of a model's card, with its own mean and deviation by default.

        `mean` and `std` are per channel, for pixels from 0 to 1; `options` are other fields.
        """
        means, stds = (
            torch.tensor(values, device=device, dtype=precision.sums).view(1, -1, 1, 1)
            for values in (mean or source.mean, std or source.std)
        )
        apply = augment.apply
        if crops_files(source):
            assert isinstance(augment, BoxAugment)
            apply = augment.after_crop
        elif isinstance(augment, BoxAugment):
            apply = partial(augment.apply, interpolation=interpolation)
        return cls(
            augment=apply,
            input_shape=source.input_shape,
            eval_crop=source.eval_crop,
            scale=1 / (255 * stds),
            shift=-means / stds,
            dtype=precision.dtype,
            interpolation=interpolation,
            **options,
        )

    def train(self, groups: Iterable[BatchGroup]) -> Iterator[Shard]:
        """The shards of `groups`, with their images augmented and normalised."""
        for group in groups:
            yield from group.shards(self.augmented(group.images, group.epoch, group.indices))

    def mixed(self, micro: Shard) -> tuple[Tensor, Tensor]:
        """The images (b, C, H, W) and targets of a micro-batch of `train`.

        With `mix`, the images are mixed and the targets are class probabilities (b, classes); without, the targets
        are int64 labels (b,).
        """
        if self.mix is None:
            return micro.images, micro.labels
        keys = sample_keys(self.seed, micro.epoch, micro.indices, MIX)
        images, targets = self.mix.apply(micro.images, micro.known_labels, keys)
        return images.to(self.dtype, memory_format=self.memory_format), targets

    def augmented(self, images: Tensor, epoch: int, indices: Tensor) -> Tensor:
        """Augment and normalise uint8 images (n, C, H, W) of an epoch to the model's input (n, C, h, w)."""
        if len(images) == 0:
            return images.new_empty((0, *self.input_shape), dtype=self.scale.dtype if self.mix else self.dtype)
        height, width = self.input_shape[1:]
        pixels = self._finish(self.augment(images, SampleRNG(self.seed, epoch, indices), (height, width)))
        if self.cutout:
            pixels.masked_fill_(self._cutout_mask(epoch, indices), 0)
        return pixels if self.mix else pixels.to(self.dtype)  # mixing is computed in the wider format

    def _cutout_mask(self, epoch: int, indices: Tensor) -> Tensor:
        """A square around a uniform centre in each image, clipped at the border: bool (n, 1, h, w)."""
        keys = sample_keys(self.seed, epoch, indices, CUTOUT)
        before, after = self.cutout // 2, self.cutout - self.cutout // 2
        rows, columns = (interval(keys, n, length, before, after) for n, length in enumerate(self.input_shape[1:]))
        return (rows[:, :, None] & columns[:, None, :])[:, None]

    def eval(self, images: Tensor) -> Tensor:
        """Crop uint8 images (B, C, H, W) to the centre that is evaluated, and normalise them, in `scale`'s dtype."""
        height, width = images.shape[-2:]
        keep_h, keep_w = (max(1, round(side * self.eval_crop)) for side in (height, width))
        top, left = (height - keep_h) // 2, (width - keep_w) // 2
        return self._finish(images[..., top : top + keep_h, left : left + keep_w])

    def _finish(self, images: Tensor) -> Tensor:
        # In place, on a copy. Multiply and add are two operations, because a fused one may round differently at the
        # end of a batch. Normalise before resizing, because resizing mostly makes images larger.
        pixels = images.to(self.scale.dtype).mul_(self.scale).add_(self.shift)
        if pixels.shape[-2:] != self.input_shape[1:]:
            pixels = F.interpolate(pixels, self.input_shape[1:], mode=self.interpolation, antialias=True)
        return pixels.contiguous(memory_format=self.memory_format)
