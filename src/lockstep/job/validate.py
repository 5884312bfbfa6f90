"""Checks of the values of a job together: that it can run, and that each of its keys has an effect.

A key without effect on this machine only (such as one for GPUs) is not a mistake: the same job must run on any
machine. What a job needs of processes, threads and memory is a lower bound: a job that is refused certainly does not
fit.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from lockstep.config.options import classes_of
from lockstep.config.schema import TrainBlock
from lockstep.core.data_protocols import Source
from lockstep.core.errors import InputError, check_installed, collecting, reason_of
from lockstep.core.fields import as_pixels
from lockstep.core.figures import check_figures, figures_of
from lockstep.core.launch_env import is_launched, local_size
from lockstep.core.model import UpdateScope, forward_on_meta
from lockstep.core.model_card import CLASSES
from lockstep.core.observer import Callback, Logger
from lockstep.core.protocols import Loss, Metric
from lockstep.models.nets import sketch
from lockstep.runtime.host import available_memory, check_room, cores
from lockstep.training.resolved_job import ResolvedJob

# The limits of ranks on a CPU, and of threads of all ranks: the larger of a fixed number and a number per core.
RANKS, RANKS_A_CORE = 8, 4
THREADS, THREADS_A_CORE = 1024, 16


def check_effects(job: ResolvedJob) -> None:
    """Refuse a key that has no effect because of another key."""
    model, train = job.model, job.train
    if model.compile_mode != "default" and not model.compile:
        raise InputError(
            f"model.compile_mode is {model.compile_mode}, but model.compile is false, so nothing is compiled; "
            "add model.compile=true, or remove model.compile_mode"
        )
    balanced = train.sampling == "balanced"
    doubled = {
        "init_from and model.pretrained=true both set the initial weights": job.init_from and model.pretrained,
        "train.sampling=balanced and loss.balanced=true both balance the classes": balanced and job.loss.balanced,
        "train.sampling=balanced and train.repeats both repeat examples in an epoch": balanced and train.repeats > 1,
        "train.ema and train.swa_from both average the weights": train.ema and train.swa_from,
        "train.size and train.sizes both choose the size of training": train.size and train.sizes,
    }
    for sentence, applies in doubled.items():
        if applies:
            raise InputError(f"{sentence}; remove one of them")
    if train.freeze_until is not None and not train.freeze:
        raise InputError(
            f"train.freeze_until is {train.freeze_until}, but train.freeze is empty, so nothing is frozen; add "
            "train.freeze=[backbone], or set train.freeze_until=null"
        )
    if job.budget.usd is not None and (job.cost.usd_per_gpu_hour is None or job.device == "cpu"):
        reason = "there is no GPU here" if job.device == "cpu" else "cost.usd_per_gpu_hour is not set"
        raise InputError(
            f"budget.usd is {job.budget.usd:g}, but {reason}, so nothing has a price; use budget.hours"
            + ", or add cost.usd_per_gpu_hour=PRICE" * (job.device != "cpu")
        )
    mixes = [alpha for alpha in (train.mixup, train.cutmix) if alpha]
    unused = {
        "train.ema is null, so nothing is averaged": ("ema_warmup", "ema_every") * (train.ema is None),
        "train.swa_from is null, so nothing is averaged": ("swa_every", "swa_images") * (train.swa_from is None),
        "train.erase is 0, so nothing is erased": ("erase_mode",) * (not train.erase),
        "train.patience is null, so no run ends early": ("min_delta",) * (train.patience is None),
        "train.mixup and train.cutmix are 0, so nothing is mixed": ("mix_by", "mix_prob", "mix_until") * (not mixes),
        "train.mixup and train.cutmix are not both on": ("mix_switch",) * (len(mixes) < 2),
    }
    for reason, name in ((reason, name) for reason, names in unused.items() for name in names):
        if (value := getattr(train, name)) != getattr(TrainBlock, name):
            raise InputError(f"train.{name} is {str(value).lower()}, but {reason}; remove it")


def check_conflicts(job: ResolvedJob) -> None:
    """Refuse keys that each have an effect, but not together."""
    if job.batch % job.train.repeats:
        whole = max(1, job.batch // job.train.repeats) * job.train.repeats
        raise InputError(
            f"train.repeats is {job.train.repeats}, but batch is {job.batch}, so a global batch cannot hold its "
            f"examples so often; use batch={whole}, or remove train.repeats"
        )
    if job.precision.storage is torch.bfloat16 and job.train.averages:
        name = "ema" if job.train.ema is not None else "swa_from"
        raise InputError(
            f"train.{name} is {getattr(job.train, name)}, but under precision=bf16_pure an average is in bfloat16 "
            "too, where a number moves by 1/256 of itself or not at all; use precision=bf16, or remove "
            f"train.{name}"
        )
    if job.strategy.fixed_order and len(set(job.launcher.node_range)) > 1:
        least, most = job.launcher.node_range
        raise InputError(
            f"launcher.nodes is {least}:{most}, but repro=strict deals its virtual shards to a fixed number of "
            f"ranks; use launcher.nodes={most}, or repro=exact"
        )


def check_targets(job: ResolvedJob) -> None:
    """Reject parts that are for other targets than the task's, and figures that are not valid tags."""
    callbacks = [("callback", callback.figures) for callback in job.callback.values()]
    loggers = [("logger", logger.figures) for logger in job.logger.values()]
    check_figures([("task", job.task.figures), *callbacks, *loggers])
    targets = job.task.targets
    parts: list[tuple[str, Loss | Metric]] = [("loss", job.loss), *(("metric", part) for part in job.metric.values())]
    for group, part in parts:
        if targets not in part.targets:
            others = [name for name, cls in classes_of(group).items() if targets in cls.targets]
            raise InputError(
                f"{group}: {type(part).__name__} is for {' and '.join(part.targets)}, and the targets of this task "
                f"are {targets}; use {group}=NAME with one of {', '.join(sorted(others))}"
            )
    if targets != CLASSES and job.train.sampling == "balanced":
        raise InputError(
            f"train.sampling=balanced balances classes, and the targets of this task are {targets}; remove it"
        )


