"""timm's models, with typed options."""

from __future__ import annotations

import enum
import inspect
import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.config.timm_names import is_timm_model, timm_models
from lockstep.core.errors import InputError, did_you_mean
from lockstep.core.fields import ranged, ruled
from lockstep.core.rules import Options
from lockstep.models.nets import Network

# Options of timm's builders of the EfficientNet family that are not arguments of the network's class.
BATCH_NORM = frozenset({"bn_eps", "bn_momentum", "bn_tf"})
# Arguments that have config keys of their own, or that the data and the device determine.
NOT_OPTIONS = frozenset(
    {"self", "args", "kwargs", "num_classes", "in_chans", "drop_rate", "drop_path_rate", "device", "dtype"}
)


@dataclass(frozen=True, kw_only=True)
class Timm(Network):
    """Any model of timm by its name, with or without a weight tag.

    Fields:
        name: e.g. `resnet50d` or `resnet50d.ra2_in1k`.
        pretrained: start from timm's published weights (downloaded once to its cache).
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth.
        options: further arguments of the network's constructor. Other arguments of timm are refused, because they
            can name files and addresses to read weights from, and folders to write to.
    """

    name: str = "resnet50d"
    pretrained: bool = False
    drop_rate: float = ranged(0.0, least=0, below=1)
    drop_path_rate: float = ranged(0.0, least=0, below=1)
    options: dict[str, Any] = ruled({}, Options(most=65_536))

    def check(self) -> None:
        if not is_timm_model(self.name):
            raise InputError(
                f"model.name is {self.name!r}, which timm does not have."
                f"{did_you_mean(self.name.partition('.')[0], timm_models())}"
            )
        architecture, _, tag = self.name.partition(".")
        if tag:
            import timm

            published = timm.list_pretrained(f"{architecture}.*")
            if self.name not in published:
                available = f" It has {', '.join(published)}." if published else ""
                raise InputError(
                    f"model.name is {self.name!r}, but timm has no such weights of {architecture}.{available}"
                )
        if self.options and (unknown := set(map(str, self.options)) - (known := network_options(architecture))):
            raise InputError(
                f"model.options.{min(unknown)} does not shape the network of {architecture}, expected an argument of "
                f"its class; leave it out.{did_you_mean(min(unknown), known)}"
            )

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        import timm

        # Again, because a rank reads its config from a file, and a name or an option can make timm read other files.
        self.check()
        channels, height, width = input_shape
        options = dict(self.options)
        published = timm.get_pretrained_cfg(self.name)
        if published is not None and published.fixed_input_size and "img_size" not in options:
            options["img_size"] = (height, width)
        if self.drop_path_rate:
            options["drop_path_rate"] = self.drop_path_rate
        try:
            model: nn.Module = timm.create_model(
                self.name,
                pretrained=self.pretrained,
                num_classes=classes,
                in_chans=channels,
                drop_rate=self.drop_rate,
                **options,
            )
        except Exception as error:  # timm's constructors and downloads raise all kinds
            what = " with its published weights" if self.pretrained else ""
            raise InputError(
                f"model={self.name}{what} cannot be built for images of {channels}x{height}x{width} "
                f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else 'no reason given'})"
                + ("; model.pretrained=false starts from random weights" if self.pretrained else "")
            ) from error
        return model


def network_options(architecture: str) -> frozenset[str]:
    """The arguments of the classes that timm builds an architecture from, which only shape the network."""
    import timm

    module = sys.modules[timm.model_entrypoint(architecture).__module__]
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, nn.Module)]
    signatures = [inspect.signature(network).parameters for network in classes]
    names = frozenset(name for parameters in signatures if "num_classes" in parameters for name in parameters)
    return (names | BATCH_NORM) - NOT_OPTIONS


class Stem(enum.Enum):
    """The first layers: a 7x7 convolution of stride 2 and a pool, or a 3x3 convolution of stride 1 without one."""

    imagenet = "imagenet"
    cifar = "cifar"


@dataclass(frozen=True, kw_only=True)
class ResNet34(Network):
    """ResNet-34 (He et al. 2016), timm's, with a choice of stem for small images."""

    stem: Stem = Stem.imagenet

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        model = Timm(name="resnet34").build(classes, input_shape)
        if self.stem is Stem.cifar:
            model.conv1 = nn.Conv2d(input_shape[0], 64, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
            model.maxpool = nn.Identity()
        return model
