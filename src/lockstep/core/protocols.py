"""The protocols of config options, with their defaults (for data see `data_protocols`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.batch import Batch
from lockstep.core.fields import Component
from lockstep.core.model import UpdateScope, whole
from lockstep.core.model_card import CLASSES, SOFTMAX, TARGETS, ModelCard, TrainedInput
from lockstep.core.plan import Plan
from lockstep.core.run_dir import RunDir
from lockstep.core.tags import LOSS
from lockstep.core.world import World

M = TypeVar("M")  # a micro-batch, which a strategy only passes on
NO_CONTEXT = nullcontext()


@dataclass(frozen=True)
class Entry:
    """What a rank runs for the run folder `path`: in this process `here(path)`.

    In a process of its own it is `exit_as_rank(path, *objects)` of the same module. `objects` are values that the run
    folder does not have. `remedy` is for a machine that runs out of memory.
    """

    here: Callable[[Path], None]
    objects: tuple[Any, ...] = ()
    remedy: str = "use train.micro_batches=auto, or fewer ranks"

    @property
    def module(self) -> str:
        return self.here.__module__


class Strategy(Component, Protocol):
    """How the gradients of several ranks or devices become one update. Holds no state of a run."""

    recordable: ClassVar[bool] = True
    """Whether a step can be recorded as one CUDA graph."""
    whole_model: ClassVar[bool] = True
    """Whether each rank has the whole model."""
    one_pass: ClassVar[bool] = True
    """Whether the backward pass of a micro-batch follows its forward pass at once."""
    fixed_order: ClassVar[bool] = False
    """Whether gradients are added in the same order on any number of ranks, as `repro=strict` promises."""
    same_work: ClassVar[bool] = True
    """Whether all ranks do the same work in a step, so that a slow one can be named."""
    adapts: ClassVar[bool] = False
    """Whether the number of devices decides which strategy takes the place of this one."""
    joins_alone: ClassVar[bool] = False
    """Whether a lone rank of a launcher joins a process group, to do on one GPU what several do."""
    widest: ClassVar[UpdateScope] = UpdateScope.model
    """The widest scope of an optimizer whose state the strategy can divide over the ranks."""
    sync_batchnorm: bool | None = None
    """Whether batch norm counts over all ranks; None if no key chooses it."""

    def ranks(self, gpus: int) -> int:
        """The default number of ranks on a machine with `gpus` GPUs."""
        return 1

    def devices(self, ranks: int, gpus: int) -> int:
        """The GPUs that `ranks` ranks use on a machine with `gpus` GPUs."""
        return ranks

    def check(self, ranks: int, device: str) -> None:
        """Raise InputError if the strategy cannot work with so many ranks on that kind of device."""
        return

    def wrap(self, model: nn.Module, world: World, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        """The replica: the module to call in training. Every rank starts from main's weights.

        `example` are the inputs of a pass over two blank images, for strategies that run one before the first step.
        """
        return model

    def check_parts(self, optimizer: Optimizer, precision: Precision, micro_batches: int | str) -> None:
        """Raise InputError if the strategy cannot work with these parts of a job."""
        return

    def check_compile(self, ranks: int, device: str) -> None:
        """Raise InputError if a compiled model does not work on so many ranks of that kind of device."""
        return

    def micro_batches(self, number: int | str, ranks: int) -> int | str:
        """The micro-batches of a step on so many ranks, for `train.micro_batches=number`. Raises InputError."""
        return number

    def with_changing_graph(self) -> Self:
        """This strategy for steps without a gradient for frozen layers. Raises InputError if it has none."""
        return self

    def data_world(self, world: World) -> World:
        """The world that decides a rank's shard of each global batch and its blocks of an evaluation."""
        return world

    def shard(self, model: nn.Module, world: World, precision: Precision, images: Tensor) -> None:
        """Cut the parameters of a model over the ranks, in place, if the strategy does so. Collective.

        Called for the wrapped model, and for the EMA copy of it. `images` are blank.
        """
        return

    def build_optimizer(self, optimizer: Optimizer, model: nn.Module, world: World) -> torch.optim.Optimizer:
        """The optimizer over the parameters of a wrapped model."""
        return optimizer.build(model)

    def grad_divisor(self, world: World) -> int:
        """The number by which `reduce` divides the sum of the ranks' gradients."""
        return world.size

    def accumulate(self, replica: nn.Module, last: bool) -> AbstractContextManager[None]:
        """The context of one micro-batch's forward and backward; only the `last` one communicates."""
        return NO_CONTEXT

    def run_micro_batches(
        self,
        replica: nn.Module,
        micro_batches: Iterable[tuple[M, bool]],
        world: World,
        *,
        forward: Callable[[M], Tensor],
        backward: Callable[[Tensor], None],
        between: Callable[[], None],
    ) -> None:
        """Run forward and backward for the micro-batches of a step, in order; each comes with whether it is the last.

        `forward` returns the loss that `backward` takes. All ranks may call `between` two of them; it may raise.
        """
        for micro, last in micro_batches:
            with self.accumulate(replica, last):
                backward(forward(micro))
            if not last:
                between()

    def reduce(self, replica: nn.Module) -> None:
        """Called after the last backward. Afterwards gradients are the sum over the ranks, over `grad_divisor`."""
        return  # there is one gradient, or backward has reduced it, as under DDP and `fully_shard`

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The L2 norm of the reduced gradient of a model with these parameters, a scalar. Collective."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return whole(nn.utils.get_total_norm(gradients))

    def share_buffers(self, model: nn.Module, world: World) -> None:
        """Copy main's buffers to every rank before an evaluation. Collective.

        Training does not read running statistics, so they may differ between ranks.
        """
        if world.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def whole_tensors(self, tensors: Sequence[Tensor], *, keep: bool) -> Iterable[Tensor]:
        """The tensors of a wrapped model or of its state, whole, for a checkpoint. Collective.

        Only main has `keep`, and needs them; other ranks may return their parts. Those that were cut are in host
        memory, so that a device holds one whole tensor at a time.
        """
        for tensor in tensors:
            full = whole(tensor)
            yield tensor if full is tensor or not keep else full.cpu()

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        """Sentences that the user should read before the run: limits of reproducibility, reasons for a low speed."""
        return []


