"""Tries steps on a throw-away model, to measure their time or memory.

So that advice need not guess, other settings are tried in turns with the present ones.
"""

import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from lockstep.core.world import World
from lockstep.models.nets import without_weights
from lockstep.optim.ema import EMA
from lockstep.precision import BF16, FP32
from lockstep.runtime import host
from lockstep.training.resolved_job import ResolvedJob

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
TRIALS_S = 1.0  # the most that all trials of a moment may take
TURNS = (3, 1)  # how many steps of each setting are timed; fewer if they take long


def dry_run_step(job: ResolvedJob, world: World, examples: int) -> Callable[[], None]:
    """A function that does one whole step of a job on blank examples, with all memory that a run needs."""
    shape = job.dataset.input_shape
    layout = job.model.memory_format
    precision = job.precision
    built = without_weights(job.model).build(job.dataset.classes, shape)
    model = precision.convert(built.to(world.device)).to(memory_format=layout)
    optimizer = job.optimizer.build(model)
    average = EMA(model, job.train.ema) if job.train.ema is not None else None
    examples = max(2, examples)  # batch norm on one rank has no variance of one
    images = torch.zeros((examples, *shape), device=world.device, dtype=precision.dtype).to(memory_format=layout)
    labels = torch.zeros(examples, dtype=torch.int64, device=world.device)

    def step() -> None:
        with precision.autocast(world.device):
            loss = F.cross_entropy(model(images).to(precision.sums), labels)
        loss.backward()
        # Stands for the buckets of a distributed strategy, or the sum of earlier micro-batches.
        buckets = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        del buckets
        if average is not None:
            average.update_parameters(model)

    return step


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


def _seconds(step: Callable[[], None], world: World) -> float:
    """Seconds of the second of two steps; of the first one if that took long."""
    first = timed(step, world.device)
    return first if first > COLD_S else timed(step, world.device)


def timed(step: Callable[[], None], device: torch.device) -> float:
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


@dataclass(frozen=True)
class Setting:
    """A job, the examples in a step of a rank, and the CPU threads of the rank."""

    job: ResolvedJob
    examples: int
    threads: int


def tried(
    present: Setting, others: Mapping[str, Setting], *, device: torch.device, seconds: float
) -> dict[str, float]:
    """How many times as many images per second than at present a step trains on with other settings, by name.

    Settings for which `seconds` in all are too short are left out, as are those that do not fit into memory.
    """
    end = time.perf_counter() + seconds
    factors: dict[str, float] = {}
    with trial(device):
        step = _warmed_up(present, device)
        if step is None:
            return {}
        expected = _timed_with(step, present.threads, device)
        for name, setting in others.items():
            share = setting.examples / present.examples
            room = (end - time.perf_counter()) / expected  # in steps: the warm-up, and both settings in turns
            turns = next((turns for turns in TURNS if share + turns * (1 + share) <= room), 0)
            if not turns:
                continue
            other = _warmed_up(setting, device)
            if other is None:
                continue
            pairs = [
                (_timed_with(step, present.threads, device), _timed_with(other, setting.threads, device))
                for _ in range(turns)
            ]
            factors[name] = agreed([share * now / then for now, then in pairs])
    return factors


def agreed(factors: Sequence[float]) -> float:
    """The median of some trials' factors; 1 if they do not agree on which setting is faster."""
    return statistics.median(factors) if min(factors) > 1 or max(factors) < 1 else 1.0


def settings_to_try(
    job: ResolvedJob, world: World, model: nn.Module, cores: int
) -> tuple[Setting, dict[str, Setting]]:
    """The present setting of a rank, and the others that may be faster, by override."""
    threads, examples = torch.get_num_threads(), job.micro_batch(world.size)
    present = Setting(job, examples, threads)
    others: dict[str, Setting] = {}
    slow_format = job.precision.dtype is not torch.float32 and job.precision.storage is torch.float32
    if slow_format and world.device.type == "cpu":
        others["precision=fp32"] = replace(present, job=replace(job, precision=FP32()))
    elif job.precision.dtype is torch.float32 and (world.device.type == "cuda" or host.has_bfloat16()):
        others["precision=bf16"] = replace(present, job=replace(job, precision=BF16()))
    if world.device.type == "cpu":
        fair = max(1, cores // world.local_size)
        for number in sorted({1, fair} - {threads}):
            others[f"launcher.threads={number}"] = replace(present, threads=number)
    if takes_channels_last(job, model) and job.model.memory_format is not torch.channels_last:
        channels_last = replace(job, model=replace(job.model, channels_last=True))
        others["model.channels_last=true"] = replace(present, job=channels_last)
    others[f"batch={2 * job.batch}"] = replace(present, examples=2 * examples)
    return present, others


def takes_channels_last(job: ResolvedJob, model: nn.Module) -> bool:
    """Whether the model has convolutions and a key for their order of memory; an extension's may have none."""
    return has_convolutions(model) and hasattr(job.model, "channels_last")


def has_convolutions(model: nn.Module) -> bool:
    return any(parameter.dim() == 4 for parameter in model.parameters())


def times_as_long(job: ResolvedJob, world: World) -> float | None:
    """How many times as long as in float32 a step takes, tried with few examples; None if that would take long."""
    present = Setting(replace(job, precision=FP32()), min(FEW, job.micro_batch(world.size)), torch.get_num_threads())
    others = {"as configured": replace(present, job=job)}
    rate = tried(present, others, device=world.device, seconds=TRIALS_S).get("as configured")
    return None if rate is None else 1 / rate


def _warmed_up(setting: Setting, device: torch.device) -> Callable[[], None] | None:
    """A function that does one step of a setting, which was called once; None if it does not fit into memory."""

    def warmed_up() -> Callable[[], None]:
        step = dry_run_step(setting.job, World.solo(device), setting.examples)
        step()
        return step

    torch.set_num_threads(setting.threads)
    return unless_out_of_memory(warmed_up)


def _timed_with(step: Callable[[], None], threads: int, device: torch.device) -> float:
    torch.set_num_threads(threads)
    return timed(step, device)


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
