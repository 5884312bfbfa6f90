"""Random resized crops of photographs, on the device or of image files while they are read."""

import functools
import math
from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.config.options import option
from lockstep.core.data_protocols import Apply, Augment, Source
from lockstep.core.errors import InputError
from lockstep.core.fields import choice, default_of, ranged
from lockstep.core.model_card import INTERPOLATION, PAD, SQUASH
from lockstep.core.rng import SampleRNG
from lockstep.data.transforms.augment import mirrored, phrase

# Tries to find a box that fits, as in torchvision. Their draws start at 2**20, far from all other draws.
TRIES, FIRST_TRY = 10, 2**20
COLOURED = (1, 3)  # the numbers of channels for which Pillow and torchvision have operations on colours


@option("augment", "standard")
class RandomResizedCrop(Augment):
    """A crop of random area and aspect ratio, resized, and a mirror: the usual augmentation for ImageNet.

    torchvision's `RandomResizedCrop(antialias=True)` (Szegedy et al. 2015), in which a box that does not fit is drawn
    again. The box is cut from stored squares on the device (`apply`), or from image files while they are read
    (`boxes`, then `after_crop`). Changes of colour are Pillow's, to the bit.
    """

    # `resized`, or `none`. `auto`: `none` with `dataset.fit=pad` or `squash`
    crop: str = choice("auto", "auto", "resized", "none")
    # smallest and largest area of the crop, as a share of the image
    scale: list[float] = ranged([0.08, 1.0], above=0, most=1)
    # smallest and largest ratio of width to height of the crop
    ratio: list[float] = ranged([3 / 4, 4 / 3], least=0.001, most=1000)
    flip: float = ranged(0.5, least=0, most=1)  # probability of a horizontal mirror
    # colour jitter: brightness, contrast and colour change by up to this share, in random order
    jitter: float = ranged(0.0, least=0, most=1)
    grey: float = ranged(0.0, least=0, most=1)  # probability of a grey image
    # probability of a Gaussian blur with a standard deviation of 0.1 to 2 pixels
    blur: float = ranged(0.0, least=0, most=1)
    solarize: float = ranged(0.0, least=0, most=1)  # probability of inverting the values from 128 on
    # on a GPU: compile the operations with `torch.compile`, which takes some ten seconds at the start, into some ten
    # kernels for an operation instead of more than 200. For small images and batches, where launching the kernels
    # takes long
    compile: bool = False

    def __str__(self) -> str:
        changes = {"jitter": self.jitter, "grey": self.grey, "blur": self.blur, "solarize": self.solarize}
        shares = [f"{name} {share:g}" for name, share in changes.items() if share]
        return phrase("random resized crop" * (self.crop != "none"), mirrored(self.flip), *shares)

    def __post_init__(self) -> None:
        box, shift = ("scale", "ratio"), ("pad", "reflect")
        unused = {"none": (*box, *shift), "pad": box, "resized": shift}.get(self.crop, ())
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in unused and value != default_of(field):
                raise InputError(
                    f"augment.{field.name} is {value}, but augment.crop={self.crop} does not use it; remove it "
                    f"or use augment.crop={'resized' if field.name in box else 'pad'}"
                )
        for name, bounds, usual in (("scale", self.scale, "[0.08,1]"), ("ratio", self.ratio, "[0.75,1.33]")):
            if len(bounds) != 2 or bounds[0] > bounds[1]:
                raise InputError(f"augment.{name} is {bounds}, expected two rising numbers: augment.{name}={usual}")

    def apply(
        self, images: Tensor, draws: SampleRNG, size: tuple[int, int], interpolation: str = INTERPOLATION
    ) -> Tensor:
        if self.crop == "none":
            return self.after_crop(images, draws, size)
        sizes = torch.stack([torch.full_like(draws.indices, side) for side in images.shape[-2:]], 1)
        return self.after_crop(resized_crops(images, self.boxes(draws, sizes), size, interpolation), draws, size)

    def on_device(self, interpolation: str, *, cropped: bool) -> Apply:
        return self.after_crop if cropped else functools.partial(self.apply, interpolation=interpolation)

    def for_data(self, source: Source) -> Augment:
        crop = "none" if source.fit in (PAD, SQUASH) else "resized"
        return replace(self, crop=crop) if self.crop == "auto" else self

    def check_channels(self, channels: int) -> None:
        have = images_have(channels)
        if channels != 3 and self.grey:
            raise InputError(f"augment.grey={self.grey:g} needs red, green and blue, but {have}: augment.grey=0")
        for name, share in (("jitter", self.jitter), ("solarize", self.solarize)):
            if channels not in COLOURED and share:
                raise InputError(
                    f"augment.{name}={share:g} is defined for grey and RGB, but {have}: augment.{name}=0"
                )

    def boxes(self, draws: SampleRNG, sizes: Tensor) -> Tensor:
        numbers = torch.arange(FIRST_TRY, FIRST_TRY + 4 * TRIES, device=sizes.device)
        box, fits = first_box(draws.uniform(numbers), sizes, self.scale, self.ratio, most=sizes)
        # The result if no try fits: the largest central box with an allowed ratio.
        height, width = (side[:, None] for side in sizes.double().unbind(1))
        low, high = self.ratio
        box_height = torch.minimum(height, (width / low).round()).clamp(min=1)
        box_width = torch.minimum(width, (height * high).round()).clamp(min=1)
        top, left = ((height - box_height) / 2).floor(), ((width - box_width) / 2).floor()
        central = torch.cat([top, left, box_height, box_width], 1)
        return torch.where(fits, box, central).long()

    def after_crop(self, images: Tensor, draws: SampleRNG, size: tuple[int, int]) -> Tensor:
        x = torch.arange(images.shape[-1], device=images.device)
        columns = torch.where((draws.uniform(4) < self.flip)[:, None], x.flip(0), x)
        return self.changed(images.gather(3, columns[:, None, None].expand_as(images)), draws)

    def changed(self, images: Tensor, draws: SampleRNG) -> Tensor:
        """What is done to the pixels after the crop and the mirror."""
        images = self.operate(images, draws)
        if not (self.jitter or self.grey or self.blur or self.solarize):
            return images
        from lockstep.data.transforms import steps  # only photographs change their colours
        from lockstep.data.transforms.operations import operate_all

        changes = steps.colours(draws, jitter=self.jitter, grey=self.grey, blur=self.blur, solarize=self.solarize)
        return operate_all(images, changes, resample="bilinear", compiled=self.compile)

    def operate(self, images: Tensor, draws: SampleRNG) -> Tensor:
        return images


