"""The state of a run as a checkpoint has it: copied to host memory, and an optimizer's state by names.

Numbers would not do, because a resumed run may group the parameters differently. A restored state is copied into the
expected one, because a fused kernel would read beyond the end of a smaller tensor.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.model import ShardedOptimizer, part_like, tensors_in

Whole = Callable[[Sequence[Tensor]], Iterable[Tensor]]
PLAIN = frozenset({Tensor, nn.Parameter, bool, int, float, str, type(None)})
STATE_AND_GROUPS = frozenset({"state", "param_groups"})


def host_copies(tree: Any) -> Any:
    """`tree` with each tensor replaced by a contiguous copy in host memory; from a GPU by way of pinned memory."""

    def copied(tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor.detach(), non_blocking=True)

    copies = map_tensors(tree, copied)
    if device := next((tensor.device for tensor in tensors_in(tree) if tensor.is_cuda), None):
        torch.cuda.current_stream(device).synchronize()
    return copies


def gathered(tree: Any, whole: Whole) -> Any:
    """`tree` (dicts and lists) with its tensors made whole (see `Strategy.whole_tensors`). Collective."""
    tensors = iter(whole([*tensors_in(tree)]))
    return map_tensors(tree, lambda _: next(tensors))


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`tree` (dicts, lists and tuples) with `change` applied to each tensor, in the order of `tensors_in`."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(item, change) for key, item in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(item, change) for item in tree)
    return tree


def check_plain(tree: Any, place: str) -> None:
    """Raise InputError for a state of the user's that has more than what `read_state` loads again."""
    if isinstance(tree, dict):
        for key, item in tree.items():
            check_plain(key, f"a key of {place}")
            check_plain(item, f"{place}[{key!r}]")
    elif type(tree) in (list, tuple):
        for number, item in enumerate(tree):
            check_plain(item, f"{place}[{number}]")
    elif type(tree) not in PLAIN:
        raise InputError(
            f"{place} is of type {type(tree).__name__}, expected tensors, numbers and texts, in lists, tuples and "
            "dictionaries"
        )


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

    The optimizer keeps the options that it was built with: the current command's options. This function changes the
    weights of the model, so restore them afterwards. It also clears their gradients. Raises RuntimeError, ValueError,
    TypeError, LookupError, AttributeError: the state is of another optimizer or another model.
    """
    every_name = _names(optimizer, model)
    optimizer = optimizer.own if isinstance(optimizer, ShardedOptimizer) else optimizer
    names = _names(optimizer, model)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        # It cannot step without a closure, as LBFGS: what its state has depends on the gradients so far.
        by_number = {names.index(name): entries for name, entries in saved["state"].items()}
        optimizer.load_state_dict({**optimizer.state_dict(), "state": by_number})
        return
    examples, counters = _expected_state(optimizer)
    elsewhere = set(every_name) - set(names)  # parameters that other ranks update and keep the state of
    saved_here = {name: entries for name, entries in saved["state"].items() if name not in elsewhere}
    state = _check_state(saved_here, dict(zip(names, examples, strict=True)))
    groups_before = {name: group for group in saved["param_groups"] for name in group["params"]}
    numbered = optimizer.state_dict()
    for group in numbered["param_groups"]:
        group |= {  # each group has its own counter, to which some optimizers add in place
            key: _restored(deepcopy(counters[key]), groups_before[names[group["params"][0]]][key]) for key in counters
        }
    optimizer.load_state_dict({**numbered, **{key: saved[key] for key in numbered.keys() - STATE_AND_GROUPS}})
    parameters = dict(zip(names, _parameters(optimizer), strict=True))
    for name, entries in state.items():
        optimizer.state[parameters[name]] = entries


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in _parameters(optimizer)]


def _expected_state(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Examples of the state that an optimizer has for each parameter, and of the counters in its groups.

    Only a step creates them, so this takes one with zero gradients, and undoes it. The weights may stay changed.
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
        log.warn(
            f"the checkpoint has no optimizer state for {len(new)} parameters ({new[0]}, ...), which start at zero"
        )
    return {
        name: {key: _restored(examples[name][key], value) for key, value in entries.items()}
        for name, entries in saved.items()
    }


def _restored(example: Any, saved: Any) -> Any:
    """The saved value in the form of its example: fused kernels expect a momentum in the layout of its parameter."""
    if isinstance(example, Tensor):
        return example.copy_(part_like(example, saved))
    if isinstance(example, (list, tuple)):
        return type(example)(_restored(*pair) for pair in zip(example, saved, strict=True))
    return saved
