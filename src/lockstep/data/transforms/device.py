"""From stored uint8 images to the model's input: augment, resize, normalise and mix, all on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.core.data_protocols import Apply, Augment, Shard
from lockstep.core.model_card import Preprocessing, centre_start, evaluated_size
from lockstep.core.plan import at_step
from lockstep.core.protocols import Precision
from lockstep.core.rng import CUTOUT, ERASE, MIX, MIX_BATCH, SampleRNG, key, sample_keys
from lockstep.data.loading.shards import BatchGroup

if TYPE_CHECKING:
    from lockstep.data.transforms.mixing import Cutout, Erase, Mix  # few jobs need one


@dataclass(frozen=True, kw_only=True)
class DeviceTransforms:
    """The steps from the stored images of a data set to the model's input. Both loaders use the same ones.

    Fields:
        augment: changes training images; `apply` of the augmentation, or what is left of it after a crop.
        preprocessing: the sizes, the share of a stored image that is evaluated, and the interpolation.
        scale, shift: the normalisation, (1, C, 1, 1): pixel * scale + shift, computed in their dtype.
        dtype, memory_format: of the model's input in training.
        cutout, erase, mix: cutout, random erasing, and mixup or CutMix; None is none.
        train_sizes: (height, width) of the model's input in training, by the steps after which they begin; empty for
            the evaluation's size.
    """

    augment: Apply
    preprocessing: Preprocessing
    scale: Tensor
    shift: Tensor
    dtype: torch.dtype
    seed: int
    memory_format: torch.memory_format = torch.contiguous_format
    cutout: Cutout | None = None
    erase: Erase | None = None
    mix: Mix | None = None
    train_sizes: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        preprocessing: Preprocessing,
        augment: Augment,
        *,
        device: torch.device,
        precision: Precision,
        cropped: bool = False,
        **options: Any,
    ) -> DeviceTransforms:
        """The steps. `cropped`: whether files are cropped, see `Source.crops_files`; `options`: other fields."""
        means, stds = (
            torch.tensor(values, device=device, dtype=precision.sums).view(1, -1, 1, 1)
            for values in (preprocessing.mean, preprocessing.std)
        )
        return cls(
            augment=augment.on_device(preprocessing.interpolation, cropped=cropped),
            preprocessing=preprocessing,
            scale=1 / (255 * stds),
            shift=-means / stds,
            dtype=precision.dtype,
            **options,
        )

    def train(self, groups: Iterable[BatchGroup]) -> Iterator[Shard]:
        """The shards of `groups`, with their images augmented and normalised."""
        for group in groups:
            yield from group.shards(self.augmented(group.images, group.epoch, group.indices, group.steps[0].step))

    def mixed(self, micro: Shard) -> tuple[Tensor, Tensor]:
        """The images (b, C, H, W) and targets of a micro-batch: int64 (b,), with `mix` shares (b, classes)."""
        if self.mix is None:
            return micro.images, micro.labels
        if self.mix.by == "batch":
            keys = torch.full_like(micro.indices, key(self.seed, MIX_BATCH, micro.step))
        else:
            keys = sample_keys(self.seed, micro.epoch, micro.indices, MIX)
        probability = self.mix.prob if micro.step <= self.mix.until else 0.0
        images, targets = self.mix.apply(micro.images, micro.known_labels, keys, probability)
        return images.to(self.dtype, memory_format=self.memory_format), targets

    def augmented(self, images: Tensor, epoch: int, indices: Tensor, step: int = 1) -> Tensor:
        """Augment and normalise uint8 images (n, C, H, W) of an epoch to the model's input (n, C, h, w) at a step."""
        size = at_step(self.train_sizes, step) if self.train_sizes else self.preprocessing.input_shape[1:]
        if len(images) == 0:
            blank = (0, images.shape[1], *size)
            return images.new_empty(blank, dtype=self.scale.dtype if self.mix else self.dtype)
        pixels = self._finish(self.augment(images, SampleRNG(self.seed, epoch, indices), size), size)
        if self.cutout:
            self.cutout.apply(pixels, sample_keys(self.seed, epoch, indices, CUTOUT))
        if self.erase:
            self.erase.apply(pixels, sample_keys(self.seed, epoch, indices, ERASE))
        return pixels if self.mix else pixels.to(self.dtype)  # mixing is computed in the wider format

    def eval(self, images: Tensor) -> Tensor:
        """Crop uint8 images (B, C, H, W) to the centre that is evaluated, and normalise them, in `scale`'s dtype."""
        size, seen = (images.shape[2], images.shape[3]), self.preprocessing.input_shape[1:]
        height, width = evaluated_size(size, self.preprocessing.eval_crop, seen)
        top, left = centre_start(size[0], height), centre_start(size[1], width)
        return self._finish(images[..., top : top + height, left : left + width], seen)

    def _finish(self, images: Tensor, size: tuple[int, int]) -> Tensor:
        # In place, on a copy. Multiply and add are two operations, because a fused one may round differently at the
        # end of a batch. Normalise before resizing, because resizing mostly makes images larger.
        pixels = images.to(self.scale.dtype).mul_(self.scale).add_(self.shift)
        if pixels.shape[-2:] != size:
            pixels = F.interpolate(pixels, size, mode=self.preprocessing.interpolation, antialias=True)
        return pixels.contiguous(memory_format=self.memory_format)
