"""From what a command resumes to a job that can start: the values of its config become a `Job`, the `Job` becomes a
`ResolvedJob`, and this is checked whole. The run folder comes after that (`lockstep.job.create`): nothing is written
here but data and published weights that are missing.
"""

import multiprocessing
from collections.abc import Sequence

import torch

from lockstep.config import components, composition
from lockstep.config.invocation import Invocation
from lockstep.config.messages import RUN_FOLDERS, refuse_keys
from lockstep.core.errors import InputError
from lockstep.core.plan import Plan
from lockstep.job.resolve import resolve
from lockstep.job.resume import Resume, check_resumable, decide_resume
from lockstep.job.validate import check_job, check_memory
from lockstep.training.fingerprint import plan_of
from lockstep.training.resolved_job import ResolvedJob


def prepare(resume: Resume, invocation: Invocation) -> ResolvedJob:
    """The job of a command, resolved, and checked with its data.

    Raises:
        InputError: the job does not fit.
    """
    torch.set_num_threads(1)  # ranks can only be forked from a single thread; each rank sets its own number
    # A job of the pool has a process of its own; Hydra's basic launcher runs the jobs of a sweep in one.
    job = checked_job(resume, sweep=invocation.sweep and multiprocessing.parent_process() is None)
    resume.fetch_data(job.dataset)
    plan = check_plan(job)
    if resume.checkpoint is None:
        job.model.prepare()
    check_resumable(resume, job, plan)
    return job


def job_of(overrides: Sequence[str]) -> ResolvedJob:
    """The job of the words of a command that makes no run folder, resolved and checked without its data."""
    refuse_keys(overrides, RUN_FOLDERS, "names the folder of a run, and no run is made here")
    with composition.invoked(list(overrides)) as (values, invocation):
        return checked_job(decide_resume(values, invocation))


def checked_job(resume: Resume, *, sweep: bool = False) -> ResolvedJob:
    """The job of a command, resolved, and checked as far as that is possible without its data.

    `sweep` is whether other jobs run in this process.
    """
    job = components.build_job(resume.values)
    resolved = resolve(job, sweep=sweep, resumed=resume.checkpoint)
    if job.repro == "exact" and "repro=exact" in resume.overrides and resolved.strategy.fixed_order:
        raise InputError("strategy=strict belongs to repro=strict, but repro=exact is given; leave out one of them")
    check_job(resolved)
    return resolved


def check_plan(job: ResolvedJob) -> Plan:
    """The plan of a job whose data is there, and which fits it and the memory."""
    plan = plan_of(job, len(job.dataset.train()))
    check_memory(job, plan)
    for step in (1, plan.total_steps):
        job.schedule.factor(step, plan)  # that of an extension may refuse a duration
    return plan
