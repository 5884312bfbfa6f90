"""The augmentations: random changes of training images, drawn by the key of each example."""

from lockstep.data.transforms.augment import (
    Auto,
    CropFlip,
    NoAugment,
    RandAugment,
    RandAugmentResized,
    RandomResizedCrop,
)

__all__ = ["Auto", "CropFlip", "NoAugment", "RandAugment", "RandAugmentResized", "RandomResizedCrop"]
