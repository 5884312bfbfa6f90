"""RandAugment (Cubuk et al. 2020) for a whole batch at once, with torchvision's operations and magnitudes.

A sample's own random numbers choose its operations and their signs. There are three kinds of operations, each
computed for all samples together: a grid moves pixels, a table of 256 entries per sample and channel maps values, and
a blend with a degenerate image changes colour and sharpness. On the CPU, a kind is computed only for the samples that
drew one of its operations. On a GPU it is computed for all samples, because counting those samples would wait for the
device.
"""

import functools
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.core.rng import SampleRNG

IDENTITY, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y, ROTATE = range(6)
BRIGHTNESS, CONTRAST, POSTERIZE, SOLARIZE, AUTOCONTRAST, EQUALIZE = range(6, 12)
COLOR, SHARPNESS = range(12, 14)
OPERATIONS = 14
STRONGEST = 30  # the last of torchvision's 31 magnitudes
# torchvision's strengths of blends, in float32 as there: values are truncated to integers, so the last bit matters.
STRENGTHS: list[float] = torch.linspace(0, 0.9, STRONGEST + 1).tolist()
FIRST_DRAW = 16  # the crop uses the sample's numbers before this one
CPU_VALUES = 2**21  # values that the CPU works on at a time: few enough that temporary memory is reused


