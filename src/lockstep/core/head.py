"""Which parameters of a model are its head: the layer that has as many outputs as there are classes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.conv import _ConvNd


def head_layers(model: nn.Module) -> tuple[str, ...]:
    """The names of the layers of a model's head; empty where the model has no layer with weights.

    A model of timm says which they are (`pretrained_cfg["classifier"]`); of any other it is the last linear layer or
    convolution.
    """
    facts = getattr(model, "pretrained_cfg", None)
    named = facts.get("classifier") if isinstance(facts, Mapping) else None
    modules = dict(model.named_modules())
    if own := tuple(name for name in ((named,) if isinstance(named, str) else named or ()) if name in modules):
        return own
    return tuple(name for name, module in modules.items() if isinstance(module, nn.Linear | _ConvNd))[-1:]


def head_parameters(model: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of a model's head."""
    layers = head_layers(model)
    return tuple(name for name, _ in model.named_parameters() if any(within(name, layer) for layer in layers))


def within(name: str, module: str) -> bool:
    """Whether a parameter or a module called `name` is that of `module`, or a part of it."""
    return name == module or not module or name.startswith(f"{module}.")
