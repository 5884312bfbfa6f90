"""From what a command resumes to a run folder: the job is resolved and checked, and only then the folder is made.

Data and published weights that are missing are downloaded by the checks. A later refusal, by a rank that builds the
parts, undoes what was written here (`Preparation`).
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.config import components, composition, messages, yaml_io
from lockstep.config.invocation import ConfigFiles, Invocation
from lockstep.config.schema import Job
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.job.preparation import Preparation
from lockstep.job.resolve import resolve
from lockstep.job.resume import Resume, check_resumable
from lockstep.job.run_folder import lock_run_folder
from lockstep.job.run_lock import Lock
from lockstep.job.validate import check_job, check_run
from lockstep.runtime import environment
from lockstep.training.resolved_job import ResolvedJob


def prepare(resume: Resume, invocation: Invocation, lock: Lock) -> Preparation:
    """Resolve and check the job of a command, make its run folder, and take `lock` on the folder.

    Raises:
        InputError: the job does not fit, or another job uses the folder; nothing was written.
    """
    torch.set_num_threads(1)  # ranks can only be forked from a single thread; each rank sets its own number
    if (folder := resume.folder) is not None:
        lock_run_folder(folder, lock)
    # A job of the pool has a process of its own; Hydra's basic launcher runs the jobs of a sweep in one.
    shares_process = invocation.sweep and multiprocessing.parent_process() is None
    resumed = resume.checkpoint()
    job = checked_job(resume.values, resume.overrides, invocation.configs, sweep=shares_process, resumed=resumed)
    plan = check_run(job, starts=resumed is None, fetch=resume.may_fetch)
    if resumed is not None:
        check_resumable(job, plan, folder, resumed)
    run_dir = RunDir.at(folder) if folder is not None else RunDir.create(Path(job.output_root), job.name)
    lock.take(run_dir.lock)
    if job.launcher.can_fork():
        import_for_ranks(job)
    return Preparation.write(
        run_dir,
        {
            run_dir.config: yaml_io.dump(components.plain(job)),
            run_dir.command: invocation.command + "\n",
            run_dir.hydra / "hydra.yaml": invocation.hydra,
            run_dir.overrides: yaml_io.dump_list(list(resume.overrides)),
            run_dir.composed: yaml_io.dump(dict(resume.values)),
        },
    )


def job_of(overrides: Sequence[str]) -> ResolvedJob:
    """The job of the words of a command, resolved and checked without its data. Nothing is written.

    Raises:
        InputError: the job does not fit.
    """
    values = composition.composed(list(overrides))
    with composition.composing():
        return checked_job(values, overrides, ConfigFiles())


def checked_job(
    values: Mapping[str, Any],
    overrides: Sequence[str],
    configs: ConfigFiles,
    *,
    sweep: bool = False,
    resumed: Path | None = None,
) -> ResolvedJob:
    """The job of a composed config, resolved, and checked as far as that is possible without its data.

    Args:
        values: the config.
        overrides: the overrides that gave `values`, with `configs`.
        sweep: whether other jobs run in this process.
        resumed: the checkpoint from which the job resumes.

    Raises:
        InputError: the job does not fit.
    """
    values = _without_auto_batch(values, overrides, configs)
    job = resolve(components.build_job(values), sweep=sweep, resumed=resumed)
    if values["repro"] == "exact" and "repro=exact" in overrides and job.strategy.fixed_order:
        raise InputError("strategy=strict belongs to repro=strict, but repro=exact is given; leave out one of them")
    check_job(job)
    return job


def import_for_ranks(job: Job) -> None:
    """Import what each rank would import, and ask what it would ask, before ranks are forked from this process."""
    from lockstep.job import launch  # noqa: F401  # late, because only a rank needs all of it

    environment.own_source()
    parts = (job.model, job.strategy, *job.logger.values())
    modules = {name for part in parts for name in getattr(part, "imports", ())}
    modules |= {"torch._dynamo"} if job.model.compile else set()
    modules |= {"torchmetrics.classification"} if job.metric else set()
    for name in sorted(modules):
        importlib.import_module(name)


def _without_auto_batch(
    values: Mapping[str, Any], overrides: Sequence[str], configs: ConfigFiles
) -> Mapping[str, Any]:
    """Replace `batch=auto` by the batch that the job has without this override, and `train.micro_batches=auto`.

    The batch identifies a run, so it must not depend on the memory of a machine.
    """
    remaining = [word for word in overrides if messages.key_of(word) != "batch" or "auto" not in word]
    if values["batch"] != "auto" or len(remaining) == len(overrides):  # a recipe cannot say it: `resolve` refuses it
        return values
    if values["train"]["micro_batches"] not in (1, "auto"):
        raise InputError(
            f"batch=auto chooses train.micro_batches, which is {values['train']['micro_batches']}; leave out one of "
            "them"
        )
    batch = composition.to_dict(composition.recompose(remaining, (), configs))["batch"]
    return {**values, "batch": batch, "train": {**values["train"], "micro_batches": "auto"}}
