"""Random erasing: rectangles of a batch of images, on its device."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.core.rng import uniform
from lockstep.data.transforms.augment import TRIES, first_box

# The area of a rectangle as a share of the image's, and the bounds of its aspect ratio, as in timm.
AREA, ASPECT = [0.02, 1 / 3], [0.3, 1 / 0.3]
FIRST_COLOUR = 1 + 4 * TRIES  # the number of an example's first colour: after those of its rectangle


@dataclass(frozen=True)
class Erase:
    """Random erasing (Zhong et al. 2020) of normalised images, as timm's `RandomErasing` does it.

    Fields:
        probability: of an image to lose a rectangle.
        mode: what the rectangle becomes. `const`: zeros; `rand`: one standard normal number for each channel;
            `pixel`: one for each pixel and channel.
    """

    probability: float
    mode: str = "const"

    def apply(self, pixels: Tensor, keys: Tensor) -> None:
        """Erase in images (n, C, H, W), in place, for each by its key, int64 (n,)."""
        channels, *size = pixels.shape[1:]
        top, left, height, width = self.boxes(keys, *size).unbind(1)
        rows, columns = span(top, top + height, size[0]), span(left, left + width, size[1])
        inside = (rows[:, :, None] & columns[:, None, :])[:, None]
        if self.mode == "const":
            pixels.masked_fill_(inside, 0)
            return
        # A CPU draws for the images that lose a rectangle only; a GPU would have to wait for their number.
        chosen = slice(None) if keys.is_cuda else height > 0
        shape = (channels, *(size if self.mode == "pixel" else (1, 1)))
        pixels[chosen] = torch.where(inside[chosen], normal(keys[chosen], shape).to(pixels.dtype), pixels[chosen])

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


def normal(keys: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers of each key, float64 (n, *shape), by the inverse distribution function."""
    numbers = FIRST_COLOUR + torch.arange(math.prod(shape), device=keys.device)
    centred = 2 * uniform(keys[:, None], numbers).double() - (1 - 2.0**-24)  # in (-1, 1)
    return (torch.erfinv(centred) * math.sqrt(2)).view(-1, *shape)
