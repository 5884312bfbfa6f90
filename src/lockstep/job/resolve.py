"""Replaces `auto` by values for this machine (device, ranks, strategy, launcher), and makes paths absolute."""

from dataclasses import fields, replace
from pathlib import Path

import torch

from lockstep.config import components
from lockstep.config.options import classes_of, options_with
from lockstep.config.schema import InputBlock, Job, TrainBlock
from lockstep.core.data_protocols import Source
from lockstep.core.errors import InputError
from lockstep.core.launch_env import Starter, in_agent, is_launched, launched_place, local_size, started_by
from lockstep.core.model_card import INTERPOLATION, TrainedInput
from lockstep.core.protocols import Launcher, Strategy
from lockstep.core.tags import monitor_of
from lockstep.data.datasets.sizes import AUTO, with_sizes
from lockstep.job.auto_training import by_images, by_weights
from lockstep.launcher.inline import Auto as AutoLauncher
from lockstep.runtime.host import cores
from lockstep.strategy.base import Auto as AutoStrategy
from lockstep.strategy.base import Single
from lockstep.training.resolved_job import ResolvedJob

# The limits of `train.eval_batch=auto`: images and pixels of a block. 256 images of 336x336 usually take 10 GB.
EVAL_BATCH, EVAL_PIXELS = 256, 2**22


def resolve(job: Job, *, sweep: bool, resumed: Path | None = None) -> ResolvedJob:
    """The job with its device, ranks, strategy, launcher and paths decided.

    `resumed` is the checkpoint from which the job resumes. What its number of images decides is as for many.
    Raises InputError if this machine lacks a device that the job requests, or two keys contradict each other.
    """
    batch = job.batch
    if isinstance(batch, str):
        raise InputError(
            "batch=auto keeps the batch that a job has without it, so it only works on the command line; in a "
            "recipe, set batch to a number and train.micro_batches to auto"
        )
    if not is_launched() or in_agent():
        launcher = job.launcher.in_allocation()
        job = replace(job, launcher=launcher.as_rank() if is_launched() else launcher)
    device = _device(job.device)
    job = by_images(by_weights(job, resumed))
    trained = _trained_input(job, resumed)
    dataset = with_sizes(with_targets(_with_absolute_paths(job.dataset).located(), job.task.targets), trained)
    job = replace(job, dataset=dataset)
    strategy, metrics = _strategy(job), components.metrics_of(job.task, job.metric)
    ranks = _ranks(job.launcher, strategy, device)
    world_size = ranks * job.launcher.node_range[1]
    if type(strategy) is AutoStrategy:
        ddp = components.build_option("strategy", "ddp") if world_size > 1 else None
        strategy = Single() if ddp is None else replace(ddp, sync_batchnorm=strategy.sync_batchnorm)
    if job.train.freeze_until is not None:
        strategy = strategy.with_changing_graph()
    resolved = replace(
        job,
        device=device,
        strategy=strategy,
        launcher=_launcher(job.launcher, strategy, ranks, device, sweep=sweep),
        repro="strict" if strategy.fixed_order else "exact",
        train=replace(
            job.train,
            micro_batches=strategy.micro_batches(job.train.micro_batches, world_size),
            eval_batch=_eval_batch(job.train, dataset),
        ),
        augment=job.augment.for_data(dataset),
        input=_input(job.input, dataset, trained),
        task=job.task.absolute(),
        metric=metrics,
        monitor=str(monitor_of(job.monitor, job.task.monitor, metrics)),
        data_root=_absolute(job.data_root),
        output_root=_absolute(job.output_root),
        init_from=_absolute(job.init_from) if job.init_from is not None else None,
        optimizer=job.optimizer.at_batch(batch, trained=job.starts_trained),
    )
    return ResolvedJob.of(resolved)


def with_targets(dataset: Source, targets: str) -> Source:
    """The data set with the targets of the task. Raises InputError if it has others."""
    own = dataset.targets
    if own == AUTO:
        return replace(dataset, targets=targets)
    if own != targets:
        name = type(dataset).__name__.lower()
        with_any = ", ".join(options_with("dataset", "targets"))
        fitting = next((name for name, cls in classes_of("task").items() if cls.targets == own), "NAME")
        raise InputError(
            f"the targets of dataset={name} are {own}, and this task's are {targets}; use task={fitting}, or "
            f"dataset=NAME with one of {with_any}"
        )
    return dataset


def resolve_launcher(launcher: Launcher, device: str) -> tuple[Launcher, str]:
    """The launcher and the device of work that has no strategy, decided as by `resolve`."""
    device, strategy = _device(device), AutoStrategy()
    return _launcher(launcher, strategy, _ranks(launcher, strategy, device), device, sweep=False), device