class Precision(Component, Protocol):
    """The precision of the forward and backward pass. The defaults are for float32."""

    dtype: ClassVar[torch.dtype] = torch.float32
    """The format of matrix products, convolutions and input images; autocast is used if it differs from `storage`."""
    storage: ClassVar[torch.dtype] = torch.float32
    """The format of parameters and gradients."""
    sums: ClassVar[torch.dtype] = torch.float32
    """The format of normalisation and of losses, never a 16-bit one."""
    matmul: ClassVar[str] = "highest"
    """torch's name for the precision of float32 products on CUDA (`highest`, or `high` for TF32)."""
    needs_loss_scaler: ClassVar[bool] = False
    """Whether small gradients are lost without a loss scaler."""

    def convert(self, model: nn.Module) -> nn.Module:
        """Convert the parameters of `model` to `storage`, in place; returns the model."""
        return model.to(self.storage)

    def check(self, device: str) -> None:
        """Raise InputError if the device does not support the format."""
        return

    def configure(self) -> None:
        """Set torch's process-wide matrix-multiplication precision."""
        torch.set_float32_matmul_precision(self.matmul)
        torch.backends.cudnn.allow_tf32 = self.matmul == "high"

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """The context of a forward pass."""
        return NO_CONTEXT if self.dtype is self.storage else torch.autocast(device.type, dtype=self.dtype)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """The loss scaler; disabled for formats that need no scaling."""
        return torch.amp.GradScaler(device.type, enabled=self.needs_loss_scaler)


class Launcher(Component, Protocol):
    """How the ranks of one job are started. `ranks` and `threads` are numbers after `auto` is resolved."""

    starts_ranks: ClassVar[bool] = False
    """Whether the launcher starts processes; if not, this process is the rank."""
    submits: ClassVar[bool] = False
    """Whether the launcher has another system run the job, on other machines."""
    restarts: int = 0
    """How often it starts ranks again after a failure."""

    @property
    def node_range(self) -> tuple[int, int]:
        """The smallest and the largest number of machines."""
        return 1, 1

    @property
    @abstractmethod
    def ranks(self) -> Any: ...

    @property
    def world_size(self) -> int:
        """The ranks of the job on all machines, after `auto` is resolved; `ranks` is the number on each machine."""
        return int(self.ranks) * self.node_range[1]

    @property
    @abstractmethod
    def threads(self) -> Any:
        """The CPU threads of each rank."""

    @property
    @abstractmethod
    def backend(self) -> str:
        """The library of the collectives, `nccl` or `gloo` after `auto` is resolved."""

    @property
    @abstractmethod
    def timeout(self) -> str:
        """The time without a finished step after which a job is ended as hanging, such as `10min`."""

    def check(self) -> None:
        """Raise InputError for a key that has no effect because of another key of the launcher."""
        return

    def try_address(self) -> str:
        """Try the address at which the machines of a job meet; a sentence. Raises InputError if it does not work."""
        return "the ranks of one machine meet at a port that is free when they start"

    def in_allocation(self) -> Launcher:
        """The launcher that starts the ranks on this machine. Raises InputError if it cannot run here."""
        return self

    def as_rank(self) -> Launcher:
        """The launcher of a rank that this launcher's agent has started."""
        return self

    def can_fork(self) -> bool:
        """Whether ranks are forked from this process, so that what it has imported serves them."""
        return False

    @abstractmethod
    def launch(self, entry: Entry, run_dir: RunDir) -> float | None:
        """Run `entry` in every rank, wait for all, return the job's objective. Raises LockstepError."""


