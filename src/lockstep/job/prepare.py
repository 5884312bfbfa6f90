"""From what a command resumes to a run folder: the job is resolved and checked, and only then the folder is made.

Data and published weights that are missing are downloaded by the checks. A later refusal, by a rank that builds the
parts, undoes what was written here (`Preparation`).
"""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Mapping
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
from lockstep.job.resume import Resume
from lockstep.job.run_folder import lock_run_folder
from lockstep.job.run_lock import Lock
from lockstep.job.validate import check_job, check_run


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
    built = checked_job(resume, invocation.configs, sweep=shares_process, resumed=resumed)
    check_run(built, folder, resumed, fetch=resume.may_fetch)
    run_dir = RunDir.at(folder) if folder is not None else RunDir.create(Path(built.output_root), built.name)
    lock.take(run_dir.lock)
    if built.launcher.can_fork():
        import_for_ranks(built)
    return Preparation.write(
        run_dir,
        {
            run_dir.config: yaml_io.dump(components.plain(built)),
            run_dir.command: invocation.command + "\n",
            run_dir.hydra / "hydra.yaml": invocation.hydra,
            run_dir.overrides: yaml_io.dump_list(list(resume.overrides)),
            run_dir.composed: yaml_io.dump(dict(resume.values)),
        },
    )


def checked_job(resume: Resume, configs: ConfigFiles, *, sweep: bool, resumed: Path | None) -> Job:
    """The job of a command, resolved, and checked as far as that is possible without its data.

    Raises:
        InputError: the job does not fit.
    """
    values = _without_auto_batch(resume, configs)
    job = resolve(components.build_job(values), sweep=sweep, resumed=resumed)
    if values["repro"] == "exact" and "repro=exact" in resume.overrides and job.strategy.fixed_order:
        raise InputError("strategy=strict belongs to repro=strict, but repro=exact is given; leave out one of them")
    check_job(job)
    return job


def import_for_ranks(job: Job) -> None:
    """Import what each rank would import, before the ranks are forked from this process."""
    parts = (job.model, job.strategy, *job.logger.values())
    modules = {name for part in parts for name in getattr(part, "imports", ())}
    modules |= {"torch._dynamo"} if job.model.compile else set()
    modules |= {"torchmetrics.classification"} if job.metric else set()
    for name in sorted(modules):
        importlib.import_module(name)


def _without_auto_batch(resume: Resume, configs: ConfigFiles) -> Mapping[str, Any]:
    """Replace `batch=auto` by the batch that the job has without this override, and `train.micro_batches=auto`.

    The batch identifies a run, so it must not depend on the memory of a machine.
    """
    values = resume.values
    if values["batch"] != "auto":
        return values
    remaining = [word for word in resume.overrides if messages.key_of(word) != "batch" or "auto" not in word]
    if len(remaining) == len(resume.overrides):
        raise InputError(
            "batch=auto keeps the batch that a job has without it, so it only works on the command line; in a "
            "recipe, set batch to a number and train.micro_batches to auto"
        )
    if values["train"]["micro_batches"] not in (1, "auto"):
        raise InputError(
            f"batch=auto chooses train.micro_batches, which is {values['train']['micro_batches']}; leave out one of "
            "them"
        )
    batch = composition.to_dict(composition.recompose(remaining, (), configs))["batch"]
    if batch == "auto":
        raise InputError(
            "batch is auto even without batch=auto on the command line; in the recipe, set batch to a number and "
            "train.micro_batches to auto"
        )
    return {**values, "batch": batch, "train": {**values["train"], "micro_batches": "auto"}}