def randaugment(images: Tensor, draws: SampleRNG, *, ops: int, magnitude: int, compiled: bool = False) -> Tensor:
    """Apply `ops` random operations to each of the uint8 images (B, C, H, W), with a strength from 0 to 30.

    `compiled` uses `torch.compile` on a GPU: ten kernels or so for an operation instead of more than 200.
    """
    apply = compiled_operate() if compiled and images.is_cuda else operate
    at_once = len(images) if images.is_cuda else max(1, CPU_VALUES // max(1, images[:1].numel()))
    parts = list(images.split(at_once))
    for n in range(ops):
        op = (draws.uniform(FIRST_DRAW + 2 * n) * OPERATIONS).long().split(at_once)
        up = (draws.uniform(FIRST_DRAW + 2 * n + 1) < 0.5).split(at_once)
        parts = [apply(*arguments, magnitude) for arguments in zip(parts, op, up, strict=True)]
    return torch.cat(parts)


@functools.cache
def compiled_operate() -> Callable[..., Tensor]:
    """`operate`, compiled for each number of images when it first comes."""
    return torch.compile(operate, fullgraph=True, dynamic=False)


def operate(images: Tensor, op: Tensor, up: Tensor, magnitude: int) -> Tensor:
    """Apply one operation to each image.

    Args:
        images: uint8 (B, C, H, W).
        op: int64 (B,), which operation.
        up: bool (B,), the sign, for the operations that have one.
        magnitude: its strength, from 0 to 30.
    """
    if images.shape[1] != 3:
        op = torch.where(op == COLOR, IDENTITY, op)
    if min(images.shape[2:]) <= 2:  # all border
        op = torch.where(op == SHARPNESS, IDENTITY, op)
    changed = images.clone(memory_format=torch.contiguous_format)
    for kind, (first, last) in KINDS.items():
        changed = _where((op >= first) & (op <= last), partial(kind, magnitude=magnitude), changed, images, op, up)
    return changed


def _where(chosen: Tensor, change: Callable[..., Tensor], others: Tensor, *arguments: Tensor) -> Tensor:
    """`change(*arguments)` for the chosen samples, and `others` for the rest; `others` may be overwritten."""
    if chosen.is_cuda:
        return torch.where(chosen.view(-1, *[1] * (others.dim() - 1)), change(*arguments), others)
    indices = chosen.nonzero().squeeze(1)
    if len(indices) == 0:
        return others
    changed = change(*(argument.index_select(0, indices) for argument in arguments))
    _rows(others).index_copy_(0, indices, _rows(changed.contiguous()))
    return others


def _rows(tensor: Tensor) -> Tensor:
    """A view (B, row), as int64 where the bytes allow it: copying goes element by element."""
    rows = tensor.view(len(tensor), -1)
    return rows.view(torch.int64) if rows.shape[1] * rows.itemsize % 8 == 0 else rows


def _moved(images: Tensor, op: Tensor, up: Tensor, magnitude: int) -> Tensor:
    """Shear, translation, rotation, by the nearest pixel; pixels from outside the image are black."""
    height, width = images.shape[2:]
    level, sign = magnitude / STRONGEST, torch.where(up, 1.0, -1.0)

    def only(kind: int, value: float) -> Tensor:
        return torch.where(op == kind, sign * value, 0.0)[:, None, None]

    angle = only(ROTATE, math.pi / 6 * level)
    cosine, sine = angle.cos(), angle.sin()
    # torchvision shears around the upper left corner, rotates around the centre, and shifts by whole pixels.
    # float64 if float32 cannot represent all offsets in an image.
    dtype = torch.float32 if (height + 2) * (width + 2) < 2**24 else torch.float64
    y = torch.arange(height, dtype=dtype, device=images.device)[:, None] + 0.5
    x = torch.arange(width, dtype=dtype, device=images.device) + 0.5
    column = cosine * (x - width / 2) + (width / 2 - 0.5 - only(TRANSLATE_X, int(150 / 331 * width * level)))
    row = cosine * (y - height / 2) + (height / 2 - 0.5 - only(TRANSLATE_Y, int(150 / 331 * height * level)))
    column = column + (only(SHEAR_X, 0.3 * level) * y - sine * (y - height / 2))
    row = row + (only(SHEAR_Y, 0.3 * level) * x + sine * (x - width / 2))
    # Gather from an image with a black frame; positions outside of the image are clamped to the frame.
    offset = _nearest(row, height).add_(1).mul_(width + 2).add_(_nearest(column, width).add_(1)).long().flatten(1)
    framed = F.pad(images, [1, 1, 1, 1]).flatten(2)
    return framed.gather(2, offset[:, None].expand(-1, images.shape[1], -1)).view_as(images)


def _nearest(coordinate: Tensor, length: int) -> Tensor:
    """The nearest pixel, or the frame at -1 or `length`."""
    return coordinate.round_().clamp_(-1, length)


def _mapped(images: Tensor, op: Tensor, up: Tensor, magnitude: int) -> Tensor:
    """Brightness, contrast, posterize, solarize, autocontrast, equalize, by a table of 256 entries per channel."""
    level, (ratio, rest) = magnitude / STRONGEST, _ratios(up, magnitude)
    values = torch.arange(256, device=images.device)
    pixels = images.flatten(2).long()
    mean = _where(op == CONTRAST, _mean_grey, torch.zeros_like(ratio), images)
    choices = {
        BRIGHTNESS: ratio[:, None] * values,
        CONTRAST: ratio[:, None] * values + (rest * mean)[:, None],
        POSTERIZE: values & (256 - 2 ** round(4 * level)),
        SOLARIZE: torch.where(values >= 255 - 255 * level, 255 - values, values),
    }
    table = torch.zeros((len(images), 256), device=images.device)
    for kind, entries in choices.items():
        table = torch.where((op == kind)[:, None], entries, table)
    tables = table.clamp_(0, 255).to(torch.uint8)[:, None].repeat(1, images.shape[1], 1)
    tables = _where(op >= AUTOCONTRAST, _tables_by_histogram, tables, pixels, op)
    return tables.gather(2, pixels).view_as(images)


def _tables_by_histogram(pixels: Tensor, op: Tensor) -> Tensor:
    """The tables (B, C, 256) of autocontrast and of equalize, from values (B, C, H * W)."""
    one = torch.ones((), dtype=torch.int32, device=pixels.device)
    count = torch.zeros((*pixels.shape[:2], 256), dtype=torch.int32, device=pixels.device)
    count.scatter_add_(2, pixels, one.expand_as(pixels))
    values = torch.arange(256, device=pixels.device)
    low = torch.where(count > 0, values, 255).amin(2, keepdim=True)
    high = torch.where(count > 0, values, 0).amax(2, keepdim=True)
    flat = low == high
    stretched = (values - low) * (255 / (high - low).float())
    stretched = torch.where(flat, values, stretched).clamp(0, 255)
    step = (pixels.shape[2] - count.gather(2, high)) // 255
    before = count.cumsum(2) - count
    equalized = torch.where(step > 0, (before + step // 2) // step.clamp(min=1), values).clamp(0, 255)
    return torch.where((op == EQUALIZE)[:, None, None], equalized, stretched).to(torch.uint8)


def _blended(images: Tensor, op: Tensor, up: Tensor, magnitude: int) -> Tensor:
    """Color (a blend with the grey image) and sharpness (a blend with the blurred image)."""
    ratio, rest = (shares[:, None, None, None] for shares in _ratios(up, magnitude))
    other = _where(op == COLOR, _grey, images.clone(memory_format=torch.contiguous_format), images)
    other = _where(op == SHARPNESS, _blurred, other, images)
    return images.float().mul_(ratio).add_(other.float().mul_(rest)).clamp_(0, 255).to(torch.uint8)


def _ratios(up: Tensor, magnitude: int) -> tuple[Tensor, Tensor]:
    """The shares (B,) of an image and of the one it is blended with; they sum to 1, and may leave [0, 1]."""
    more = STRENGTHS[magnitude]
    return torch.where(up, 1 + more, 1 - more), torch.where(up, 1 - (1 + more), 1 - (1 - more))


def _grey(images: Tensor) -> Tensor:
    """Images of three channels in grey, with the same shape; other images unchanged."""
    if images.shape[1] != 3:
        return images
    red, green, blue = images.split(1, 1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue).to(torch.uint8).expand_as(images)


def _mean_grey(images: Tensor) -> Tensor:
    """The mean grey value, float (B,). It sums integers, so the order of the sum does not matter."""
    grey = _grey(images)[:, :1] if images.shape[1] == 3 else images
    return grey.sum((1, 2, 3), dtype=torch.int32) / (images.shape[2] * images.shape[3] * grey.shape[1])


def _blurred(images: Tensor) -> Tensor:
    """A 3x3 mean with the centre weighted five times, as torchvision's; the border stays."""
    wide = images.short()  # exact, and faster than a convolution
    rows = (wide[..., :-2] + wide[..., 1:-1]).add_(wide[..., 2:])
    sums = (rows[..., :-2, :] + rows[..., 1:-1, :]).add_(rows[..., 2:, :]).add_(wide[..., 1:-1, 1:-1], alpha=4)
    blurred = images.clone()
    blurred[..., 1:-1, 1:-1] = sums.float().div_(13).round_()
    return blurred


# The first and the last operation of each kind of operation.
KINDS: dict[Callable[..., Tensor], tuple[int, int]] = {
    _moved: (SHEAR_X, ROTATE),
    _mapped: (BRIGHTNESS, EQUALIZE),
    _blended: (COLOR, SHARPNESS),
}
