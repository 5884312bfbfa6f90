"""Shear, translation and rotation of a batch: by the nearest pixel, as torchvision's, or mixed, as Pillow's."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

IDENTITY, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE = range(6)
Amounts = Callable[[int], Tensor]  # of an operation, (B, 1, 1), and 0 for samples with another one


def moved(images: Tensor, op: Tensor, amount: Tensor, fill: tuple[int, ...]) -> Tensor:
    height, width = images.shape[2:]
    amount = torch.where(op == ROTATE, amount.deg2rad(), amount).float()
    row, column = _torchvisions(lambda kind: torch.where(op == kind, amount, 0.0)[:, None, None], images)
    if (height + 2) * (width + 2) >= 2**24:  # float32 cannot represent all offsets in the image
        row, column = row.double(), column.double()
    # Gather from an image with a frame of the fill; positions outside of the image are clamped to the frame.
    row, column = row.round_().clamp_(-1, height).add_(1), column.round_().clamp_(-1, width).add_(1)
    offset = row.mul_(width + 2).add_(column).long().flatten(1)
    channels = images.split(images.shape[1] // len(fill), 1)
    framed = torch.cat([F.pad(part, [1] * 4, value=value) for part, value in zip(channels, fill, strict=True)], 1)
    return framed.flatten(2).gather(2, offset[:, None].expand(-1, images.shape[1], -1)).view_as(images)


def _centres(images: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    height, width = images.shape[2:]
    y = torch.arange(height, dtype=dtype, device=images.device)[:, None] + 0.5
    return y, torch.arange(width, dtype=dtype, device=images.device) + 0.5


def _torchvisions(only: Amounts, images: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (B, H, W) as torchvision computes them, on a CPU that multiplies and adds in one instruction.

    It shears around the upper left corner and rotates around the centre. Where a position is half-way between pixels,
    its last bit decides.
    """
    height, width = images.shape[2:]
    y, x = _centres(images, torch.float32)
    y, x = (y - height / 2).double(), x - width / 2
    cosine, sine = only(ROTATE).double().cos().float(), only(ROTATE).double().sin().float()

    def along(by_x: Tensor, by_y: Tensor, start: Tensor, side: int) -> Tensor:
        by_x, by_y, start = by_x / (side / 2), by_y / (side / 2), start / (side / 2)
        position = ((x * by_x).double() + y * by_y.double()).float().add_(start)  # y * by_y is exact in float64
        return position.add_(1).mul_(side / 2).sub_(0.5)

    column = along(cosine, only(SHEAR_X) - sine, only(SHEAR_X) * (height / 2) - only(TRANSLATE_X).trunc(), width)
    row = along(only(SHEAR_Y) + sine, cosine, only(SHEAR_Y) * (width / 2) - only(TRANSLATE_Y).trunc(), height)
    return row, column


def resampled(images: Tensor, op: Tensor, amount: Tensor, fill: tuple[int, ...], resample: str) -> Tensor:
    """Shear, translation, rotation with Pillow's bilinear or bicubic filter, in float64 as there."""
    height, width = images.shape[2:]

    def only(kind: int) -> Tensor:
        return torch.where(op == kind, amount, 0.0)[:, None, None]

    angle = -only(ROTATE).remainder(360).deg2rad()
    cosine, sine = (value.mul(1e15).round().div(1e15) for value in (angle.cos(), angle.sin()))
    y, x = _centres(images, torch.float64)
    centred = [cosine * (-width / 2) + sine * (-height / 2), -sine * (-width / 2) + cosine * (-height / 2)]
    column = cosine * x + (only(SHEAR_X) + sine) * y + (centred[0] + width / 2 - only(TRANSLATE_X))
    row = (only(SHEAR_Y) - sine) * x + cosine * y + (centred[1] + height / 2 - only(TRANSLATE_Y))
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    column, row = column - 0.5, row - 0.5
    left, top = column.floor(), row.floor()
    reach, mix = RESAMPLE[resample]
    pixels = images.flatten(2).double()
    columns = [(left + n).clamp_(0, width - 1).long() for n in reach]

    def line(shift: int) -> Tensor:
        start = (top + shift).clamp_(0, height - 1).long().mul_(width)
        indices = ((start + n).flatten(1)[:, None].expand(-1, images.shape[1], -1) for n in columns)
        return mix(*(pixels.gather(2, index).view_as(images) for index in indices), (column - left)[:, None])

    mixed = mix(*map(line, reach), (row - top)[:, None]).clamp_(0, 255).to(torch.uint8)
    colour = torch.cat([images.new_full((1, 1, 1, 1), value) for value in fill], 1)  # no copy: that waits for a GPU
    return torch.where(inside[:, None], mixed, colour)


def _cubic(a: Tensor, b: Tensor, c: Tensor, d: Tensor, share: Tensor) -> Tensor:
    square = (a - b).mul_(2).add_(c).sub_(d)
    result = (b - a).sub_(c).add_(d).mul_(share).add_(square)
    return result.mul_(share).sub_(a - c).mul_(share).add_(b)


# The pixels that Pillow's filter mixes, from the one before the position on, and how.
RESAMPLE: dict[str, tuple[range, Callable[..., Tensor]]] = {
    "bilinear": (range(2), lambda first, second, share: (second - first).mul_(share).add_(first)),
    "bicubic": (range(-1, 3), _cubic),
}
