"""Checks before a job starts that this machine has enough processes, threads and memory for it.

The needs are lower bounds: a job that is refused certainly does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lockstep.core.errors import InputError
from lockstep.core.launched import is_launched, local_size
from lockstep.core.plan import Plan
from lockstep.models.nets import check_size, sketch
from lockstep.runtime.host import available_memory, check_room, cores
from lockstep.training.resolved_job import ResolvedJob

# The limits of ranks on a CPU, and of threads of all ranks: the larger of a fixed number and a number per core.
RANKS, RANKS_A_CORE = 64, 4
THREADS, THREADS_A_CORE = 1024, 16
FLOAT32 = 4  # bytes
LARGE = 1024  # the side of images for which the layers of some networks of timm take long to make


def check_threads(job: ResolvedJob) -> None:
    """Refuse more processes or threads than a system can start, because it would kill a program that starts them.

    Raises:
        InputError: there are too many.
    """
    ranks, threads = job.launcher.ranks, job.launcher.threads
    workers = job.loader.workers
    if is_launched():
        ranks = local_size(ranks)
    elif job.device == "cpu" and ranks > (most := max(RANKS, RANKS_A_CORE * cores())):
        raise InputError(
            f"launcher.ranks is {ranks}, but this machine has {cores()} CPU cores, expected at most {most} ranks: "
            "launcher.ranks=2"
        )
    total = ranks * (threads + (0 if workers == "auto" else int(workers)))
    if total > (most := max(THREADS, THREADS_A_CORE * cores())):
        raise InputError(
            f"launcher.threads is {threads} and loader.workers is {workers}, which on {ranks} ranks are {total:,} "
            f"threads, expected at most {most:,} on a machine of {cores()} CPU cores; use launcher.threads=auto "
            "loader.workers=auto"
        )


def check_data_memory(job: ResolvedJob) -> None:
    """Refuse a data set that makes more images than fit into memory.

    Raises:
        InputError: the images do not fit.
    """
    if size := job.dataset.generated_bytes:
        name, examples = type(job.dataset).__name__.lower(), getattr(job.dataset, "examples", 1)
        fitting = max(1, int(examples * available_memory() / 2 / size))
        check_room(f"the images of dataset={name}", size, f"dataset.examples={fitting}")


def check_memory(job: ResolvedJob, plan: Plan) -> None:
    """Refuse a job that does not fit into memory: the kernel would kill its processes without a message.

    Raises:
        InputError: something does not fit.
    """
    # What imports much is timm's: it takes seconds, and its own sizes are known to fit.
    usual = bool(getattr(job.model, "imports", ())) and max(job.dataset.input_shape) <= LARGE
    on_cpu = job.device == "cpu"
    if not usual or getattr(job.model, "options", None):
        copies = local_size(job.launcher.ranks) * (1 + on_cpu)  # the gradients are on the device
        check_size(sketch(job.model, job.dataset.classes, job.dataset.input_shape), copies)
    for purpose, size, remedy in _needs(job, plan) if on_cpu else ():
        check_room(purpose, size, remedy)


def _needs(job: ResolvedJob, plan: Plan) -> Iterator[tuple[str, float, str]]:
    """The parts of a job that need memory on this machine: a name, the bytes, and a remedy."""
    pixels = math.prod(job.dataset.input_shape)
    micro_batches = plan.batch if job.train.micro_batches == "auto" else plan.micro_batches
    batch = math.ceil(plan.batch / micro_batches)
    smaller = "a smaller dataset.input_size"
    yield f"a micro-batch of {batch} images", FLOAT32 * pixels * batch, f"train.micro_batches=auto or {smaller}"
    block = min(job.train.eval_batch, plan.examples)
    yield f"an evaluation block of {block} images", FLOAT32 * pixels * block, f"train.eval_batch=1 or {smaller}"
    if job.loader.workers not in (0, "auto"):
        ahead = min(int(job.loader.workers) * job.loader.prefetch, plan.total_steps) * plan.batch
        bytes_ahead = ahead * math.prod(job.dataset.image_shape)
        yield f"{ahead} images that are read ahead", bytes_ahead, "loader.prefetch=2"
