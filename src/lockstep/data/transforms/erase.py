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
        """Erase in images (n, C, H, W), in place, for each by its key, int64 (n,)."""
        boxes = self.boxes(keys, *pixels.shape[-2:])
        if pixels.is_cuda:
            self.together(pixels, keys, boxes)
            return
        numbers = self._numbers(pixels)  # a CPU draws for the rectangles only
        for image, key, (top, left, height, width) in zip(pixels, keys, boxes.tolist(), strict=True):
            if height:
                place = (slice(None), slice(top, top + height), slice(left, left + width))
                image[place] = self._colours(key, numbers[place] if self.mode == "pixel" else numbers)

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


def span(start: Tensor, stop: Tensor, length: int) -> Tensor:
    """The positions from `start` up to, but not including, `stop`: bool (n, length)."""
    position = torch.arange(length, device=start.device)
    return (position >= start[:, None]) & (position < stop[:, None])
