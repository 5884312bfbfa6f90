"""Cuts a model into stages that run one after another. One forward pass is watched to find the possible cuts.

A model can be cut before a module that takes one tensor, if no other result from before the cut is used after it. So
blocks with residual connections stay whole, and any family of models can be cut.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.core.errors import InputError, did_you_mean
from lockstep.core.model import model_mode, tensors_in

MOST_PLACES = 12  # the most places for a cut that an error names


@dataclass(frozen=True)
class Stages:
    """How a model is cut: before the modules `entries`, whose inputs have the dtypes `formats`.

    `homes` is the stage of each parameter and buffer, by name, `classes` the number of logits.
    """

    entries: tuple[str, ...]
    formats: tuple[torch.dtype, ...]
    homes: dict[str, int]
    classes: int


@dataclass
class CutPlace:
    """A module as a place for a cut, with the dtype and the number of elements of its input.

    `argument` is the `id` of the input while the module runs, `obstacle` why the model cannot be cut before it, or
    "".
    """

    name: str
    dtype: torch.dtype = torch.float32
    size: int = 0
    argument: int | None = None
    obstacle: str = ""


class ForwardTrace(TorchFunctionMode):
    """Follows one forward pass: which modules begin in which order, and where a tensor is used after it was made.

    A position is the number of modules that have begun; the model itself is at 0.
    """

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        super().__init__()
        self.places: list[CutPlace] = []
        self.begun: dict[nn.Module, int] = {model: 0}
        self.names = {id(tensor): name for name, tensor in named_tensors(model)}
        self.first_use: dict[str, int] = {}
        # The position at which each tensor was made. Weak, so that the pass needs no more memory.
        self.birth = WeakIdKeyDictionary({images: 0})
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                if name:
                    begin = functools.partial(self._begin, name)
                    hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
                    hooks.enter_context(module.register_forward_hook(self._end))
            with self, model_mode(model, training=False):
                self.logits: Tensor = model(images)

    def _begin(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module in self.begun:
            self.places[self.begun[module] - 1].obstacle = "it runs more than once in a forward pass"
            return
        tensors = list(tensors_in((args, kwargs)))
        only_input = len(tensors) == 1 and bool(args) and tensors[0] is args[0]
        place = CutPlace(name, obstacle="" if only_input else f"it takes {len(tensors)} tensors, expected one")
        if only_input:
            place.dtype, place.size, place.argument = tensors[0].dtype, tensors[0].numel(), id(tensors[0])
        self.places.append(place)
        self.begun[module] = len(self.places)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # After the module, a use of its input prevents a cut: only the module gets the numbers from the other stage.
        self.places[self.begun[module] - 1].argument = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = list(tensors_in(result))
        if outputs:  # otherwise the call only reads a shape or a format
            for tensor in tensors_in((args, kwargs)):
                self._use(tensor)
        for output in outputs:
            if id(output) not in self.names and output not in self.birth:
                self.birth[output] = len(self.places)
        return result

    def _use(self, tensor: Tensor) -> None:
        name = self.names.get(id(tensor))
        if name is not None:
            since = self.first_use.setdefault(name, len(self.places))
        elif tensor in self.birth:
            since = self.birth[tensor]
        else:  # a constant
            return
        for place in self.places[since:]:
            if name is not None:
                place.obstacle = place.obstacle or f"{name} is used on both sides of it"
            elif place.argument != id(tensor):
                place.obstacle = place.obstacle or "more than its input is used behind it, as by a skip connection"

    def homes(self, model: nn.Module) -> dict[str, int]:
        """The position of each parameter and buffer: where it is first used, or else its module's position."""
        modules = dict(model.named_modules())
        return {
            name: self.first_use.get(name, self.begun.get(modules[name.rpartition(".")[0]], 0))
            for name, _ in named_tensors(model)
        }


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a model by name, each once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def cut(model: nn.Module, images: Tensor, stages: int, entries: Sequence[str] | None) -> Stages:
    """Cut a model into `stages` stages: before the modules `entries`, or into stages with about equal parameters.

    `images` are some inputs, (b, C, H, W), in the format that a run gives the model. Parameters, buffers and the mode
    are left unchanged. Raises InputError: the model cannot be cut there, or not into so many stages.
    """
    trace = ForwardTrace(model, images)
    homes = trace.homes(model)
    sizes = [0] * (len(trace.places) + 1)  # numbers at each position
    for name, parameter in model.named_parameters():
        sizes[homes[name]] += parameter.numel()
    starts = _balance(sizes, trace.places, stages) if entries is None else _locate(sizes, trace.places, entries)
    bounds = [0, *starts, len(sizes)]
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if not sum(sizes[start:stop]):
            raise InputError(
                f"strategy.cuts is [{','.join(entries or ())}], which leaves stage {number} without parameters; "
                "cut elsewhere, or remove strategy.cuts"
            )
    places = [trace.places[start - 1] for start in starts]
    return Stages(
        entries=tuple(place.name for place in places),
        formats=tuple(place.dtype for place in places),
        homes={name: sum(start <= position for start in starts) for name, position in homes.items()},
        classes=trace.logits.shape[-1],
    )


