"""The training step: the same in a run, in a recording of it, in a trial before a run, and in a loop of the user.

It calls its parts and builds none, so their modules are imported for their types alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.core.batch import Batch
from lockstep.core.errors import InputError, shown
from lockstep.core.tags import GRAD_NORM, LEARNING_RATE

if TYPE_CHECKING:
    from lockstep.core.data_protocols import Shard
    from lockstep.core.plan import Plan
    from lockstep.core.protocols import Precision, Schedule, Strategy, Task
    from lockstep.core.world import World
    from lockstep.losses import MaskedLoss
    from lockstep.training.train_state import TrainState


def ignore(*_: object) -> None:
    """Do nothing: what nobody listens to."""


@dataclass(frozen=True, kw_only=True)
class StepListener:
    """What a step calls while it runs.

    Fields:
        record: called after a forward pass, with its summed loss, its logits, its examples and their images.
        reduced: called when the gradients of all ranks are added up and unscaled.
        between: called between two micro-batches; it may raise.
        log: called with the name of a figure of the task, and its value for each example, zero for broken images.
    """

    record: Callable[[Tensor, Tensor, Shard, Tensor], None] = ignore
    reduced: Callable[[], None] = ignore
    between: Callable[[], None] = ignore
    log: Callable[[str, Tensor], None] = ignore


def factor_at(schedule: Schedule, step: int, plan: Plan, scores: Sequence[tuple[int, float]]) -> float:
    """The factor of a schedule, which may be the user's. Raises InputError if it is no finite number from 0 on."""
    factor = schedule.factor(step, plan, scores)
    is_number = type(factor) is float or isinstance(factor, Real | Tensor)  # the second is six calls
    if is_number and 0 <= factor < math.inf:
        return factor
    name = type(schedule).__name__
    raise InputError(f"the schedule {name} gives step {step} the factor {shown(factor)}, expected a number from 0 on")


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Give every parameter group `lr` times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]


