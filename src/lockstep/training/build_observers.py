"""What records a run: the telemetry of each rank with main's sinks, and main's GPU monitor."""

from __future__ import annotations

import itertools
import math

from lockstep import checkpoint
from lockstep.config.schema import Job
from lockstep.core.plan import Plan
from lockstep.core.protocols import Sink
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.telemetry import Telemetry, sinks
from lockstep.telemetry.display import display
from lockstep.telemetry.gpu import NoMonitor, monitor, watched_gpus
from lockstep.telemetry.samples import NoSamples, Samples
from lockstep.training import banner
from lockstep.training.network import Network
from lockstep.training.trainer import Progress

# A loss above this many times that of guessing (the logarithm of the number of classes) counts as diverged.
MAX_LOSS_RATIO = 1000


def build_observers(
    job: Job, run_dir: RunDir, world: World, plan: Plan, network: Network, progress: Progress
) -> tuple[Telemetry, NoMonitor]:
    """The recorder of this rank, and the GPU monitor of main. Collective."""
    files, board = _sinks(job, run_dir, world, plan, progress) if world.is_main else ([], [])
    telemetry = Telemetry(
        world=world,
        plan=plan,
        sinks=[*files, *board],
        display=display(plan, progress.step, is_main=world.is_main),
        samples=_samples(job, run_dir, world, progress),
        step=progress.step,
        window=progress.window,
        flops=network.flops,
        peak=network.peak,
        loss_limit=MAX_LOSS_RATIO * math.log(max(2, job.dataset.classes)),
    )
    gpu_monitor = monitor(
        wanted=job.telemetry.gpu and world.is_main,
        gpus=watched_gpus(network.replica, world),
        path=run_dir.gpu,
        sinks=board,
        step=lambda: telemetry.step,
    )
    return telemetry, gpu_monitor


def _sinks(job: Job, run_dir: RunDir, world: World, plan: Plan, progress: Progress) -> tuple[list[Sink], list[Sink]]:
    """Main's files of figures, and its TensorBoard log if the job has one."""
    checkpoint.mark_saved_or_not(run_dir)
    # A new run that starts from another run's checkpoint has none of that run's figures.
    logged = progress.window["flushed"] if progress.window and not run_dir.none_yet.exists() else 0
    files: list[Sink] = [
        sinks.JsonLines(run_dir.metrics, progress.step, logged),
        sinks.Table(run_dir.table, plan, progress.step, sinks.last_figures(run_dir.metrics)),
    ]
    if not job.telemetry.tensorboard:
        return files, []
    return files, [sinks.TensorBoard(run_dir.path, progress.step, banner.hyperparameters(job, world))]


def _samples(job: Job, run_dir: RunDir, world: World, progress: Progress) -> NoSamples:
    """The log of the samples of this rank. The files of ranks that no longer exist after a resume are cut as well."""
    if not job.telemetry.samples:
        return NoSamples()
    ranks = itertools.count(world.rank, world.size)
    files = list(itertools.takewhile(lambda path: path.exists(), map(run_dir.rank_samples, ranks)))
    for path in files[1:]:
        sinks.JsonLines(path, progress.step).close()
    return Samples(sinks.JsonLines(run_dir.rank_samples(world.rank), progress.step))
