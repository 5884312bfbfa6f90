"""timm's models, with typed options."""

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch
from torch import nn

from lockstep.config.options import TIMM, model_of, models_of, option
from lockstep.core.errors import InputError, did_you_mean, reason_of
from lockstep.core.fields import INTERPOLATIONS, TEXT, choice, in_config, mapping, ranged, ruled
from lockstep.core.model import forward_on_meta
from lockstep.core.model_card import INTERPOLATION, TrainedInput
from lockstep.models.nets import Network

REACH_S = 5.0  # how long the network may take to answer
# Options of timm's builders of the EfficientNet family that are not arguments of the network's class.
BATCH_NORM = frozenset({"bn_eps", "bn_momentum", "bn_tf"})
# Arguments that have their own config keys, or that the data and the device determine.
NOT_OPTIONS = frozenset(
    {"self", "args", "kwargs", "num_classes", "in_chans", "drop_rate", "drop_path_rate", "device", "dtype"}
)


@option("model")
class Timm(Network):
    """Any model of timm, with or without the tag of its weights: `model=resnet50d`, `model=resnet50d.ra2_in1k`. TAB
    completes the names. `model=timm model.name=resnet50d` is the same.
    """

    imports: ClassVar[tuple[str, ...]] = ("timm",)
    name: str = in_config("???", ruled("resnet50d", TEXT))  # timm's name of the model; `model=NAME` sets it
    # start from timm's published weights (downloaded once). `auto`: if they are on this machine or can be downloaded
    pretrained: bool | str = choice(False, False, True, "auto")
    drop_rate: float = ranged(0.0, least=0, below=1)  # dropout rate before the classifier
    drop_path_rate: float = ranged(0.0, least=0, below=1)  # rate of stochastic depth
    # further arguments of the network's constructor: `+model.options.KEY=VALUE`. Arguments that make timm read or
    # write a file are refused
    options: dict[str, Any] = mapping(most=16_384)

    @property
    def library_name(self) -> str:
        return self.name

    @property
    def has_usual_size(self) -> bool:
        return not self.options

    def check(self) -> None:
        architecture, _, tag = self.name.partition(".")
        if model_of(self.name) is None:
            raise InputError(
                f"model.name is {self.name!r}, which timm does not have.{did_you_mean(architecture, models_of(TIMM))}"
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
                f"its class; remove it.{did_you_mean(min(unknown), known)}"
            )

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        import timm

        # Check again: a rank reads its config from a file, and a name or an option can make timm read other files.
        self.check()
        channels, height, width = input_shape
        options = dict(self.options)
        cfg = self._cfg
        if cfg is not None and cfg.fixed_input_size and "img_size" not in options:
            options["img_size"] = (height, width)
        if self.drop_path_rate:
            options["drop_path_rate"] = self.drop_path_rate
        if self.pretrained:
            options["pretrained_cfg_overlay"] = published_weights(self.name)
        return built(
            lambda: timm.create_model(
                self.name,
                pretrained=bool(self.pretrained),
                num_classes=classes,
                in_chans=channels,
                drop_rate=self.drop_rate,
                **options,
            ),
            input_shape,
            name=self.library_name,
            usual=max(cfg.input_size[1:]) if cfg is not None and cfg.input_size else None,  # None: timm does not say
            pretrained=bool(self.pretrained),
        )

    def trained_input(self) -> TrainedInput | None:
        cfg = self._cfg
        if cfg is None or not (cfg.hf_hub_id or cfg.url):
            return None
        return TrainedInput(
            input_shape=tuple(cfg.input_size),
            eval_crop=min(1.0, cfg.crop_pct or 1.0),
            mean=tuple(cfg.mean),
            std=tuple(cfg.std),
            interpolation=cfg.interpolation if cfg.interpolation in INTERPOLATIONS else INTERPOLATION,
        )

    def prepare(self) -> None:
        if self.pretrained:
            published_weights(self.name)

    def has_published(self) -> bool:
        import timm

        return timm.is_model_pretrained(self.name)

    def missing_weights(self) -> str:
        return missing_weights(self.name)

    @property
    def _cfg(self) -> Any:
        """timm's facts about the model and its weights; None if it has none."""
        import timm

        return timm.get_pretrained_cfg(self.name)


