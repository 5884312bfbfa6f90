"""Tries steps on a throw-away model before a run, to measure their time or memory."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.nn import functional as F

from lockstep.core.world import World
from lockstep.models.nets import without_weights
from lockstep.optim.ema import EMA
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


def dry_run_step(job: ResolvedJob, world: World, examples: int) -> Callable[[], None]:
    """A function that does one whole step of a job on blank examples, with all memory that a run needs."""
    shape = job.dataset.input_shape
    layout = job.model.memory_format
    precision = job.precision
    built = without_weights(job.model).build(job.dataset.classes, shape)
    model = precision.convert(built.to(world.device)).to(memory_format=layout)
    optimizer = job.optimizer.build(model)
    average = EMA(model, job.train.ema) if job.train.ema is not None else None
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
    # Fork the generator: this throw-away model must not advance the state of the run's.
    with torch.random.fork_rng(devices=[]):
        try:
            seconds = unless_out_of_memory(lambda: _seconds(dry_run_step(job, world, tried), world))
            if seconds is not None and tried < examples and seconds * examples / tried < LONG_S:
                tried = examples
                seconds = unless_out_of_memory(lambda: _seconds(dry_run_step(job, world, examples), world))
        finally:
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
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
