"""timm's models behind one typed front."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.catalog import is_timm_model, timm_models
from lockstep.errors import InputError, did_you_mean
from lockstep.fields import Options, ranged, ruled
from lockstep.models.nets import Network


@dataclass(frozen=True, kw_only=True)
class Timm(Network):
    """Any model of timm by its name, with or without a weight tag.

    Fields:
        name: e.g. `resnet50d` or `resnet50d.ra2_in1k`.
        pretrained: start from timm's published weights (downloaded once to its cache).
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth.
        options: further arguments of the model's constructor.
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
                few = f" It has {', '.join(published)}." if published else ""
                raise InputError(f"model.name is {self.name!r}, but timm has no such weights of {architecture}.{few}")

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        import timm

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
        except Exception as error:  # timm's constructors and its downloads raise what they please
            what = " with its published weights" if self.pretrained else ""
            raise InputError(
                f"model={self.name}{what} cannot be built for images of {channels}x{height}x{width} "
                f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else 'no reason given'})"
                + ("; model.pretrained=false starts from random weights" if self.pretrained else "")
            ) from error
        return model


class Stem(enum.Enum):
    """How a network enters: 7x7 at stride 2 and a pool, or 3x3 at stride 1 and none."""

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