def built(
    make: Callable[[], nn.Module],
    input_shape: tuple[int, int, int],
    *,
    name: str,
    usual: int | None,
    pretrained: bool,
) -> nn.Module:
    """The network of a library that `make` makes for images of this shape; `usual` is the side that it is made for.

    Raises InputError if it cannot be built, or does not accept the images.
    """
    channels, height, width = input_shape
    try:
        model = make()
        if (height, width) != (usual, usual) and not any(tensor.is_meta for tensor in model.parameters()):
            forward_on_meta(model, input_shape)  # a size that the model does not accept raises before training
    except InputError:
        raise
    except Exception as error:  # the libraries' constructors and networks raise all kinds of errors
        reason = reason_of(error)
        weights = " with its published weights" if pretrained else ""
        remedies = ["model.pretrained=false starts from random weights"] if pretrained else []
        if usual is not None and (height, width) != (usual, usual):
            remedies.insert(0, f"use dataset.input_size={usual}, the size that it was made for")
        raise InputError(
            f"model={name}{weights} cannot be built for images of {channels}x{height}x{width} "
            f"({type(error).__name__}: {reason})" + "".join(f"; {remedy}" for remedy in remedies)
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


@option("model", "resnet34")
class ResNet34(Network):
    """ResNet-34 (He et al. 2016), timm's, with a choice of stems for large and small images."""

    imports: ClassVar[tuple[str, ...]] = ("timm",)
    has_usual_size: ClassVar[bool] = True
    # `imagenet`: 7x7 at stride 2 and a pool; `cifar`: 3x3 at stride 1 and no pool, for images of about 32x32
    stem: str = choice("imagenet", "imagenet", "cifar")

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        model = Timm(name="resnet34").build(classes, input_shape)
        if self.stem == "cifar":
            model.conv1 = nn.Conv2d(input_shape[0], 64, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
            model.maxpool = nn.Identity()
        return model


def published_weights(name: str) -> dict[str, Any]:
    """The weights of timm's model `name`, as entries of timm's `pretrained_cfg`; fetched if they are not in a cache.

    Raises InputError if timm has none for the model, or they cannot be fetched.
    """
    cfg = _published(name)
    if (weights := _cached(cfg)) is not None:
        return weights
    reason = _barred(cfg)
    try:
        if not reason and cfg.hf_hub_id:
            return _of_hub(cfg, cached=False)
        if not reason:
            file = cached_file(cfg.url)
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(cfg.url, str(file), progress=False)
            return _of_url(cfg)
    except Exception as error:  # the libraries raise all kinds of errors
        reason = reason_of(error)
    raise InputError(
        f"model.pretrained: {_not_here(cfg, name, reason)}; use init_from=FILE.safetensors for a file that you have, "
        "or model.pretrained=false"
    )


@functools.cache
def missing_weights(name: str) -> str:
    """Why the weights of timm's model `name` are in no cache and cannot be fetched; empty if they can be had."""
    try:
        cfg = _published(name)
    except InputError:
        return f"timm has no published weights for {name}"
    reason = "" if _cached(cfg) is not None else _barred(cfg)
    return reason and _not_here(cfg, name, reason)


def _published(name: str) -> Any:
    """timm's facts about the published weights of a model. Raises InputError if it has none."""
    import timm

    cfg = timm.get_pretrained_cfg(name)
    if cfg is None or not (cfg.hf_hub_id or cfg.url):
        raise InputError(f"model={name}: timm has no published weights for it; remove model.pretrained")
    return cfg


def _cached(cfg: Any) -> dict[str, Any] | None:
    """The weights in a cache of this machine; None if no cache has them."""
    from huggingface_hub.errors import EntryNotFoundError

    if cfg.hf_hub_id:
        with suppress(EntryNotFoundError):
            return _of_hub(cfg, cached=True)
    return _of_url(cfg) if cfg.url and cached_file(cfg.url).is_file() else None


def _of_url(cfg: Any) -> dict[str, Any]:
    return {"file": str(cached_file(cfg.url)), "custom_load": bool(cfg.custom_load)}


def _address(cfg: Any) -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT if cfg.hf_hub_id else cfg.url)


def _barred(cfg: Any) -> str:
    """Why weights cannot be fetched; empty if their host answers."""
    from huggingface_hub import constants

    if cfg.hf_hub_id and constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    return unreachable(_address(cfg))


def _not_here(cfg: Any, name: str, reason: str) -> str:
    place = f"{cfg.hf_hub_id} of {_address(cfg)}" if cfg.hf_hub_id else _address(cfg)
    return (
        f"the weights of {name} are not in the cache of this machine, and cannot be fetched from {place} ({reason})"
    )


def _of_hub(cfg: Any, *, cached: bool) -> dict[str, Any]:
    """The best weights file in a repository of the hub; if `cached`, only from this machine."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    repository, _, revision = cfg.hf_hub_id.partition("@")
    name = cfg.hf_hub_filename or "pytorch_model.bin"
    download = functools.partial(hf_hub_download, repository, revision=revision or None, local_files_only=cached)
    with suppress(EntryNotFoundError):
        return {"file": download(name.replace("pytorch_model.bin", "model.safetensors")), "custom_load": False}
    return {"file": download(name), "custom_load": False}


def cached_file(url: str) -> Path:
    """Where torch keeps the weights of an address."""
    return Path(torch.hub.get_dir(), "checkpoints", Path(urlsplit(url).path).name)


def unreachable(address: str) -> str:
    """Why `address` does not answer, also through the proxy in front of it; empty if it does."""
    try:
        urlopen(Request(address, method="HEAD"), timeout=REACH_S).close()
    except HTTPError:
        return ""  # an answer
    except OSError as error:
        return f"{urlsplit(address).hostname}: {getattr(error, 'reason', error)}"
    return ""
