"""Random erasing: rectangles of a batch of images, on its device."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.core.rng import uniform
from lockstep.data.transforms.augment import TRIES, first_box

# The area of a rectangle as a share of the image's, and the bounds of its aspect ratio, as in timm.
AREA, ASPECT = [0.02, 1 / 3], [0.3, 1 / 0.3]
FIRST_COLOUR = 1 + 4 * TRIES  # the number of an example's first colour: after the numbers of its rectangle


@dataclass(frozen=True)
class Erase:
    """Random erasing (Zhong et al. 2020) of normalised images, as timm's `RandomErasing` does it.

    An image loses a rectangle with a `probability`. It becomes zeros (mode `const`), one standard normal number for
    each channel (`rand`), or one for each pixel and channel (`pixel`).
    """

    probability: float
    mode: str = "const"

    def apply(self, pixels: Tensor, keys: Tensor) -> None:
        """Erase in images (n, C, H, W), in place, for each by its key, int64 (n,), without waiting for the device."""
        top, left, height, width = self.boxes(keys, *pixels.shape[-2:]).unbind(1)
        rows, columns = span(top, top + height, pixels.shape[2]), span(left, left + width, pixels.shape[3])
        inside = (rows[:, :, None] & columns[:, None, :])[:, None]
        pixels.copy_(torch.where(inside, self._colours(keys, pixels).to(pixels.dtype), pixels))

    def _colours(self, keys: Tensor, pixels: Tensor) -> Tensor:
        """The colours, which broadcast to the pixels: zeros, or standard normal by the inverse distribution."""
        if self.mode == "const":
            return pixels.new_zeros(())
        # Which of an example's random numbers each colour is.
        shape = (pixels.shape[1], *(pixels.shape[2:] if self.mode == "pixel" else (1, 1)))
        numbers = FIRST_COLOUR + torch.arange(math.prod(shape), device=pixels.device).view(shape)
        centred = 2 * uniform(keys[:, None, None, None], numbers).double() - (1 - 2.0**-24)  # in (-1, 1)
        return torch.erfinv(centred) * math.sqrt(2)

    def boxes(self, keys: Tensor, height: int, width: int) -> Tensor:
        """The rectangles as int64 (n, 4): top, left, height and width; of no size where nothing is erased."""
        numbers = uniform(keys[:, None], torch.arange(FIRST_COLOUR, device=keys.device))
        sizes = torch.stack([torch.full_like(keys, side) for side in (height, width)], 1)
        boxes, fits = first_box(numbers[:, 1:], sizes, AREA, ASPECT, most=sizes - 1)
        return (boxes * (fits & (numbers[:, :1] < self.probability))).long()


def span(start: Tensor, stop: Tensor, length: int) -> Tensor:
    """The positions from `start` up to, but not including, `stop`: bool (n, length)."""
    position = torch.arange(length, device=start.device)
    return (position >= start[:, None]) & (position < stop[:, None])
