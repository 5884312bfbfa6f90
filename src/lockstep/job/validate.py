"""Whether a job can be done, and whether each of its keys has an effect, before any of it is done.

A range says what one value may be (`lockstep.core.fields`); here is what several make together: more memory or
threads than the machine has, and keys that another key of the same job leaves without effect. What merely
idles on this machine (a GPU's option without a GPU) is no mistake: the same job is to run on any.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lockstep import checkpoint
from lockstep.config.schema import Job
from lockstep.core import log
from lockstep.core.data_protocols import BoxAugment, Source
from lockstep.core.errors import InputError
from lockstep.core.launched import is_launched, local_size
from lockstep.core.plan import Plan
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.data.datasets.builtin import Fake
from lockstep.data.datasets.files import crops_files
from lockstep.data.loading.loaders import Resident, Streaming
from lockstep.data.transforms.augment import CropFlip
from lockstep.models import ResNet34, Timm
from lockstep.models.nets import CompileMode
from lockstep.precision import BF16Pure
from lockstep.runtime.host import GB, available_memory, cores
from lockstep.strategy import DataParallel, Strict
from lockstep.training.fingerprint import fingerprint, plan_of, train_longer

# The most ranks on a CPU, and threads of all ranks: a number for any machine, and one per core for large ones.
RANKS, RANKS_A_CORE = 64, 4
THREADS, THREADS_A_CORE = 1024, 16
FLOAT32 = 4  # bytes


def check_effects(job: Job) -> None:
    """Refuse a key that has no effect because of another key.

    Raises:
        InputError: there is one.
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
    if isinstance(job.augment, CropFlip) and job.augment.reflect and job.augment.pad == 0:
        raise InputError(
            "augment.reflect is true, but augment.pad is 0, so nothing is padded; use augment.pad=4 or "
            "augment.reflect=false"
        )
    if isinstance(job.precision, BF16Pure) and job.train.ema is not None:
        raise InputError(
            f"train.ema is {job.train.ema}, but under precision=bf16_pure an average is in bfloat16 too, where a "
            "number moves by 1/256 of itself or not at all; use precision=bf16, or leave out train.ema"
        )
    loader = job.loader
    if isinstance(loader, Streaming) and loader.workers == 0 and loader.prefetch != Streaming.prefetch:
        raise InputError(
            f"loader.prefetch is {loader.prefetch}, but loader.workers is 0, and only workers read ahead; use "
            "loader.workers=1, or leave out loader.prefetch"
        )


def check_packages(job: Job) -> None:
    """Refuse a logger whose package is not installed.

    Raises:
        InputError: there is one.
    """
    for name, logger in job.logger.items():
        package = getattr(logger, "package", None)
        if package is not None and importlib.util.find_spec(package) is None:
            raise InputError(
                f"logger={name} needs the package {package}, which is not installed; install it with pip install "
                f"'lockstep[{package}]', or leave the logger out"
            )