def _locate(sizes: Sequence[int], places: Sequence[CutPlace], entries: Sequence[str]) -> list[int]:
    numbers = {place.name: number for number, place in enumerate(places, 1)}
    starts = []
    for name in entries:
        if name not in numbers:
            sides = {place.name: (sizes[:number], sizes[number:]) for number, place in enumerate(places, 1)}
            free = [place.name for place in places if not place.obstacle and all(map(any, sides[place.name]))]
            shown = ", ".join(free[:MOST_PLACES]) + ", ..." * (len(free) > MOST_PLACES)
            raise InputError(
                f"strategy.cuts: the model runs no module {name!r}, expected some of {shown}."
                f"{did_you_mean(name, list(numbers))}"
            )
        if obstacle := places[numbers[name] - 1].obstacle:
            raise InputError(
                f"strategy.cuts: the model cannot be cut before {name}: {obstacle}; cut elsewhere, or remove "
                "strategy.cuts"
            )
        starts.append(numbers[name])
    if starts != sorted(set(starts)):
        raise InputError(
            f"strategy.cuts is [{','.join(entries)}], expected different modules in the order in which they run"
        )
    return starts


def _balance(sizes: Sequence[int], places: Sequence[CutPlace], stages: int) -> list[int]:
    """The cuts that make the stages most equal. `sizes` has the number of parameters at each position."""
    before = list(itertools.accumulate(sizes, initial=0))  # the parameters before each position
    # Of several places without parameters between them, take the one that sends least, and of these the outermost.
    starts_by_size: dict[int, list[int]] = defaultdict(list)
    for start, place in enumerate(places, 1):
        if not place.obstacle and 0 < before[start] < before[-1]:
            starts_by_size[before[start]].append(start)
    starts = [
        min(group, key=lambda start: (places[start - 1].size, places[start - 1].name.count(".")))
        for group in starts_by_size.values()
    ]
    if len(starts) < stages - 1:
        raise InputError(
            f"strategy=pipeline has {stages} stages, but this model can be cut into {len(starts) + 1} at the most; "
            f"use launcher.ranks={len(starts) + 1}, or strategy=fsdp"
        )
    # By the start of the last stage so far: the sum of the squared sizes of the stages before it, and the cuts.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(stages - 1):
        best = {
            cut: min(
                (squares + (before[cut] - before[start]) ** 2, (*cuts, cut))
                for start, (squares, cuts) in best.items()
                if start < cut
            )
            for cut in starts
            if cut > min(best)
        }
    ways = [(squares + (before[-1] - before[start]) ** 2, cuts) for start, (squares, cuts) in best.items()]
    return list(min(ways)[1])
