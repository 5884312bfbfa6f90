"""What is asked of any model: its mode, a pass without data, its head, its soundness, and its probabilities."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lockstep.core.model_card import SIGMOID

# The base classes of all batch norms and of all convolutions, torch's and timm's. They have no public names.
BatchNorm = _BatchNorm
Convolution = _ConvNd


@contextmanager
def model_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model in training or evaluation mode, and restore the mode of each of its modules afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def forward_on_meta(model: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Run a model on a blank image of torch's meta device, in evaluation mode: nothing is computed or changed."""
    # Each tensor where its module holds it, once: `functional_call` would leave a module that several parts share on
    # the meta device, if it were named by each of them.
    shapes = {
        f"{path}.{name}".lstrip("."): torch.empty_like(tensor, device="meta")
        for path, module in model.named_modules()
        for slots in (module.named_parameters, module.named_buffers)
        for name, tensor in slots(recurse=False, remove_duplicate=False)
    }
    dtype = next((tensor.dtype for tensor in shapes.values() if tensor.is_floating_point()), torch.float32)
    image = torch.empty((1, *input_shape), device="meta", dtype=dtype)
    with model_mode(model, training=False), torch.no_grad():
        torch.func.functional_call(model, shapes, (image,), tie_weights=False)


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(module, BatchNorm) for module in model.modules())


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested mappings, lists and tuples, in their order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(item)


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
    return tuple(name for name, module in modules.items() if isinstance(module, nn.Linear | Convolution))[-1:]


def head_parameters(model: nn.Module) -> tuple[str, ...]:
    layers = head_layers(model)
    return tuple(name for name, _ in model.named_parameters() if any(within(name, layer) for layer in layers))


def within(name: str, module: str) -> bool:
    """Whether `name` is the name of `module`, or of a parameter or module inside it."""
    return name == module or not module or name.startswith(f"{module}.")


def infinite_buffers(model: nn.Module) -> frozenset[str]:
    """The names of the buffers of a new model that are infinite by design, such as the bounds of a clamp that limits
    nothing."""
    return frozenset(name for name, tensor in model.named_buffers() if bool(tensor.isinf().any()))


def is_sound(tensor: Tensor, *, infinite: bool) -> Tensor:
    """Whether all numbers of a tensor are finite, or, if it may be `infinite`, at least numbers: a bool scalar."""
    return (~tensor.isnan() if infinite else tensor.isfinite()).all()


def probabilities(logits: Tensor, kind: str) -> Tensor:
    """The probabilities of logits (B, classes), in the same shape; `kind` is `softmax` or `sigmoid`."""
    return logits.sigmoid() if kind == SIGMOID else logits.softmax(1)
