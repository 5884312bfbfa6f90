"""The networks: a few of our own, and all of timm's by name."""

from lockstep.models.nets import BasicNet, DigitNet
from lockstep.models.zoo import ResNet34, Timm

__all__ = ["BasicNet", "DigitNet", "ResNet34", "Timm"]
