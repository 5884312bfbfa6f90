"""The operations of the augmentation policies, for a whole batch at once.

Each of four kinds is computed for all samples together: a grid moves pixels, a table of 256 entries per channel maps
values, a blend with a degenerate image changes colour and sharpness, and a blur. A CPU computes a kind only for the
samples that drew it; a GPU would have to wait to count those.

With `resample="nearest"` the pixels are torchvision's for tensors, to the bit; with `bilinear` and `bicubic` they are
Pillow's, which timm and torchvision's training scripts use.
"""

import functools
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from lockstep.data.transforms.geometry import IDENTITY, RESAMPLE, ROTATE, SHEAR_X, moved, resampled

BRIGHTNESS, CONTRAST, POSTERIZE, SOLARIZE, SOLARIZE_ADD, INVERT, AUTOCONTRAST, EQUALIZE = range(6, 14)
COLOR, SHARPNESS, BLUR = range(14, 17)
# Values that the CPU works on at a time: few enough that temporary memory is reused, and fewer if they have 8 bytes.
CPU_VALUES, CPU_VALUES_PILLOW = 2**21, 2**18
MOST_BLUR = 2.0  # the largest standard deviation of a blur, in pixels, so that five pixels are enough for a pass

# An operation and its amount for each sample, int64 and float64 (B,). Amounts: the shear; pixels to the right or
# down; degrees; the change of brightness, contrast, colour and sharpness (-1 is black, flat, grey and soft); bits
# that are left; the first value that is inverted; what is added to values below 128; a blur's standard deviation.
Step = tuple[Tensor, Tensor]


