"""From a composed config to a run folder. Nothing is written before the whole job has been checked."""

from __future__ import annotations

import importlib
import multiprocessing
from pathlib import Path
from typing import Any

import torch

from lockstep.config import components, composition, messages, yaml_io
from lockstep.config.invocation import ConfigFiles, Invocation
from lockstep.config.schema import Job
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.job.preparation import Preparation
from lockstep.job.resolve import named_checkpoint, resolve
from lockstep.job.resume import check_kept_config, resumed_job
from lockstep.job.run_folder import continued, lock_run_folder
from lockstep.job.run_lock import Lock
from lockstep.job.validate import check_job, check_run, checkpoint_to_resume
from lockstep.launcher import Spawn
from lockstep.models import ResNet34, Timm
from lockstep.strategy import DDP, Strict
from lockstep.telemetry.loggers import TensorBoard


def prepare(job: dict[str, Any], invocation: Invocation, lock: Lock) -> Preparation:
    """Create the run folder of a composed job, write its resolved config there, and take `lock` on the folder.

    Raises:
        InputError: the job does not fit, or another job uses the folder; nothing was written.
    """
    torch.set_num_threads(1)  # ranks can only be forked from a single thread; each rank sets its own number
    folder = lock_run_folder(job, invocation, lock)
    overrides = list(invocation.overrides)
    current = job
    if (resumed_folder := continued(job, invocation)) is not None:
        job, overrides = resumed_job(RunDir(resumed_folder), invocation)
        # Somebody else may have written the run folder, so only the present command may name another output folder.
        job["output_root"] = current["output_root"]
    built = components.build_job(_without_auto_batch(job, overrides, invocation.configs))
    resumed = checkpoint_to_resume(folder, named_checkpoint(built.resume))
    # A job of the pool has a process of its own; Hydra's basic launcher runs the jobs of a sweep in one.
    shares_process = invocation.sweep and multiprocessing.parent_process() is None
    built = resolve(built, sweep=shares_process, resumed=resumed)
    if job["repro"] == "exact" and "repro=exact" in overrides and isinstance(built.strategy, Strict):
        raise InputError("strategy=strict belongs to repro=strict, but repro=exact is given; leave out one of them")
    check_job(built)
    if resumed_folder is not None:
        check_kept_config(RunDir(resumed_folder), job, invocation)
    check_run(built, folder, resumed, fetch=job["dataset"].get("root") in (None, current["data_root"]))
    run_dir = RunDir.at(folder) if folder is not None else RunDir.create(Path(built.output_root), built.name)
    if folder is None:
        lock.take(run_dir.lock)
    if isinstance(built.launcher, Spawn) and built.launcher.can_fork():
        import_for_ranks(built)
    return Preparation.write(
        run_dir,
        {
            run_dir.config: yaml_io.dump(components.plain(built)),
            run_dir.command: invocation.command + "\n",
            run_dir.hydra / "hydra.yaml": invocation.hydra,
            run_dir.overrides: yaml_io.dump_list(overrides),
            run_dir.composed: yaml_io.dump(job),
        },
    )


def import_for_ranks(job: Job) -> None:
    """Import what each rank would import, before the ranks are forked from this process."""
    modules = {
        "torch._dynamo": job.model.compile or isinstance(job.strategy, DDP),
        "timm": isinstance(job.model, (ResNet34, Timm)),
        "torch.utils.tensorboard": any(isinstance(logger, TensorBoard) for logger in job.logger.values()),
        "torchmetrics.classification": bool(job.metric),
    }
    for name, needed in modules.items():
        if needed:
            importlib.import_module(name)


def _without_auto_batch(job: dict[str, Any], overrides: list[str], configs: ConfigFiles) -> dict[str, Any]:
    """Replace `batch=auto` by the batch that the job has without this override, and `train.micro_batches=auto`.

    The batch identifies a run, so it must not depend on the memory of a machine.
    """
    if job["batch"] != "auto":
        return job
    remaining = [word for word in overrides if messages.key_of(word) != "batch" or "auto" not in word]
    if len(remaining) == len(overrides):
        raise InputError(
            "batch=auto keeps the batch that a job has without it, so it only works on the command line; in a "
            "recipe, set batch to a number and train.micro_batches to auto"
        )
    if job["train"]["micro_batches"] not in (1, "auto"):
        raise InputError(
            f"batch=auto chooses train.micro_batches, which is {job['train']['micro_batches']}; leave one of them out"
        )
    batch = composition.to_dict(composition.recompose(remaining, (), configs))["batch"]
    if batch == "auto":
        raise InputError(
            "batch is auto even without batch=auto on the command line; in the recipe, set batch to a number and "
            "train.micro_batches to auto"
        )
    return {**job, "batch": batch, "train": {**job["train"], "micro_batches": "auto"}}
