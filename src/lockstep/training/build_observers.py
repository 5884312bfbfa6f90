"""Builds everything that records a run: the telemetry of each rank, main's observers, and main's GPU monitor."""

from __future__ import annotations

import itertools
import math

from lockstep import checkpoint
from lockstep.config import components
from lockstep.config.schema import Job
from lockstep.core.observer import Observer, RunInfo
from lockstep.core.plan import Plan
from lockstep.core.run_dir import RunDir
from lockstep.core.sharding import has_stages
from lockstep.core.world import World
from lockstep.telemetry import Telemetry, sinks
from lockstep.telemetry.display import display
from lockstep.telemetry.gpu import NoMonitor, monitor, watched_gpus
from lockstep.telemetry.observers import Observers
from lockstep.telemetry.samples import NoSamples, Samples
from lockstep.training import banner
from lockstep.training.network import Network
from lockstep.training.progress import Progress

# A loss above this many times that of guessing (the logarithm of the number of classes) counts as diverged.
MAX_LOSS_RATIO = 1000


def build_observers(
    job: Job, run_dir: RunDir, world: World, plan: Plan, network: Network, progress: Progress
) -> tuple[Telemetry, NoMonitor]:
    """The telemetry of this rank, and the GPU monitor of main. Collective."""
    observer = _observer(job, run_dir, world, plan, progress) if world.is_main else Observer()
    telemetry = Telemetry(
        world=world,
        plan=plan,
        observer=observer,
        display=display(plan, progress.step, is_main=world.is_main),
        samples=_samples(job, run_dir, world, progress),
        step=progress.step,
        window=progress.window,
        flops=network.flops,
        peak=network.peak,
        loss_limit=MAX_LOSS_RATIO * math.log(max(2, job.dataset.classes)),
        comparable=not has_stages(network.model),
    )
    gpu_monitor = monitor(
        enabled=job.telemetry.gpu and world.is_main,
        gpus=watched_gpus(network.replica, world),
        path=run_dir.gpu,
        observer=observer,
        step=lambda: telemetry.step,
    )
    return telemetry, gpu_monitor


def _observer(job: Job, run_dir: RunDir, world: World, plan: Plan, progress: Progress) -> Observer:
    """The observer of main: the loggers, and the table of evaluations."""
    checkpoint.mark_saved_or_not(run_dir)
    run = RunInfo(
        run_dir=run_dir,
        plan=plan,
        step=progress.step,
        after=progress.after,
        # A new run that starts from the checkpoint of another run has none of its figures.
        logged=progress.window["flushed"] if progress.window and not run_dir.none_yet.exists() else 0,
        config=components.plain(job),
        hyperparameters=banner.hyperparameters(job, world),
    )
    loggers = [logger.build(run) for logger in job.logger.values()]
    logged = sinks.read_figures(run_dir.metrics, progress.after)
    latest = {tag: value for _, scalars in logged for tag, value in scalars.items()}
    return Observers(sinks.Table(run_dir.table, plan, progress.after, latest), *loggers)


def _samples(job: Job, run_dir: RunDir, world: World, progress: Progress) -> NoSamples:
    """The log of the samples of this rank. The files of ranks that no longer exist after a resume are cut as well."""
    if not job.telemetry.samples:
        return NoSamples()
    ranks = itertools.count(world.rank, world.size)
    files = list(itertools.takewhile(lambda path: path.exists(), map(run_dir.rank_samples, ranks)))
    for path in files[1:]:
        sinks.JsonLines(path, progress.step).close()
    return Samples(sinks.JsonLines(run_dir.rank_samples(world.rank), progress.step))
