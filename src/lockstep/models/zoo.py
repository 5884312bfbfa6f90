"""timm's models, with typed options."""

import inspect
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from lockstep.config.options import is_timm_model, timm_models
from lockstep.core.errors import InputError, did_you_mean
from lockstep.core.fields import choice, ranged, ruled
from lockstep.core.model import forward_on_meta
from lockstep.core.model_card import INTERPOLATION, INTERPOLATIONS, TrainedInput
from lockstep.core.rules import Options, Text
from lockstep.models.nets import Network, TimeLimit, TooSlowError
from lockstep.models.published import published_weights

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

    imports: ClassVar[tuple[str, ...]] = ("timm",)
    name: str = ruled("resnet50d", Text())
    pretrained: bool = False
    drop_rate: float = ranged(0.0, least=0, below=1)
    drop_path_rate: float = ranged(0.0, least=0, below=1)
    options: dict[str, Any] = ruled({}, Options(most=16_384))

    def check(self) -> None:
        architecture, _, tag = self.name.partition(".")
        if not is_timm_model(self.name):
            raise InputError(
                f"model.name is {self.name!r}, which timm does not have.{did_you_mean(architecture, timm_models())}"
            )
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

        # Check again: a rank reads its config from a file, and a name or an option can make timm read other files.
        self.check()
        channels, height, width = input_shape
        options = dict(self.options)
        if (architecture := self.name.partition(".")[0]).endswith("_enc"):
            others = [name for name in timm_models() if not name.endswith("_enc")]
            raise InputError(
                f"model={self.name} is the encoder of a model, and gives no logits; choose a whole one."
                f"{did_you_mean(architecture.removesuffix('_enc'), others)}"
            )
        if self._cfg is not None and self._cfg.fixed_input_size and "img_size" not in options:
            options["img_size"] = (height, width)
        if self.drop_path_rate:
            options["drop_path_rate"] = self.drop_path_rate
        if self.pretrained:
            options["pretrained_cfg_overlay"] = published_weights(self.name)
        try:
            model: nn.Module = timm.create_model(
                self.name,
                pretrained=self.pretrained,
                num_classes=classes,
                in_chans=channels,
                drop_rate=self.drop_rate,
                **options,
            )
            if max(height, width) != self._usual_size() and not any(tensor.is_meta for tensor in model.parameters()):
                # A size that the model cannot take raises before training. A recurrent network, whose every position
                # takes Python's time, takes any size.
                with suppress(TooSlowError), TimeLimit():
                    forward_on_meta(model, input_shape)
        except InputError:
            raise
        except Exception as error:  # timm's constructors and networks raise all kinds of errors
            raise self._not_built(error, input_shape) from error
        return model

    def trained_input(self) -> TrainedInput | None:
        cfg = self._cfg
        if cfg is None or not (cfg.hf_hub_id or cfg.url):
            return None
        return TrainedInput(
            size=max(cfg.input_size[1:]),
            crop=min(1.0, cfg.crop_pct or 1.0),
            mean=tuple(cfg.mean),
            std=tuple(cfg.std),
            interpolation=cfg.interpolation if cfg.interpolation in INTERPOLATIONS else INTERPOLATION,
        )

    def prepare(self) -> None:
        if self.pretrained:
            published_weights(self.name)

    def _not_built(self, error: Exception, input_shape: tuple[int, int, int]) -> InputError:
        """The error for a model that cannot be built for the images, or does not accept them."""
        channels, height, width = input_shape
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        weights = " with its published weights" if self.pretrained else ""
        remedies = ["model.pretrained=false starts from random weights"] if self.pretrained else []
        size = self._usual_size()
        if size is not None and (height, width) != (size, size):
            remedies.insert(0, f"use dataset.input_size={size}, the size that it was made for")
        return InputError(
            f"model={self.name}{weights} cannot be built for images of {channels}x{height}x{width} "
            f"({type(error).__name__}: {reason})" + "".join(f"; {remedy}" for remedy in remedies)
        )

    @property
    def _cfg(self) -> Any:
        """timm's facts about the model and its weights; None if it has none."""
        import timm

        return timm.get_pretrained_cfg(self.name)

    def _usual_size(self) -> int | None:
        """The side of the images that timm made the model for; None if timm does not say."""
        return max(self._cfg.input_size[1:]) if self._cfg is not None and self._cfg.input_size else None


def network_options(architecture: str) -> frozenset[str]:
    """The arguments of the classes that timm builds an architecture from, which only shape the network."""
    import timm

    module = sys.modules[timm.model_entrypoint(architecture).__module__]
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, nn.Module)]
    signatures = [inspect.signature(network).parameters for network in classes]
    names = frozenset(name for parameters in signatures if "num_classes" in parameters for name in parameters)
    return (names | BATCH_NORM) - NOT_OPTIONS


@dataclass(frozen=True, kw_only=True)
class ResNet34(Network):
    """ResNet-34 (He et al. 2016), timm's, with a choice of stem for small images.

    Fields:
        stem: the first layers: `imagenet`, a 7x7 convolution of stride 2 and a pool; or `cifar`, a 3x3 convolution
            of stride 1 without one.
    """

    imports: ClassVar[tuple[str, ...]] = ("timm",)
    stem: str = choice("imagenet", "imagenet", "cifar")

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        model = Timm(name="resnet34").build(classes, input_shape)
        if self.stem == "cifar":
            model.conv1 = nn.Conv2d(input_shape[0], 64, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
            model.maxpool = nn.Identity()
        return model