def check_whole_steps(job: ResolvedJob, callbacks: Mapping[str, Callback]) -> None:
    """Reject callbacks that act between the parts of a step, if it is recorded, or the optimizer calls its parts."""
    changing = [name for name, own in callbacks.items() if type(own).after_backward is not Callback.after_backward]
    if changing and job.optimizer.needs_closure:
        raise InputError(
            f"{several_gradients(job)}, of which after_backward of the callbacks {', '.join(changing)} would see the "
            "first alone; remove them, or use optimizer=sgd"
        )
    if changing and job.train.cuda_graph:
        raise InputError(
            f"train.cuda_graph is true, but no replay calls after_backward of the callbacks {', '.join(changing)}; "
            "use train.cuda_graph=false, or remove them"
        )


def named_objects(job: ResolvedJob, callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """The user's objects by the names of their classes. Raises InputError if the job cannot have them."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        name = type(callback).__name__
        if not isinstance(callback, Callback):
            raise InputError(f"callbacks has an object of {name}, which is no lockstep.Callback; derive it from that")
        if job.launcher.submits:
            raise InputError(
                f"callbacks has an object of {name}, which other machines cannot have; declare its class as an "
                'option of a package, @lockstep.option("callback"), and choose it with callback=[NAME]'
            )
        others = sum(type(other).__name__ == name for other in named.values())
        named[name if not others else f"{name}{others + 1}"] = callback
    check_whole_steps(job, named)
    check_figures([("callback", own.figures) for own in (*job.callback.values(), *named.values())])
    return named


def check_packages(loggers: Mapping[str, Logger]) -> None:
    """Reject a logger whose package is not installed."""
    for name, logger in loggers.items():
        if logger.package is not None:
            check_installed(logger.package, f"logger={name}")


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
        lambda: check_conflicts(job),
        lambda: check_targets(job),
        lambda: check_packages(job.logger),
        lambda: check_threads(job),
        lambda: check_data_memory(job.dataset),
        lambda: _check_kernels(job),
        lambda: _check_compile(job),
        lambda: _check_graph(job),
        lambda: check_whole_steps(job, job.callback),
        lambda: _check_closure(job),
        lambda: _check_recompute(job),
        lambda: _check_train_size(job),
    ]
    problems: list[str] = []
    for check in checks:
        with collecting(problems):
            check()
    if problems:
        raise InputError(*problems)


def _check_crop(job: ResolvedJob) -> None:
    """The augmentation fits the images. Cropping from files needs boxes, and files that are read in every epoch."""
    job.augment.check_channels(job.dataset.input_shape[0])
    if not job.dataset.crops_files:
        return
    from lockstep.data.transforms.crops import RandomResizedCrop  # few jobs crop files

    if not isinstance(job.augment, RandomResizedCrop):
        raise InputError(
            "dataset.crop_from=file cuts the boxes of a random resized crop from the files, and the augmentation is "
            f"{type(job.augment).__name__}; use augment=standard or dataset.crop_from=square"
        )
    if job.augment.crop != "resized":
        raise InputError(
            "dataset.crop_from=file cuts the boxes of a random resized crop from the files, and augment.crop is "
            f"{job.augment.crop}; use augment.crop=resized or dataset.crop_from=square"
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
        "model.compile_mode=default": job.model.compile and job.model.compile_mode == "max_autotune",
    }
    if job.strategy.fixed_order and any(timed.values()):
        remedy = " ".join(key for key, on in timed.items() if on)
        raise InputError(
            "repro=strict has the same bits every time, but these options choose by time among kernels that round in "
            f"different ways; use {remedy}, or repro=exact"
        )


def _check_compile(job: ResolvedJob) -> None:
    if not job.model.compile:
        return
    job.strategy.check_compile(job.launcher.world_size, job.device)
    # A CUDA graph overwrites the gradients of the previous micro-batch (pytorch/pytorch#169545).
    if job.device == "cuda" and job.model.compile_mode != "default" and job.train.micro_batches != 1:
        raise InputError(
            f"model.compile_mode={job.model.compile_mode} records CUDA graphs, which cannot add up the "
            f"gradients of micro-batches, and train.micro_batches is {job.train.micro_batches}; use "
            "model.compile_mode=default"
        )


def _check_graph(job: ResolvedJob) -> None:
    """Refuse options with which a step cannot be recorded as one CUDA graph (`train.cuda_graph`)."""
    if not job.train.cuda_graph:
        return
    strategy, optimizer = (type(part).__name__.lower() for part in (job.strategy, job.optimizer))
    mode, scales = job.model.compile_mode, job.precision.needs_loss_scaler
    looks_ahead = job.optimizer.lookahead is not None
    python_rate = (
        f"optimizer={optimizer} computes with its learning rate in Python, so each step would have the rate of the "
        "recorded one; use optimizer=sgd, adam, adamw or muon"
    )
    several = f"under strategy={strategy} a step is more than the work of one device"
    obstacles = {
        f"{several}; use repro=exact strategy=single": not job.strategy.recordable,
        "under precision=fp16 a step counts only if no gradient overflows; use precision=bf16": scales,
        python_rate: not job.optimizer.recordable,
        "optimizer.lookahead adds to some steps alone, and a replay is the same in each; remove one": looks_ahead,
        f"this task logs {', '.join(figures_of(job.task))}, which no replay does; use another task": job.task.figures,
        "the recorded step takes images of one size; remove train.sizes": job.train.sizes is not None,
        f"model.compile_mode={mode} records its own graphs; use model.compile_mode=default": mode != "default",
    }
    problems = [f"train.cuda_graph is true, but {reason}" for reason, applies in obstacles.items() if applies]
    if problems:
        raise InputError(*problems)


def several_gradients(job: ResolvedJob) -> str:
    """The start of a sentence about an optimizer that needs the step's closure."""
    return f"optimizer={type(job.optimizer).__name__.lower()} computes several gradients in a step"


def _check_closure(job: ResolvedJob) -> None:
    """Refuse what cannot compute the gradient of a step again, if the optimizer does."""
    if not job.optimizer.needs_closure:
        return
    strategy = type(job.strategy).__name__.lower()
    obstacles = {
        "a loss scaler cannot skip; use precision=bf16": job.precision.needs_loss_scaler,
        f"strategy={strategy} cannot; use strategy=ddp": job.strategy.widest is not UpdateScope.model,
        "optimizer.lookahead does not follow; remove it": job.optimizer.lookahead is not None,
    }
    problems = [f"{several_gradients(job)}, which {reason}" for reason, applies in obstacles.items() if applies]
    if problems:
        raise InputError(*problems)


def _check_recompute(job: ResolvedJob) -> None:
    """Refuse options under which activations cannot be computed again (`model.grad_checkpointing`)."""
    if not job.model.grad_checkpointing:
        return
    obstacles = {
        "model.compile=true, whose compiler chooses itself what to compute again": job.model.compile,
        "train.cuda_graph=true, which records each kernel once": job.train.cuda_graph,
        f"strategy={type(job.strategy).__name__.lower()}, which runs other micro-batches before the backward pass": (
            not job.strategy.one_pass
        ),
    }
    for obstacle, applies in obstacles.items():
        if applies:
            raise InputError(f"model.grad_checkpointing does not work with {obstacle}; remove one of them")


def _check_train_size(job: ResolvedJob) -> None:
    """Refuse sizes in training that the model does not take, or that change nothing."""
    key, shapes, usual = "train.sizes" if job.train.sizes else "train.size", job.train_shapes, job.dataset.input_shape
    if {*shapes} == {usual} and (job.train.size or job.train.sizes):
        size = as_pixels(*usual[1:])
        raise InputError(f"{key} is {size}, which is the size of the evaluation too; remove it")
    for shape in dict.fromkeys(shape for shape in shapes if shape != usual):
        _check_model_takes(job, shape, key)


def _check_model_takes(job: ResolvedJob, shape: tuple[int, int, int], key: str) -> None:
    (_, height, width), size = job.dataset.input_shape, str(as_pixels(*shape[1:])).replace(" ", "")
    model = sketch(job.model, job.dataset.classes, job.dataset.input_shape)
    try:
        forward_on_meta(model, shape)
    except Exception as error:  # networks raise all kinds of errors
        raise InputError(
            f"{key} is {size}, which this model for images of {height}x{width} does not take ({reason_of(error)}); "
            f"use dataset.input_size={size} for both, or a network of convolutions, such as model=resnet50"
        ) from error


def check_threads(job: ResolvedJob) -> None:
    """Refuse more processes or threads than a system can start, because it would kill a program that starts them."""
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


def check_data_memory(dataset: Source) -> None:
    """Refuse a data set that makes more images than fit into memory."""
    if size := dataset.generated_bytes:
        name, fitting = type(dataset).__name__.lower(), max(1, int(dataset.examples * available_memory() / 2 / size))
        check_room(f"the images of dataset={name}", size, f"dataset.examples={fitting}")
