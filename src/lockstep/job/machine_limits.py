"""Checks before a job starts that this machine has enough processes, threads and memory for it.

The needs are lower bounds: a job that is refused certainly does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from lockstep.config.schema import Job
from lockstep.core.errors import InputError
from lockstep.core.launched import is_launched, local_size
from lockstep.core.plan import Plan
from lockstep.data.datasets.builtin import Fake
from lockstep.data.loading.loaders import Streaming
from lockstep.models.nets import without_weights
from lockstep.runtime.host import GB, available_memory, cores

# The limits of ranks on a CPU, and of threads of all ranks: the larger of a fixed number and a number per core.
RANKS, RANKS_A_CORE = 64, 4
THREADS, THREADS_A_CORE = 1024, 16
FLOAT32 = 4  # bytes


def check_threads(job: Job, device: str) -> None:
    """Refuse more processes or threads than a system can start, because it would kill a program that starts them.

    Raises:
        InputError: there are too many.
    """
    ranks, threads = int(job.launcher.ranks), int(job.launcher.threads)
    workers = job.loader.workers if isinstance(job.loader, Streaming) else 0
    if is_launched():
        ranks = local_size(ranks)
    elif device == "cpu" and ranks > (most := max(RANKS, RANKS_A_CORE * cores())):
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


def check_data_memory(job: Job) -> None:
    """Refuse `dataset=fake` with more images than fit into memory.

    Raises:
        InputError: the images do not fit.
    """
    if isinstance(job.dataset, Fake):
        images = job.dataset.examples + job.dataset.examples // 4
        _check_room(
            [("the images of dataset=fake", images * math.prod(job.dataset.image_shape), "dataset.examples=1024")]
        )


def check_memory(job: Job, plan: Plan) -> None:
    """Refuse a job on the CPU that does not fit into memory: the kernel would kill its processes without a message.

    Raises:
        InputError: something does not fit.
    """
    if job.device == "cpu":
        _check_room(_needs(job, plan))


def _needs(job: Job, plan: Plan) -> Iterator[tuple[str, float, str]]:
    """The parts of a job that need memory on this machine: a name, the bytes, and a remedy."""
    pixels = math.prod(job.dataset.input_shape)
    ranks = local_size(int(job.launcher.ranks))
    micro_batches = plan.batch if job.train.micro_batches == "auto" else plan.micro_batches
    batch = math.ceil(plan.batch / micro_batches)
    smaller = "a smaller dataset.input_size"
    yield f"a micro-batch of {batch} images", FLOAT32 * pixels * batch, f"train.micro_batches=auto or {smaller}"
    block = min(int(job.train.eval_batch), plan.examples)
    yield f"an evaluation block of {block} images", FLOAT32 * pixels * block, f"train.eval_batch=1 or {smaller}"
    if isinstance(job.loader, Streaming) and job.loader.workers != "auto":
        ahead = min(int(job.loader.workers) * job.loader.prefetch, plan.total_steps) * plan.batch
        bytes_ahead = ahead * math.prod(job.dataset.image_shape)
        yield f"{ahead} images that are read ahead", bytes_ahead, "loader.prefetch=2"
    # What takes seconds to import is timm's, whose own sizes are known to fit.
    if not getattr(job.model, "imports", ()) or getattr(job.model, "options", None):
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = without_weights(job.model).build(job.dataset.classes, job.dataset.input_shape)
            size = sum(parameter.numel() for parameter in model.parameters())
        yield f"{size:,} parameters and their gradients", 2 * FLOAT32 * size * ranks, "a smaller model or input"


def _check_room(needs: Iterator[tuple[str, float, str]] | list[tuple[str, float, str]]) -> None:
    room = available_memory()
    for purpose, size, remedy in needs:
        if size > room:
            raise InputError(
                f"{purpose} need {size / GB:,.1f} GB, and this machine has {room / GB:,.1f} GB free; use {remedy}"
            )