def check_threads(job: Job, device: str) -> None:
    """Refuse more processes or threads than a system can start: it would kill the program in the middle.

    Raises:
        InputError: there are more.
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
    total, most = (
        ranks * (threads + (0 if workers == "auto" else int(workers))),
        max(THREADS, THREADS_A_CORE * cores()),
    )
    if total > most:
        raise InputError(
            f"launcher.threads is {threads} and loader.workers is {workers}, which on {ranks} ranks are {total:,} "
            f"threads, expected at most {most:,} on a machine of {cores()} CPU cores; use launcher.threads=auto "
            "loader.workers=auto"
        )


def check_folders(job: Job) -> None:
    """Refuse paths for data and runs that are not folders and cannot become folders.

    Raises:
        InputError: one is such a path.
    """
    for key, path in (("data_root", Path(job.data_root)), ("output_root", Path(job.output_root))):
        try:
            nearest = next(folder for folder in (path, *path.parents) if folder.is_symlink() or folder.exists())
            fits = nearest.is_dir()
        except OSError as error:
            raise InputError(f"{key}: {path} cannot be reached ({error.strerror}); use {key}=FOLDER") from error
        if not fits:
            raise InputError(f"{key}: {nearest} is no folder; name another with {key}=FOLDER")


def check_data_memory(job: Job) -> None:
    """Refuse `dataset=fake` with more images than fit into memory.

    Raises:
        InputError: it does not fit.
    """
    if isinstance(job.dataset, Fake):
        images = job.dataset.examples + job.dataset.examples // 4
        _check_room(
            [("the images of dataset=fake", images * math.prod(job.dataset.image_shape), "dataset.examples=1024")]
        )


def check_memory(job: Job, plan: Plan) -> None:
    """Refuse a job that does not fit into memory, on the CPU, where the kernel kills a process without a message.

    Raises:
        InputError: something does not fit.
    """
    if job.device == "cpu":
        _check_room(_needs(job, plan))


def _needs(job: Job, plan: Plan) -> Iterator[tuple[str, float, str]]:
    """What needs memory on this machine, how many bytes, and a remedy."""
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
    if not isinstance(job.model, ResNet34 | Timm):  # those take seconds to import, and their sizes are known to fit
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            parameters = job.model.build(job.dataset.classes, job.dataset.input_shape).parameters()
            size = sum(parameter.numel() for parameter in parameters)
        yield f"{size:,} parameters and their gradients", 2 * FLOAT32 * size * ranks, "a smaller model or input"


def _check_room(needs: Iterator[tuple[str, float, str]] | list[tuple[str, float, str]]) -> None:
    room = available_memory()
    for what, size, remedy in needs:
        if size > room:
            raise InputError(
                f"{what} need {size / GB:,.1f} GB, and this machine has {room / GB:,.1f} GB free; use {remedy}"
            )


def check_job(job: Job) -> None:
    """Check all that can be checked without the data. One error has everything that is wrong."""
    single: list[Callable[[], None]] = [
        lambda: job.strategy.check(int(job.launcher.ranks), job.device),
        lambda: job.strategy.check_parts(job.optimizer, job.precision, job.train.micro_batches),
        lambda: job.precision.check(job.device),
        job.model.check,
        lambda: _check_crop(job),
        lambda: check_effects(job),
        lambda: check_packages(job),
        lambda: check_threads(job, job.device),
        lambda: check_folders(job),
        lambda: check_data_memory(job),
        lambda: _check_kernels(job),
        lambda: _check_compile(job),
    ]
    problems = []
    for check in single:
        try:
            check()
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("\n".join(problems))


def _check_crop(job: Job) -> None:
    """Cropping from files needs an augmentation with boxes, and a loader that reads anew in each epoch."""
    if not crops_files(job.dataset):
        return
    if not isinstance(job.augment, BoxAugment):
        raise InputError(
            "dataset.crop_from=file cuts the boxes of a random resized crop from the files, and the augmentation is "
            f"{type(job.augment).__name__}; use augment=standard or dataset.crop_from=square"
        )
    if isinstance(job.loader, Resident):
        raise InputError(
            "loader=resident decodes each image once, but dataset.crop_from=file cuts another box from the file in "
            "each epoch; use loader=streaming or dataset.crop_from=square"
        )


def _check_kernels(job: Job) -> None:
    """Under `repro=strict` kernels must not be chosen by timing them."""
    timed = {
        "train.cudnn_benchmark=false": job.train.cudnn_benchmark,
        "model.compile_mode=default": job.model.compile and job.model.compile_mode.value == "max-autotune",
    }
    if isinstance(job.strategy, Strict) and any(timed.values()):
        remedy = " ".join(key for key, on in timed.items() if on)
        raise InputError(
            "repro=strict has the same bits every time, but a stopwatch would choose among kernels that round in "
            f"different ways; use {remedy}, or repro=exact"
        )


def _check_compile(job: Job) -> None:
    """Refuse what torch cannot do with a compiled model on GPUs."""
    if not job.model.compile or job.device != "cuda":
        return
    # A graph writes its gradients where those of the micro-batch before are (pytorch/pytorch#169545).
    if job.model.compile_mode.value != "default" and job.train.micro_batches != 1:
        raise InputError(
            f"model.compile_mode={job.model.compile_mode.name} records CUDA graphs, which cannot add up the "
            f"gradients of micro-batches, and train.micro_batches is {job.train.micro_batches}; use "
            "model.compile_mode=default"
        )
    if isinstance(job.strategy, DataParallel) and (gpus := torch.cuda.device_count()) > 1:
        raise InputError(
            f"strategy=dp has a copy of the model on each of {gpus} GPUs, and all copies would call what is compiled "
            "for the first; use strategy=ddp or model.compile=false"
        )


def check_run(job: Job, folder: Path | None, *, fetch: bool) -> None:
    """Check that the data exists, that the plan fits it, and that a checkpoint to resume from belongs to this run.

    Missing data is downloaded if `fetch` is set: not to a place that only a run folder names, which can be somebody
    else's.
    """
    if job.init_from is not None:
        checkpoint.weights_file(Path(job.init_from))
    if fetch:
        job.dataset.prepare()
    else:
        _check_data(job.dataset)
    examples = len(job.dataset.train())
    plan = plan_of(job, examples)
    check_memory(job, plan)
    for step in (1, plan.total_steps):
        job.schedule.factor(step, plan)  # raises if one of its durations does not fit
    # The ranks look for it again, and warn of damaged checkpoints: then there is a log for the warning.
    resumed = checkpoint.newest_of_run(RunDir(folder), say=lambda sentence: None) if folder is not None else None
    if resumed is None and job.resume is not None:
        resumed = Path(job.resume)
    if resumed is not None:
        checkpoint.check_fingerprint(fingerprint(job, examples), resumed)
        step = checkpoint.read_facts(resumed)["progress"]["step"]
        ended = folder is None or _ended(RunDir(folder))
        if step > plan.total_steps or (step == plan.total_steps and ended):
            raise InputError(
                f"resume: {resumed} has finished step {step} of {plan.total_steps}, so nothing is left to do; "
                f"train longer with {train_longer(job)}"
            )


def _ended(run_dir: RunDir) -> bool:
    """Whether a run was completed, and not only its last step done. A damaged summary is written anew later."""
    try:
        return run_dir.read_summary().get("status") == "completed"
    except UnreadableFile as error:
        log.show_warning(f"{error}; it is written anew")
        return False


def _check_data(dataset: Source) -> None:
    """Check that both splits can be read."""
    try:
        dataset.train()
        dataset.eval()
    except InputError as error:
        raise InputError(
            f"{error}; a resume downloads nothing to a folder that only the run names: say it with data_root=FOLDER"
        ) from error
