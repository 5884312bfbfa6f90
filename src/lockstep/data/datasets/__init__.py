"""The data sets: each has a training and an evaluation split, of pixels in memory or of files that are decoded."""

from lockstep.config.options import lazy_classes

__getattr__, __dir__ = lazy_classes("dataset")
