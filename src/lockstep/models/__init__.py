"""The networks: a few of our own, and all models of timm and torchvision by name."""

from lockstep.models.nets import BasicNet, DigitNet, Linear, WhiteNet
from lockstep.models.of_torchvision import Torchvision
from lockstep.models.wide_resnet import WideResNet
from lockstep.models.zoo import ResNet34, Timm
