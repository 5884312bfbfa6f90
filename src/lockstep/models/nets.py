"""Small convolutional networks that need no library, and checks of any model before it is built."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config.options import option
from lockstep.core.errors import InputError
from lockstep.core.fields import choice, ranged
from lockstep.core.protocols import Model
from lockstep.runtime.host import check_room

NORM_GROUPS = 8
PATCH = 2  # side of a whitened patch, in pixels
SAMPLE = 5000  # the most training images that the whitening is computed from
SAMPLE_PIXELS = SAMPLE * 32**2  # and the most pixels in them: as floats they are 60 MB
PATCH_CHUNK = 500  # images that have their patches in memory at a time
# Added to the variances, so that directions of almost no variance are not amplified.
VARIANCE_EPS = 5e-4
LOGIT_SCALE = 1 / 9


@dataclass(frozen=True, kw_only=True)
class Network(Model):
    """The base class of all models."""

    channels_last: bool = False  # NHWC memory order, which GPU convolutions prefer
    # compute the activations of each block again in the backward pass: less memory, about a third more time
    grad_checkpointing: bool = False
    # use `torch.compile`: the first steps take much longer, later ones less; see docs/performance.md#compute
    compile: bool = False
    # `default`: torch's default; `reduce_overhead`: CUDA graphs; `max_autotune`: time many kernels and take the
    # fastest
    compile_mode: str = choice("default", "default", "reduce_overhead", "max_autotune")


def without_weights(option: Model) -> Model:
    """The same model with random weights: for a caller that loads other weights, or needs only the shapes."""
    return replace(cast(Any, option), pretrained=False) if option.pretrained else option


def sketch(option: Model, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """The model on the meta device: names and shapes only. Raises InputError if it cannot be built.

    A few bytes of a config or of a weights file can describe a model of any size. So it is sketched before it is
    built, which takes no memory.
    """
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return without_weights(option).build(classes, input_shape)


def check_model_size(model: nn.Module, copies: int = 1) -> None:
    """Raise InputError if a model with `copies` copies of its parameters does not fit into this machine's memory."""
    size = sum(parameter.numel() for parameter in model.parameters())
    parameters, buffers = (sum(tensor.nbytes for tensor in part) for part in (model.parameters(), model.buffers()))
    purpose = f"{copies} x {size:,} parameters and the buffers"
    check_room(purpose, copies * parameters + buffers, "a smaller model or input")


def check_side(model: str, input_shape: tuple[int, int, int], *, least: int, usual: int) -> None:
    """Raise InputError if a side of the images has fewer than `least` pixels."""
    _, height, width = input_shape
    if min(height, width) < least:
        raise InputError(
            f"model={model} needs images of {least}x{least} pixels or more, the data set gives {height}x{width}; "
            f"use dataset.input_size={usual}"
        )


class MaxPoolTo(nn.Module):
    """Max pooling of a map of any size to `cells` by `cells`, where `cells` is 1 or 2.

    It computes AdaptiveMaxPool2d by MaxPool2d, because the gradient of AdaptiveMaxPool2d has no deterministic kernel
    on CUDA, so `repro=strict` could not train with it.
    """

    def __init__(self, cells: int) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, features: Tensor) -> Tensor:
        strides = [size // self.cells for size in features.shape[2:]]
        windows = [size - (self.cells - 1) * stride for size, stride in zip(features.shape[2:], strides, strict=True)]
        return F.max_pool2d(features, windows, strides)


@option("model")
class Linear(Network):
    """Softmax regression on the pixels: the smallest network, and the baseline for the others."""

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))


@option("model", "basicnet")
class BasicNet(Network):
    """The network of the MNIST tutorials (pytorch/examples): conv 1-32-3, conv 32-64-3, pool, 9216-128-10, with
    dropout. 1.2 M parameters at 28x28; for images of 6x6 or more.
    """

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        check_side("basicnet", input_shape, least=6, usual=28)
        channels, height, width = input_shape
        return nn.Sequential(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, classes),
        )


@option("model", "digitnet")
class DigitNet(Network):
    """Three convolutions with group norm, for images down to 4x4: 0.1 M parameters, no batch norm."""

    # channels of the first layer, a multiple of 8; the other two have twice and four times as many
    width: int = ranged(32, least=NORM_GROUPS, most=16_384)
    dropout: float = ranged(0.1, least=0, below=1)  # dropout rate before the last layer

    def __post_init__(self) -> None:
        if self.width % NORM_GROUPS:
            raise InputError(f"model.width is {self.width}, expected a multiple of {NORM_GROUPS}: model.width=32")

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        check_side("digitnet", input_shape, least=4, usual=8)
        sizes = (input_shape[0], self.width, 2 * self.width, 4 * self.width)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(NORM_GROUPS, outputs), nn.ReLU()]
        layers.insert(6, nn.MaxPool2d(2))
        return nn.Sequential(
            *layers,
            MaxPoolTo(2),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(sizes[-1] * 4, classes),
        )


@option("model", "whitenet")
class WhiteNet(Network):
    """Trains fast on small photographs: a layer that whitens 2x2 patches (computed from 5,000 training images, and
    frozen), three blocks of convolutions, and a linear layer. 2 M parameters; for images of 9x9 or more.

    Modelled on the networks of the CIFAR-10 speed records (Jordan 2024, "94% on CIFAR-10 in 3.29 seconds", arXiv
    2404.00498). The filters of the first layer are the principal directions of the training images' patches, each
    with both signs, scaled to unit variance. Convolutions are 3x3 and start as the identity, and each block halves
    the image. Batch norm has a bias but no weight, and its running statistics follow the last few batches.
    """

    widths: list[int] = ranged([64, 256, 256], least=1, most=16_384)  # channels of the three blocks
    # convolutions per block; with three or more, a shortcut skips all but the first
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
        return nn.Sequential(
            whitening,
            nn.GELU(),
            *(_block(inputs, outputs, self.depth) for inputs, outputs in itertools.pairwise(sizes)),
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
    for chunk in images.cpu().split(PATCH_CHUNK):
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
