"""The size of an optimizer's state, estimated before its first step."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.protocols import Optimizer

SIDE = 8  # of the small parameters


def state_bytes(option: Optimizer, model: nn.Module) -> int | None:
    """An estimate of the bytes of an optimizer's state after its first step; None if it cannot be made.

    The optimizer is built over one small parameter for each number of dimensions, and takes a step. The size of its
    state is then scaled to the model's parameters.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    small: Any = nn.Module()
    for parameter in trained:
        name = f"dimensions_{parameter.dim()}"
        if not hasattr(small, name):
            small.register_parameter(name, nn.Parameter(torch.zeros([SIDE] * parameter.dim(), dtype=parameter.dtype)))
    changed: Any = option
    if getattr(option, "layer_decay", None) is not None:
        changed = dataclasses.replace(changed, layer_decay=None)  # the small module has no layers
    try:
        with torch.random.fork_rng(devices=[]):  # some optimizers draw numbers
            optimizer = changed.build(small)
            for parameter in small.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
    except Exception:  # the optimizer of an extension may need the real model
        return None
    shares = {}
    for parameter in small.parameters():
        state = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
        shares[parameter.dim()] = sum(value.nbytes for value in state if value.dim() > 0) / parameter.numel()
    return round(sum(shares[parameter.dim()] * parameter.numel() for parameter in trained))
