"""The networks: a few of our own, and all models of timm and torchvision by name."""

from lockstep.config.options import lazy_classes

__getattr__, __dir__ = lazy_classes("model")
