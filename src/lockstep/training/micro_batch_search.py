"""Finds by trying which batches and micro-batches fit into memory, and sets how the C library keeps freed memory."""

import ctypes
import gc
import math
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from lockstep.core.errors import InputError, LockstepError
from lockstep.core.native_threads import is_own_process
from lockstep.core.world import World
from lockstep.runtime.host import GB, available_memory
from lockstep.training.dry_run import dry_run_step, timed, trial, unless_out_of_memory
from lockstep.training.evaluate import evaluate
from lockstep.training.resolved_job import ResolvedJob

# Later steps may need a little more memory than the first, because of fragmentation.
MARGIN = 1.2
# glibc's numbers for two options of `mallopt` (malloc.h), and their defaults.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
TRIM, MAPPINGS = 128 * 1024, 65536
# Batches are tried up to this long a step and this long in all (seconds).
LONGEST_STEP_S, LONGEST_S = 2.0, 10.0
STEPS = 3  # are timed of each batch


def keep_freed_memory(world: World, *, keep: bool) -> None:
    """On the CPU: have the C library keep freed memory for the next step (`keep`), or return it.

    By default glibc maps new memory for each tensor above 32 MB, and the kernel clears its pages at the first write.
    For large activations this happens at every step. Kept memory is fragmented, so a job that is short of memory (it
    has micro-batches) does not keep it. Other C libraries are not changed, and
    neither is a program that uses Lockstep as a library: nothing can read what it had set.
    """
    libc = ctypes.CDLL(None)
    if is_own_process() and world.device.type == "cpu" and hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0 if keep else MAPPINGS)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1 if keep else TRIM)
        if not keep:
            libc.malloc_trim(0)  # return what an earlier job of this process kept


def micro_batches_that_fit(job: ResolvedJob, world: World, *, least: int = 1, held_gb: float = 0.0) -> int | None:
    """The smallest number of micro-batches, a power of two times `least`, with which a step of this rank fits.

    `held_gb` GB of the device's memory stay free for the images that a run keeps there. None if not even single
    examples fit. Not collective: ranks may get different numbers.
    """
    shard = math.ceil(job.batch / world.size)
    micro_batches = least
    while True:
        examples = math.ceil(shard / micro_batches)
        if fits(job, world, math.ceil(MARGIN * examples), held_gb):
            return micro_batches
        if examples == 1:
            return None
        micro_batches = min(2 * micro_batches, shard)


def choose_micro_batches(job: ResolvedJob, world: World, *, held_gb: float) -> int:
    """The number for `train.micro_batches=auto`: it fits on every rank, beside `held_gb` GB of images. Collective.

    Raises:
        InputError: a single example does not fit.
    """
    needed = world.gather(micro_batches_that_fit(job, world, held_gb=held_gb) or 0)
    if 0 in needed:
        raise InputError(
            f"model={type(job.model).__name__} does not fit into the memory of rank {needed.index(0)} with a single "
            "example of the data set; use a smaller model or dataset.input_size"
        )
    return max(needed)


def oom_advice(error: BaseException, job: ResolvedJob, world: World, step: int) -> LockstepError:
    """The error for a rank that ran out of memory in training, with the number of micro-batches that would fit."""
    if any(frame.name == evaluate.__name__ for frame in traceback.extract_tb(error.__traceback__)):
        fewer = max(1, job.train.eval_batch // 2)
        return LockstepError(f"out of memory in the evaluation after step {step - 1}; use train.eval_batch={fewer}")
    if not job.strategy.whole_model and world.size > 1:
        examples = job.micro_batch(job.strategy.data_world(world).size)
        return LockstepError(
            f"out of memory at step {step} with micro-batches of {examples} examples; "
            f"train.micro_batches={2 * job.train.passes} makes them smaller and leaves the global batch "
            "as it is, and more ranks have smaller parts of the model"
        )
    traceback.clear_frames(error.__traceback__)  # they hold the activations
    gc.collect()
    keep_freed_memory(world, keep=False)
    examples = job.micro_batch(world.size)
    fitting = micro_batches_that_fit(job, world, least=2 * job.train.passes) if examples > 1 else None
    advice = (
        f"train.micro_batches={fitting} fits and leaves the global batch as it is; train.micro_batches=auto "
        "finds such a number by itself"
        if fitting
        else "not even single examples fit; use a smaller model or dataset.input_size"
    )
    return LockstepError(f"out of memory at step {step} with micro-batches of {examples} examples; {advice}")


def fits(job: ResolvedJob, world: World, examples: int, held_gb: float) -> bool:
    """Whether a whole step on `examples` blank examples fits into memory."""

    def step() -> bool:
        reserved = torch.empty(int(held_gb * GB), dtype=torch.uint8, device=world.device)
        dry_run_step(job, world, examples)()
        del reserved
        return True

    with _bounded(world), trial(world.device):
        try:
            return unless_out_of_memory(step) is not None
        finally:
            gc.collect()


@contextmanager
def _bounded(world: World) -> Iterator[None]:
    """On the CPU: let allocations fail at a rank's share of free memory, before the kernel kills the process."""
    if world.device.type != "cpu" or sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + int(available_memory() / world.local_size)
    limits = [bound, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def advice_on_batch(job: ResolvedJob, world: World, examples: int) -> str:
    """A sentence for `batch=auto`: the present and the largest batch that fits, with images per second and rate.

    Batches are doubled while they fit on a rank and their steps are short, up to all `examples` of an epoch. They are
    tried on main alone.
    """
    end = time.perf_counter() + LONGEST_S
    present = batch = job.batch
    rates: dict[int, float] = {}
    with trial(world.device):
        while True:
            seconds = _seconds(job, world, math.ceil(batch / world.size))
            if seconds is None:
                limit = "the next one does not fit into memory"
                break
            rates[batch] = batch / seconds
            if 2 * batch > examples:
                limit = "an epoch has no more examples"
                break
            if 2 * seconds > LONGEST_STEP_S or time.perf_counter() > end:
                limit = "larger ones were not tried, because their steps are long"
                break
            batch *= 2
    if set(rates) <= {present}:
        return f"batch=auto is {present}: {limit}"
    largest = max(rates)
    rate = job.optimizer.lr * _usual_rate(job, largest) / _usual_rate(job, present)
    return (
        f"batch=auto is {present}, which trains on about {rates[present]:,.0f} img/s; up to {largest:,} fit here "
        f"({limit}), with {rates[largest]:,.0f} img/s: batch={largest} optimizer.lr={rate:.3g}, which is another run"
    )


def _usual_rate(job: ResolvedJob, batch: int) -> float:
    return float(replace(job.optimizer, lr="auto").at_batch(batch, trained=False).lr)


def _seconds(job: ResolvedJob, world: World, examples: int) -> float | None:
    """The seconds of a step on a rank; None if it does not fit into memory."""
    if not fits(job, world, examples, held_gb=0.0):
        return None

    def median() -> float:
        step = dry_run_step(job, world, examples)
        return statistics.median(timed(step, world.device) for _ in range(STEPS))

    return unless_out_of_memory(median)
