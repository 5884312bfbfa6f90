"""The augmentations: random changes of training images, drawn by the key of each example."""

from lockstep.config.options import lazy_classes

__getattr__, __dir__ = lazy_classes("augment")
