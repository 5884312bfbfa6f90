"""A model. Each field is a key of the config: `model=small_conv model.width=16`."""

from torch import nn

import lockstep
from lockstep.core.fields import ranged
from lockstep.models.nets import Network


@lockstep.option("model")
class SmallConv(Network):
    """Two convolutions and a linear layer, for images of any size.

    Fields:
        width: channels of the first convolution; the second one has twice as many.
    """

    width: int = ranged(8, least=1, most=1024)

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(input_shape[0], self.width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(self.width, 2 * self.width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * self.width, classes),
        )
