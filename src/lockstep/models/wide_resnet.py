"""Wide residual networks for images of about 32x32, which neither timm nor torchvision has."""

import itertools

from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.options import option
from lockstep.core.errors import InputError
from lockstep.core.fields import ranged
from lockstep.models.nets import Network

WIDTHS = (16, 32, 64)  # channels of the three groups of blocks, for width 1


@option("model", "wide_resnet")
class WideResNet(Network):
    """A wide residual network for images of about 32x32, such as WRN-28-10 with 36.5 M parameters (Zagoruyko and
    Komodakis 2016, arXiv 1605.07146).
    """

    # layers of convolutions: 6 n + 4, with n blocks in each of three groups
    depth: int = ranged(28, least=10, most=1000)
    width: int = ranged(10, least=1, most=100)  # the groups have 16, 32 and 64 times as many channels
    # probability between the two convolutions of a block; the paper also has 0.3
    dropout: float = ranged(0.0, least=0, below=1)

    def __post_init__(self) -> None:
        if self.depth % 6 != 4:
            near = self.depth - (self.depth - 4) % 6
            raise InputError(
                f"model.depth is {self.depth}, expected 6 n + 4, n blocks in each group: model.depth={near}"
            )

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        channels = [WIDTHS[0], *(self.width * channels for channels in WIDTHS)]
        blocks = [
            Block(inputs if number == 0 else outputs, outputs, 2 if number == 0 and group else 1, self.dropout)
            for group, (inputs, outputs) in enumerate(itertools.pairwise(channels))
            for number in range((self.depth - 4) // 6)
        ]
        head = (nn.BatchNorm2d(channels[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        network = nn.Sequential(_conv(input_shape[0], WIDTHS[0], 3), *blocks, *head, nn.Linear(channels[-1], classes))
        nn.init.zeros_(network[-1].bias)  # type: ignore[arg-type]
        return network


class Block(nn.Module):
    """Two convolutions, each after its batch norm and ReLU; a shortcut of other size begins behind the first ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), _conv(inputs, outputs, 3, stride)
        self.norm2, self.conv2 = nn.BatchNorm2d(outputs), _conv(outputs, outputs, 3)
        self.dropout = nn.Dropout(dropout)
        self.shortcut = _conv(inputs, outputs, 1, stride) if inputs != outputs else None

    def forward(self, features: Tensor) -> Tensor:
        active = F.relu(self.norm1(features))
        shortcut = features if self.shortcut is None else self.shortcut(active)
        inner = self.dropout(F.relu(self.norm2(self.conv1(active))))
        return shortcut + self.conv2(inner)


def _conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the side at stride 1, with the initial weights of He et al. 2015."""
    layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