def images_have(channels: int) -> str:
    return f"the images have {channels} channel{'s' * (channels != 1)}"


def first_box(
    numbers: Tensor, sizes: Tensor, scale: list[float], ratio: list[float], *, most: Tensor
) -> tuple[Tensor, Tensor]:
    """The first of `TRIES` boxes of random place, area and aspect ratio that fits, for each of n images.

    `numbers` are uniform in [0, 1), (n, 4 * TRIES); `sizes` and `most`, int64 (n, 2), the height and width of an
    image, and the largest ones of its box. The area is uniform between the bounds of `scale`, as a share of the
    image's, and width / height log-uniform between those of `ratio`. Returns the boxes, float64 (n, 4): top, left,
    height and width; and whether one fits, bool (n, 1).
    """
    height, width = (side[:, None] for side in sizes.double().unbind(1))
    (least_area, most_area), (low, high) = scale, ratio
    area, aspect, vertical, horizontal = numbers.double().view(-1, TRIES, 4).unbind(2)
    area = height * width * (least_area + area * (most_area - least_area))
    aspect = torch.exp(math.log(low) + aspect * (math.log(high) - math.log(low)))
    box_height, box_width = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()
    fits = (box_height > 0) & (box_width > 0) & (box_height <= most[:, :1]) & (box_width <= most[:, 1:])
    top = (vertical * (height - box_height + 1)).floor()
    left = (horizontal * (width - box_width + 1)).floor()
    first = fits.int().argmax(1)[:, None]
    box = torch.cat([side.gather(1, first) for side in (top, left, box_height, box_width)], 1)
    return box, fits.any(1, keepdim=True)


def resized_crops(images: Tensor, boxes: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """A box of each uint8 image (B, C, H, W), resized with antialiasing: uint8 (B, C, *size).

    On the CPU the pixels equal torchvision's `resized_crop` for uint8, which rounds after the columns and
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
    """Like `resized_crops`, without waiting for the device, and without sums that depend on the batch size."""
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
