"""Saves and restores the state of an optimizer, such as its momenta.

A checkpoint stores the state by the names of the parameters, so that a resumed run may group them differently
(another weight decay does that). A restored state is compared with the state that the optimizer of this run would
have: a kernel that is fused over all parameters does not check shapes, and would read beyond the end of a smaller
tensor.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core import log
from lockstep.core.sharding import ShardedOptimizer, part_like

STATE_AND_GROUPS = frozenset({"state", "param_groups"})


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """The `state_dict` of an optimizer over parameters of `model`, with names instead of numbers."""
    names = _names(optimizer, model)
    numbered = optimizer.state_dict()
    groups = [
        {**group, "params": [names[number] for number in group["params"]]} for group in numbered["param_groups"]
    ]
    state = {names[number]: entries for number, entries in numbered["state"].items()}
    return {**numbered, "state": state, "param_groups": groups}


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load the result of `optimizer_state` into an optimizer that has not stepped yet.

    The optimizer keeps the options that it was built with, which are those of the current command. This function
    changes the weights of the model, so restore them afterwards. It also clears their gradients.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: the state is of another optimizer or another model.
    """
    every_name = _names(optimizer, model)
    optimizer = optimizer.own if isinstance(optimizer, ShardedOptimizer) else optimizer
    names = _names(optimizer, model)
    examples, counters = _expected_state(optimizer)
    elsewhere = set(every_name) - set(names)  # parameters that other ranks update, whose state they have
    saved_here = {name: entries for name, entries in saved["state"].items() if name not in elsewhere}
    state = _check_state(saved_here, dict(zip(names, examples, strict=True)))
    groups_before = {name: group for group in saved["param_groups"] for name in group["params"]}
    numbered = optimizer.state_dict()
    for group in numbered["param_groups"]:
        group |= {
            key: _check_value(key, counters[key], groups_before[names[group["params"][0]]][key]) for key in counters
        }
    optimizer.load_state_dict({**numbered, **{key: saved[key] for key in numbered.keys() - STATE_AND_GROUPS}})
    parameters = dict(zip(names, _parameters(optimizer), strict=True))
    for name, entries in state.items():
        optimizer.state[parameters[name]] = entries


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """The names of an optimizer's parameters, in its own order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in _parameters(optimizer)]


def _expected_state(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Examples of the state that an optimizer has for each parameter, and of the counters in its groups.

    Only a step creates them. So this function takes a step with zero gradients, unless the optimizer has its state
    from the start, and undoes the step. The weights may stay changed.
    """
    parameters = _parameters(optimizer)
    if optimizer.state:
        return [dict(optimizer.state[parameter]) for parameter in parameters], {}
    options = set(optimizer.param_groups[0])
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    examples = [dict(optimizer.state.get(parameter, {})) for parameter in parameters]
    counters = {key: value for key, value in optimizer.param_groups[0].items() if key not in options}
    for parameter in parameters:
        parameter.grad = None
    for group in optimizer.param_groups:
        for key in counters:
            del group[key]
    optimizer.state.clear()
    return examples, counters


def _check_state(saved: Mapping[str, Any], examples: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The saved state of each parameter, copied into the example of it."""
    if not any(examples.values()):  # SGD without momentum ignores the saved momenta
        return {}
    if unknown := [str(name) for name in saved if name not in examples]:
        raise ValueError(f"the optimizer's state is of other parameters, e.g. {unknown[0]}")
    for name, entries in saved.items():
        if examples[name].keys() != entries.keys():
            here, there = (", ".join(map(str, keys)) or "nothing" for keys in (examples[name], entries))
            raise ValueError(f"the optimizer's state of {name} has {there}, expected {here}")
    if new := [name for name in examples if name not in saved]:
        log.warn(f"the checkpoint has no optimizer state of {len(new)} parameters ({new[0]}, ...), which start anew")
    return {
        name: {key: _check_value(f"{key} of {name}", examples[name][key], value) for key, value in entries.items()}
        for name, entries in saved.items()
    }


def _check_value(name: str, example: Any, saved: Any) -> Any:
    """The saved value, in the form of its example: the same type, and for tensors the same shape and memory layout.

    A tensor is copied into its example, because fused kernels assume that a momentum has the memory layout of its
    parameter.

    Raises:
        ValueError: the saved value does not have the example's type or shape.
    """
    same = type(saved) is type(example)
    if isinstance(example, Tensor) and isinstance(saved, Tensor):
        same = saved.shape == example.shape and saved.layout == example.layout
        same = same and saved.is_floating_point() == example.is_floating_point()
    elif isinstance(example, (list, tuple)) and same:
        same = len(saved) == len(example)
    if not same:
        raise ValueError(f"the optimizer's {name} is {_described(saved)}, expected {_described(example)}")
    if isinstance(example, Tensor):
        return example.copy_(part_like(example, saved))
    if isinstance(example, (list, tuple)):
        return type(example)(_check_value(name, *pair) for pair in zip(example, saved, strict=True))
    return saved


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__
