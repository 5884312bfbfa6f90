"""What the parts of a run promise each other. The trainer knows these and no concrete part.

Those of the data path are in `lockstep.core.data_protocols`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from enum import Enum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lockstep.core.component import Component
from lockstep.core.observer import Observer, RunInfo
from lockstep.core.plan import Plan
from lockstep.core.process_group import Backend
from lockstep.core.run_dir import RunDir
from lockstep.core.trained_input import TrainedInput
from lockstep.core.world import World

Entry = Callable[[Path], None]
M = TypeVar("M")  # a micro-batch, which a strategy only passes on


class Strategy(Component, Protocol):
    """How the gradients of several ranks or devices become one update. Holds no state of a run."""

    @property
    def sync_every(self) -> int:
        """The steps from one at whose end all ranks have the same state to the next."""

    def ranks(self, gpus: int) -> int:
        """The number of ranks to use where the user named none, on a machine with `gpus` GPUs."""

    def check(self, ranks: int, device: str) -> None:
        """Raise InputError where the strategy cannot work with so many ranks on that kind of device."""

    def wrap(self, model: nn.Module, world: World, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        """The replica: the module to call in training. Every rank starts from main's weights.

        `example` are the inputs of a pass over two blank images, for strategies that must see one before the first
        step.
        """

    def check_parts(self, optimizer: Optimizer, precision: Precision, micro_batches: int | str) -> None:
        """Raise InputError where the strategy cannot work with these parts of a job."""

    def data_world(self, world: World) -> World:
        """The world by which a rank takes its shard of each global batch and its blocks of an evaluation."""

    def shard(self, model: nn.Module, world: World, precision: Precision, images: Tensor) -> None:
        """Cut the parameters of a model over the ranks, in place, where the strategy does that. Collective.

        Called for the wrapped model, and for the copy that averages its weights. `images` are blank.
        """

    def build_optimizer(self, optimizer: Optimizer, model: nn.Module, world: World) -> torch.optim.Optimizer:
        """The optimizer over the parameters of a wrapped model."""

    def grad_divisor(self, world: World) -> int:
        """By what `reduce` divides the sum of the ranks' gradients."""

    def accumulate(self, replica: nn.Module, last: bool) -> AbstractContextManager[None]:
        """The context of one micro-batch's forward and backward; only the `last` one communicates."""

    def run_micro_batches(
        self,
        replica: nn.Module,
        micro_batches: Iterator[tuple[M, bool]],
        world: World,
        *,
        forward: Callable[[M], Tensor],
        backward: Callable[[Tensor], None],
        between: Callable[[], None],
    ) -> None:
        """Take the micro-batches of a step, each with whether it is the last, through forward and backward.

        Both go in the order of the micro-batches. `forward` gives the loss that `backward` takes. `between` may be
        called between two micro-batches, by all ranks; it may raise.
        """

    def reduce(self, replica: nn.Module, step: int) -> None:
        """Called after the last backward: leaves each rank the sum over the ranks, divided by `grad_divisor`."""

    def end_step(self, trained: Trained, step: int, plan: Plan) -> None:
        """Called after the optimizer's step. Where `plan.in_sync`, all ranks have the same state afterwards."""

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        """Sentences that the user should read before the run: where equal runs end, what holds it back."""


class Trained(Protocol):
    """What a training step changes."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def replica(self) -> nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def ema(self) -> AveragedModel | None: ...


class Precision(Component, Protocol):
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


class Launcher(Component, Protocol):
    """How the ranks of one job come to life. `ranks` and `threads` are numbers once they are resolved."""

    @property
    def ranks(self) -> int | str: ...

    @property
    def world_size(self) -> int:
        """The ranks of the job on all machines, once they are resolved; `ranks` are those of each machine."""

    @property
    def threads(self) -> int | str:
        """CPU threads of each rank."""

    @property
    def backend(self) -> Backend: ...

    @property
    def timeout(self) -> str:
        """Without a finished step, after which a job is ended as hanging: a time such as `10min`."""

    def launch(self, entry: Entry, run_dir: RunDir) -> float | None:
        """Run `entry(run_dir.path)` in every rank, wait for all, and return the job's objective."""


class Model(Component, Protocol):
    """A network to be built."""

    @property
    def compile(self) -> bool: ...

    @property
    def compile_mode(self) -> Enum: ...

    @property
    def memory_format(self) -> torch.memory_format:
        """That of images and weights."""

    def check(self) -> None:
        """Raise InputError for a model that does not exist, without building one."""
        return

    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        """The module: float images (B, C, H, W) to logits (B, classes)."""

    def trained_input(self) -> TrainedInput | None:
        """What the weights of its name were trained on; None if there are none, or nobody knows."""
        return None

    def prepare(self) -> None:
        """Make sure that the weights that it starts from are there; fetch them if allowed. Raises InputError."""
        return

    def initialise(self, model: nn.Module, images: Callable[[int], Tensor]) -> None:
        """Set what depends on the data: `images(n)` are n training images as a fresh `model` would see them."""
        return


class Optimizer(Component, Protocol):
    """An optimizer to be built over a model's parameters."""

    @property
    def lr(self) -> float | str:
        """The base learning rate, which the schedule multiplies; a number once it is resolved."""

    @property
    def weight_decay(self) -> float: ...

    def build(self, model: nn.Module) -> torch.optim.Optimizer: ...


class Schedule(Component, Protocol):
    """The learning rate over a run, as a pure function of the step: there is no state to save."""

    def factor(self, step: int, plan: Plan) -> float:
        """What the base learning rate is multiplied with at `step` (from 1)."""


class Loss(Component, Protocol):
    """What training minimises.

    A class whose losses judge each class by itself says `probabilities: ClassVar[str] = "sigmoid"`; of any other,
    probabilities are the softmax of the logits.
    """

    def build(self, classes: int, labels: Tensor) -> nn.Module:
        """The module: logits (b, classes) and targets to the loss of each example, (b,).

        Targets are labels, int64 (b,), or under Mixup and CutMix shares of the classes, (b, classes) in the format
        of the images. `labels`, int64 (n,), are those of the training split. An evaluation calls the module in
        evaluation mode, where it leaves out what only regularises training.
        """


class Logger(Component, Protocol):
    """A place for the figures of a run. Any number of them may be chosen."""

    def build(self, run: RunInfo) -> Observer:
        """What is told of the run, in main only.

        Raises:
            InputError: it needs what is not installed.
        """


class Metric(Component, Protocol):
    """A score of an evaluation besides accuracy. Any number of them may be chosen."""

    def build(self, classes: int) -> Score:
        """What takes an evaluation's predictions and makes a number of them."""


class Score(Protocol):
    """What `torchmetrics.Metric` has. Only main has one; it gets every example once, in the order of the split."""

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        """Take examples: probabilities (n, classes) as the loss has them, and labels, int64 (n,), both on the CPU."""

    def compute(self) -> Tensor:
        """The score: a scalar, or one for each class, (classes,)."""

    def reset(self) -> None:
        """Forget all examples."""
