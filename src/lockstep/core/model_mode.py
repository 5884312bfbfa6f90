"""Switching a model to training or evaluation mode for the length of a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


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
