"""The augmentations: random changes of training images, drawn by the key of each example."""

from lockstep.data.transforms.augment import CropFlip, NoAugment, RandAugment, RandAugmentResized, RandomResizedCrop

__all__ = ["CropFlip", "NoAugment", "RandAugment", "RandAugmentResized", "RandomResizedCrop"]
