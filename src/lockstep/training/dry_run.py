"""Tries steps on a throw-away model: how long they take, and which fit into memory."""

import gc
import math
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from lockstep.core.data_protocols import Shard
from lockstep.core.errors import InputError, LockstepError
from lockstep.core.model import is_sharded
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.runtime.host import GB, available_memory, is_out_of_memory, keep_freed_memory
from lockstep.strategy.base import Single
from lockstep.training.evaluate import evaluate_model
from lockstep.training.resolved_job import ResolvedJob, card_of, step_settings
from lockstep.training.train_state import TrainState, blank_labels, build_loss, build_state, ready_task, without_start
from lockstep.training.train_step import TrainStep

T = TypeVar("T")
# The rate is tried with few examples first, and with a full micro-batch if that takes less than LONG_TRIAL_S seconds.
FEW_EXAMPLES, LONG_TRIAL_S = 8, 1.0
LAST = 2**40  # a step after which nothing thaws
MARGIN = 1.2  # later steps may need a little more memory than the first, because of fragmentation


def dry_run_step(job: ResolvedJob, world: World, examples: int) -> Callable[[], object]:
    """A function that does the last step of a job, in which all layers that thaw are trained, on blank examples.

    It has all memory that a run needs. It is the step of one rank, because a trial is not collective.
    """
    job, world = replace(without_start(job), strategy=Single()), World.solo(world.device)
    shape = job.train_shape
    examples = max(2, examples)  # batch norm on one rank has no variance of one
    rarely = {"log_every": LAST, "eval_every": LAST, "save_every": LAST}
    plan = Plan(examples=examples, batch=examples, total_steps=LAST, micro_batches=1, **rarely)
    blank = partial(torch.zeros, device=world.device, dtype=job.precision.dtype)
    state = build_state(job, world, plan, lambda number: blank((number, *shape)))
    images = blank((examples, *shape)).to(memory_format=job.model.memory_format)
    labels = blank_labels(job, examples, world)
    loss = build_loss(job, labels, world, skip=0)
    indices = torch.zeros(examples, dtype=torch.int64, device=world.device)
    step = TrainStep(
        world=world,
        plan=plan,
        state=state,
        **step_settings(job),
        task=ready_task(job, card_of(job), loss, world),
        loss=loss,
        inputs=lambda micro: [images, *state.draws.keys_of(micro), labels, labels],
    )
    # Stands for the buckets of a distributed strategy, or the sum of earlier micro-batches.
    buckets = [torch.empty_like(parameter) for parameter in state.model.parameters() if parameter.requires_grad]
    return lambda: (step(Shard(LAST, 0, images, labels, indices, examples, 0, 1)), buckets)


def timed(step: Callable[[], object], device: torch.device) -> float:
    """The seconds of a step, until its device has done it."""
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def stopwatch(job: ResolvedJob, world: World, examples: int) -> Callable[[], float] | None:
    """A function that takes a step on blank examples, after a first one here, and returns its seconds.

    None if it does not fit into memory.
    """

    def warmed_up() -> Callable[[], float]:
        seconds = partial(timed, dry_run_step(job, world, examples), world.device)
        seconds()
        return seconds

    return unless_out_of_memory(warmed_up)


def training_rate(job: ResolvedJob, world: World) -> float | None:
    """The images per second that a rank can train on; None if measuring takes long, or a step does not fit."""
    if job.model.compile:
        return None

    def measured(examples: int) -> float | None:
        seconds = stopwatch(job, world, examples)
        return None if seconds is None else examples / seconds()

    micro_batch = job.micro_batch(world.size)
    with trial(world.device):
        rate = measured(min(FEW_EXAMPLES, micro_batch))
        if rate is None or micro_batch <= FEW_EXAMPLES or micro_batch / rate >= LONG_TRIAL_S:
            return rate
        return measured(micro_batch)


