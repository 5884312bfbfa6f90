"""Answers what `batch=auto` asks: how large a batch could be here, and what that would bring."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch

from lockstep.core.world import World
from lockstep.training.dry_run import dry_run_step, is_out_of_memory, timed
from lockstep.training.micro_batch_search import fits
from lockstep.training.resolved_job import ResolvedJob

# Batches are tried up to this long a step and this long in all (seconds).
LONGEST_STEP_S, LONGEST_S = 2.0, 10.0
STEPS = 3  # are timed of each batch


def advice_on_batch(job: ResolvedJob, world: World, examples: int) -> str:
    """A sentence with the largest batch that fits, its images per second and learning rate, beside the present one.

    Batches are doubled while they fit on a rank and their steps are short, up to all `examples` of an epoch. They are
    tried on main alone.
    """
    end = time.perf_counter() + LONGEST_S
    present = batch = job.batch
    rates: dict[int, float] = {}
    with torch.random.fork_rng(devices=[]):  # a throw-away model must not advance the state of the run's
        while True:
            seconds = _seconds(job, world, -(-batch // world.size))
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
    try:
        step = dry_run_step(job, world, examples)
        return statistics.median(timed(step, world.device) for _ in range(STEPS))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None
