"""Checks before a job starts: that it can run, and that each of its keys has an effect.

`lockstep.core.fields` checks each value by itself. This module checks values together: a key that has no effect
because of another key, and parts that do not fit each other. An option that has no effect on this machine only (such
as an option for GPUs on a machine without one) is not a mistake: the same job must run on any machine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

from lockstep import checkpoint
from lockstep.core.data_protocols import BoxAugment, Source
from lockstep.core.errors import InputError
from lockstep.core.plan import Plan
from lockstep.data.datasets.files import crops_files
from lockstep.job.machine_limits import check_data_memory, check_memory, check_threads
from lockstep.models.nets import CompileMode
from lockstep.training.fingerprint import plan_of
from lockstep.training.freezing import freeze_until
from lockstep.training.resolved_job import ResolvedJob


def check_effects(job: ResolvedJob) -> None:
    """Refuse a key that has no effect because of another key.

    Raises:
        InputError: the job has such a key.
    """
    model = job.model
    if model.compile_mode is not CompileMode.default and not model.compile:
        raise InputError(
            f"model.compile_mode is {model.compile_mode.name}, but model.compile is false, so nothing is compiled; "
            "add model.compile=true, or leave out model.compile_mode"
        )
    if job.init_from is not None and getattr(model, "pretrained", False):
        raise InputError(
            "init_from takes the place of the weights that model.pretrained=true asks for; leave out one of them"
        )
    if job.train.freeze_until is not None and not job.train.freeze:
        raise InputError(
            f"train.freeze_until is {job.train.freeze_until}, but train.freeze is empty, so nothing is frozen; add "
            "train.freeze=[backbone], or leave out train.freeze_until"
        )
    if job.budget.usd is not None and (job.cost.usd_per_gpu_hour is None or job.device == "cpu"):
        reason = "there is no GPU here" if job.device == "cpu" else "cost.usd_per_gpu_hour is not set"
        raise InputError(
            f"budget.usd is {job.budget.usd:g}, but {reason}, so nothing has a price; use budget.hours"
            + ", or add cost.usd_per_gpu_hour=PRICE" * (job.device != "cpu")
        )
    if job.precision.storage is torch.bfloat16 and job.train.ema is not None:
        raise InputError(
            f"train.ema is {job.train.ema}, but under precision=bf16_pure an average is in bfloat16 too, where a "
            "number moves by 1/256 of itself or not at all; use precision=bf16, or leave out train.ema"
        )
    if job.strategy.fixed_order and len(set(job.launcher.node_range)) > 1:
        least, most = job.launcher.node_range
        raise InputError(
            f"launcher.nodes is {least}:{most}, but repro=strict deals its virtual shards to a fixed number of "
            f"ranks; use launcher.nodes={most}, or repro=exact"
        )


def check_packages(job: ResolvedJob) -> None:
    """Refuse a logger whose package is not installed.

    Raises:
        InputError: a package is missing.
    """
    for name, logger in job.logger.items():
        package = getattr(logger, "package", None)
        if package is not None and importlib.util.find_spec(package) is None:
            raise InputError(
                f"logger={name} needs the package {package}, which is not installed; install it with pip install "
                f"'lockstep[{package}]', or leave the logger out"
            )


def check_folders(job: ResolvedJob) -> None:
    """Refuse paths for data and runs that are not folders and cannot become folders.

    Raises:
        InputError: a path is wrong.
    """
    for key, path in (("data_root", Path(job.data_root)), ("output_root", Path(job.output_root))):
        try:
            nearest = next(folder for folder in (path, *path.parents) if folder.is_symlink() or folder.exists())
            fits = nearest.is_dir()
        except OSError as error:
            raise InputError(f"{key}: {path} cannot be reached ({error.strerror}); use {key}=FOLDER") from error
        if not fits:
            raise InputError(f"{key}: {nearest} is no folder; name another with {key}=FOLDER")


def check_job(job: ResolvedJob) -> None:
    """Check everything that can be checked without the data. One InputError has a line for each problem."""
    checks: list[Callable[[], None]] = [
        lambda: job.strategy.check(job.launcher.world_size, job.device),
        lambda: job.strategy.check_parts(job.optimizer, job.precision, job.train.micro_batches),
        lambda: job.precision.check(job.device),
        job.model.check,
        job.launcher.check,
        job.loader.check,
        lambda: _check_crop(job),
        lambda: check_effects(job),
        lambda: check_packages(job),
        lambda: check_threads(job),
        lambda: check_folders(job),
        lambda: check_data_memory(job),
        lambda: _check_kernels(job),
        lambda: _check_compile(job),
        lambda: _check_graph(job),
    ]
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except InputError as error:
            problems.extend(error.args)
    if problems:
        raise InputError(*problems)


def _check_crop(job: ResolvedJob) -> None:
    """Cropping from files needs an augmentation with boxes, and a loader that reads the files in every epoch."""
    if not crops_files(job.dataset):
        return
    if not isinstance(job.augment, BoxAugment):
        raise InputError(
            "dataset.crop_from=file cuts the boxes of a random resized crop from the files, and the augmentation is "
            f"{type(job.augment).__name__}; use augment=standard or dataset.crop_from=square"
        )
    if job.loader.decodes_once:
        raise InputError(
            "loader=resident decodes each image once, but dataset.crop_from=file cuts another box from the file in "
            "each epoch; use loader=streaming or dataset.crop_from=square"
        )


def _check_kernels(job: ResolvedJob) -> None:
    """Refuse options that choose kernels by timing them if `repro=strict`."""
    timed = {
        "train.cudnn_benchmark=false": job.train.cudnn_benchmark,
        "model.compile_mode=default": job.model.compile and job.model.compile_mode.value == "max-autotune",
    }
    if job.strategy.fixed_order and any(timed.values()):
        remedy = " ".join(key for key, on in timed.items() if on)
        raise InputError(
            "repro=strict has the same bits every time, but these options choose by time among kernels that round in "
            f"different ways; use {remedy}, or repro=exact"
        )


def _check_compile(job: ResolvedJob) -> None:
    """Refuse options that do not work with a compiled model."""
    if not job.model.compile:
        return
    job.strategy.check_compile(job.launcher.world_size, job.device)
    # A CUDA graph overwrites the gradients of the previous micro-batch (pytorch/pytorch#169545).
    if job.device == "cuda" and job.model.compile_mode.value != "default" and job.train.micro_batches != 1:
        raise InputError(
            f"model.compile_mode={job.model.compile_mode.name} records CUDA graphs, which cannot add up the "
            f"gradients of micro-batches, and train.micro_batches is {job.train.micro_batches}; use "
            "model.compile_mode=default"
        )


def _check_graph(job: ResolvedJob) -> None:
    """Refuse options with which a step cannot be recorded as one CUDA graph (`train.cuda_graph`)."""
    if not job.train.cuda_graph:
        return
    strategy, optimizer = (type(part).__name__.lower() for part in (job.strategy, job.optimizer))
    mode = job.model.compile_mode
    obstacles = [
        (
            not job.strategy.recordable,
            f"under strategy={strategy} a step is more than the work of one device; use repro=exact strategy=single",
        ),
        (
            job.precision.needs_loss_scaler,
            "under precision=fp16 a step counts only if no gradient overflows; use precision=bf16",
        ),
        (
            not job.optimizer.recordable,
            f"optimizer={optimizer} computes with its learning rate in Python, so each step would have that of the "
            "recorded one; use optimizer=sgd, adam, adamw or muon",
        ),
        (
            mode is not CompileMode.default,
            f"model.compile_mode={mode.name} records graphs of its own; use model.compile_mode=default",
        ),
    ]
    problems = [f"train.cuda_graph is true, but {reason}" for applies, reason in obstacles if applies]
    if problems:
        raise InputError(*problems)


def check_run(job: ResolvedJob, *, starts: bool, fetch: bool) -> Plan:
    """The plan of a job whose data exists and fits it. `starts` is whether the job starts from its initial weights.

    Missing data is downloaded if `fetch` is set. It must not be set if only the run folder names the data's folder,
    because somebody else may have written the run folder.

    Raises:
        InputError: it does not fit.
    """
    if job.init_from is not None and starts:
        checkpoint.weights_file(Path(job.init_from))
    if fetch:
        job.dataset.prepare()
    else:
        _check_data(job.dataset)
    plan = check_plan(job)
    if starts:
        job.model.prepare()
    return plan


def check_plan(job: ResolvedJob) -> Plan:
    """The plan of a job whose data is there, and which fits it and the memory.

    Raises:
        InputError: it does not fit.
    """
    plan = plan_of(job, len(job.dataset.train()))
    check_memory(job, plan)
    freeze_until(job, plan)  # raises if the duration does not fit
    for step in (1, plan.total_steps):
        job.schedule.factor(step, plan)  # raises if one of its durations does not fit
    return plan


def _check_data(dataset: Source) -> None:
    """Check that both splits can be read."""
    try:
        dataset.train()
        dataset.eval()
    except InputError as error:
        raise InputError(
            f"{error}; a resume downloads nothing to a folder that only the run names: name it with data_root=FOLDER"
        ) from error
