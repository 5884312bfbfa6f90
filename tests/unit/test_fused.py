"""Torch's fused optimizers on lists that are made once: the bits of torch's own step, whatever happens between."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lockstep.optim.fused import KERNELS, fused

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "dampened": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "adam": (Adam, {"lr": 0.1, "betas": (0.7, 0.9), "eps": 1e-3, "weight_decay": 0.01}),
    "adamw": (AdamW, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.03}),
    "uphill": (AdamW, {"lr": 0.1, "maximize": True}),
    "uphill in Adam": (Adam, {"lr": 0.1, "maximize": True}),
}
# What may happen after a step, by name: it gets the model, the optimizer and the number of the step.
EVENTS: dict[str, Callable[[nn.Module, Optimizer, int], object]] = {
    "nothing": lambda *_: None,
    "another rate": lambda _, optimizer, step: optimizer.param_groups[1].update(lr=0.01 * step),
    "a frozen layer": lambda model, _, step: model[0].requires_grad_(step % 2 == 0),
    "a state that is loaded": lambda _, optimizer, step: optimizer.load_state_dict(
        copy.deepcopy(optimizer.state_dict())
    ),
    "a state that is replaced": lambda _, optimizer, step: [
        optimizer.state.update({parameter: {name: value.clone() for name, value in entries.items()}})
        for parameter, entries in list(optimizer.state.items())
    ],
    "a state that is cleared": lambda _, optimizer, step: optimizer.state.clear() if step == 3 else None,
    "a step that overflowed": lambda _, optimizer, step: setattr(
        optimizer, "found_inf", torch.tensor(1.0) if step == 3 else None
    ),
}


def weights_after(build: Callable[..., Optimizer], options: dict[str, Any], event: str) -> list[Tensor]:
    """The weights and the state after six steps of a model in two groups and two formats."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5).double(), nn.Linear(5, 2))
    parameters = list(model.parameters())
    optimizer = build([{"params": parameters[::2]}, {"params": parameters[1::2]}], fused=True, **options)
    for step in range(6):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()
        EVENTS[event](model, optimizer, step)
    assert all(parameter.grad is None for parameter in parameters)
    state = [value for entries in optimizer.state.values() for value in entries.values() if value is not None]
    return [*(parameter.detach() for parameter in parameters), *state]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_bits_are_those_of_torchs_own_step(name: str, event: str) -> None:
    original, options = OPTIMIZERS[name]
    pairs = zip(weights_after(fused(original), options, event), weights_after(original, options, event), strict=True)
    assert all(torch.equal(own, expected) for own, expected in pairs)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_the_first_step_is_torchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, options = OPTIMIZERS[name]
    parameter = nn.Parameter(torch.ones(2))
    optimizer = fused(original)([parameter], fused=True, **options)
    parameter.grad = torch.ones(2)
    optimizer.step()
    monkeypatch.setattr(original, "step", None)
    before = parameter.detach().clone()
    optimizer.step()
    assert not torch.equal(parameter, before)
    assert {kind for kind, _ in OPTIMIZERS.values()} == set(KERNELS), "every kernel is compared"
    assert type(optimizer) is fused(original), "each class is made once"
    assert type(optimizer).__name__ == original.__name__
    assert not hasattr(type(optimizer).step, "__wrapped__"), "torch's ranges for a profiler take a quarter of a step"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_lists_are_made_once_for_each_state_that_is_loaded(name: str) -> None:
    original, options = OPTIMIZERS[name]
    parameter = nn.Parameter(torch.ones(2))
    optimizer = fused(original)([parameter], fused=True, **options)
    lists = []
    for step in range(9):
        if step in (3, 6):
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        parameter.grad = torch.ones(2)
        optimizer.step()
        lists.append(optimizer.tensors)  # type: ignore[attr-defined]
    assert all(tensors is lists[start] is not None for start in (1, 3, 6) for tensors in lists[start : start + 2])
    assert all(lists[step] is not lists[step - 1] for step in (3, 6)), "of the state that was loaded"


@pytest.mark.parametrize("original", [Adam, AdamW, SGD])
def test_every_step_of_parameters_that_are_cut_over_ranks_is_torchs(
    original: type[Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    parameters[1].full_tensor = lambda: None  # type: ignore[attr-defined]  # as a tensor has that is cut
    optimizer = fused(original)(parameters, lr=0.1, fused=True)
    steps: list[Optimizer] = []
    step = original.step
    monkeypatch.setattr(original, "step", lambda self: (steps.append(self), step(self)))
    for number in (1, 2, 3):
        for parameter in parameters:
            parameter.grad = torch.ones(2)
        optimizer.step()
        assert steps == [optimizer] * number
