"""The state that a run trains: how it is built, loaded and compiled, and how far it has come."""

from __future__ import annotations

import copy
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from lockstep.checkpoint import reading
from lockstep.checkpoint.reading import LoadedCheckpoint, check_fingerprint, load_newest
from lockstep.checkpoint.writing import Checkpointer
from lockstep.config.options import is_ours, option_name
from lockstep.core import log
from lockstep.core.errors import InputError, shown
from lockstep.core.model import infinite_buffers
from lockstep.core.model_card import CLASSES, ModelCard
from lockstep.core.plan import Plan
from lockstep.core.protocols import Task
from lockstep.core.run_dir import RunDir, relative
from lockstep.core.world import World
from lockstep.losses import MaskedLoss, check_losses
from lockstep.models.nets import without_weights
from lockstep.runtime.host import cores
from lockstep.runtime.signals import StopRequest
from lockstep.stochastic import ForwardDraws, key_draws
from lockstep.telemetry.profile import peak_flops, training_flops
from lockstep.telemetry.window import WindowState
from lockstep.training import network
from lockstep.training.network import Freezing
from lockstep.training.resolved_job import Decisions, ResolvedJob, averaging_of, decisions, named

if TYPE_CHECKING:
    from lockstep.training.averages import EMA

# A rank has a few shapes of batches: full and last ones, cut unevenly into shards and micro-batches, in training and
# in evaluation. Beyond torch's default of 8 shapes a model would run uncompiled.
SHAPES = 32
TRIED = 4  # examples that the loss is tried on


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What one rank trains: the model with everything that holds its parameters.

    Fields:
        model: the raw module, which is evaluated and saved.
        replica: the wrapped module, which is called in training.
        infinite: the names of its buffers that are infinite by design.
        draws: the random numbers of its forward passes; their keys are inputs of the replica.
        ema: the average of the weights, if the job keeps one; it may begin later.
        notes: sentences about random layers with numbers that depend on the ranks.
        peak_rate: images per second at the peak rate of all devices of the job; 0 if it is not known.
    """

    model: nn.Module
    replica: nn.Module
    infinite: frozenset[str] = frozenset()
    draws: ForwardDraws
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    freezing: Freezing = field(default_factory=Freezing)
    ema: EMA | None = None
    notes: list[str] = field(default_factory=list)
    peak_rate: float = 0.0

    @property
    def averaged(self) -> nn.Module | None:
        """The model with the averaged weights; None if there is no average, or none yet."""
        return self.ema.module if self.ema is not None and self.ema.n_averaged else None

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


@dataclass
class Progress:
    """How far a run has come.

    Fields:
        scores: the step and the monitored figure of each evaluation so far; None if it had no value.
        figures: the figures of the evaluation after the present step, by name; empty if there was none.
        window: the counts since the last log point, of the step that was saved last.
        decisions: what the plan has decided.
        callbacks: what each callback is, by its name.
        stopped: why one of them has ended the run; empty if none has.
    """

    step: int = 0
    scores: list[tuple[int, float | None]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int = 0
    best_figures: dict[str, float] = field(default_factory=dict)
    window: WindowState | None = None
    decisions: Decisions = field(default_factory=dict)
    callbacks: Mapping[str, str] = field(default_factory=dict)
    stopped: str = ""

    @classmethod
    def saved(cls, facts: Mapping[str, Any]) -> Self:
        return cls(**{**facts, "scores": [(step, score) for step, score in facts["scores"]]})

    def evaluated(self, score: float | None, figures: Mapping[str, float], *, better: bool) -> None:
        """Note an evaluation after the present step, and whether it is the best so far."""
        self.scores.append((self.step, score))
        self.figures = {name: value for name, value in figures.items() if math.isfinite(value)}
        if better:
            self.best, self.best_step, self.best_figures = score, self.step, self.figures

    @property
    def is_evaluated(self) -> bool:
        return bool(self.scores) and self.scores[-1][0] == self.step

    @property
    def score(self) -> float | None:
        """The monitored figure after the present step; None without one."""
        return self.scores[-1][1] if self.is_evaluated else None

    @property
    def after(self) -> float:
        """`RunInfo.after`, which is behind the figures of this progress."""
        return self.step + 0.5 if self.is_evaluated else self.step


def without_start(job: ResolvedJob) -> ResolvedJob:
    """The same job with random initial weights, for a job that takes its weights from a checkpoint."""
    return replace(job, init_from=None, model=without_weights(job.model))


def build_state(job: ResolvedJob, world: World, plan: Plan, images: Callable[[int], Tensor]) -> TrainState:
    """The network of a job on its device, wrapped by its strategy. Collective.

    Args:
        images: `images(n)` are n training images (n, C, H, W), for a model that is initialised from data.

    Raises:
        InputError: the model cannot be built for the data or the batch, or the weights of `init_from` do not fit it.
    """
    precision, strategy = job.precision, job.strategy
    shape = job.train_shape
    model: nn.Module = job.model.build(job.dataset.classes, job.dataset.input_shape)
    if not isinstance(model, nn.Module):
        raise InputError(f"model={option_name(type(job.model))}: its build returns {shown(model)}, expected a module")
    job.model.initialise(model, images)
    infinite = infinite_buffers(model)
    model = precision.convert(model.to(world.device)).to(memory_format=job.model.memory_format)
    start = None
    if job.init_from is not None:
        from lockstep.checkpoint.weights import load_start  # most jobs start without weights

        start = load_start(model, Path(job.init_from), job.dataset.class_names)
    frozen = network.frozen_names(model, job.train.freeze)
    until = job.train.freeze_until
    until = None if until is None else plan.in_steps("train.freeze_until", until)
    peak = peak_flops(world.device, precision.dtype, tf32=precision.matmul == "high") * world.size
    flops = training_flops(model, shape) if peak and len(job.train_shapes) == 1 else 0.0
    blank = torch.zeros((2, *shape), device=world.device, dtype=precision.storage)
    blank = blank.to(memory_format=job.model.memory_format)
    draws = key_draws(model, blank[:1], job.seed)
    if is_ours(type(job.task)) and draws.returned != f"[{job.dataset.classes}]":
        raise InputError(
            f"the model {type(model).__name__} returns {draws.returned} for an example, expected "
            f"[{job.dataset.classes}]: a tensor with an output for each of the {job.task.targets} of the data set"
        )
    if until is None:
        network.freeze_for_good(model, frozen)
    average = copy.deepcopy(model) if job.train.averages else None
    if job.model.grad_checkpointing:
        network.recompute_blocks(model)
    inputs = draws.blank_inputs(blank)
    freezing = Freezing.of(model, frozen, until)
    keyed, ranks = draws.keyed(model), strategy.data_world(world).size
    network.check_single_examples(keyed, inputs, plan, strategy, ranks, freezing)
    replica = strategy.wrap(network.for_empty_micro_batches(keyed, inputs, plan, world), world, plan, inputs)
    strategy.shard(model, world, precision, blank)
    ema = None
    if average is not None:
        strategy.shard(average, world, precision, blank)
        from lockstep.training.averages import build_average  # few jobs average

        ema = build_average(job, plan, model, average)
    optimizer = strategy.build_optimizer(job.optimizer, model, world)
    freezing = Freezing.of(model, frozen, until)  # of the parts of a rank, too
    freezing.freeze_for(step=1)
    return TrainState(
        model=model,
        replica=replica,
        infinite=infinite,
        draws=draws,
        optimizer=optimizer,
        freezing=freezing,
        scaler=precision.scaler(world.device),
        ema=ema,
        notes=[*([f"init_from: {start}"] if start else []), *draws.notes],
        peak_rate=peak / flops if flops else 0.0,
    )


def build_and_load_state(
    job: ResolvedJob, run_dir: RunDir, world: World, plan: Plan, images: Callable[[int], Tensor]
) -> tuple[TrainState, LoadedCheckpoint | None]:
    """The network of a run (see `build_state`), and its checkpoint, which is read while the model is built."""
    with ThreadPoolExecutor(1) as reader:
        loading = reader.submit(load_newest, run_dir, Path(job.resume) if job.resume is not None else None)
        # A checkpoint replaces the initial weights; their file may be gone by now.
        start = without_start(job) if job.starts_trained and loading.result() is not None else job
        return build_state(start, world, plan, images), loading.result()


def restore(
    job: ResolvedJob,
    plan: Plan,
    state: TrainState,
    checkpointer: Checkpointer,
    loaded: LoadedCheckpoint | None,
    callbacks: Mapping[str, str],
) -> tuple[Progress, str]:
    """The progress to continue from, and its origin and step: a checkpoint, `init_from=`, or "" for a fresh start.

    A mean of weights and the scores are as they would be if the run had had this plan from its start. A run that a
    callback has ended goes on with other `callbacks`, which may have other values.
    """
    decided = decisions(job, plan)
    if loaded is None:
        origin = f"weights of {job.init_from}, step 0" if job.init_from else ""
        return Progress(decisions=decided, callbacks=callbacks), origin
    check_fingerprint(checkpointer.fingerprint, loaded.path)
    progress = reading.restore_from(
        loaded, model=state.model, ema=state.ema, optimizer=state.optimizer, scaler=state.scaler
    )
    if loaded.path.parent != checkpointer.run_dir.checkpoints:  # a new run: the earlier one has the best weights
        progress |= {"best": None, "best_step": 0, "best_figures": {}}
    step, ema, saved = progress["step"], state.ema, progress.get("decisions", {})  # none of an earlier version
    before = averaging_of(saved).until(step) if "train.swa_from" in saved else None
    if ema is not None and ema.steps and (steps := ema.steps.until(step)) <= {step} and steps != before:
        ema.n_averaged.zero_()
        if steps:
            ema.update_parameters(state.model)
    before_callbacks = progress.get("callbacks", {})  # none of an earlier version
    note_callbacks(before_callbacks, callbacks)
    stopped = progress.get("stopped", "") if before_callbacks == callbacks else ""
    # An earlier plan has evaluated its last step, too, and so has a callback that has ended the run.
    ended_at = step if stopped else None
    scores = [item for item in progress["scores"] if plan.due("eval", item[0]) or item[0] == ended_at]
    progress |= {"decisions": decided, "callbacks": callbacks, "stopped": stopped, "scores": scores}
    return Progress.saved(progress), f"{relative(loaded.path)}, step {step:,}"


def note_callbacks(saved: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Say which callbacks a resumed run begins anew, and which it no longer has."""
    new = ", ".join(name for name in here if name not in saved)
    dropped = ", ".join(name for name in saved if name not in here)
    if new or dropped:
        starts = f"the checkpoint has no state of the callbacks {new}, which start fresh" if new else ""
        drops = f"the run no longer has the callbacks {dropped}, whose state is dropped" if dropped else ""
        log.note(f"resume: {'; '.join(filter(None, (starts, drops)))}")


