"""The head of a model: the layer with one output for each class, and its parameters."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.conv import _ConvNd


def head_layers(model: nn.Module) -> tuple[str, ...]:
    """The names of the layers of a model's head; empty if the model has no layer with weights.

    A timm model names the layers of its head (`pretrained_cfg["classifier"]`). In any other model, the head is the
    last linear layer or convolution.
    """
    facts = getattr(model, "pretrained_cfg", None)
    named = facts.get("classifier") if isinstance(facts, Mapping) else None
    modules = dict(model.named_modules())
    if layers := tuple(name for name in ((named,) if isinstance(named, str) else named or ()) if name in modules):
        return layers
    return tuple(name for name, module in modules.items() if isinstance(module, nn.Linear | _ConvNd))[-1:]


def head_parameters(model: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of a model's head."""
    layers = head_layers(model)
    return tuple(name for name, _ in model.named_parameters() if any(within(name, layer) for layer in layers))


def within(name: str, module: str) -> bool:
    """Whether `name` is the name of `module`, or of a parameter or module inside it."""
    return name == module or not module or name.startswith(f"{module}.")
