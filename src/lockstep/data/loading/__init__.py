"""The loaders: how the examples of each step reach the device that trains on them."""

from lockstep.config.options import lazy_classes

__getattr__, __dir__ = lazy_classes("loader")
