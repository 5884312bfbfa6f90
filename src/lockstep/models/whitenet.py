"""A small VGG-like network after a fixed whitening of patches, for fast training on small photographs."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.options import option
from lockstep.core.errors import InputError
from lockstep.core.fields import ranged
from lockstep.models.nets import MaxPoolTo, Network, check_side

PATCH = 2  # side of a whitened patch, in pixels
SAMPLE = 5000  # the most training images that the whitening is computed from
SAMPLE_PIXELS = SAMPLE * 32**2  # and the most pixels in them: as floats they are 60 MB
CHUNK = 500  # images whose patches are in memory at a time
# Added to the variances, so that directions of almost no variance are not amplified.
VARIANCE_EPS = 5e-4
LOGIT_SCALE = 1 / 9


@option("model", "whitenet")
class WhiteNet(Network):
    """A whitening of 2x2 patches, three blocks of 3x3 convolutions that each halve the image, and a linear layer.

    Modelled on the networks of the CIFAR-10 speed records (Jordan 2024, "94% on CIFAR-10 in 3.29 seconds", arXiv
    2404.00498). The first layer is frozen: its filters are the principal directions of the training images' patches,
    each with both signs, scaled to unit variance. Convolutions start as the identity. Batch norm has a bias but no
    weight, and its running statistics follow the last few batches.
    """

    widths: list[int] = ranged([64, 256, 256], least=1, most=16_384)
    depth: int = ranged(2, least=1, most=100)

    def __post_init__(self) -> None:
        if len(self.widths) != 3:
            raise InputError(
                f"model.widths is {self.widths}, expected three numbers, a block each: model.widths=[64,256,256]"
            )

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        check_side("whitenet", input_shape, least=8 + PATCH - 1, usual=32)
        channels = input_shape[0]
        whitening = nn.Conv2d(channels, 2 * channels * PATCH**2, PATCH)
        whitening.weight.requires_grad_(False)
        nn.init.zeros_(whitening.bias)  # type: ignore[arg-type]
        sizes = [whitening.out_channels, *self.widths]
        blocks = [_block(inputs, outputs, self.depth) for inputs, outputs in itertools.pairwise(sizes)]
        return nn.Sequential(
            whitening,
            nn.GELU(),
            *blocks,
            MaxPoolTo(1),
            nn.Flatten(),
            nn.Linear(self.widths[-1], classes, bias=False),
            _Scaled(),
        )

    def initialise(self, model: nn.Module, images: Callable[[int], Tensor]) -> None:
        assert isinstance(model, nn.Sequential)
        whitening = model[0]
        assert isinstance(whitening, nn.Conv2d)
        with torch.no_grad():
            pixels = images(1)[0, 0].numel()
            whitening.weight.copy_(whitening_filters(images(max(1, min(SAMPLE, SAMPLE_PIXELS // pixels)))))


def whitening_filters(images: Tensor) -> Tensor:
    """Filters (2 k, C, 2, 2) whose outputs on the patches of `images` (n, C, H, W) are uncorrelated with variance 1.

    k is C * 4; the second half is the negative of the first. Computed in float64 on the CPU, so that all ranks get
    the same filters.
    """
    channels = images.shape[1]
    size = channels * PATCH**2
    moments, count = torch.zeros((size, size), dtype=torch.float64), 0
    for chunk in images.cpu().split(CHUNK):
        patches = F.unfold(chunk.double(), PATCH).transpose(0, 1).flatten(1)
        moments += patches @ patches.T
        count += patches.shape[1]
    variances, directions = torch.linalg.eigh(moments / count)
    filters = (directions / (variances + VARIANCE_EPS).sqrt()).T.reshape(size, channels, PATCH, PATCH)
    return torch.cat([filters, -filters])


class _Scaled(nn.Module):
    """Scales the logits down, so that the linear layer can train at a high learning rate."""

    def forward(self, logits: Tensor) -> Tensor:
        return logits * LOGIT_SCALE


class _Residual(nn.Module):
    """Convolutions with a shortcut around them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, features: Tensor) -> Tensor:
        return F.gelu(features + self.layers(features))


def _block(inputs: int, outputs: int, depth: int) -> nn.Sequential:
    """`depth` convolutions; the pooling after the first one halves the image."""
    first_layers = [_convolution(inputs, outputs), nn.MaxPool2d(2), _norm(outputs), nn.GELU()]
    layers: list[nn.Module] = []
    for _ in range(depth - 1):
        layers += [_convolution(outputs, outputs), _norm(outputs), nn.GELU()]
    return nn.Sequential(*first_layers, *([_Residual(*layers[:-1])] if depth > 2 else layers))


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight[:inputs].detach())
    return layer


def _norm(channels: int) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(channels, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer
