"""The augmentations: random changes of training images, drawn by the key of each example."""

from lockstep.data.transforms.augment import Auto, CropFlip, NoAugment, RandomResizedCrop
from lockstep.data.transforms.policies import (
    AugMix,
    AutoAugment,
    Policy,
    RandAugment,
    ThreeAugment,
    TimmRandAugment,
    TrivialAugment,
)
