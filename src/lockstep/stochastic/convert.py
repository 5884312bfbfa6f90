"""Finds the modules of a model that draw random numbers, and makes them draw by the keys of the examples.

One training forward pass is observed, in two ways. First, torch's random functions are replaced by keyed ones, and
each call is recorded as a site of the module that made it. Second, a module that moves torch's generator in another
way is recorded by its name, for a warning to the user.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from lockstep.core.data_protocols import Shard
from lockstep.core.model import model_mode
from lockstep.core.rng import generator_seed, reseed
from lockstep.stochastic.functions import KeyedFunctions, drop_block
from lockstep.stochastic.numbers import ForwardKeys, Site, forward_keys

# The batch size of the observed pass: a dimension of this size, or of a multiple of it, is taken for the batch
# dimension. n * n pixels or n * n + 1 tokens are no multiple of it, unless n is.
EXAMPLES = 11
# More draws than any model has; the keys of the observed pass are made before the draws are counted.
MOST_DRAWS = 4096
# Layers with their own keyed forward. By name, so that timm is imported for timm's models only.
OWN_FORWARD = {"timm.layers.drop.DropBlock2d": drop_block}


@dataclass(frozen=True)
class ForwardDraws:
    """The random draws of a model's training forward pass.

    Fields:
        keys: of all keyed draws.
        unknown: the names of modules that draw without keys.
        returned: what the model returned for an example: the shape of a tensor, or a type.
    """

    seed: int
    device: torch.device
    keys: ForwardKeys = field(default_factory=ForwardKeys)
    unknown: tuple[str, ...] = ()
    returned: str = ""

    def keys_of(self, micro: Shard) -> tuple[Tensor, ...]:
        """The keys of a micro-batch's forward pass, int64 (b, 2); none for a model that draws nothing."""
        if self.unknown:  # so that their draws are at least the same after a resume
            reseed(self.device, generator_seed(self.seed, micro.step, micro.number))
        return (forward_keys(self.seed, micro),) if self.keys.draws else ()

    def set_keys(self, micro: Shard) -> None:
        """Set the keys of a micro-batch for the next forward pass of a model that is called without keys."""
        for keys in self.keys_of(micro):
            self.keys.set(keys)

    def blank_inputs(self, images: Tensor) -> tuple[Tensor, ...]:
        if not self.keys.draws:
            return (images,)
        return images, torch.zeros((images.shape[0], 2), dtype=torch.int64, device=self.device)

    def keyed(self, model: nn.Module) -> nn.Module:
        """A module that takes the images and any keys, for the model itself."""
        return KeyedModel(model, self) if self.keys.draws else model

    @property
    def notes(self) -> list[str]:
        if not self.unknown:
            return []
        return [
            f"the model draws random numbers in a way that Lockstep does not know ({', '.join(self.unknown)}); on "
            "another number of ranks or micro-batches they differ, and so does the run"
        ]


class KeyedModel(nn.Module):
    """A model that also takes the keys of its random numbers: (images, keys) to logits."""

    def __init__(self, model: nn.Module, draws: ForwardDraws) -> None:
        super().__init__()
        self.model = model
        self.keys = draws.keys
        self.drawing = [module for module in model.modules() if hasattr(module, "_draw_sites")]

    def forward(self, images: Tensor, keys: Tensor) -> Any:
        self.keys.set(keys)
        for module in self.drawing:  # the last pass may not have reached all draws, as in a stage of a pipeline
            module._draw_next = 0  # type: ignore[assignment]
        return self.model(images)


