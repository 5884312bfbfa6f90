"""Tries steps on a throw-away model, to measure their time or memory.

So that advice need not guess, other settings are tried in turns with the present ones.
"""

import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.data.loading.shards import Shard
from lockstep.precision import BF16, FP32
from lockstep.runtime import host
from lockstep.strategy import Single
from lockstep.training.build_model import build_loss, build_network, without_start
from lockstep.training.fingerprint import larger_batch
from lockstep.training.resolved_job import ResolvedJob
from lockstep.training.train_step import TrainStep

T = TypeVar("T")
# The rate is tried with few examples first, and with a full micro-batch if that takes less than LONG_S seconds.
FEW, LONG_S = 8, 1.0
# The first step of a model includes its warm-up. If it took longer than this (seconds), a second one is not tried.
COLD_S = 5.0
# Words in the errors of libraries that do not raise torch.OutOfMemoryError. In this order: CUDA, NCCL and Triton;
# cuBLAS and cuSOLVER; cuDNN; torch's allocator for host memory; oneDNN.
OUT_OF_MEMORY = (
    "out of memory",
    "ALLOC_FAILED",
    "ALLOCATION_FAILED",
    "can't allocate memory",
    "could not create a primitive",
)
LAST = 2**40  # a step after which nothing thaws
TURNS = 5  # how many steps of each setting are timed


def dry_run_step(job: ResolvedJob, world: World, examples: int) -> Callable[[], object]:
    """A function that does the last step of a job, in which all layers that thaw are trained, on blank examples.

    It has all memory that a run needs. It is the step of one rank, because a trial is no collective.
    """
    job, world = replace(without_start(job), strategy=Single()), World.solo(world.device)
    shape = job.dataset.input_shape
    examples = max(2, examples)  # batch norm on one rank has no variance of one
    rarely = {"log_every": LAST, "eval_every": LAST, "save_every": LAST}
    plan = Plan(examples=examples, batch=examples, total_steps=LAST, micro_batches=1, **rarely)
    blank = partial(torch.zeros, device=world.device, dtype=job.precision.dtype)
    network = build_network(job, world, plan, lambda number: blank((number, *shape)))
    images = blank((examples, *shape)).to(memory_format=job.model.memory_format)
    labels, indices = torch.zeros((2, examples), dtype=torch.int64, device=world.device)
    step = TrainStep(
        job=job,
        world=world,
        plan=plan,
        network=network,
        loss=build_loss(job, labels, world, skip=0),
        inputs=lambda micro: [*network.draws.inputs(images, micro), labels, labels],
    )
    # Stands for the buckets of a distributed strategy, or the sum of earlier micro-batches.
    buckets = [torch.empty_like(parameter) for parameter in network.model.parameters() if parameter.requires_grad]
    return lambda: (step(Shard(LAST, 0, images, labels, indices, examples, 0, 1)), buckets)


def training_rate(job: ResolvedJob, world: World) -> float | None:
    """The images per second that a rank can train on when it never waits for data.

    None if measuring it would take long (the model is compiled), or if a step does not fit into memory.
    """
    if job.model.compile:
        return None
    examples = job.micro_batch(world.size)
    tried = min(FEW, examples)
    with trial(world.device):
        seconds = unless_out_of_memory(lambda: _seconds(dry_run_step(job, world, tried), world))
        if seconds is not None and tried < examples and seconds * examples / tried < LONG_S:
            tried = examples
            seconds = unless_out_of_memory(lambda: _seconds(dry_run_step(job, world, examples), world))
    return None if seconds is None else tried / seconds


def _seconds(step: Callable[[], object], world: World) -> float:
    """Seconds of the second of two steps; of the first one if that took long."""
    first = timed(step, world.device)
    return first if first > COLD_S else timed(step, world.device)


def timed(step: Callable[[], object], device: torch.device) -> float:
    """The seconds of a step, until its device has done it."""
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def unless_out_of_memory(function: Callable[[], T]) -> T | None:
    """The result of a function; None if memory has run out in it."""
    try:
        return function()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the activations
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on a GPU or on the host."""
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    in_words = isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
    return out_of_memory or in_words


class Gain(NamedTuple):
    """How many times as fast a setting was (the median of its turns), and how far its turns lie apart."""

    factor: float
    spread: float

    @property
    def is_clear(self) -> bool:
        """Whether the gain, or loss, is larger than the spread of its measurements."""
        return abs(self.factor - 1) > self.spread


def tried(job: ResolvedJob, others: Mapping[str, ResolvedJob], world: World, *, seconds: float) -> dict[str, Gain]:
    """How many times as many images per second than the job a rank trains on with other settings, by name.

    Each step is timed beside one of the job, so that other work on the machine slows both. Settings for which
    `seconds` in all are too short are left out, as are those that do not fit into memory.
    """
    end = time.perf_counter() + seconds
    gains: dict[str, Gain] = {}
    with trial(world.device):
        if (now := _stopwatch(job, world)) is None:
            return {}
        expected = now()
        for name, setting in others.items():
            share = setting.micro_batch(world.size) / job.micro_batch(world.size)
            room = (end - time.perf_counter()) / expected  # in steps: the warm-up, and both settings in turns
            if share + TURNS * (1 + share) <= room and (then := _stopwatch(setting, world)) is not None:
                factors = [share * now() / then() for _ in range(TURNS)]
                gains[name] = Gain(statistics.median(factors), max(factors) - min(factors))
    return gains


def _stopwatch(job: ResolvedJob, world: World) -> Callable[[], float] | None:
    """A function that returns the seconds of a step, warmed up; None if the step does not fit into memory."""
    steps: list[Callable[[], object]] = []

    def seconds() -> float:
        torch.set_num_threads(job.launcher.threads)
        if not steps:
            steps.append(dry_run_step(job, World.solo(world.device), job.micro_batch(world.size)))
        return timed(steps[0], world.device)

    return seconds if unless_out_of_memory(seconds) is not None else None


def settings_to_try(job: ResolvedJob, world: World, model: nn.Module, cores: int) -> dict[str, ResolvedJob]:
    """The settings that may be faster than those of the job, by override."""
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


def takes_channels_last(job: ResolvedJob, model: nn.Module) -> bool:
    """Whether the model has convolutions and a key for their order of memory; an extension's may have none."""
    return has_convolutions(model) and hasattr(job.model, "channels_last")


def has_convolutions(model: nn.Module) -> bool:
    return any(parameter.dim() == 4 for parameter in model.parameters())


@contextmanager
def trial(device: torch.device) -> Iterator[None]:
    """A context for throw-away models: it restores torch's generator and threads, and frees a GPU's memory."""
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        if torch.get_num_threads() != threads:  # a call changes how MKL uses its threads, even with the same number
            torch.set_num_threads(threads)
        if device.type == "cuda":
            torch.cuda.empty_cache()
