"""The composition root: every part of a run made in order, each from those above it, in every rank alike."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import checkpoint, config, environment, incident, memory, report
from lockstep.checkpoint import Checkpointer, Loaded
from lockstep.closing import closing
from lockstep.compiling import compile_model
from lockstep.config import Job
from lockstep.data.folder import crops_files
from lockstep.data.loader import GB, Task, cores
from lockstep.data.mix import Mix
from lockstep.data.pipeline import Pipeline
from lockstep.data.reading import sample
from lockstep.data.shards import Loader
from lockstep.data.shared import share_listings
from lockstep.data.splits import Crop
from lockstep.errors import NumericalError
from lockstep.identity import check_same_data, identity, plan_of
from lockstep.optim import averaged
from lockstep.plan import Plan
from lockstep.protocols import Precision, Sink, Split, Strategy
from lockstep.rundir import RunDir
from lockstep.signals import StopRequest
from lockstep.stochastic import ForwardDraws, KeyedModel, key_draws
from lockstep.storage import write_atomic
from lockstep.telemetry import Telemetry, sinks
from lockstep.telemetry.display import display
from lockstep.telemetry.flops import peak_flops, training_flops
from lockstep.telemetry.gpu import NoMonitor, monitor, watched_gpus
from lockstep.telemetry.samples import NoSamples, Samples
from lockstep.trainer import Progress, Trainer
from lockstep.trial import training_rate
from lockstep.world import World

# A loss of so many times that of guessing (the logarithm of the classes) is not one of training any more.
LOST = 1000


def run(
    world: World, run_dir: RunDir, *, stop: StopRequest | None = None, alive: Callable[[], None] = lambda: None
) -> None:
    """Train the job of `run_dir` as one rank of `world`, or go on with it, until `stop` is asked for.

    `alive` is called as it advances.

    Raises:
        InputError: the data, the model or the checkpoint do not fit.
        Stopped: the job was asked to stop, and is saved.
        NumericalError: a loss is not finite.
    """
    started = time.time()
    stop = stop or StopRequest()
    resolved = config.load(run_dir.config)
    job = config.build_all(resolved)
    torch.manual_seed(job.seed)
    memory.keep_freed_memory(world, keep=job.train.micro_batches == 1)
    job.precision.configure()
    torch.backends.cudnn.benchmark = job.train.cudnn_benchmark
    if torch.are_deterministic_algorithms_enabled():  # a strict job before this one in the process left it on
        torch.use_deterministic_algorithms(False)  # imports the compiler: not for every job

    train, held_out = _splits(job, world)
    task = _loader_task(job, (train, held_out), world)
    if job.train.micro_batches == "auto":
        job.train.micro_batches = memory.choose_micro_batches(job, world, held_gb=job.loader.held_gb(task))
    plan = plan_of(job, len(train))
    facts = identity(job, len(train))
    check_same_data(facts, world)
    job.loader, reason = world.broadcast(job.loader.choose(task))
    mix = _mix(job)
    pipeline = _pipeline(job, world, mix)
    with ThreadPoolExecutor(1) as reader:  # reads, and above all hashes, while the model is built
        loaded = reader.submit(_loaded, job, run_dir)
        network = _network(job, world, plan, lambda number: pipeline.eval(sample(train, number).to(world.device)))
    # Several ranks may compile, or not, each for itself, and a stop has to find them at the same place.
    interrupts = job.model.compile and world.size == 1
    if job.model.compile:
        compile_model(
            network.model,
            job.model.compile_mode.value,
            threads=max(1, cores() // world.local_size),
            speaks=world.is_main,
            interrupting=stop.interrupting if interrupts else nullcontext,
        )
    checkpointer = Checkpointer(
        run_dir=run_dir,
        identity=facts,
        keep=job.checkpoint.keep,
        keep_best=job.checkpoint.keep_best,
        writes=world.is_main,
        every_s=plan.save_every_s,
    )
    progress, origin = _restore(job, network, checkpointer, loaded.result())
    checkpointer.mend(progress.best_step)

    if world.is_main:
        report.banner(
            job=job,
            run_dir=run_dir,
            world=world,
            plan=plan,
            overrides=config.load_list(run_dir.overrides),
            parameters=sum(each.numel() for each in network.model.parameters()),
            examples=(len(train), len(held_out)),
            loader_reason=reason,
            origin=origin,
            step=progress.step,
            notes=_notes(job, network, world, plan),
        )
    # A resident one reads every image here, and one may be broken: only then is it a run.
    loader = _loader(job, train, held_out, plan, world, partners=mix is not None)
    if world.is_main:
        write_atomic(run_dir.config, config.dump({**resolved, **_chosen(job)}))
        write_atomic(run_dir.environment, environment.as_json(world))
        run_dir.mark_latest(Path(job.output_root))
        run_dir.start_summary(started=started, step=progress.step)
    recorder, watcher = _observers(job, run_dir, world, plan, network, progress)
    trainer = Trainer(
        world=world,
        plan=plan,
        model=network.model,
        replica=network.replica,
        forward_keys=network.draws.of,
        strategy=job.strategy,
        precision=job.precision,
        scaler=network.scaler,
        optimizer=network.optimizer,
        lr=job.optimizer.lr,
        schedule=job.schedule,
        loader=loader,
        pipeline=pipeline,
        checkpointer=checkpointer,
        telemetry=recorder,
        stop=stop,
        alive=alive,
        label_smoothing=job.train.label_smoothing,
        eval_views=job.train.eval_views,
        clip_norm=job.train.clip_norm,
        ema=network.ema,
        cuts_steps=plan.micro_batches > 1 or interrupts,
        progress=progress,
    )
    watcher.start()
    gpu: dict[str, float] = {}
    with closing(lambda: gpu.update(watcher.close()), recorder.close, checkpointer.close):
        try:
            trainer.fit()
        except NumericalError as error:
            if world.is_main:
                incident.keep(error, trainer, run_dir)
            # All ranks meet this error at one step. The launcher ends the others when the first one leaves, so none
            # leaves before main has written.
            world.barrier()
            raise
        except (RuntimeError, MemoryError) as error:
            if memory.exhausted(error):
                raise memory.explain(error, job, world, trainer.progress.step + 1) from None
            raise
    skipped = loader.left_out()
    if world.is_main:
        figures = {**recorder.totals_of_run(), **{f"gpu_{key}": value for key, value in gpu.items()}}
        seconds = time.time() - started
        run_dir.write_summary(
            status="completed",
            exit_code=0,
            objective=progress.best,
            seconds=round(seconds, 3),
            step=progress.step,
            best=progress.best,
            best_step=progress.best_step,
            skipped=skipped,
            **{key: round(value, 3) for key, value in figures.items()},
        )
        report.closing(job=job, run_dir=run_dir, progress=progress, seconds=seconds, figures=figures)


def _notes(job: Job, network: Network, world: World, plan: Plan) -> list[str]:
    """Where the promise of equal runs ends for this job."""
    notes = job.strategy.notes(network.model, world, plan) + network.draws.notes
    if world.device.type == "cuda" and job.repro != "strict":
        notes.append(
            "some kernels of a GPU add in an order that changes from run to run: equal runs agree to rounding; "
            "repro=strict takes others, and agrees to the bit"
        )
    return notes


@dataclass(kw_only=True)
class Network:
    """The model of a run and all that holds its parameters."""

    model: nn.Module
    replica: nn.Module
    draws: ForwardDraws
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: torch.optim.swa_utils.AveragedModel | None
    flops: float
    peak: float


def _splits(job: Job, world: World) -> tuple[Split, Split]:
    """Both splits; one process of each machine sees to the files, the others wait for it."""
    if world.local_rank == 0:
        job.dataset.prepare()
    world.barrier()
    share_listings(job.dataset, world)
    train = job.dataset.train()
    if crops_files(job.dataset):
        train = replace(train, crop=Crop(job.augment.boxes, job.seed, job.dataset.input_shape[1:]))
    return train, job.dataset.eval()


def _loader_task(job: Job, splits: tuple[Split, Split], world: World) -> Task:
    """What a loader has to know of a run to choose."""
    train, held_out = splits
    plan = plan_of(job, len(train))
    evaluations = math.ceil(plan.total_steps / plan.eval_every)
    return Task(
        world=world,
        splits=splits,
        gigabytes=(len(train) + len(held_out)) * math.prod(job.dataset.image_shape) / GB,
        reads=(plan.total_steps * plan.batch + evaluations * len(held_out)) * world.local_size // world.size,
        boxes=crops_files(job.dataset),
        training_rate=lambda: training_rate(job, world),
    )


def _chosen(job: Job) -> dict[str, Any]:
    """The keys of the config whose `auto` has become a value."""
    return {"loader": config.node(job.loader), "train": vars(job.train)}


def _mix(job: Job) -> Mix | None:
    """How examples are mixed, if they are."""
    mix = Mix(
        classes=job.dataset.classes,
        mixup=job.train.mixup,
        cutmix=job.train.cutmix,
        label_smoothing=job.train.label_smoothing,
    )
    return mix if mix.on else None


def _loader(job: Job, train: Split, held_out: Split, plan: Plan, world: World, *, partners: bool) -> Loader:
    values = max(math.prod(job.dataset.image_shape), math.prod(job.dataset.input_shape))
    return Loader(
        world=world,
        plan=plan,
        seed=job.seed,
        eval_batch=job.train.eval_batch,
        # Copies, because the loader marks broken images in them.
        train_labels=train.labels.to(world.device, copy=True),
        eval_labels=held_out.labels.to(world.device, copy=True),
        train_feed=job.loader.feed(train, world),
        eval_feed=job.loader.feed(held_out, world),
        partners=partners,
        stride=job.loader.stride(plan.batch // world.size, values, world),
        order_device=job.loader.order_device(world),
        skip=train.skip,
    )


def _pipeline(job: Job, world: World, mix: Mix | None) -> Pipeline:
    return Pipeline.of(
        job.dataset,
        job.augment,
        device=world.device,
        precision=job.precision,
        memory_format=job.model.memory_format,
        seed=job.seed,
        cutout=job.train.cutout,
        mix=mix,
    )


def _network(job: Job, world: World, plan: Plan, images: Callable[[int], Tensor]) -> Network:
    precision: Precision = job.precision
    strategy: Strategy = job.strategy
    shape = job.dataset.input_shape
    model: nn.Module = job.model.build(job.dataset.classes, shape)
    job.model.initialise(model, images)
    model = precision.convert(model.to(world.device)).to(memory_format=job.model.memory_format)
    if job.init_from is not None:
        checkpoint.load_weights(model, Path(job.init_from))
    peak = peak_flops(world.device, precision.dtype, tf32=precision.matmul == "high") * world.size
    flops = training_flops(model, shape) if peak else 0.0
    blank = torch.zeros((2, *shape), device=world.device, dtype=precision.storage).to(
        memory_format=job.model.memory_format
    )
    draws = key_draws(model, blank[:1], job.seed)
    replica = strategy.wrap(KeyedModel(model, draws), world, plan, (blank, draws.blank(len(blank))))
    return Network(
        model=model,
        replica=replica,
        draws=draws,
        optimizer=job.optimizer.build(model),
        scaler=precision.scaler(world.device),
        ema=averaged(model, job.train.ema) if job.train.ema is not None else None,
        flops=flops,
        peak=peak,
    )


def _loaded(job: Job, run_dir: RunDir) -> Loaded | None:
    """The run folder's own newest good checkpoint, or else that of `resume=`."""
    found = checkpoint.load_newest(run_dir)
    return checkpoint.load(Path(job.resume)) if found is None and job.resume is not None else found