@dataclass(kw_only=True)
class TrainStep:
    """Updates the weights of a state. It knows no rank, no path and no device by name.

    Fields:
        lr: the base learning rate, which the schedule multiplies.
        clip_norm: the largest L2 norm of the gradient; None does not clip it.
        task: the task of the job, ready on this device.
        inputs: what the replica takes for a micro-batch, images first; then the targets and the labels of its loss.
        scores: the evaluations so far, for the schedule: the step and the gain.
        takes_closure: whether the optimizer computes several gradients in a step.
    """

    world: World
    plan: Plan
    state: TrainState
    strategy: Strategy
    precision: Precision
    schedule: Schedule
    lr: float
    clip_norm: float | None
    task: Task
    loss: MaskedLoss
    inputs: Callable[[Shard], list[Tensor]]
    listener: StepListener = StepListener()
    scores: list[tuple[int, float]] = field(default_factory=list)
    takes_closure: bool = False

    def __post_init__(self) -> None:
        self.autocast = self.precision.autocast(self.world.device)
        self.grad_divisor = self.strategy.grad_divisor(self.world)
        self.parameters = [*self.state.model.parameters()]

    def __call__(self, shard: Shard) -> dict[str, Any]:
        """One optimizer update on this rank's shard of a global batch; returns the figures of a log point."""
        state, logs = self.state, self.plan.due("log", shard.step)
        self.set_learning_rate(shard.step)
        grad_norm = self.update(shard, measures_norm=logs)
        if state.ema is not None and state.ema.due(shard.step):
            state.ema.update_parameters(state.model)
        return {LEARNING_RATE: state.optimizer.param_groups[0]["lr"], GRAD_NORM: grad_norm} if logs else {}

    def set_learning_rate(self, step: int) -> None:
        """Give the optimizer its learning rates for a step, counted from 1, and freeze what `train.freeze` says."""
        self.state.freezing.freeze_for(step)
        factor = factor_at(self.schedule, step, self.plan, self.scores)
        set_learning_rate(self.state.optimizer, self.lr * factor)

    def update(self, shard: Shard, *, measures_norm: bool = False) -> Tensor | None:
        """Forward, backward and the optimizer's step on a shard.

        Returns the L2 norm of the gradient, a scalar, where it is clipped or `measures_norm` is set.
        """
        if self.takes_closure:
            return self.update_by_closure(shard, measures_norm=measures_norm)
        state, grad_norm = self.state, self._compute_gradients(shard, measures_norm=measures_norm)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def _compute_gradients(self, shard: Shard, *, measures_norm: bool) -> Tensor | None:
        """Forward and backward on a shard, and clipping; returns the norm as `update` does."""
        state = self.state
        # Scaled like this, the ranks' gradients add up to the gradient of the global batch's mean loss, however
        # unevenly it is cut into shards and micro-batches.
        scale = self.grad_divisor / shard.count
        self.strategy.run_micro_batches(
            state.replica,
            shard.micro_batches(self.plan.micro_batches),
            self.world,
            forward=self.forward,
            backward=lambda loss: state.scaler.scale(loss * scale).backward(),
            between=self.listener.between,
        )
        self.strategy.reduce(state.replica)
        state.scaler.unscale_(state.optimizer)
        self.listener.reduced()
        grad_norm = None
        if measures_norm or self.clip_norm is not None:
            grad_norm = self.strategy.gradient_norm(self.parameters)
            if self.clip_norm is not None:
                nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, grad_norm)
        return grad_norm

    def update_by_closure(self, shard: Shard, *, measures_norm: bool) -> Tensor | None:
        """`update` for an optimizer whose step takes a closure, as torch calls it. Each call of it is collective.

        The closure computes the gradient at the present weights, on the same micro-batches with the same random
        numbers, and returns the mean loss of the global batch. The first call counts: its losses are recorded, its
        statistics of batch norm stay, and the norm of its gradient is returned.
        """
        state, norms, losses, listener = self.state, list[Tensor | None](), list[Tensor](), self.listener

        def record(loss: Tensor, *others: Any) -> None:
            losses.append(loss)
            if not norms:
                listener.record(loss, *others)

        first = replace(self, listener=replace(listener, record=record))
        again = replace(self, listener=StepListener(record=record))

        def closure() -> Tensor:
            losses.clear()
            state.optimizer.zero_grad(set_to_none=True)
            buffers = [buffer.clone() for buffer in state.model.buffers()]
            with torch.enable_grad():
                norm = (again if norms else first)._compute_gradients(shard, measures_norm=measures_norm)
            if norms:
                with torch.no_grad():
                    for buffer, before in zip(state.model.buffers(), buffers, strict=True):
                        buffer.copy_(before)
            norms.append(norm)
            return self.world.sum(torch.stack(losses).double().sum()) / shard.count

        state.optimizer.step(closure)  # type: ignore[arg-type]  # torch's stubs want a float
        state.optimizer.zero_grad(set_to_none=True)
        return norms[0]

    def forward(self, micro: Shard) -> Tensor:
        """The summed loss of a micro-batch, a scalar."""
        images, *keys, targets, labels = self.inputs(micro)
        batch = Batch(images, targets, partial(self.network, keys), self.loss, partial(self.log, labels))
        with self.autocast:
            losses, logits = self.task.losses(batch)
            if self.loss.tolerates_broken:
                losses = self.loss.counted(losses, labels)
            loss: Tensor = losses.sum()
        scored = micro.first(logits.shape[0])  # of a model that is cut into stages, the last one has the logits
        self.listener.record(loss.detach(), logits.detach(), scored, images)
        return loss

    def network(self, keys: list[Tensor], images: Tensor) -> Tensor:
        """The outputs of the replica for images, with the keys of their random numbers, in the dtype of losses."""
        return self.state.replica(images, *keys).to(self.precision.sums)

    def log(self, labels: Tensor, name: str, values: Tensor) -> None:
        """Log a figure of each example of a micro-batch, (b,), under one of the task's `figures`.

        Raises InputError: there is not one for each of the `labels`.
        """
        if values.ndim != 1 or len(values) not in (0, len(labels)):  # none without the last stage of a model
            raise InputError(
                f"task: the figure {name!r} has the shape {(*values.shape,)}, expected one number for each of the "
                f"{len(labels)} examples of the micro-batch, ({len(labels)},)"
            )
        self.listener.log(name, self.loss.counted(values.detach(), labels))
