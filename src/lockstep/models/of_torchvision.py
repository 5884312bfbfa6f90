"""torchvision's classifiers by name, with its published weights."""

from typing import Any, ClassVar

import torch
from torch import nn

from lockstep.config.options import TORCHVISION, models_of, option, tagged_names
from lockstep.core.errors import InputError, did_you_mean, reason_of
from lockstep.core.fields import INTERPOLATIONS, TEXT, choice, in_config, mapping, ruled
from lockstep.core.model import Convolution, head_layers
from lockstep.core.model_card import INTERPOLATION, TrainedInput
from lockstep.models.nets import Network
from lockstep.models.zoo import built, cached_file, unreachable

# Their second heads, for training alone, would make the output a tuple.
TWO_HEADS = ("googlenet", "inception_v3")
PUBLISHED_CLASSES = 1000  # of published weights


@option("model")
class Torchvision(Network):
    """Any classifier of torchvision, with or without the name of its weights: `model=torchvision.resnet50`,
    `model=torchvision.resnet50.IMAGENET1K_V1`. TAB completes the names.
    """

    imports: ClassVar[tuple[str, ...]] = ("torchvision",)
    # torchvision's name of the model; `model=torchvision.NAME` sets it
    name: str = in_config("???", ruled("resnet50", TEXT))
    # start from torchvision's weights (downloaded once): those that the name has, or the best. `auto`: if they are on
    # this machine or can be downloaded
    pretrained: bool | str = choice(False, False, True, "auto")
    # further arguments of the network's constructor: `+model.options.KEY=VALUE`
    options: dict[str, Any] = mapping(most=16_384)

    @property
    def library_name(self) -> str:
        return f"{TORCHVISION}.{self.name}"

    @property
    def has_usual_size(self) -> bool:
        return not self.options

    @property
    def architecture(self) -> str:
        return self.name.partition(".")[0]

    @property
    def _weights(self) -> Any:
        from torchvision import models

        weights = models.get_model_weights(self.architecture)
        tag = self.name.partition(".")[2]
        return weights[tag] if tag else weights.DEFAULT

    def check(self) -> None:
        names = models_of(TORCHVISION)
        if self.architecture not in names:
            hint = did_you_mean(self.architecture, names)
            raise InputError(f"model.name is {self.name!r}, which torchvision does not have.{hint}")
        published = tagged_names(f"{TORCHVISION}.{self.architecture}")
        if self.name != self.architecture and self.library_name not in published:
            raise InputError(
                f"model.name is {self.name!r}, but torchvision has no such weights, expected one of "
                f"{', '.join(published)}"
            )
        if reserved := sorted({"weights", "progress", "num_classes"} & set(self.options)):
            raise InputError(f"model.options.{reserved[0]} is chosen by other keys; remove it")

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        from torchvision import models

        self.check()
        channels, height, _ = input_shape
        if channels != 3:
            raise InputError(
                f"model={self.library_name} takes images of 3 channels, and the data set has {channels}; use "
                "a model of timm, such as model=resnet50"
            )
        options = dict(self.options)
        if self.architecture.startswith("vit_"):
            options.setdefault("image_size", height)
        if self.architecture in TWO_HEADS:
            options |= {"aux_logits": False, "init_weights": True}
        weights = self._fetched() if self.pretrained else None
        if weights is None:
            options["num_classes"] = classes

        def make() -> nn.Module:
            # A RegNet computes its widths by tensors, which needs numbers.
            home = torch.get_default_device()
            with torch.device("cpu" if self.architecture.startswith("regnet") else home):
                model: nn.Module = models.get_model(self.architecture, weights=weights, **options).to(home)
            if weights is not None and classes != PUBLISHED_CLASSES:
                _replace_head(model, classes)
            return model

        usual = int(self._weights.transforms().crop_size[0])
        return built(make, input_shape, name=self.library_name, usual=usual, pretrained=bool(self.pretrained))

    def trained_input(self) -> TrainedInput:
        usual = self._weights.transforms()
        (size,), (resized,), interpolation = usual.crop_size, usual.resize_size, usual.interpolation.value
        return TrainedInput(
            input_shape=(3, size, size),
            eval_crop=size / resized,
            mean=tuple(usual.mean),
            std=tuple(usual.std),
            interpolation=interpolation if interpolation in INTERPOLATIONS else INTERPOLATION,
        )

    def prepare(self) -> None:
        if self.pretrained:
            self._fetched()

    def has_published(self) -> bool:
        return True

    def missing_weights(self) -> str:
        url = self._weights.url
        reason = "" if cached_file(url).is_file() else unreachable(url)
        return reason and f"the weights of {self.library_name} cannot be fetched ({reason})"

    def _fetched(self) -> Any:
        """The weights, as torchvision names them, in the cache of torch. Raises InputError."""
        url = self._weights.url
        file = cached_file(url)
        reason = "" if file.is_file() else unreachable(url)
        try:
            if not reason and not file.is_file():
                self._weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        except Exception as error:  # the library raises all kinds of errors
            reason = reason_of(error)
        if reason:
            raise InputError(
                f"model.pretrained: the weights of {self.library_name} cannot be fetched ({reason}); put {url} "
                f"into {file.parent}, or use model.pretrained=false"
            )
        return self._weights


def _replace_head(model: nn.Module, classes: int) -> None:
    name = head_layers(model)[-1]
    layer = model.get_submodule(name)
    if isinstance(layer, Convolution):
        head: nn.Module = nn.Conv2d(layer.in_channels, classes, kernel_size=1)
    else:
        assert isinstance(layer, nn.Linear)
        head = nn.Linear(layer.in_features, classes)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, head)