def _launcher(launcher: Launcher, strategy: Strategy, ranks: int, device: str, *, sweep: bool) -> Launcher:
    if type(launcher) is AutoLauncher:
        alone = is_launched() or (ranks == 1 and not sweep)
        launcher = replace(components.build_option("launcher", "inline" if alone else "spawn"), **vars(launcher))
    if not launcher.starts_ranks and ranks > 1 and not is_launched():
        source = f"strategy={type(strategy).__name__.lower()}" if launcher.ranks == "auto" else "launcher.ranks"
        raise InputError(
            f"launcher=inline has one rank, but {source} requests {ranks}; use launcher=spawn, or launcher.ranks=1"
        )
    threads = launcher.threads
    if threads == "auto":  # with a fixed order one, because another number would add in another order
        threads = 1 if strategy.fixed_order else max(1, cores() // local_size(ranks))
    return replace(launcher, ranks=ranks, backend=_backend(launcher.backend, device), threads=int(threads))


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _with_absolute_paths(dataset: Source) -> Source:
    """The data set with absolute paths, so that a process with another current folder finds it."""
    names = {"root", "path", "images"} & {field.name for field in fields(dataset)}
    paths = {name: getattr(dataset, name) for name in names}
    return replace(dataset, **{name: _absolute(path) for name, path in paths.items() if path is not None})


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device=cuda, but torch finds no CUDA GPU on this machine; use device=cpu or device=auto")
    return device


def _strategy(job: Job) -> Strategy:
    """The strategy that the user chose, by its name or by `repro=strict`."""
    if job.repro == "exact" or job.strategy.fixed_order:
        return job.strategy
    if type(job.strategy) is AutoStrategy and not job.strategy.sync_batchnorm:
        raise InputError(
            "strategy.sync_batchnorm is false, but under repro=strict batch norm works per virtual shard; remove "
            "strategy.sync_batchnorm, or use repro=exact"
        )
    if type(job.strategy) not in (AutoStrategy, Single):
        raise InputError(
            f"repro=strict adds gradients in a fixed order, which {type(job.strategy).__name__} does not keep; "
            "remove strategy=..., or use repro=exact"
        )
    return components.build_option("strategy", "strict")


def _eval_batch(train: TrainBlock, dataset: Source) -> int:
    """The images of a block of evaluation. `auto` only depends on pixels, so that all machines add in one order."""
    if train.eval_batch != "auto":
        return int(train.eval_batch)
    _, height, width = dataset.input_shape
    return max(1, min(EVAL_BATCH, EVAL_PIXELS // (height * width)))


def _trained_input(job: Job, resumed: Path | None) -> TrainedInput | None:
    """The images of a resumed run, whose sizes another version may have chosen, or else of the initial weights."""
    places = [] if resumed is None else [resumed]
    if job.init_from is not None and not job.model.pretrained:  # having both is refused later
        places.append(Path(job.init_from).expanduser())
    if places:
        from lockstep.checkpoint.weights import find_card, weights_file  # most jobs start without weights

        if known := next(filter(None, (find_card(weights_file(place)) for place in places)), None):
            return known
    return job.model.trained_input() if job.starts_trained else None


def _input(block: InputBlock, dataset: Source, trained: TrainedInput | None) -> InputBlock:
    """How pixels are normalised and resized: as set by the user, else as for the weights, else as for the data."""
    channels = dataset.input_shape[0]
    mean, std = (dataset.mean, dataset.std) if trained is None else trained.normalisation(channels)
    interpolation = block.interpolation
    if interpolation == "auto":
        interpolation = trained.interpolation if trained is not None else INTERPOLATION
    chosen = InputBlock(mean=list(block.mean or mean), std=list(block.std or std), interpolation=interpolation)
    for key, values in (("mean", chosen.mean), ("std", chosen.std)):
        if len(values or ()) != channels:
            raise InputError(
                f"input.{key} is {values}, but the images have {channels} channel{'s' * (channels != 1)}, expected a "
                f"number for each; remove it"
            )
    return chosen


def _ranks(launcher: Launcher, strategy: Strategy, device: str) -> int:
    if is_launched():
        return _launched_ranks(launcher)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    ranks = strategy.ranks(gpus) if launcher.ranks == "auto" else int(launcher.ranks)
    if device == "cuda" and ranks > gpus:
        raise InputError(
            f"launcher.ranks is {ranks}, but this machine has {gpus} GPU{'s' * (gpus != 1)}, and each rank needs "
            f"one; use launcher.ranks={gpus} or device=cpu"
        )
    return ranks


def _launched_ranks(launcher: Launcher) -> int:
    """The number of ranks that torchrun, srun or a script has started, so that no launcher of ours starts any."""
    ranks, starter = launched_place().size, started_by()
    if launcher.ranks not in ("auto", ranks):
        raise InputError(
            f"launcher.ranks is {launcher.ranks}, but {starter.label} has started {ranks}; use launcher.ranks=auto, "
            f"or start {launcher.ranks} ({starter.value})"
        )
    if launcher.starts_ranks:
        name = type(launcher).__name__.lower()
        alternative = f", or launcher={name} without {starter.cause}"
        if starter is Starter.torchrun and launcher.restarts:
            alternative = f" and torchrun --max-restarts={launcher.restarts}"
        raise InputError(
            f"launcher={name} starts ranks, but {starter.label} has started them; use launcher=auto{alternative}"
        )
    return ranks


def _backend(backend: str, device: str) -> str:
    if backend == "auto":
        return "nccl" if device == "cuda" else "gloo"
    if backend == "nccl" and device != "cuda":
        raise InputError(f"launcher.backend=nccl needs CUDA GPUs, but device is {device}; use launcher.backend=gloo")
    return backend
