"""Finds by trying which micro-batches fit into memory, and sets how the C library keeps freed memory."""

import ctypes
import gc
import math
import resource
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lockstep.core.errors import InputError, LockstepError
from lockstep.core.native_threads import is_own_process
from lockstep.core.world import World
from lockstep.runtime.host import GB, available_memory
from lockstep.training.dry_run import dry_run_step, trial, unless_out_of_memory
from lockstep.training.evaluate import evaluate
from lockstep.training.resolved_job import ResolvedJob

# Later steps may need a little more memory than the first, because of fragmentation.
MARGIN = 1.2
# glibc's numbers for two options of `mallopt` (malloc.h), and their defaults.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
TRIM, MAPPINGS = 128 * 1024, 65536


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
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + int(available_memory() / world.local_size)
    limits = [bound, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
