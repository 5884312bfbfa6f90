"""Builds the model of a run with its optimizer and its loss, and loads the checkpoint that the run starts from."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.checkpoint import Checkpointer, LoadedCheckpoint
from lockstep.core.errors import InputError
from lockstep.core.model import infinite_buffers
from lockstep.core.plan import Plan
from lockstep.core.run_dir import RunDir, relative
from lockstep.core.world import World
from lockstep.losses import MaskedLoss
from lockstep.models.nets import without_weights
from lockstep.optim.ema import EMA
from lockstep.stochastic import key_draws
from lockstep.telemetry.profile import peak_flops, training_flops
from lockstep.training.blank_example import check_single_examples, for_empty_micro_batches
from lockstep.training.freezing import Freezing, freeze_for_good, frozen_names
from lockstep.training.network import Network, Progress
from lockstep.training.resolved_job import ResolvedJob

TRIED = 3  # examples that the loss is tried on


def without_start(job: ResolvedJob) -> ResolvedJob:
    """The same job with random initial weights, for a job that takes its weights from a checkpoint."""
    return replace(job, init_from=None, model=without_weights(job.model))


def build_network(job: ResolvedJob, world: World, plan: Plan, images: Callable[[int], Tensor]) -> Network:
    """The network of a job on its device, wrapped by its strategy. Collective.

    Args:
        images: `images(n)` are n training images (n, C, H, W), for a model that is initialised from data.

    Raises:
        InputError: the model cannot be built for the data or the batch, or the weights of `init_from` do not fit it.
    """
    precision, strategy = job.precision, job.strategy
    shape = job.dataset.input_shape
    model: nn.Module = job.model.build(job.dataset.classes, shape)
    job.model.initialise(model, images)
    infinite = infinite_buffers(model)
    model = precision.convert(model.to(world.device)).to(memory_format=job.model.memory_format)
    start = job.init_from and checkpoint.load_start(model, Path(job.init_from), job.dataset.class_names)
    frozen = frozen_names(model, job.train.freeze)
    until = job.train.freeze_until
    until = None if until is None else plan.in_steps("train.freeze_until", until)
    peak = peak_flops(world.device, precision.dtype, tf32=precision.matmul == "high") * world.size
    flops = training_flops(model, shape) if peak else 0.0
    blank = torch.zeros((2, *shape), device=world.device, dtype=precision.storage)
    blank = blank.to(memory_format=job.model.memory_format)
    draws = key_draws(model, blank[:1], job.seed)
    if until is None:
        freeze_for_good(model, frozen)
    average = copy.deepcopy(model) if job.train.ema is not None else None
    inputs = draws.blank_inputs(blank)
    freezing = Freezing.of(model, frozen, until)
    check_single_examples(draws.keyed(model), inputs, plan, strategy, strategy.data_world(world).size, freezing)
    replica = strategy.wrap(for_empty_micro_batches(draws.keyed(model), inputs, plan, world), world, plan, inputs)
    strategy.shard(model, world, precision, blank)
    ema = None
    if average is not None and job.train.ema is not None:
        strategy.shard(average, world, precision, blank)
        ema = EMA(model, job.train.ema, average, warmup=job.train.ema_warmup)
    optimizer = strategy.build_optimizer(job.optimizer, model, world)
    freezing = Freezing.of(model, frozen, until)  # of the parts of a rank, too
    freezing.freeze_for(step=1)
    return Network(
        model=model,
        replica=replica,
        infinite=infinite,
        draws=draws,
        optimizer=optimizer,
        freezing=freezing,
        scaler=precision.scaler(world.device),
        ema=ema,
        notes=[*([f"init_from: {start}"] if start else []), *draws.notes],
        flops=flops,
        peak=peak if flops else 0.0,
    )


def build_network_and_load_state(
    job: ResolvedJob, run_dir: RunDir, world: World, plan: Plan, images: Callable[[int], Tensor]
) -> tuple[Network, LoadedCheckpoint | None]:
    """The network of a run (see `build_network`), and its checkpoint, which is read while the model is built."""
    with ThreadPoolExecutor(1) as reader:
        loading = reader.submit(checkpoint.load_newest, run_dir, Path(job.resume) if job.resume is not None else None)
        # A checkpoint replaces the initial weights, whose file may be gone by now.
        start = without_start(job) if job.starts_trained and loading.result() is not None else job
        return build_network(start, world, plan, images), loading.result()


def restore(
    job: ResolvedJob, network: Network, checkpointer: Checkpointer, loaded: LoadedCheckpoint | None
) -> tuple[Progress, str]:
    """The progress to continue from and its origin: a checkpoint, `init_from=`, or nothing for a fresh start."""
    if loaded is None:
        return Progress(), f"weights of {job.init_from}" if job.init_from else ""
    checkpoint.check_fingerprint(checkpointer.fingerprint, loaded.path)
    progress = checkpoint.restore(
        loaded,
        model=network.model,
        ema=network.ema,
        optimizer=network.optimizer,
        scaler=network.scaler,
    )
    if loaded.path.parent != checkpointer.run_dir.checkpoints:  # a new run: the earlier one has the best weights
        progress |= {"best": None, "best_step": 0}
    return Progress(**progress), str(relative(loaded.path))


def build_loss(job: ResolvedJob, labels: Tensor, world: World, *, skip: int) -> MaskedLoss:
    """The loss of a job on its device, for the `labels` of its training split, of which `skip` may be broken.

    Raises:
        InputError: the loss has parameters, which nothing would train, or does not give one number per example.
    """
    classes = job.dataset.classes
    module = job.loss.build(classes, labels).to(world.device)
    name = type(job.loss).__name__
    if next(module.parameters(), None) is not None:
        raise InputError(f"the loss {name} has parameters, which no optimizer trains; make them buffers or constants")
    logits = torch.zeros((TRIED, classes), device=world.device, dtype=job.precision.sums)
    targets = torch.arange(TRIED, device=world.device) % classes
    if job.train.mixup or job.train.cutmix:
        targets = torch.eye(classes, device=world.device)[targets].to(logits)
    shape = tuple(module(logits, targets).shape)
    if shape != (TRIED,):
        raise InputError(
            f"the loss {name} gives a tensor of shape {shape} for {TRIED} examples, expected ({TRIED},), a number "
            'for each; a loss of torch.nn does so with reduction="none"'
        )
    return MaskedLoss(module, tolerates_broken=skip > 0)