def key_draws(model: nn.Module, image: Tensor, seed: int) -> ForwardDraws:
    """Make `model` draw by the keys of its examples, in place; returns its draws.

    `image` is one blank input (1, C, H, W) on the model's device. The model is called once. Parameters, buffers and
    generators are left unchanged.
    """
    keys = ForwardKeys()
    observer = _Observer(keys, {module: name for name, module in model.named_modules()})
    with torch.no_grad(), untouched(model, image.device), observer.watch():
        keys.draws = MOST_DRAWS
        keys.set(torch.zeros((EXAMPLES, 2), dtype=torch.int64, device=image.device))
        outputs = model(image.expand(EXAMPLES, *image.shape[1:]).contiguous())
    keys.draws = observer.draws
    for module, sites in observer.sites.items():
        _draw_by_key(module, sites)
    returned = str(list(outputs.shape[1:])) if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
    return ForwardDraws(seed, image.device, keys, tuple(observer.unknown), returned)


def _draw_by_key(module: nn.Module, sites: list[Site]) -> None:
    """Make `module` run its forward with keyed functions, by changing its class (as torch's parametrizations do)."""
    original = type(module)
    keyed_forward = OWN_FORWARD.get(f"{original.__module__}.{original.__qualname__}")

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return original.forward(self, *args, **kwargs)
        if keyed_forward is not None:
            return keyed_forward(self._next_bits, self, *args, **kwargs)
        with KeyedFunctions(self._next_bits):
            return original.forward(self, *args, **kwargs)

    def _next_bits(self: Any, shape: torch.Size, like: Tensor) -> Tensor:
        # A module that is called several times in a pass has a site for each call; then the next pass begins.
        site: Site = self._draw_sites[self._draw_next]
        self._draw_next = (self._draw_next + 1) % len(self._draw_sites)
        return site.bits(shape, like)

    module.__class__ = type(original.__name__, (original,), {"forward": forward, "_next_bits": _next_bits})
    module._draw_sites, module._draw_next = tuple(sites), 0  # type: ignore[assignment]


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model in training mode, and restore its mode, its buffers and torch's generators afterwards."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [device] if device.type == "cuda" else []
    with model_mode(model, training=True), torch.random.fork_rng(devices=devices):
        yield
    for buffer, before in buffers:
        buffer.copy_(before)


class _Observer:
    """Collects the sites of a forward pass, and the names of modules that draw in another way."""

    def __init__(self, keys: ForwardKeys, names: dict[nn.Module, str]) -> None:
        self.keys, self.names = keys, names
        self.stack: list[nn.Module] = []
        self.sites: dict[nn.Module, list[Site]] = defaultdict(list)
        self.draws = 0
        self.unknown: dict[str, None] = {}
        self.generators = _generator_states()

    @contextmanager
    def watch(self) -> Iterator[None]:
        enter_hook = hooks.register_module_forward_pre_hook(lambda module, _: self._enter(module))
        leave_hook = hooks.register_module_forward_hook(lambda *_: self._leave(), always_call=True)
        states = _other_generator_states()
        with enter_hook, leave_hook, KeyedFunctions(self.new_bits):
            yield
        for name, state in _other_generator_states().items():
            if state != states[name]:
                self.unknown[name] = None

    def _enter(self, module: nn.Module) -> None:
        self._check_generators()
        self.stack.append(module)

    def _leave(self) -> None:
        self._check_generators()
        self.stack.pop()

    def _check_generators(self) -> None:
        """Record the module that runs now if torch's generators have moved since the last check."""
        generators = _generator_states()
        if any(not torch.equal(now, before) for now, before in zip(generators, self.generators, strict=True)):
            module = self.stack[-1]
            self.unknown[self.names.get(module) or type(module).__name__] = None
        self.generators = generators

    def new_bits(self, shape: torch.Size, like: Tensor) -> Tensor:
        """The bits of a new site of the module that runs now."""
        exact = [dim for dim, size in enumerate(shape) if size == EXAMPLES]
        multiple = [dim for dim, size in enumerate(shape) if size % EXAMPLES == 0]
        site = Site(self.draws, next(iter(exact + multiple), None), self.keys)
        self.draws += 1
        self.sites[self.stack[-1]].append(site)
        return site.bits(shape, like)


def _generator_states() -> list[Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def _other_generator_states() -> dict[str, Any]:
    return {"Python's random": random.getstate(), "NumPy's random": repr(np.random.get_state(legacy=False))}