def _restore(job: Job, network: Network, checkpointer: Checkpointer, loaded: Loaded | None) -> tuple[Progress, str]:
    """The progress to go on from, and where it came from: a checkpoint, `init_from=`, a fresh start."""
    if loaded is None:
        return Progress(), f"weights of {job.init_from}" if job.init_from else ""
    checkpoint.check_identity(checkpointer.identity, loaded.path)
    progress = checkpoint.restore(
        loaded,
        model=network.model,
        ema=network.ema,
        optimizer=network.optimizer,
        scaler=network.scaler,
    )
    return Progress(**progress), str(loaded.path)


def _observers(
    job: Job, run_dir: RunDir, world: World, plan: Plan, network: Network, progress: Progress
) -> tuple[Telemetry, NoMonitor]:
    """The recorder of this rank, and the GPU monitor of main."""
    board: list[Sink] = []
    files: list[Sink] = []
    if world.is_main:
        checkpoint.mark_saved_or_not(run_dir)
        # A new run that goes on from the checkpoint of another one has none of its figures.
        logged = progress.window["flushed"] if progress.window and not run_dir.none_yet.exists() else 0
        files = [
            sinks.JsonLines(run_dir.metrics, progress.step, logged),
            sinks.Table(run_dir.table, plan, progress.step, sinks.last_figures(run_dir.metrics)),
        ]
        if job.telemetry.tensorboard:
            board = [sinks.TensorBoard(run_dir.path, progress.step, report.hyperparameters(job, world))]
    recorder = Telemetry(
        world=world,
        plan=plan,
        sinks=[*files, *board],
        display=display(plan, progress.step, is_main=world.is_main),
        samples=_samples(job, run_dir, world, progress),
        step=progress.step,
        window=progress.window,
        flops=network.flops,
        peak=network.peak,
        loss_limit=LOST * math.log(max(2, job.dataset.classes)),
    )
    watcher = monitor(
        wanted=job.telemetry.gpu and world.is_main,
        gpus=watched_gpus(network.replica, world),
        path=run_dir.gpu,
        sinks=board,
        step=lambda: recorder.step,
    )
    return recorder, watcher


def _samples(job: Job, run_dir: RunDir, world: World, progress: Progress) -> NoSamples:
    """The log of what this rank trains on. Files of ranks that a resume no longer has are cut at its step too."""
    if not job.telemetry.samples:
        return NoSamples()
    ranks = itertools.count(world.rank, world.size)
    files = list(itertools.takewhile(lambda path: path.exists(), map(run_dir.rank_samples, ranks)))
    for path in files[1:]:
        sinks.JsonLines(path, progress.step).close()
    return Samples(sinks.JsonLines(run_dir.rank_samples(world.rank), progress.step))
