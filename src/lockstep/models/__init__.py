"""The networks: a few of our own, and all models of timm by name."""

from lockstep.models.nets import BasicNet, DigitNet, Linear, WhiteNet
from lockstep.models.zoo import ResNet34, Timm

__all__ = ["BasicNet", "DigitNet", "Linear", "ResNet34", "Timm", "WhiteNet"]
