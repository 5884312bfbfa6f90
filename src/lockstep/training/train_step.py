"""The training step: the same in a run, in a recording of it, in a trial before a run, and in a loop of the user."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lockstep.core.data_protocols import Shard
from lockstep.core.errors import InputError
from lockstep.core.plan import Plan
from lockstep.core.protocols import Task
from lockstep.core.world import World
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.losses import MaskedLoss
from lockstep.optim.optimizers import clip_gradients, gradient_norm, set_learning_rate
from lockstep.stochastic import ForwardDraws
from lockstep.training.resolved_job import ResolvedJob
from lockstep.training.train_state import TrainState


def inputs_of(transforms: DeviceTransforms, draws: ForwardDraws, micro: Shard) -> list[Tensor]:
    """The `inputs` of a step in training: with mixed images, and with the keys of the model's random numbers."""
    images, targets = transforms.mixed(micro)
    return [*draws.inputs(images, micro), targets, micro.labels]


def ignore(*_: object) -> None:
    """Do nothing: what nobody listens to."""


@dataclass(kw_only=True)
class TrainStep:
    """Updates the weights of a state. It knows no rank, no path and no device by name.

    To its task it is the present micro-batch (`protocols.Batch`): `images`, `targets`, `network`, `loss` and `log`.

    Fields:
        task: the task of the job, ready on this device.
        inputs: what the replica takes for a micro-batch, images first; then the targets and the labels of its loss.
        record: called after a forward pass, with its summed loss, its logits, its examples and their images.
        reduced: called when the gradients of all ranks are added up.
        between: called between two micro-batches; it may raise.
        logged: called with the name of a figure of the task, and its value for each example, zero for broken images.
        scores: the evaluations so far, for the schedule: the step and the gain.
    """

    job: ResolvedJob
    world: World
    plan: Plan
    state: TrainState
    task: Task
    loss: MaskedLoss
    inputs: Callable[[Shard], list[Tensor]]
    record: Callable[[Tensor, Tensor, Shard, Tensor], None] = ignore
    reduced: Callable[[], None] = ignore
    between: Callable[[], None] = ignore
    logged: Callable[[str, Tensor], None] = ignore
    scores: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.autocast = self.job.precision.autocast(self.world.device)
        self.grad_divisor = self.job.strategy.grad_divisor(self.world)

    def __call__(self, shard: Shard) -> dict[str, Any]:
        """One optimizer update on this rank's shard of a global batch; returns the figures of a log point."""
        state, logs = self.state, self.plan.due("log", shard.step)
        self.set_learning_rate(shard.step)
        grad_norm = self.update(shard, measures_norm=logs)
        if state.ema is not None and state.ema.due(shard.step):
            state.ema.update_parameters(state.model)
        return {"optim/lr": state.optimizer.param_groups[0]["lr"], "optim/grad_norm": grad_norm} if logs else {}

    def set_learning_rate(self, step: int) -> None:
        """Give the optimizer its learning rates for a step, counted from 1, and freeze what `train.freeze` says."""
        self.state.freezing.freeze_for(step)
        factor = self.job.schedule.factor(step, self.plan, self.scores)
        set_learning_rate(self.state.optimizer, self.job.optimizer.lr * factor)

    def update(self, shard: Shard, *, measures_norm: bool = False) -> Tensor | None:
        """Forward, backward and the optimizer's step on a shard.

        Returns the L2 norm of the gradient, a scalar, where it is clipped or `measures_norm` is set.
        """
        state, clip_norm = self.state, self.job.train.clip_norm
        # Scaled like this, the ranks' gradients add up to the gradient of the global batch's mean loss, however
        # unevenly it is cut into shards and micro-batches.
        scale = self.grad_divisor / shard.count
        self.job.strategy.run_micro_batches(
            state.replica,
            shard.micro_batches(self.plan.micro_batches),
            self.world,
            forward=self.forward,
            backward=lambda loss: state.scaler.scale(loss * scale).backward(),
            between=self.between,
        )
        self.job.strategy.reduce(state.replica)
        self.reduced()
        state.scaler.unscale_(state.optimizer)
        grad_norm = None
        if clip_norm is not None:
            grad_norm = clip_gradients(state.model, clip_norm)
        elif measures_norm:
            grad_norm = gradient_norm(state.model)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def forward(self, micro: Shard) -> Tensor:
        """The summed loss of a micro-batch, a scalar."""
        self.images, *self.keys, self.targets, self.labels = self.inputs(micro)
        with self.autocast:
            losses, logits = self.task.losses(self)
            if self.loss.tolerates_broken:
                losses = self.loss.counted(losses, self.labels)
            loss: Tensor = losses.sum()
        scored = micro.first(logits.shape[0])  # of a model that is cut into stages, the last one has the logits
        self.record(loss.detach(), logits.detach(), scored, self.images)
        return loss

    def network(self, images: Tensor) -> Tensor:
        """The outputs of the replica for the images of the present micro-batch, in the dtype of losses."""
        outputs: Tensor = self.state.replica(images, *self.keys).to(self.job.precision.sums)
        return outputs

    def log(self, name: str, values: Tensor) -> None:
        """Log a figure of each example of the present micro-batch, (b,), under one of the task's `figures`.

        Raises InputError: there is not one for each example.
        """
        if values.ndim != 1 or len(values) not in (0, len(self.labels)):  # none without the last stage of a model
            raise InputError(
                f"task: the figure {name!r} has the shape {(*values.shape,)}, expected one number for each of the "
                f"{len(self.labels)} examples of the micro-batch, ({len(self.labels)},)"
            )
        self.logged(name, self.loss.counted(values.detach(), self.labels))