def build_loss(job: ResolvedJob, labels: Tensor, world: World, *, skip: int) -> MaskedLoss:
    """The loss of a job on its device, for the `labels` of its training split, of which `skip` may be broken.

    Raises InputError: the loss has parameters, which nothing would train, or does not give each example a number that
    depends on this example alone.
    """
    classes = job.dataset.classes
    module = job.loss.build(classes, labels).to(world.device)
    name = f"the loss {named(job.loss)}"
    if next(module.parameters(), None) is not None:
        raise InputError(f"{name} has parameters, which no optimizer trains; make them buffers or constants")
    logits = torch.randn((TRIED, classes), generator=torch.Generator().manual_seed(0))
    logits, targets = logits.to(world.device, job.precision.sums), _tried_targets(job, world)
    if is_ours(type(job.loss)):
        check_losses(name, module(logits, targets), TRIED)
    else:
        from lockstep.training import own_losses  # few jobs have one

        own_losses.check_apart(name, copy.deepcopy(module), logits, targets)
    return MaskedLoss(module, tolerates_broken=skip > 0)


def ready_task(job: ResolvedJob, card: ModelCard, loss: MaskedLoss, world: World) -> Task:
    """The task of a job on its device. Raises InputError: it does not fit the job, or mixes examples."""
    task = job.task.ready(card, world.device)
    if not is_ours(type(job.task)):
        from lockstep.training import own_losses  # few jobs have one

        own_losses.check_task(job, task, loss, _tried_targets(job, world), world)
    return task


