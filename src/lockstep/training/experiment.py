"""The composition root: builds the parts of a run in order, each from the parts above it, alike on every rank."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch

from lockstep.checkpoint import Checkpointer, LoadedCheckpoint
from lockstep.core.errors import NumericalError, Stopped
from lockstep.core.log import close_all
from lockstep.core.observer import Observer
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.losses import probabilities_of
from lockstep.metrics import NoScores, build_scores
from lockstep.runtime.signals import StopRequest
from lockstep.telemetry.monitor import Monitor
from lockstep.training import micro_batch_search
from lockstep.training.banner import resume_command
from lockstep.training.build_data import TrainingData, build_data, build_loader
from lockstep.training.build_model import (
    build_loss,
    build_network_and_load_state,
    restore,
)
from lockstep.training.build_observers import build_observers
from lockstep.training.compile import compile_model, interrupts_compiling
from lockstep.training.dry_run import is_out_of_memory
from lockstep.training.fingerprint import card_of
from lockstep.training.graph_step import GraphStep
from lockstep.training.predictions import CollectedPredictions
from lockstep.training.resolved_job import ResolvedJob
from lockstep.training.run_record import NoRecord, RunRecord
from lockstep.training.train_step import TrainStep, inputs_of
from lockstep.training.trainer import Trainer


def run(
    job: ResolvedJob,
    run_dir: RunDir,
    world: World,
    *,
    stop: StopRequest | None = None,
    heartbeat: Callable[[], None] = lambda: None,
) -> None:
    """Train or resume a resolved job in its folder as one rank of `world`, to its end or until `stop` is requested.

    `heartbeat` is called while the job advances.

    Raises:
        InputError: the data, the model or the checkpoint do not fit.
        Stopped: the job was asked to stop, and is saved.
        NumericalError: a loss is not finite.
    """
    stop = stop or StopRequest()
    record = RunRecord(run_dir, world) if world.is_main else NoRecord()
    configure_torch(job, world)

    job, data = build_data(job, world)
    loss = build_loss(job, data.train.labels, world, skip=max(data.train.skip, data.val.skip))
    images = partial(data.normalised, world=world)
    network, loaded = build_network_and_load_state(job, run_dir, world, data.plan, images)
    compile_model(network.model, job, world, stop)
    checkpointer = build_checkpointer(job, run_dir, world, data, loaded)
    progress, origin = restore(job, network, checkpointer, loaded)
    checkpointer.repair_export(progress.best_step)

    record.announce(job, data, network, progress, origin=origin)
    loader = build_loader(job, data, world)  # may refuse the data, so the run begins after it
    record.write_start(job, data.plan, progress, run=checkpointer.run)
    telemetry, monitor = build_observers(job, run_dir, world, data, network, progress, stop)
    checkpointer.on_saved = telemetry.observer.saved
    scores, predictions = build_judges(job, data, world, telemetry.observer)
    step = step_class(job, world)(
        job=job,
        world=world,
        plan=data.plan,
        network=network,
        loss=loss,
        inputs=partial(inputs_of, data.transforms, network.draws),
    )
    trainer = Trainer(
        step=step,
        loader=loader,
        transforms=data.transforms,
        scores=scores,
        predictions=predictions,
        checkpointer=checkpointer,
        telemetry=telemetry,
        stop=stop,
        heartbeat=heartbeat,
        cuts_steps=data.plan.micro_batches > 1 or interrupts_compiling(job, world),
        progress=progress,
    )
    hardware = train(trainer, monitor, explaining(job, run_dir, world, trainer, record))
    record.complete(job, trainer, hardware, skipped=loader.count_skipped())


def step_class(job: ResolvedJob, world: World) -> type[TrainStep]:
    """The step of a job: one that replays CUDA graphs, where the job asks for it and the device has them."""
    return GraphStep if job.train.cuda_graph and world.device.type == "cuda" else TrainStep


def build_judges(
    job: ResolvedJob, data: TrainingData, world: World, observer: Observer
) -> tuple[NoScores, CollectedPredictions]:
    """What an evaluation fills besides loss and accuracy: scores, and the predictions of which `observer` is told."""
    source, kind = job.dataset, probabilities_of(job.loss)
    names = source.class_names
    return build_scores(job.metric, source.classes, names, world, kind), CollectedPredictions(
        names, source.classes, world, kind=kind, sample_name=data.val.name, observer=observer
    )


def build_checkpointer(
    job: ResolvedJob, run_dir: RunDir, world: World, data: TrainingData, loaded: LoadedCheckpoint | None
) -> Checkpointer:
    """The checkpointer, which saves the run on main and restores it on every rank."""
    own = loaded.run if loaded is not None and loaded.path.parent == run_dir.checkpoints else None
    return Checkpointer(
        run_dir=run_dir,
        fingerprint=data.fingerprint,
        keep=job.checkpoint.keep,
        keep_best=job.checkpoint.keep_best,
        writes=world.is_main,
        every_s=data.plan.save_every_s,
        card=card_of(job),
        run=Run(run_dir.path).id or own or secrets.token_hex(8),
    )


def train(trainer: Trainer, monitor: Monitor | None, explaining: AbstractContextManager[None]) -> dict[str, float]:
    """Train to the end, and close everything that was open; returns the mean figures of the hardware, on main."""
    hardware: dict[str, float] = {}
    closes = [trainer.checkpointer.close, trainer.telemetry.close]
    if monitor is not None:
        monitor.start()
        closes.insert(0, lambda: hardware.update(monitor.close()))
    with close_all(*closes), explaining:
        trainer.fit()
        trainer.telemetry.outcome = "completed"
    return hardware


def configure_torch(job: ResolvedJob, world: World) -> None:
    """Set torch's process-wide options for this job; an earlier job of the process may have left others."""
    torch.manual_seed(job.seed)
    micro_batch_search.keep_freed_memory(world, keep=job.train.micro_batches == 1)
    job.precision.configure()
    torch.backends.cudnn.benchmark = job.train.cudnn_benchmark
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)  # only if needed, because it is slow: it imports the compiler


@contextmanager
def explaining(job: ResolvedJob, run_dir: RunDir, world: World, trainer: Trainer, record: NoRecord) -> Iterator[None]:
    """Explain an error of training: keep the batch behind bad numbers, or find a number of micro-batches that fits.

    Raises:
        NumericalError, LockstepError: the error that ended training, explained.
    """
    try:
        yield
    except Stopped as error:
        trainer.telemetry.outcome = "stopped"
        record.keep_progress(trainer.progress)
        raise Stopped(f"{error}; `{resume_command(run_dir)}` goes on") from error
    except NumericalError as error:
        record.keep_progress(trainer.progress)
        record.keep_incident(error, trainer)
        # All ranks raise this at the same step. The launcher ends the others when one leaves, so all wait until main
        # has written.
        world.barrier()
        raise
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise micro_batch_search.oom_advice(error, job, world, trainer.progress.step + 1) from None
        raise