class Model(Component, Protocol):
    """A network to be built."""

    compile: bool = False
    compile_mode: str = "default"
    grad_checkpointing: bool = False
    pretrained: bool | str = False
    """Whether it begins with published weights; `auto` until that is decided."""
    channels_last: bool | None = None
    """Whether the channels of a pixel are stored together; None if no key chooses it."""

    @property
    def has_usual_size(self) -> bool:
        """Whether it is a published model, which fits into memory with images of the usual size."""
        return False

    @property
    def memory_format(self) -> torch.memory_format:
        """The memory format of images and weights."""
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def check(self) -> None:
        """Raise InputError for a model that does not exist, without building one."""
        return

    @abstractmethod
    def build(self, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
        """The module: float images (B, C, H, W) to logits (B, classes)."""

    def has_published(self) -> bool | None:
        """Whether its library has published weights of it; None for a model of no library."""
        return None

    def trained_input(self) -> TrainedInput | None:
        """The input that the pretrained weights expect; None if there are no such weights, or it is unknown."""
        return None

    def prepare(self) -> None:
        """Make sure that the pretrained weights are there; download them if allowed. Raises InputError."""
        return

    def missing_weights(self) -> str:
        """Why the pretrained weights are neither on this machine nor within reach of it; empty if they are."""
        return ""

    def initialise(self, model: nn.Module, images: Callable[[int], Tensor]) -> None:
        """Set the weights that depend on the data: `images(n)` returns n training images as inputs of `model`."""
        return


class Optimizer(Component, Protocol):
    """An optimizer to be built over a model's parameters."""

    recordable: ClassVar[bool] = False
    """Whether a CUDA graph can record its step: it takes tensors for learning rates, and its state begins at zero."""
    needs_closure: ClassVar[bool] = False
    """Whether its step takes a closure that computes the loss and its gradient again, as torch's LBFGS does."""
    scope: ClassVar[UpdateScope] = UpdateScope.model
    """What the update of a number depends on, which decides how its state can be cut."""
    weight_decay: float = 0.0
    decay_embeddings: bool | None = False
    """Whether the parameters that a model's `no_weight_decay` names decay; None if that is not chosen."""
    lookahead: int | None = None
    """After how many steps the slow weights of look-ahead follow; None without them."""

    @property
    @abstractmethod
    def lr(self) -> Any:
        """The base learning rate, which the schedule multiplies; a number after `auto` is resolved."""

    @property
    def algorithm(self) -> str:
        """The name of the algorithm, which no resume may change."""
        return type(self).__name__

    def at_batch(self, batch: int, *, trained: bool) -> Self:
        """This optimizer with a number for `lr=auto`, for a global batch, and whether the weights are trained."""
        return self

    @abstractmethod
    def build(self, model: nn.Module) -> torch.optim.Optimizer: ...


class Schedule(Component, Protocol):
    """The learning rate over a run, a pure function of the step and of the scores so far, with no state to save."""

    @abstractmethod
    def factor(self, step: int, plan: Plan, scores: Sequence[tuple[int, float]]) -> float:
        """The factor of the base learning rate at `step` (from 1).

        `scores` are the evaluations so far, in order: the step and the gain, which is the monitor's value, or minus
        that if less is better. An evaluation at `step` or later must not change the factor.
        """


class Loss(Component, Protocol):
    """The loss that training minimises."""

    probabilities: ClassVar[str] = SOFTMAX
    """How outputs become probabilities; `sigmoid` for a loss that judges each class by itself."""
    targets: ClassVar[tuple[str, ...]] = TARGETS
    """The kinds of targets that it is for."""
    class_weights: list[float] | None = None
    """The weight of each class; None if no key sets them."""
    balanced: bool = False
    """Whether each class weighs as much as its images are few."""

    @abstractmethod
    def build(self, classes: int, labels: Tensor) -> nn.Module:
        """The module: logits (b, classes) and targets to the loss of each example, (b,).

        Targets are labels, int64 (b,). With Mixup and CutMix they are shares of the classes, (b, classes), in the
        dtype of the images; for tasks of `labels` and `values` they are always floats (b, classes). `labels` are the
        labels of the training split. An evaluation calls the module in evaluation mode, in which it omits terms
        that only regularise training.
        """


class Task(Component, Protocol):
    """What a target, a prediction and a score are. It must not mix examples: each has its own loss.

    A task of the user inherits from `Multiclass`, `Multilabel` or `Regression` of `lockstep.tasks`.
    """

    targets: ClassVar[str] = CLASSES
    """What a target is: one of the `classes`, `labels` (a share for each of them), or `values`."""
    probabilities: ClassVar[str | None] = None
    """How outputs become predictions; None: as the loss says."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """The options of `metric` that every job of this task has."""
    figures: ClassVar[tuple[str, ...]] = ()
    """The figures that `losses` logs, as monitors are written: a minus in front says that less is better."""
    counted: ClassVar[tuple[str, ...]] = ()
    """The scores of an evaluation that are shares of its examples, in percent."""
    usual_loss: ClassVar[str | None] = None
    """The option of `loss` that the task chooses; None for the default one."""
    monitor: ClassVar[str] = LOSS
    """The figure of an evaluation that `monitor=auto` is."""

    def absolute(self) -> Self:
        """This task with absolute paths, for processes with another current folder."""
        return self

    def identity(self) -> Mapping[str, str]:
        """What a resume must not change, besides the option itself."""
        return {}

    def ready(self, card: ModelCard, device: torch.device) -> Self:
        """This task on the device of a rank, for a network whose inputs `card` describes. Raises InputError."""
        return self

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss of each example, (b,), and the outputs, (b, outputs), of a micro-batch in training."""
        outputs = batch.network(batch.images)
        return batch.loss(outputs, batch.targets), outputs

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The losses and outputs of a block of an evaluation."""
        outputs = batch.network(batch.images)
        return batch.loss(outputs, batch.targets), outputs

    def hits(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """How many examples are right, an int64 scalar; called if `top1` is among the scores that are `counted`."""
        return (outputs.argmax(1) == labels).sum()

    @abstractmethod
    def predict(self, outputs: Tensor) -> Tensor:
        """The predictions for the outputs, in the form of the labels; for classes, from best to next best."""

    def counts(self, predicted: Tensor, labels: Tensor) -> Tensor:
        """How many examples of a block count for each score of `counted`, int64 (n,)."""
        return torch.zeros(0, dtype=torch.int64, device=labels.device)


class Metric(Component, Protocol):
    """A score of an evaluation besides accuracy. Any number of them may be chosen."""

    higher_is_better: ClassVar[bool | None] = None
    """Whether the larger score is better. None: as what `build` returns says (torchmetrics' do), or else yes."""
    targets: ClassVar[tuple[str, ...]] = TARGETS
    """The kinds of targets that it is for."""
    average: str = ""
    """How the scores of the classes are averaged: `none` if each has a score, empty if no key chooses it."""

    def notes(self, names: Sequence[str]) -> list[str]:
        """Sentences for the start of a run about the names of the classes. Raises InputError if it does not fit."""
        return []

    @abstractmethod
    def build(self, classes: int) -> Score:
        """The object that computes the score from an evaluation's predictions."""

    def build_for(self, targets: str, names: Sequence[str]) -> Score:
        """The object for a task with these targets, and for classes, labels or values with these names."""
        return self.build(len(names))


class Score(Protocol):
    """The interface of `torchmetrics.Metric`. Only main has one; it gets every example once, in the split's order."""

    takes_log_odds: ClassVar[bool] = False
    """Whether `update` gets `log_odds` in place of probabilities, which lose the order of examples near 0 and 1."""

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        """Take examples: probabilities (n, classes) as the loss has them, and labels, both on the CPU.

        Labels are int64 (n,), or float32 (n, classes) for a task of `labels` or `values`; these get no probabilities
        but the values that are predicted.
        """

    def compute(self) -> Tensor:
        """The score: a scalar, or one for each class, (classes,); NaN where it has no value."""

    def reset(self) -> None:
        """Forget all examples."""