def operate_all(
    images: Tensor, steps: Iterable[Step], *, resample: str, compiled: bool, fill: tuple[int, ...] = (0,)
) -> Tensor:
    """Apply operations one after another to the uint8 images (B, C, H, W), as `operate` does."""
    apply = compiled_operate() if compiled and images.is_cuda else operate
    steps = list(steps)
    if not steps:
        return images
    at_once = max(1, (CPU_VALUES_PILLOW if resample in RESAMPLE else CPU_VALUES) // max(1, images[:1].numel()))
    at_once = len(images) if images.is_cuda else at_once
    parts = list(images.split(at_once))
    for op, amount in steps:
        pieces = zip(parts, op.split(at_once), amount.split(at_once), strict=True)
        parts = [apply(*piece, resample, fill) for piece in pieces]
    return torch.cat(parts)


@functools.cache
def compiled_operate() -> Callable[..., Tensor]:
    """`operate`, compiled for each number of images when it first comes."""
    return torch.compile(operate, fullgraph=True, dynamic=False)


def operate(images: Tensor, op: Tensor, amount: Tensor, resample: str, fill: tuple[int, ...] = (0,)) -> Tensor:
    """Apply one operation to each of the uint8 images (B, C, H, W), see `Step`. `fill` is the colour outside."""
    if images.shape[1] != 3:
        op = torch.where(op == COLOR, IDENTITY, op)
    if min(images.shape[2:]) <= 2:  # all border
        op = torch.where(op == SHARPNESS, IDENTITY, op)
    pillow = resample in RESAMPLE
    move = partial(resampled, resample=resample) if pillow else moved
    kinds: dict[tuple[int, int], Callable[..., Tensor]] = {
        (SHEAR_X, ROTATE): partial(move, fill=fill),
        (BRIGHTNESS, EQUALIZE): partial(_mapped, pillow=pillow),
        (COLOR, SHARPNESS): partial(_blended, pillow=pillow),
        (BLUR, BLUR): _blurred,
    }
    changed = images.clone(memory_format=torch.contiguous_format)
    for (first, last), kind in kinds.items():
        changed = _where((op >= first) & (op <= last), kind, changed, images, op, amount)
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


def _mapped(images: Tensor, op: Tensor, amount: Tensor, pillow: bool) -> Tensor:
    """What maps values one by one, by a table of 256 entries per channel."""
    (ratio, rest), whole = _ratios(amount), amount.long()[:, None]
    threshold = amount.masked_fill(op == INVERT, 0).float()[:, None]
    values = torch.arange(256, device=images.device)
    pixels = images.flatten(2).long()
    mean = _where(op == CONTRAST, partial(_mean_grey, pillow=pillow), torch.zeros_like(ratio), images)[:, None]
    brighter = ratio[:, None] * values
    choices = {
        BRIGHTNESS: brighter,
        CONTRAST: mean + ratio[:, None] * (values - mean) if pillow else brighter + rest[:, None] * mean,
        POSTERIZE: values & (256 - 2 ** (8 - whole.clamp(0, 8))),
        SOLARIZE_ADD: values + whole * (values < 128),
    }
    table = torch.where(values >= threshold, 255 - values, values).float()
    for kind, entries in choices.items():
        table = torch.where((op == kind)[:, None], entries, table)
    tables = table.clamp_(0, 255).to(torch.uint8)[:, None].repeat(1, images.shape[1], 1)
    tables = _where(op >= AUTOCONTRAST, partial(_tables_by_histogram, pillow=pillow), tables, pixels, op)
    return tables.gather(2, pixels).view_as(images)


def _tables_by_histogram(pixels: Tensor, op: Tensor, pillow: bool) -> Tensor:
    """The tables (B, C, 256) of autocontrast and of equalize, from values (B, C, H * W)."""
    one = torch.ones((), dtype=torch.int32, device=pixels.device)
    count = torch.zeros((*pixels.shape[:2], 256), dtype=torch.int32, device=pixels.device)
    count.scatter_add_(2, pixels, one.expand_as(pixels))
    values = torch.arange(256, device=pixels.device)
    low = torch.where(count > 0, values, 255).amin(2, keepdim=True)
    high = torch.where(count > 0, values, 0).amax(2, keepdim=True)
    flat = low == high
    if pillow:
        scale = torch.full_like(low, 255).double() / (high - low)  # `255 / tensor` multiplies by the reciprocal
        stretched = values * scale + -low * scale
    else:
        stretched = (values - low) * (255 / (high - low).float())
    stretched = torch.where(flat, values, stretched).clamp(0, 255)
    step = (pixels.shape[2] - count.gather(2, high)) // 255
    before = count.cumsum(2) - count
    equalized = torch.where(step > 0, (before + step // 2) // step.clamp(min=1), values).clamp(0, 255)
    return torch.where((op == EQUALIZE)[:, None, None], equalized, stretched).to(torch.uint8)


def _blended(images: Tensor, op: Tensor, amount: Tensor, pillow: bool) -> Tensor:
    """Color (a blend with the grey image) and sharpness (a blend with the smoothed image)."""
    ratio, rest = (shares[:, None, None, None] for shares in _ratios(amount))
    other = images.clone(memory_format=torch.contiguous_format)
    other = _where(op == COLOR, partial(_grey, pillow=pillow), other, images)
    other = _where(op == SHARPNESS, _smoothed, other, images).float()
    if pillow:
        return other.add_((images.float() - other).mul_(ratio)).clamp_(0, 255).to(torch.uint8)
    return images.float().mul_(ratio).add_(other.mul_(rest)).clamp_(0, 255).to(torch.uint8)


def _ratios(amount: Tensor) -> tuple[Tensor, Tensor]:
    """The shares (B,) of an image and of the one it is blended with; they sum to 1, and may leave [0, 1].

    float32, as in torchvision and Pillow: values are truncated to integers, so the last bit matters.
    """
    ratio = 1 + amount
    return ratio.float(), (1 - ratio).float()


def _grey(images: Tensor, pillow: bool) -> Tensor:
    """Images of three channels in grey, with the same shape; other images unchanged."""
    if images.shape[1] != 3:
        return images
    red, green, blue = images.split(1, 1)
    if pillow:
        grey = (19595 * red.int() + 38470 * green.int() + 7471 * blue.int() + 2**15) >> 16
    else:
        grey = 0.2989 * red + 0.587 * green + 0.114 * blue
    return grey.to(torch.uint8).expand_as(images)


def _mean_grey(images: Tensor, pillow: bool) -> Tensor:
    """The mean grey value, float (B,), which Pillow rounds. It sums integers, so in any order."""
    grey = _grey(images, pillow)[:, :1] if images.shape[1] == 3 else images
    mean = grey.sum((1, 2, 3)) / (images.shape[2] * images.shape[3] * grey.shape[1])
    return (mean + 0.5).floor() if pillow else mean


def _smoothed(images: Tensor) -> Tensor:
    """A 3x3 mean with the centre weighted five times, as torchvision's and Pillow's; the border stays."""
    wide = images.short()  # exact, and faster than a convolution
    rows = (wide[..., :-2] + wide[..., 1:-1]).add_(wide[..., 2:])
    sums = (rows[..., :-2, :] + rows[..., 1:-1, :]).add_(rows[..., 2:, :]).add_(wide[..., 1:-1, 1:-1], alpha=4)
    smoothed = images.clone()
    smoothed[..., 1:-1, 1:-1] = sums.float().div_(13).round_()
    return smoothed


def _blurred(images: Tensor, op: Tensor, amount: Tensor) -> Tensor:
    """Pillow's Gaussian blur: three box blurs of each row, then of each column, in its fixed-point numbers."""
    variance = amount.float().clamp(max=MOST_BLUR).square() / 3
    whole = (((12 * variance.double() + 1).sqrt().float().double() - 1) / 2).floor().float()
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1) * (whole + 1)))
    inner = (torch.full_like(whole, 2**24) / ((whole + part) * 2 + 1)).long()
    outer = (2**24 - (2 * whole.long() + 1) * inner) // 2
    near, far = torch.where(whole >= 1, inner, outer), torch.where(whole >= 1, outer, 0)
    # Products of 32 bits without a sign, which wrap alike with one.
    inner, near, far = (weights[:, None, None, None].int() for weights in (inner, near, far))
    pixels = images.int()
    for _ in range(2):
        last = pixels.shape[3] - 1
        places = torch.arange(-2, last + 3, device=images.device).clamp(0, last)
        for _ in range(3):
            padded = pixels.index_select(3, places)
            pixels = (padded[..., 1:-3] + padded[..., 3:-1]).mul_(near).add_(padded[..., 2:-2] * inner)
            pixels.add_((padded[..., :-4] + padded[..., 4:]).mul_(far)).add_(2**23)
            pixels = pixels.bitwise_right_shift_(24).bitwise_and_(255)
        pixels = pixels.mT.contiguous()
    return pixels.to(torch.uint8, memory_format=torch.contiguous_format)
