"""Which other settings would be faster than a job's: they are tried in steps on blank images."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from lockstep.core.world import World
from lockstep.data.datasets.files import FileSource
from lockstep.diagnostics.inspection import Finding, Level
from lockstep.diagnostics.verdict import WORTH, takes_channels_last
from lockstep.models.nets import sketch
from lockstep.models.zoo import Timm
from lockstep.precision import BF16, FP32
from lockstep.runtime import host
from lockstep.runtime.host import cores
from lockstep.training.dry_run import stopwatch, training_rate, trial
from lockstep.training.resolved_job import ResolvedJob, larger_batch

T = TypeVar("T")
SMALL_MODEL = "mobilenetv3_small_100"  # of timm: 0.06 GMACs at 224 pixels, with published weights
OTHERS_S = 5.0  # the most that trying other settings takes
TURNS = 5  # how many steps of each setting are timed


def other_settings(job: ResolvedJob, world: World) -> Finding:
    """Which other settings are faster by more than their turns differ, tried in steps on blank images."""
    model = sketch(job.model, job.dataset.classes, job.dataset.input_shape)
    gains = tried(job, settings_to_try(job, world, model, cores()), world, seconds=OTHERS_S)
    shown = {name: f"{name} {gain.factor:.2f}x +- {gain.spread:.2f}" for name, gain in gains.items()}
    faster = [shown[name] for name, gain in gains.items() if gain.is_clear and gain.factor >= WORTH]
    text = f"no other setting is faster by more than its {TURNS} turns differ: {', '.join(shown.values())}"
    if not gains:
        text = f"no other setting was tried: steps of this job take too long for {OTHERS_S:g} s"
    elif faster:
        text = f"{', '.join(faster)} the images per second in {TURNS} turns (another batch or precision: another run)"
    return Finding("speed", text)


def lighter_work(job: ResolvedJob, world: World, now: float) -> Finding:
    """Which smaller input or model is worth a change on a CPU where the job trains on `now` images per second."""
    others = {f"model={SMALL_MODEL}": replace(job, model=Timm(name=SMALL_MODEL))}
    if isinstance(job.dataset, FileSource) and (side := job.dataset.enlarged_side()) is not None:
        source = replace(job.dataset, input_size=side, decode_size=side)
        others[f"dataset.input_size={side} dataset.decode_size={side}"] = replace(job, dataset=source)
    gains = {name: (training_rate(other, world) or 0.0) / now for name, other in others.items()}
    faster = [f"{name} {gain:.1f}x" for name, gain in gains.items() if gain >= WORTH]
    remedy = f"{', '.join(faster)} the images per second (another run), or " if faster else "use a smaller model or "
    return Finding("speed", f"the steps take long on this CPU: {remedy}a GPU", Level.warning)


def settings_to_try(job: ResolvedJob, world: World, model: nn.Module, cores: int) -> dict[str, ResolvedJob]:
    """Settings that may be faster than the job's, by override."""
    on_cpu, others = world.device.type == "cpu", dict[str, ResolvedJob]()
    if on_cpu and job.precision.dtype is not torch.float32 and job.precision.storage is torch.float32:
        others["precision=fp32"] = replace(job, precision=FP32())
    elif job.precision.dtype is torch.float32 and (not on_cpu or host.has_bfloat16()):
        others["precision=bf16"] = replace(job, precision=BF16())
    for threads in sorted({1, max(1, cores // world.local_size)} - {job.launcher.threads}) if on_cpu else ():
        others[f"launcher.threads={threads}"] = replace(job, launcher=replace(job.launcher, threads=threads))
    if takes_channels_last(job, model) and job.model.memory_format is not torch.channels_last:
        others["model.channels_last=true"] = replace(job, model=replace(job.model, channels_last=True))
    if (larger := larger_batch(job.batch, len(job.dataset.train()))) is not None:
        others[larger] = replace(job, batch=2 * job.batch)
    return others


class Gain(NamedTuple):
    """How many times as fast a setting was (the median of its turns), and how far its turns lie apart."""

    factor: float
    spread: float

    @property
    def is_clear(self) -> bool:
        """Whether the gain, or loss, is larger than the spread of its measurements."""
        return abs(self.factor - 1) > self.spread


def tried(job: ResolvedJob, others: Mapping[str, ResolvedJob], world: World, *, seconds: float) -> dict[str, Gain]:
    """Throughput of a rank with other settings, relative to the job's, by name.

    Steps alternate with steps of the job, so that other work on the machine slows both. Settings that do not fit into
    memory, or into `seconds` in all, are skipped.
    """
    end = time.perf_counter() + seconds
    gains: dict[str, Gain] = {}

    def with_threads(setting: ResolvedJob, function: Callable[[], T]) -> T:
        torch.set_num_threads(setting.launcher.threads)
        return function()

    def timer(setting: ResolvedJob) -> Callable[[], float] | None:
        examples = setting.micro_batch(world.size)
        seconds = with_threads(setting, partial(stopwatch, setting, World.solo(world.device), examples))
        return None if seconds is None else partial(with_threads, setting, seconds)

    with trial(world.device):
        if (now := timer(job)) is None:
            return {}
        expected = now()
        for name, setting in others.items():
            share = setting.micro_batch(world.size) / job.micro_batch(world.size)
            room = (end - time.perf_counter()) / expected  # in steps: the warm-up, and both settings in turns
            if share + TURNS * (1 + share) <= room and (then := timer(setting)) is not None:
                factors = [share * now() / then() for _ in range(TURNS)]
                gains[name] = Gain(statistics.median(factors), max(factors) - min(factors))
    return gains
