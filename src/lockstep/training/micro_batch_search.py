"""What fits into a device's memory: found by trying, not by estimating. And how the host's is kept."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lockstep.config.schema import Job
from lockstep.core.errors import InputError, LockstepError
from lockstep.core.world import World
from lockstep.runtime.host import GB, available_memory
from lockstep.training.dry_run import is_out_of_memory, trial_step
from lockstep.training.evaluate import evaluate

# A step later in the run may need a little more than the first: the allocator's memory is in pieces by then.
MARGIN = 1.2
# glibc's names of what `mallopt` sets (malloc.h), and what it has them at.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
TRIM, MAPPINGS = 128 * 1024, 65536


def keep_freed_memory(world: World, *, keep: bool) -> None:
    """On the CPU: have the C library keep what is freed, because the next step wants the same again, or not.

    As it comes, glibc maps each tensor of over 32 MB anew, and the kernel blanks its pages one by one when they are
    first written to: at each step, for activations that large. What is kept has gaps, so a job that cuts its batch
    because there is little memory gives it back. Other C libraries are left alone.
    """
    libc = ctypes.CDLL(None)
    if world.device.type == "cpu" and hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0 if keep else MAPPINGS)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1 if keep else TRIM)
        if not keep:
            libc.malloc_trim(0)  # what an earlier job of this process kept


def micro_batches_that_fit(job: Job, world: World, *, least: int = 1, held_gb: float = 0.0) -> int | None:
    """The smallest number of micro-batches, a power of two times `least`, with which a step of this rank fits.

    So much memory of the device (`held_gb`, in GB) is left for what the run keeps there besides. None if not even
    single examples do. Local: the ranks may come to different numbers.
    """
    shard = math.ceil(int(job.batch) / world.size)
    micro_batches = least
    while True:
        examples = math.ceil(shard / micro_batches)
        if _fits(job, world, math.ceil(MARGIN * examples), held_gb):
            return micro_batches
        if examples == 1:
            return None
        micro_batches = min(2 * micro_batches, shard)


def choose_micro_batches(job: Job, world: World, *, held_gb: float) -> int:
    """What `train.micro_batches=auto` becomes: the number that fits on every rank, with `held_gb` of images beside.

    Collective.

    Raises:
        InputError: a single example does not fit.
    """
    found = torch.zeros(world.size, dtype=torch.int64, device=world.device)
    found[world.rank] = micro_batches_that_fit(job, world, held_gb=held_gb) or 0
    needed = world.sum(found).tolist()
    if 0 in needed:
        raise InputError(
            f"model={type(job.model).__name__} does not fit into the memory of rank {needed.index(0)} with a single "
            "example of the data set; use a smaller model or dataset.input_size"
        )
    return max(needed)


def oom_advice(error: BaseException, job: Job, world: World, step: int) -> LockstepError:
    """The error of a rank that ran out of memory while training, with what would have fitted."""
    if any(frame.name == evaluate.__name__ for frame in traceback.extract_tb(error.__traceback__)):
        fewer = max(1, job.train.eval_batch // 2)
        return LockstepError(f"out of memory in the evaluation after step {step - 1}; use train.eval_batch={fewer}")
    traceback.clear_frames(error.__traceback__)  # they hold the activations
    gc.collect()
    keep_freed_memory(world, keep=False)
    examples = job.micro_batch(world.size)
    fitting = micro_batches_that_fit(job, world, least=2 * int(job.train.micro_batches)) if examples > 1 else None
    advice = (
        f"train.micro_batches={fitting} fits and leaves the global batch as it is; train.micro_batches=auto "
        "finds such a number by itself"
        if fitting
        else "not even single examples fit; use a smaller model or dataset.input_size"
    )
    return LockstepError(f"out of memory at step {step} with micro-batches of {examples} examples; {advice}")


def _fits(job: Job, world: World, examples: int, held_gb: float) -> bool:
    """Whether a whole step on so many blank examples fits, with all that a run keeps next to it."""
    # Fork the generator: this throw-away model must not advance the state of the run's.
    with _bounded(world), torch.random.fork_rng(devices=[]):
        try:
            held = torch.empty(int(held_gb * GB), dtype=torch.uint8, device=world.device)
            trial_step(job, world, examples)()
            del held
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            return False
        finally:
            gc.collect()
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
    return True


@contextmanager
def _bounded(world: World) -> Iterator[None]:
    """On the CPU: have an allocation fail at a rank's share of free memory; the kernel would end the process."""
    if world.device.type != "cpu" or sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    bound = pages * resource.getpagesize() + int(available_memory() / world.local_size)
    limits = [bound, *(each for each in (soft, hard) if each != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
