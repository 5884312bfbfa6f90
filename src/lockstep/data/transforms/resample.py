"""Cuts one box out of each image of a batch and resizes it, with antialiasing: torchvision's `resized_crop`."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def resized_crops(images: Tensor, boxes: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """A box of each uint8 image (B, C, H, W), resized with antialiasing: uint8 (B, C, *size).

    On the CPU the pixels are those of torchvision's `resized_crop` for uint8, which rounds after the columns and
    after the rows; on a GPU a few differ by 1 or 2 of 255. They do not depend on the other images of the batch.
    `boxes` is int64 (B, 4): top, left, height and width.
    """
    if images.is_cuda or size == (1, 1):  # for one pixel torch's kernel fails: "num_channels == ..."
        return crops_together(images, boxes, size, interpolation)
    # One image at a time: torch's kernel for uint8 is faster than any way to resize a batch at once.
    crops = images.new_empty((*images.shape[:2], *size))
    for crop, image, (top, left, height, width) in zip(crops.split(1), images.split(1), boxes.tolist(), strict=True):
        box = image[:, :, top : top + height, left : left + width]
        crop.copy_(F.interpolate(box, size, mode=interpolation, antialias=True))
    return crops


def crops_together(images: Tensor, boxes: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """Like `resized_crops`, with the same number of kernels for any batch, and without waiting for the device.

    It has no products of matrices and no sums over an axis, because their rounding may depend on the batch size.
    """
    top, left, height, width = boxes.unbind(1)
    rows = _resized_rows(images.float(), left, width, size[1], interpolation)
    columns = _resized_rows(rows.mT, top, height, size[0], interpolation)
    return columns.mT.to(torch.uint8, memory_format=torch.contiguous_format)


def _resized_rows(images: Tensor, start: Tensor, length: Tensor, size: int, interpolation: str) -> Tensor:
    """`length` pixels from `start` on of each row of the images (B, C, H, W), as whole floats (B, C, H, size)."""
    reach, curve = FILTERS[interpolation]
    side = images.shape[-1]
    scale = (length / size)[:, None]
    stretch = scale.clamp(min=1)  # antialiasing: one pixel of the result covers at least one pixel of the image
    centre = (torch.arange(size, device=images.device) + 0.5) * scale
    first = (centre - reach * stretch).floor()
    values, weights = images.new_zeros(()), images.new_zeros(())
    for tap in range(2 * math.ceil(reach * max(1, side / size)) + 2):
        position = first + tap
        inside = (position >= 0) & (position < length[:, None])
        weight = curve((position + 0.5 - centre).abs() / stretch) * inside
        index = (start[:, None] + position.long()).clamp(0, side - 1)[:, None, None]
        values = values + images.gather(-1, index.expand(*images.shape[:-1], -1)) * weight[:, None, None]
        weights = weights + weight
    return (values / weights[:, None, None]).round().clamp(0, 255)


def _cubic(distance: Tensor) -> Tensor:
    """Keys' cubic convolution (1981) with a = -1/2, as in Pillow and torch with antialiasing."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0))


# How far a filter reaches on each side, in pixels, and its weight at a distance.
FILTERS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "bilinear": (1, lambda distance: (1 - distance).clamp(min=0)),
    "bicubic": (2, _cubic),
}
