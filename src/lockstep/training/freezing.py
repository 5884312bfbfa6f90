"""Freezes layers for the whole run, or until one of its steps.

The step alone decides which layers are frozen, so that a resume cannot get it wrong. Frozen batch norms keep their
running statistics and use them, as in an evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from lockstep.core.errors import InputError, did_you_mean
from lockstep.core.model import BatchNorm, head_layers, within

BACKBONE = "backbone"  # all layers but the head, if no layer has this name
SHOWN = 30


@dataclass(frozen=True)
class Freezing:
    """The frozen layers of a model, and their last frozen step.

    Fields:
        switched: the parameters that are frozen at first and trained later.
        norms: the batch norms that keep their running statistics.
        until: the last step in which they are frozen; None is the last step of the run.
        numbers: how many single weights are frozen.
    """

    switched: tuple[nn.Parameter, ...] = ()
    norms: tuple[nn.Module, ...] = ()
    until: int | None = None
    numbers: int = 0

    @classmethod
    def of(cls, model: nn.Module, names: frozenset[str], until: int | None) -> Freezing:
        """The freezing of a wrapped model, by the names that `frozen_names` returns."""
        norms = []
        for name, module in model.named_modules():
            own = [f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)]
            if isinstance(module, BatchNorm) and (names.issuperset(own) if own else name in names):
                norms.append(module)
        parameters = [parameter for name, parameter in model.named_parameters() if name in names]
        switched = tuple(parameter for parameter in parameters if parameter.requires_grad)
        return cls(switched, tuple(norms), until, sum(parameter.numel() for parameter in parameters))

    def frozen(self, step: int) -> bool:
        """Whether the layers are frozen in a step, counted from 1."""
        return self.until is None or step <= self.until

    def frozen_norms(self, step: int) -> tuple[nn.Module, ...]:
        """The batch norms that keep their running statistics in a step, counted from 1."""
        return self.norms if self.frozen(step) else ()

    def freeze_for(self, step: int) -> None:
        """Freeze or thaw the layers for a step, counted from 1."""
        if not self.switched and not self.norms:
            return
        frozen = self.frozen(step)
        for parameter in self.switched:
            parameter.requires_grad_(not frozen)
        for norm in self.norms:  # an evaluation leaves the whole model in training mode
            norm.train(not frozen)

    def __str__(self) -> str:
        when = "" if self.until is None else f" until step {self.until:,}"
        return f"{self.numbers:,} of them frozen{when}" if self.numbers else ""


def freeze_for_good(model: nn.Module, names: frozenset[str]) -> None:
    """Freeze parameters for the whole run, so that strategies and optimizers ignore them."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def frozen_names(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """The names of the parameters and batch norms that `patterns` freeze (see `train.freeze`).

    Raises InputError: a pattern fits nothing, or nothing would be left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    names += [name for name, module in model.named_modules() if isinstance(module, BatchNorm)]
    frozen: set[str] = set()
    for pattern in patterns:
        fitting = {name for name in names if _fits(name, pattern)}
        if not fitting and pattern == BACKBONE:
            head = head_layers(model)
            fitting = {name for name in names if not any(within(name, layer) for layer in head)}
        if not fitting:
            raise _unknown(model, pattern)
        frozen |= fitting
    if all(name in frozen for name, parameter in model.named_parameters() if parameter.requires_grad):
        raise InputError(f"train.freeze is [{','.join(patterns)}], which leaves nothing to train; freeze less")
    return frozenset(frozen)


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern fits a dotted name, or the name of a module that contains it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: number + 1]), pattern) for number in range(len(parts)))


def _unknown(model: nn.Module, pattern: str) -> InputError:
    modules = {name: module for name, module in model.named_modules() if name and any(map(id, module.parameters()))}
    top = [f"{name} ({type(module).__name__})" for name, module in modules.items() if "." not in name]
    shown = ", ".join(top[:SHOWN]) + ", ..." * (len(top) > SHOWN)
    return InputError(
        f"train.freeze: {pattern!r} matches no layer of the model, expected {BACKBONE} (all but the head, "
        f"{' and '.join(head_layers(model)) or 'which it does not have'}), or layers by name, with * for any text: "
        f"{shown}.{did_you_mean(pattern, [BACKBONE, *modules])}"
    )