def unless_out_of_memory(function: Callable[[], T]) -> T | None:
    """The result of a function; None if memory has run out in it."""
    try:
        return function()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the activations
        return None


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
            gc.collect()
            torch.cuda.empty_cache()


def micro_batches_that_fit(
    job: ResolvedJob, world: World, *, least: int = 1, held_gb: float = 0.0, after_failure: bool = False
) -> int | None:
    """The smallest number of micro-batches, a power of two times `least`, with which a step of this rank fits.

    `held_gb` GB of the device's memory stay free for the images that a run keeps there. None if not even single
    examples fit. `after_failure` is for a thread in which memory has run out, see `fits`. Not collective: ranks may
    get different numbers.
    """
    shard, micro_batches = math.ceil(job.batch / world.size), least
    while not fits(job, world, math.ceil(MARGIN * math.ceil(shard / micro_batches)), held_gb, apart=after_failure):
        if micro_batches >= shard:
            return None
        micro_batches = min(2 * micro_batches, shard)
    return micro_batches


def choose_micro_batches(job: ResolvedJob, world: World, *, held_gb: float) -> int:
    """The number for `train.micro_batches=auto`: it fits on every rank, next to `held_gb` GB of images. Collective.

    Raises InputError: a single example does not fit.
    """
    needed = world.gather(micro_batches_that_fit(job, world, held_gb=held_gb) or 0)
    if 0 in needed:
        raise InputError(
            f"model={type(job.model).__name__} does not fit into the memory of rank {needed.index(0)} with a single "
            "example of the data set; use a smaller model or dataset.input_size"
        )
    return max(needed)


def release(state: TrainState) -> None:
    """Free the memory of the state of a run that has ended, because a trial needs as much."""
    for module in filter(None, (state.model, state.ema)):
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.grad = None
            if not is_sharded(tensor):
                tensor.data = tensor.data.new_empty(0)
    for owner in filter(None, (state.optimizer, state.ema)):
        vars(owner).clear()  # also their lists of tensors that share this memory


def oom_advice(error: BaseException, job: ResolvedJob, world: World, state: TrainState, step: int) -> LockstepError:
    """The error for a rank that ran out of memory in training, with the number of micro-batches that would fit."""
    if any(frame.name == evaluate_model.__name__ for frame in traceback.extract_tb(error.__traceback__)):
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
    release(state)
    gc.collect()
    keep_freed_memory(world, keep=False)
    examples = job.micro_batch(world.size)
    fitting = None
    if examples > 1:
        fitting = micro_batches_that_fit(job, world, least=2 * job.train.passes, after_failure=True)
    again = "model.grad_checkpointing=true, " * (not job.model.grad_checkpointing)
    advice = f"not even single examples fit; use {again}a smaller model or dataset.input_size"
    if fitting:
        advice = f"train.micro_batches={fitting} fits and leaves the global batch as it is; train.micro_batches=auto "
        advice += "finds such a number by itself"
    return LockstepError(f"out of memory at step {step} with micro-batches of {examples} examples; {advice}")


def fits(job: ResolvedJob, world: World, examples: int, held_gb: float, *, apart: bool = False) -> bool:
    """Whether a whole step on `examples` blank examples fits into memory.

    With `apart`, on the CPU in a new thread: if memory runs out while oneDNN compiles a kernel, the error stays with
    the thread, and all its later kernels fail ("could not create a primitive"), however much memory there is then.
    """

    def step() -> bool:
        reserved = torch.empty(int(held_gb * GB), dtype=torch.uint8, device=world.device)
        dry_run_step(job, world, examples)()
        del reserved
        return True

    def bounded() -> bool:
        with _bounded(world), trial(world.device):
            try:
                return unless_out_of_memory(step) is not None
            finally:
                gc.collect()

    if not apart or world.device.type != "cpu":
        return bounded()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(torch.ones(2**17).neg_).result()  # starts its OpenMP threads, whose stacks are not the step's
        return thread.submit(bounded).result()


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
