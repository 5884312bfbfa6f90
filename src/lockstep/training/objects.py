"""Options that stand for objects which a program gives to `lockstep.train`: a module, Datasets, a loss.

A config has the name of the object's type, and no file has the object: a resume is given it again.
"""

import copy
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, fields, replace
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lockstep.config import components, options
from lockstep.config.commands import override
from lockstep.config.extensions import OBJECT, OBJECT_CLASSES, arguments_of, is_object
from lockstep.config.options import OBJECTS, known
from lockstep.config.schema import GROUPS, MANY, Job
from lockstep.config.suggest import suggest_option
from lockstep.core.errors import InputError
from lockstep.core.fields import TEXT, Role, default_of, ranged, ruled, with_role
from lockstep.core.observer import Callback
from lockstep.core.protocols import Loss
from lockstep.data.datasets.composed import sources
from lockstep.data.datasets.items import DatasetOption
from lockstep.models.nets import Network
from lockstep.training.resolved_job import ResolvedJob, chosen_options


def original_of(group: str, option: Any) -> Any:
    """The object that `option` stands for. Raises InputError: only the program that began the run had it."""
    check_given({group: option})
    return vars(option)["original"]


def check_given(parts: Mapping[str, Any]) -> None:
    """Raise InputError if some of these options, by group, stand for objects that were not given."""
    missing = {group: part for group, part in parts.items() if is_object(part) and vars(part)["original"] is None}
    if not missing:
        return
    objects = " and ".join(f"{group} is {part.type} of {part.module}" for group, part in missing.items())
    are, them = ("an object", "it") if len(missing) == 1 else ("objects", "them")
    calls = arguments_of(missing)
    to_use = f", or lockstep.load(RUN, {calls[0]})" if "model" in missing else ""
    raise InputError(
        f"{objects}, {are} that a program gave to lockstep.train, and no file has {them}; give {them} again: "
        f'lockstep.train(["resume=RUN"], {", ".join(calls)}){to_use}'
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class OfProgram:
    """The name of the type of an object that a program gave, and the object."""

    type: str = ruled("", TEXT)
    module: str = ruled("", TEXT)
    original: InitVar[Any] = None  # not a field: a config cannot hold it

    def __post_init__(self, original: Any) -> None:
        object.__setattr__(self, "original", original)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelObject(OfProgram, Network):
    """A module that a program gave: training begins with its weights, in a copy."""

    weights: str = with_role(Role.start, ruled("", TEXT))  # a hash of those that training begins with

    def check(self) -> None:
        original_of("model", self)

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        return copy.deepcopy(original_of("model", self)).to(torch.empty(0).device)  # which may be the meta device


def with_module(option: Any, module: nn.Module) -> ModelObject:
    """The option of a model with the module that it stands for. Raises InputError if it needs none."""
    if not isinstance(option, ModelObject):
        raise InputError(f"model is {type(option).__name__}, which needs no object of a program; remove model=...")
    return replace(option, original=module)


@dataclass(frozen=True, kw_only=True, eq=False)
class LossObject(OfProgram, Loss):
    """A loss that a program gave: a module or a function, from logits and targets to one loss per example."""

    def build(self, classes: int, labels: Tensor) -> nn.Module:
        loss = original_of("loss", self)
        return copy.deepcopy(loss) if isinstance(loss, nn.Module) else FunctionLoss(loss)


class FunctionLoss(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.function(logits, targets)


@dataclass(frozen=True, kw_only=True, eq=False)
class DatasetObject(OfProgram, DatasetOption):
    """Datasets of torch that a program gave: what to train on, to evaluate, and to test."""

    labels: list[str] | None = ruled(None, TEXT)  # names of the classes, labels or values
    channel_mean: list[float] | None = ranged(None, least=-1e6, most=1e6)  # null: ImageNet's
    channel_std: list[float] | None = ranged(None, least=1e-6, most=1e6)

    val_remedy: ClassVar[str] = (
        "give one, lockstep.dataset(train, val=DATASET), or evaluate a share of each class, with val_share=0.1"
    )

    def __post_init__(self, original: Any) -> None:
        super().__post_init__(original)
        DatasetOption.__post_init__(self)

    @property
    def place(self) -> Hashable:
        return super().place, *map(id, original_of("dataset", self))

    @property
    def names(self) -> Sequence[str]:
        return self.labels or ()

    @property
    def mean(self) -> tuple[float, ...]:
        return tuple(self.channel_mean) if self.channel_mean else super().mean

    @property
    def std(self) -> tuple[float, ...]:
        return tuple(self.channel_std) if self.channel_std else super().std

    def train_dataset(self) -> Any:
        return original_of("dataset", self)[0]

    def val_dataset(self) -> Any:
        return original_of("dataset", self)[1]

    def test_dataset(self) -> Any:
        return original_of("dataset", self)[2]


def code_parts(job: ResolvedJob, callbacks: Iterable[Callback]) -> list[Any]:
    """The classes and functions of the objects that a program gave for a job, and of what these have."""
    items: list[Any] = [*callbacks]
    for option in chosen_options(job):
        original = vars(option)["original"] if type(option).__module__ == OBJECTS else ()
        for item in original if isinstance(original, tuple) else (original,):
            items += item.modules() if isinstance(item, nn.Module) else sources(item)
    values = [value for item in items if hasattr(item, "__dict__") for value in (item, *vars(item).values())]
    functions = [value.func if isinstance(value, partial) else value for value in values]
    return [*map(type, items), *(function for function in functions if isinstance(function, FunctionType))]


def digest(module: nn.Module) -> str:
    """A hash of the tensors of a module."""
    sha256 = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        sha256.update(f"{name} {tensor.dtype} {(*tensor.shape,)}".encode())
        sha256.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return sha256.hexdigest()[:12]


def stand_in(group: str, value: Any) -> Any:
    """The option that a value from Python is, or that stands for it. Raises InputError."""
    cls = type(value)
    of_program = cls.__module__ == OBJECTS and cls.__name__ == OBJECT_CLASSES.get(group)
    if of_program or cls in options.declared(group).values():
        return value
    if isinstance(value, str):
        raise InputError(f'{group} is a text, expected an object; an option is chosen by a word: ["{group}={value}"]')
    named = value if hasattr(value, "__qualname__") else cls
    name = named.__name__
    usual = suggest_option(group, name.lower())  # of a class of torch or timm
    is_class = isinstance(value, type)
    if is_class and (group in OBJECT_CLASSES or value in options.declared(group).values() or not usual):
        raise InputError(f"{group} is the class {name}, expected an object of it: {group}={name}(...)")
    if group == "model" and isinstance(value, nn.Module):
        return ModelObject(type=name, module=named.__module__, weights=digest(value), original=value)
    if group == "loss" and cls.__module__ == nn.CrossEntropyLoss.__module__ and value.reduction != "none":
        word = f", or use the word {usual}" * bool(usual)
        raise InputError(
            f"loss is {name} with reduction={value.reduction!r}, expected one loss per example: "
            f'{name}(reduction="none"){word}'
        )
    if group == "loss" and callable(value):
        return LossObject(type=name, module=named.__module__, original=value)
    kind = f"the class {name}" if is_class else f"an object of {name}"
    accepted = {"model": "a torch.nn.Module, or ", "loss": "a function or a torch.nn.Module, or "}.get(group, "")
    datasets = "; Datasets of torch, such as LOADER.dataset, are lockstep.dataset(train=..., val=...)"
    raise InputError(
        f'{group} is {kind}, expected {accepted}an object of a class with @lockstep.option("{group}")'
        f"{datasets * (group == 'dataset')}{_same_as(group, usual)}"
    )


def _same_as(group: str, usual: str) -> str:
    """The end of a sentence: our class and words for an object of another library, where these are known."""
    if (cls := options.classes_of(group).get(usual.removeprefix(f"{group}="))) is None:
        return f"; the words are {usual}" * bool(usual)
    return f": {options.class_path(cls)}({'lr=' * (group == 'optimizer')}...), or the word {usual}"


def changed_words(key: str, option: Any) -> list[str]:
    """The overrides that set the values of an option that are not its defaults, below `key`."""
    values = components.node(option)
    defaults = {field.name: default_of(field) for field in fields(option)}
    named = {name: default.name if isinstance(default, Enum) else default for name, default in defaults.items()}
    return [override(f"{key}.{name}", values[name]) for name in named if values[name] != named[name]]


def in_words(objects: Mapping[str, Any], words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The words that choose objects by their groups, followed by `words`; and the objects that options stand for.

    Raises InputError for a value that is no part of a group, or a word that chooses another one.
    """
    chosen, originals = list[str](), dict[str, Any]()
    for group, value in objects.items():
        if group not in GROUPS:
            if group in vars(Job()):
                raise InputError(f'{group} is a key, which is set by a word: ["{group}={value}"]')
            raise InputError(f"{group} is not a group of options.{known(group, GROUPS)}")
        if typed := [word for word in words if word.startswith(f"{group}=")]:
            raise InputError(f"{typed[0]} and an object both choose the {group}; remove one of them")
        parts = [stand_in(group, part) for part in (value if group in MANY else [value])]
        names = [OBJECT if type(part).__module__ == OBJECTS else options.option_name(type(part)) for part in parts]
        chosen.append(override(group, names if group in MANY else names[0]))
        for name, part in zip(names, parts, strict=True):
            chosen += changed_words(f"{group}.{name}" if group in MANY else group, part)
            originals |= {group: vars(part)["original"]} if name == OBJECT else {}
    return [*chosen, *words], originals