def _tried_targets(job: ResolvedJob, world: World) -> Tensor:
    targets = blank_labels(job, TRIED, world)
    if targets.ndim == 1 and (job.train.mixup or job.train.cutmix):
        targets = torch.eye(job.dataset.classes, device=world.device, dtype=job.precision.sums)[targets]
    return targets


def blank_labels(job: ResolvedJob, number: int, world: World) -> Tensor:
    """Labels of the task, (number,) or (number, outputs), for trials that no data is read for. Neighbours differ."""
    examples, outputs = (torch.arange(size, device=world.device) for size in (number, job.dataset.classes))
    if job.task.targets == CLASSES:
        return examples % len(outputs)
    return ((examples[:, None] + outputs) % 2).float()


def compile_model(model: nn.Module, job: ResolvedJob, world: World, stop: StopRequest) -> None:
    """Compile `model` in place, if the job requests it, for each shape of batch when it first comes.

    Dynamic shapes, which torch turns on at the second size, are off: kernels would depend on the batches before, and
    a resumed run would round differently.
    """
    if not job.model.compile:
        return
    # Imported here, because they are slow. torch has no public hook for the start and end of a compilation.
    from torch._dynamo import callback
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # names a call of torch; the run names precision=
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        inductor.compile_threads = max(1, cores() // world.local_size)  # by default all cores, in each rank
    dynamo.recompile_limit = max(dynamo.recompile_limit, SHAPES)
    callback.callback_handler.clear()  # callbacks of an earlier run in this process
    context, began, tells = ExitStack(), 0.0, world.is_main

    def start(_: Any) -> None:
        nonlocal began, tells
        if tells:
            log.say("compiling the model: the first batch of each shape takes about a minute, less the next time")
        began, tells = time.monotonic(), False
        context.enter_context(stop.interrupting(stop.undoes))

    def end(_: Any) -> None:
        context.close()
        log.logger.info("compiled in %.1f s", time.monotonic() - began)

    callback.on_compile_start(start)
    callback.on_compile_end(end)
    model.compile(mode=job.model.compile_mode.replace("_", "-"), dynamic=False)
