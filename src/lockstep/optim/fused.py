"""What is added to optimizers by changing their class: a fused step with lists that are made once, and look-ahead.

At each step of its fused SGD, Adam and AdamW torch collects parameters, gradients and state anew and groups them by
device: for two tensors a hundred calls of Python, around a kernel of four microseconds. Here the first step is by
torch. The next ones call the same kernel with the same arguments. So the results have the same bits, and torch saves
and restores the state.

The kernels have names of torch that begin with an underscore; `tests/unit/test_fused.py` compares both ways.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lockstep.core.model import is_sharded, own_parts

Group = dict[str, Any]
# A group, the place of some of its parameters among all, these parameters, of one device and dtype and without
# autograd, and a list of each entry of their state.
Tensors = tuple[Group, slice, list[Tensor], list[list[Tensor]]]
SLOW_KEY, STEPS_KEY = "lookahead_slow", "lookahead_steps"  # entries of the state


def sgd(group: Group, parameters: list[Tensor], gradients: list[Tensor], momenta: list[Tensor]) -> None:
    torch._fused_sgd_(
        parameters,
        gradients,
        momenta,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
    )


def adam(group: Group, *lists: list[Tensor]) -> None:
    parameters, gradients, averages, squares, steps = lists
    torch._foreach_add_(steps, 1)
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
    )


# By optimizer: its kernel, and the entries of the state that the kernel takes.
KERNELS: dict[type[Optimizer], tuple[Callable[..., None], tuple[str, ...]]] = {
    SGD: (sgd, ("momentum_buffer",)),
    Adam: (adam, ("exp_avg", "exp_avg_sq", "step")),
    AdamW: (adam, ("exp_avg", "exp_avg_sq", "step")),
}


class _Fused(Optimizer):
    """What `fused` adds to an optimizer. `original` is its own class."""

    original: ClassVar[type[Optimizer]]
    found_inf: Tensor | None = None  # a loss scaler sets it for the length of a step
    tensors: list[Tensors] | None = None
    all_parameters: tuple[Tensor, ...] = ()
    # The groups, and the state of the first parameter, that `tensors` are of: loading a state replaces both.
    groups: object = None
    first_state: object = None

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the parameters: by torch if some have no gradient or no state yet, or if a loss scaler is used."""
        assert closure is None
        if self.groups is not self.param_groups or self.first_state is not next(iter(self.state.values()), None):
            self._collect()
        gradients = [parameter.grad for parameter in self.all_parameters if parameter.grad is not None]
        if self.tensors is None or self.found_inf is not None or len(gradients) < len(self.all_parameters):
            with torch.no_grad():
                inspect.unwrap(self.original.step)(self)
            return
        kernel, _ = KERNELS[self.original]
        for group, rows, parameters, state in self.tensors:
            kernel(group, parameters, gradients[rows], *state)

    def _collect(self) -> None:
        """Make the lists; leave them None if a parameter has no state yet, or is cut over the ranks."""
        _, names = KERNELS[self.original]
        alike: dict[Any, tuple[Group, list[Tensor]]] = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                alike.setdefault((number, parameter.device, parameter.dtype), (group, []))[1].append(parameter)
        self.tensors, self.groups, tensors, end = None, None, [], 0
        for group, parameters in alike.values():
            entries = [self.state.get(parameter, {}) for parameter in parameters]
            stateless = group.get("momentum") == 0
            unknown = not stateless and any(entry.get(name) is None for entry in entries for name in names)
            if unknown or not group["fused"] or any(map(is_sharded, parameters)):
                return
            state = [[] if stateless else [entry[name] for entry in entries] for name in names]
            rows = slice(end, end := end + len(parameters))
            tensors.append((group, rows, [parameter.detach() for parameter in parameters], state))
        self.tensors, self.groups = tensors, self.param_groups
        self.first_state = next(iter(self.state.values()), None)
        self.all_parameters = tuple(parameter for _, parameters in alike.values() for parameter in parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, without a profiler's range around it: 1 instead of 14 us."""
        assert set_to_none
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


@functools.cache
def fused(original: type[Optimizer]) -> Callable[..., Optimizer]:
    """One of torch's optimizers with the step of this module, and without the wrappers around its methods.

    The wrappers for torch.compile import torch's compiler at the first call, which takes 0.8 to 1.2 s; no optimizer
    is compiled here. The wrappers for the profiler and for hooks take a quarter of the time of a small step.
    """
    names = ("add_param_group", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(original, name)) for name in names}
    built = type(original.__name__, (_Fused, original), {**methods, "original": original})
    built.step.hooked = True  # type: ignore[attr-defined]  # tells torch that the step has its hooks already
    return built


class _Lookahead(Optimizer):
    """What `with_lookahead` adds to an optimizer.

    timm's class keeps its counter in the parameter groups, and begins its slow weights at the first synchronisation,
    so that a checkpoint before it has another form. Here both are in the state of each parameter from its first step
    on, where checkpoints and strategies find them, and the slow weights begin at the initial ones, as in the paper.
    """

    k: int
    alpha: float

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the weights; at every k-th step, set them to slow weights that have moved towards them by `alpha`."""
        stepped = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        # Add them after the step, because an optimizer takes an empty state for a new parameter's.
        begun = {weight: weight.detach().clone() for weight in stepped if SLOW_KEY not in self.state.get(weight, ())}
        super().step(closure)
        for weight, slow in begun.items():
            self.state[weight] |= {SLOW_KEY: slow, STEPS_KEY: 0}
        due = []
        for weight in stepped:
            self.state[weight][STEPS_KEY] += 1
            if self.state[weight][STEPS_KEY] % self.k == 0:
                due.append(weight)
        if due:
            slow_parts, parts = own_parts(self.state[weight][SLOW_KEY] for weight in due), own_parts(due)
            torch._foreach_add_(slow_parts, torch._foreach_sub(parts, slow_parts), alpha=self.alpha)
            torch._foreach_copy_(parts, slow_parts)


def with_lookahead(optimizer: Optimizer, k: int, alpha: float) -> Optimizer:
    """An optimizer before its first step with look-ahead (Zhang et al. 2019), in place, by changing its class."""
    original = type(optimizer)
    optimizer.__class__ = type(original.__name__, (_Lookahead, original), {"k": k, "alpha": alpha})
    for weight, entries in optimizer.state.items():  # of an optimizer that has state before its first step
        assert isinstance(weight, Tensor)
        entries |= {SLOW_KEY: weight.detach().clone(), STEPS_KEY: 0}
    return optimizer
