"""Finding out which modules of a model draw random numbers, and having them draw by the keys of the examples.

Nothing is known of the model but what one training forward pass does. That pass runs under two observers: torch's own
functions that draw are answered as they will be later, and each is a site of the module that called it; whatever else
takes numbers from torch's generator is remembered with the module's name, for the user to read.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from lockstep.core.data_protocols import MicroBatch
from lockstep.core.rng import generator_seed, reseed
from lockstep.stochastic.functions import KeyedFunctions, drop_block
from lockstep.stochastic.keys import ForwardKeys, Site, forward_keys

# The examples of the pass that is observed: a dimension of so many, or of a multiple, is the batch's. Neither n * n
# pixels nor n * n + 1 tokens are a multiple of it, unless n is.
EXAMPLES = 11
# More than any model draws; the keys of the observed pass are made before they are counted.
MOST_DRAWS = 4096
# Modules of torch that never draw, by where they are defined, and ours. A model of nothing else is not observed.
SILENT = {
    f"torch.nn.modules.{name}"
    for name in ("batchnorm", "container", "conv", "flatten", "instancenorm", "linear", "normalization", "padding")
} | {"torch.nn.modules.pooling", "torch.nn.modules.upsampling", "torch.nn.modules.pixelshuffle"}
SILENT_TYPES = (nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity, nn.LeakyReLU, nn.Hardswish)

# Modules that need more than other numbers, by name: timm is not imported for models that are not timm's.
OWN_FORWARD = {"timm.layers.drop.DropBlock2d": drop_block}


@dataclass(frozen=True)
class ForwardDraws:
    """What a model draws in a training forward pass.

    Fields:
        seed, device: of the run.
        keys: the keyed draws.
        unknown: the names of modules that draw in a way that is not keyed.
    """

    seed: int
    device: torch.device
    keys: ForwardKeys = field(default_factory=ForwardKeys)
    unknown: tuple[str, ...] = ()

    def of(self, micro: MicroBatch) -> Tensor | None:
        """The keys of a micro-batch's forward pass, int64 (b, 2); None for a model that draws nothing."""
        if self.unknown:  # These at least draw the same numbers again behind a resume.
            reseed(self.device, generator_seed(self.seed, micro.step, micro.number))
        return forward_keys(self.seed, micro) if self.keys.draws else None

    def blank(self, examples: int) -> Tensor | None:
        """Keys for a pass over blank images."""
        return torch.zeros((examples, 2), dtype=torch.int64, device=self.device) if self.keys.draws else None

    @property
    def notes(self) -> list[str]:
        """Sentences that the user should read before the run."""
        if not self.unknown:
            return []
        return [
            f"the model draws random numbers in a way that Lockstep does not know ({', '.join(self.unknown)}); on "
            "another number of ranks or micro-batches they are others, and so is the run"
        ]


class KeyedModel(nn.Module):
    """A model that is told whose random numbers to draw: (images, keys) to logits."""

    def __init__(self, model: nn.Module, draws: ForwardDraws) -> None:
        super().__init__()
        self.model = model
        self.keys = draws.keys

    def forward(self, images: Tensor, keys: Tensor | None) -> Any:
        if keys is not None:
            self.keys.begin(keys)
        return self.model(images)


def key_draws(model: nn.Module, image: Tensor, seed: int) -> ForwardDraws:
    """Have `model` draw by the keys of its examples, in place, and say what it draws.

    `image` is one blank input (1, C, H, W) on the model's device. The model is called once; parameters, buffers and
    generators are left as they were.
    """
    if all(_silent(module) for module in model.modules()):
        return ForwardDraws(seed, image.device)
    keys = ForwardKeys()
    observed = _Observer(keys, {module: name for name, module in model.named_modules()})
    with torch.no_grad(), _untouched(model, image.device), observed.watch():
        keys.draws = MOST_DRAWS
        keys.begin(torch.zeros((EXAMPLES, 2), dtype=torch.int64, device=image.device))
        model(image.expand(EXAMPLES, *image.shape[1:]).contiguous())
    keys.draws = observed.draws
    for module, sites in observed.sites.items():
        _draw_by_key(module, sites)
    return ForwardDraws(seed, image.device, keys, tuple(observed.unknown))


def _silent(module: nn.Module) -> bool:
    home = type(module).__module__
    return home in SILENT or type(module) in SILENT_TYPES or home.startswith("lockstep.models.")


def _draw_by_key(module: nn.Module, sites: list[Site]) -> None:
    """Run the forward of `module` with keyed functions, by a subclass of its own (as torch's parametrizations do)."""
    plain = type(module)
    own = OWN_FORWARD.get(f"{plain.__module__}.{plain.__qualname__}")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return plain.forward(self, *args, **kwargs)
        if own is not None:
            return own(self._next_site, self, *args, **kwargs)
        with KeyedFunctions(self._next_site):
            return plain.forward(self, *args, **kwargs)

    def _next_site(self: Any, shape: torch.Size) -> Site:
        # A module that is called several times in a pass has a site for each; then the next pass begins.
        site: Site = self._draw_sites[self._draw_next]
        self._draw_next = (self._draw_next + 1) % len(self._draw_sites)
        return site

    module.__class__ = type(plain.__name__, (plain,), {"forward": forward, "_next_site": _next_site})
    module._draw_sites, module._draw_next = tuple(sites), 0  # type: ignore[assignment]


@contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Have buffers, training mode and torch's generators afterwards as they were before."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
    for module, training in modes:
        module.training = training
    for buffer, before in buffers:
        buffer.copy_(before)


class _Observer:
    """Collects the sites of a forward pass, and what draws otherwise."""

    def __init__(self, keys: ForwardKeys, names: dict[nn.Module, str]) -> None:
        self.keys, self.names = keys, names
        self.stack: list[nn.Module] = []
        self.sites: dict[nn.Module, list[Site]] = defaultdict(list)
        self.draws = 0
        self.unknown: dict[str, None] = {}
        self.generators = _states()

    @contextmanager
    def watch(self) -> Iterator[None]:
        entered = hooks.register_module_forward_pre_hook(lambda module, _: self._enter(module))
        left = hooks.register_module_forward_hook(lambda *_: self._leave(), always_call=True)
        others: list[tuple[str, Callable[[], Any]]] = [
            ("Python's random", random.getstate),
            ("NumPy's random", lambda: repr(np.random.get_state(legacy=False))),
        ]
        before = [state() for _, state in others]
        try:
            with KeyedFunctions(self.take):
                yield
        finally:
            entered.remove()
            left.remove()
        for (name, state), was in zip(others, before, strict=True):
            if state() != was:
                self.unknown[name] = None

    def _enter(self, module: nn.Module) -> None:
        self._notice()
        self.stack.append(module)

    def _leave(self) -> None:
        self._notice()
        self.stack.pop()

    def _notice(self) -> None:
        """Remember the module that runs now if torch's generators have moved since the last look."""
        generators = _states()
        if any(not torch.equal(now, was) for now, was in zip(generators, self.generators, strict=True)):
            module = self.stack[-1]
            self.unknown[self.names.get(module) or type(module).__name__] = None
        self.generators = generators

    def take(self, shape: torch.Size) -> Site:
        """A new site of the module that runs now."""
        exact = [dim for dim, size in enumerate(shape) if size == EXAMPLES]
        multiple = [dim for dim, size in enumerate(shape) if size % EXAMPLES == 0]
        site = Site(self.draws, next(iter(exact + multiple), None), self.keys)
        self.draws += 1
        self.sites[self.stack[-1]].append(site)
        return site


def _states() -> list[Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]
