"""What an optimizer has gathered, on its way into a checkpoint and back.

In a checkpoint it goes by the names of the parameters, so that a resume may group them in another way (another weight
decay does). Coming back it is compared with what the optimizer of today gathers: a kernel that is fused over all
parameters takes a tensor of another shape for one of its own, and reads beyond its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core import log

STATE_AND_GROUPS = frozenset({"state", "param_groups"})


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """The `state_dict` of an optimizer over parameters of `model`, with their names in the place of numbers."""
    names = _names(optimizer, model)
    numbered = optimizer.state_dict()
    groups = [{**group, "params": [names[each] for each in group["params"]]} for group in numbered["param_groups"]]
    state = {names[number]: gathered for number, gathered in numbered["state"].items()}
    return {**numbered, "state": state, "param_groups": groups}


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Give an optimizer that has not stepped yet what `optimizer_state` saved.

    Its options stay those that it was built with: those of today's command. The weights of the model change on the
    way, and are to be restored after it; their gradients are forgotten.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: it is not what this optimizer gathers for this model.
    """
    names = _names(optimizer, model)
    examples, counters = _gathered(optimizer)
    state = _fitting(saved["state"], dict(zip(names, examples, strict=True)))
    groups_before = {name: group for group in saved["param_groups"] for name in group["params"]}
    numbered = optimizer.state_dict()
    for group in numbered["param_groups"]:
        group |= {key: _filled(key, counters[key], groups_before[names[group["params"][0]]][key]) for key in counters}
    optimizer.load_state_dict({**numbered, **{key: saved[key] for key in numbered.keys() - STATE_AND_GROUPS}})
    parameters = dict(zip(names, _parameters(optimizer), strict=True))
    for name, gathered in state.items():
        optimizer.state[parameters[name]] = gathered


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """The names of an optimizer's parameters, in its own order."""
    names = {id(each): name for name, each in model.named_parameters()}
    return [names[id(each)] for each in _parameters(optimizer)]


def _gathered(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """An example of what an optimizer gathers for each of its parameters, and of what it counts in each group.

    For certain it is known after a step only: where nothing is there from the start a blank one is taken, and
    forgotten but for the weights, which it may change.
    """
    parameters = _parameters(optimizer)
    if optimizer.state:
        return [dict(optimizer.state[each]) for each in parameters], {}
    options = set(optimizer.param_groups[0])
    for each in parameters:
        each.grad = torch.zeros_like(each)
    optimizer.step()
    examples = [dict(optimizer.state.get(each, {})) for each in parameters]
    counters = {key: value for key, value in optimizer.param_groups[0].items() if key not in options}
    for each in parameters:
        each.grad = None
    for group in optimizer.param_groups:
        for key in counters:
            del group[key]
    optimizer.state.clear()
    return examples, counters


def _fitting(saved: Mapping[str, Any], examples: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What was gathered for each parameter, in the place of an example of it."""
    if not any(examples.values()):  # SGD without momentum has no use for the momenta of a run that had some
        return {}
    if unknown := [str(name) for name in saved if name not in examples]:
        raise ValueError(f"the optimizer's state is of other parameters, e.g. {unknown[0]}")
    for name, gathered in saved.items():
        if examples[name].keys() != gathered.keys():
            here, there = (", ".join(map(str, each)) or "nothing" for each in (examples[name], gathered))
            raise ValueError(f"of {name} the optimizer keeps {there}, expected {here}")
    if new := [name for name in examples if name not in saved]:
        log.warn(f"the checkpoint has no optimizer state of {len(new)} parameters ({new[0]}, ...), which start anew")
    return {
        name: {key: _filled(f"{key} of {name}", examples[name][key], value) for key, value in gathered.items()}
        for name, gathered in saved.items()
    }


def _filled(what: str, example: Any, found: Any) -> Any:
    """What was saved, as an example of it is: of its kind, and for tensors of its shape, number format and layout.

    The layout counts: kernels that are fused over all parameters take it that a momentum lies in memory as its
    parameter does.
    """
    alike = type(found) is type(example)
    if isinstance(example, Tensor) and alike:
        alike = found.shape == example.shape and found.layout == example.layout
        alike = alike and found.is_floating_point() == example.is_floating_point()
    elif isinstance(example, (list, tuple)) and alike:
        alike = len(found) == len(example)
    if not alike:
        raise ValueError(f"the optimizer's {what} is {_described(found)}, expected {_described(example)}")
    if isinstance(example, Tensor):
        return example.copy_(found)
    if isinstance(example, (list, tuple)):
        return type(example)(_filled(what, *pair) for pair in zip(example, found, strict=True))
    return found


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__
