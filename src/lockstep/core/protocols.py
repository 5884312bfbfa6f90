"""What the parts of a run promise each other. The trainer knows these and no concrete part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lockstep.core.plan import Plan
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World

Entry = Callable[[Path], None]


class Strategy(Protocol):
    """How the gradients of several ranks or devices become one update. Holds no state of a run."""

    def ranks(self, gpus: int) -> int:
        """The number of ranks to use where the user named none, on a machine with `gpus` GPUs."""

    def check(self, ranks: int, device: str) -> None:
        """Raise InputError where the strategy cannot work with so many ranks on that kind of device."""

    def wrap(self, model: nn.Module, world: World, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        """The replica: the module to call in training. Every rank starts from main's weights.

        `example` are the inputs of a pass over two blank images, for strategies that must see one before the first
        step.
        """

    def grad_divisor(self, world: World) -> int:
        """By what `reduce` divides the sum of the ranks' gradients."""

    def accumulate(self, replica: nn.Module, last: bool) -> AbstractContextManager[None]:
        """The context of one micro-batch's forward and backward; only the `last` one communicates."""

    def reduce(self, replica: nn.Module) -> None:
        """Called after the last backward: leaves each rank the sum over the ranks, divided by `grad_divisor`."""

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        """Sentences that the user should read before the run: where equal runs end, what holds it back."""


class Precision(Protocol):
    """The number format of the forward and backward pass.

    `storage` is the dtype of parameters, `dtype` that of products and images (by autocast where they differ), `sums`
    that of normalisation and losses, `matmul` torch's name for the precision of float32 products.
    """

    @property
    def storage(self) -> torch.dtype: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def sums(self) -> torch.dtype: ...

    @property
    def matmul(self) -> str: ...

    def convert(self, model: nn.Module) -> nn.Module:
        """`model` with its parameters in the format of storage."""

    def check(self, device: str) -> None:
        """Raise InputError where the device does not have the format."""

    def configure(self) -> None:
        """Set torch's process-wide matrix-multiplication precision."""

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """The context of a forward pass."""

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """The loss scaler, disabled for the formats that need none."""


class Launcher(Protocol):
    """How the ranks of one job come to life."""

    ranks: int | str

    def launch(self, entry: Entry, run_dir: RunDir) -> float | None:
        """Run `entry(run_dir.path)` in every rank, wait for all, and return the job's objective."""


class Split(Protocol):
    """The examples of one split, in a fixed order, each stored at one shape.

    `labels` is int64 of shape (N,). `images` is uint8 of shape (N, C, H, W) where the split is an array,
    else None; `fetch` gives any of its images, decoded on the spot.
    """

    @property
    def labels(self) -> Tensor: ...

    @property
    def images(self) -> Tensor | None: ...

    @property
    def skip(self) -> int:
        """The most images that may be broken."""

    def __len__(self) -> int: ...

    def fetch(self, indices: list[int], epoch: int = 0) -> Tensor:
        """uint8 images of shape (len(indices), C, H, W). Raises InputError for one that cannot be read.

        `epoch` is for a split that cuts other boxes from its images in each.
        """


class Stepped(Protocol):
    """What belongs to one step of a run."""

    @property
    def step(self) -> int: ...


class MicroBatch(Stepped, Protocol):
    """The examples of one forward pass: labels (b,), and sample indices of which the first b are theirs."""

    @property
    def epoch(self) -> int: ...

    @property
    def number(self) -> int:
        """Which piece of its global batch it is, from 0."""

    @property
    def labels(self) -> Tensor: ...

    @property
    def indices(self) -> Tensor: ...


class Source(Protocol):
    """Where images and labels come from."""

    @property
    def classes(self) -> int: ...

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of a stored image."""

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """The same of what the model sees."""

    @property
    def eval_crop(self) -> float:
        """The central share of a stored image's side that is evaluated."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Per channel, of pixels from 0 to 1; `std` likewise."""

    @property
    def std(self) -> tuple[float, ...]: ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """By label; empty where they have none."""

    def fingerprint(self) -> Mapping[str, Mapping[str, str]]:
        """What tells the examples of each split, "train" and "val", from others, wherever they are kept.

        Parts of a split that can differ by themselves have words of their own, so that a difference can be named.
        """

    def prepare(self) -> None:
        """See that the data is there, downloading it under a lock where it may be. Raises InputError."""

    def train(self) -> Split: ...

    def eval(self) -> Split: ...


class Sink(Protocol):
    """A place for scalars. Only main has real ones."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def flush(self) -> None:
        """Have the file hold all that was written."""

    def close(self) -> None: ...


class Schedule(Protocol):
    """The learning rate over a run, as a pure function of the step: there is no state to save."""

    def factor(self, step: int, plan: Plan) -> float:
        """What the base learning rate is multiplied with at `step` (from 1)."""


class Model(Protocol):
    """A network to be built."""

    compile: bool
    compile_mode: Enum

    @property
    def memory_format(self) -> torch.memory_format:
        """That of images and weights."""

    def check(self) -> None:
        """Raise InputError for a model that does not exist, without building one."""

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        """The module: float images (B, C, H, W) to logits (B, classes)."""

    def initialise(self, model: nn.Module, images: Callable[[int], Tensor]) -> None:
        """Set what depends on the data: `images(n)` are n training images as a fresh `model` would see them."""


class Optimizer(Protocol):
    """An optimizer to be built over a model's parameters."""

    def build(self, model: nn.Module) -> torch.optim.Optimizer: ...


class SampleRNG(Protocol):
    """The random numbers of a batch of examples, each float32 (b,) in [0, 1)."""

    @property
    def epoch(self) -> int:
        """Counted from 0."""

    def uniform(self, n: int) -> Tensor:
        """Number `n` of each example in this epoch."""

    def epoch_invariant(self, n: int) -> Tensor:
        """Number `n` of each example, the same in all epochs."""


class Augment(Protocol):
    """Random changes of training images, a pure function of (seed, epoch, sample index)."""

    def apply(self, images: Tensor, draws: SampleRNG, size: tuple[int, int]) -> Tensor:
        """Change a batch.

        Args:
            images: uint8 (B, C, H, W).
            draws: the random numbers of its examples.
            size: the (height, width) the model wants; an augmentation that resamples may go there at once.
        """


@runtime_checkable
class BoxAugment(Augment, Protocol):
    """An augmentation whose first part can be left to who reads the files: a box of each whole image."""

    def boxes(self, draws: SampleRNG, sizes: Tensor) -> Tensor:
        """The boxes, int64 (b, 4) as top, left, height and width, in images of `sizes`, int64 (b, 2)."""

    @property
    def rest(self) -> Augment:
        """What is left to do where the boxes have been cut and resized."""
