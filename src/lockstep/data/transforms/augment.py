"""Augmentations of a whole batch on its device: uint8 images to uint8 or float in 0..255, of any size.

A sample's own random numbers decide, so ranks, workers, batch sizes and resumes cannot change it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.config import components
from lockstep.config.options import option, preset
from lockstep.core.data_protocols import Augment, Source
from lockstep.core.errors import InputError, percent
from lockstep.core.fields import ranged
from lockstep.core.rng import SampleRNG


@option("augment", "none")
class NoAugment(Augment):
    """No augmentation."""

    def __str__(self) -> str:
        return "none"

    def apply(self, images: Tensor, draws: SampleRNG, size: tuple[int, int]) -> Tensor:
        return images


@option("augment")
class Auto(NoAugment):
    """The usual augmentation of the data set: `shift` for digits, `crop_flip` for small photographs (up to 64
    pixels), `standard` for large ones, `none` for others.
    """

    def for_data(self, source: Source) -> Augment:
        return components.build_option("augment", source.usual_augment).for_data(source)


@option("augment")
class CropFlip(Augment):
    """A crop of the original size out of the zero-padded image, and a mirror: for small photographs.

    He et al. 2016, section 4.2.
    """

    pad: int = ranged(4, least=0, most=1024)  # pixels added on each side before the crop
    reflect: bool = False  # fill the added pixels with the mirrored image instead of black
    flip: float = ranged(0.5, least=0, most=1)  # probability of a horizontal mirror
    # mirror each image in every second epoch instead of by chance; `flip` is then the share of images that are
    # mirrored in the first epoch
    alternate: bool = False

    def __post_init__(self) -> None:
        if self.reflect and self.pad == 0:
            raise InputError(
                "augment.reflect is true, but augment.pad is 0, so nothing is padded; use augment.pad=4 or "
                "augment.reflect=false"
            )

    def __str__(self) -> str:
        return phrase(f"shift by up to {self.pad} pixel{'s' * (self.pad != 1)}" * bool(self.pad), mirrored(self.flip))

    def apply(self, images: Tensor, draws: SampleRNG, size: tuple[int, int]) -> Tensor:
        height, width = images.shape[-2:]
        top, left = ((draws.uniform(n) * (2 * self.pad + 1)).long()[:, None] for n in (0, 1))
        x = torch.arange(width, device=images.device)
        columns = left + torch.where(self._mirrored(draws)[:, None], width - 1 - x, x)
        rows = top + torch.arange(height, device=images.device)
        if self.reflect:
            rows, columns = reflected(rows - self.pad, height), reflected(columns - self.pad, width)
            padded, row_length = images, width
        else:
            padded, row_length = F.pad(images, [self.pad] * 4), width + 2 * self.pad
        # One gather by the pixels' offsets in a channel: the fastest of seven ways on a CPU, and one kernel on a GPU.
        offsets = (rows[:, :, None] * row_length + columns[:, None, :]).flatten(1)
        channels = padded.flatten(2)
        return channels.gather(2, offsets[:, None].expand(-1, channels.shape[1], -1)).view_as(images)

    def _mirrored(self, draws: SampleRNG) -> Tensor:
        if self.alternate:
            return (draws.epoch_invariant(0) < self.flip) ^ (draws.epoch % 2 == 1)
        return draws.uniform(2) < self.flip


preset(
    "augment", "shift", CropFlip(pad=1, flip=0.0), "A shift by up to a pixel: for digits, which must not be mirrored."
)


def reflected(positions: Tensor, side: int) -> Tensor:
    """Positions outside of 0 to side - 1, reflected at the outermost pixels to positions inside."""
    positions = positions.abs() % max(1, 2 * side - 2)
    return side - 1 - (side - 1 - positions).abs()


def phrase(*parts: str) -> str:
    return ", ".join(part for part in parts if part) or "none"


def mirrored(share: float) -> str:
    """The words for mirroring a share of the images; empty for a share of 0."""
    return "" if not share else "flip" if share == 0.5 else f"flip {percent(share)}"
