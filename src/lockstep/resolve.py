"""From a composed config to a run folder: choose what is `auto`, check everything, then make the folder.

Nothing is written before all of it is known to fit, and everything that does not is said at once.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep import checkpoint, checks, config, log
from lockstep.claim import claim, continued
from lockstep.config import ConfigFiles, Invocation, Job
from lockstep.data.folder import crops_files
from lockstep.data.loader import Resident, cores
from lockstep.errors import InputError
from lockstep.files import UnreadableFile
from lockstep.identity import identity, plan_of, train_longer
from lockstep.launcher import Auto as AutoLauncher
from lockstep.launcher import Inline, Spawn
from lockstep.launcher.base import Backend
from lockstep.launcher.spawn import can_fork
from lockstep.lock import Lock
from lockstep.models import ResNet34, Timm
from lockstep.protocols import BoxAugment, Source
from lockstep.resume import check_kept_config, resumed_job
from lockstep.rundir import MANIFEST, RunDir, slug
from lockstep.strategy import DDP, DataParallel, Single, Strict
from lockstep.strategy import Auto as AutoStrategy
from lockstep.world import launched_rank, local_size


def prepare(job: dict[str, Any], invocation: Invocation, lock: Lock) -> RunDir:
    """The run folder of the job that was asked for, with its resolved config in it, held by `lock`.

    Raises:
        InputError: something of the job does not fit, or another job is in the folder; nothing was written.
    """
    torch.set_num_threads(1)  # a process of one thread can be forked into ranks, each of which sets its own number
    folder = claim(job, invocation, lock)
    overrides = list(invocation.overrides)
    today = job
    if (earlier := continued(job, invocation)) is not None:
        job, overrides = resumed_job(RunDir(earlier), invocation)
        # A run folder can be someone else's: where else to write is for today's command to say.
        job["output_root"] = today["output_root"]
    resolved = resolve(_fitting(job, overrides, invocation.configs), sweep=invocation.sweep)
    built = config.build_all(resolved)
    if job["repro"] == "exact" and "repro=exact" in overrides and isinstance(built.strategy, Strict):
        raise InputError(
            "strategy=strict is what repro=strict chooses, and repro=exact is given; leave out one of them"
        )
    _check(built)
    if earlier is not None:
        check_kept_config(RunDir(earlier), job, invocation)
    _check_run(built, folder, fetch=job["dataset"].get("root") in (None, today["data_root"]))
    if folder is not None:
        run_dir = RunDir.at(folder)
    elif invocation.sweep and invocation.folder is not None:
        told = [each for each in invocation.overrides if not each.startswith(("output_root=", "data_root="))]
        label = slug(",".join(told) or "defaults")
        run_dir = RunDir.at(invocation.folder / f"{invocation.number:03}-{label}")
    else:
        run_dir = RunDir.create(Path(resolved["output_root"]), resolved["name"])
    if folder is None:
        lock.take(run_dir.lock)
    if isinstance(built.launcher, Spawn) and can_fork():
        _import_for_ranks(built)
    return run_dir.begin(
        {
            run_dir.config: config.dump(resolved),
            run_dir.command: invocation.command + "\n",
            run_dir.hydra / "hydra.yaml": invocation.hydra,
            run_dir.overrides: config.dump_list(overrides),
            run_dir.composed: config.dump(job),
        }
    )


def _import_for_ranks(job: Job) -> None:
    """Import what each rank would import for itself, before they are forked from this process."""
    wanted = {
        "torch._dynamo": job.model.compile or isinstance(job.strategy, DDP),
        "timm": isinstance(job.model, (ResNet34, Timm)),
        "torch.utils.tensorboard": job.telemetry.tensorboard,
    }
    for name in (name for name, wants in wanted.items() if wants):
        importlib.import_module(name)


def _fitting(job: dict[str, Any], overrides: list[str], configs: ConfigFiles) -> dict[str, Any]:
    """`batch=auto` in other words: the global batch that the job has without it, cut so that it fits.

    The batch is part of what a run is, so it is never chosen by what a machine has room for.
    """
    if job["batch"] != "auto":
        return job
    told = [each for each in overrides if config.key_of(each) != "batch" or "auto" not in each]
    if len(told) == len(overrides):
        raise InputError(
            "batch=auto keeps the batch that a job has without it, and belongs on the command line; a recipe has a "
            "number, and train.micro_batches: auto"
        )
    if job["train"]["micro_batches"] not in (1, "auto"):
        raise InputError(
            f"batch=auto chooses train.micro_batches, which is {job['train']['micro_batches']}; leave one of them out"
        )
    own = config.to_dict(config.recompose(told, (), configs))["batch"]
    if own == "auto":
        raise InputError("batch is auto without batch=auto too; a recipe has a number, and train.micro_batches: auto")
    return {**job, "batch": own, "train": {**job["train"], "micro_batches": "auto"}}


def resolve(job: dict[str, Any], *, sweep: bool) -> dict[str, Any]:
    """A plain config with device, ranks, strategy, launcher and paths decided.

    Raises:
        InputError: the machine does not have what was asked for.
    """
    built = config.build_all(job)
    device = _device(built.device)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    launcher, strategy = built.launcher, _strategy(built)
    ranks = _ranks(launcher, strategy, gpus, device)
    if type(strategy) is AutoStrategy:
        strategy = DDP(sync_batchnorm=strategy.sync_batchnorm) if ranks > 1 else Single()
    if type(launcher) is AutoLauncher:
        alone = launched_rank() is not None or (ranks == 1 and not sweep)
        launcher = (Inline if alone else Spawn)(**vars(launcher))
    if type(launcher) is Inline and ranks > 1 and launched_rank() is None:
        wants = f"strategy={type(strategy).__name__.lower()}" if launcher.ranks == "auto" else "launcher.ranks"
        raise InputError(
            f"launcher=inline has one rank, but {wants} asks for {ranks}; use launcher=spawn, or launcher.ranks=1"
        )
    launcher = replace(
        launcher, ranks=ranks, backend=_backend(launcher.backend, device), threads=_threads(launcher, ranks, strategy)
    )
    absolute = {key: _absolute(job[key]) for key in ("data_root", "output_root", "init_from")}
    data_paths = {"root", "path"} & set(job["dataset"])
    resume = _absolute(job["resume"]) if job["resume"] not in (None, "latest") else None
    return {
        **job,
        **absolute,
        "dataset": {**job["dataset"], **{key: _absolute(getattr(built.dataset, key)) for key in data_paths}},
        "resume": resume if resume and Path(resume, MANIFEST).is_file() else None,
        "device": device,
        "repro": "strict" if isinstance(strategy, Strict) else "exact",
        "train": {**job["train"], "micro_batches": _micro_batches(built, strategy, ranks)},
        "strategy": config.node(strategy),
        "launcher": config.node(launcher),
    }


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("device=cuda, but torch finds no CUDA GPU on this machine; use device=cpu or device=auto")
    return wanted


def _strategy(job: Job) -> Any:
    """The strategy that was asked for, by its own name or by `repro=strict`."""
    if job.repro == "exact" or isinstance(job.strategy, Strict):
        return job.strategy
    if type(job.strategy) is AutoStrategy and not job.strategy.sync_batchnorm:
        raise InputError(
            "strategy.sync_batchnorm is false, but under repro=strict batch norm counts per virtual shard; leave out "
            "strategy.sync_batchnorm, or use repro=exact"
        )
    if type(job.strategy) not in (AutoStrategy, Single):
        raise InputError(
            f"repro=strict adds gradients in an order of its own, which {type(job.strategy).__name__} does not keep; "
            "leave out strategy=..., or use repro=exact"
        )
    return Strict()


def _micro_batches(job: Job, strategy: Any, ranks: int) -> int | str:
    """Under `repro=strict` each virtual shard is a micro-batch."""
    wanted = job.train.micro_batches
    if not isinstance(strategy, Strict):
        return wanted
    if wanted != 1:
        raise InputError(
            f"train.micro_batches is {wanted}, but under repro=strict the virtual shards are the "
            f"micro-batches; use strategy=strict strategy.shards={2 * strategy.shards} for smaller ones"
        )
    return max(1, strategy.shards // ranks)


def _ranks(launcher: Any, strategy: Any, gpus: int, device: str) -> int:
    if launched_rank() is not None:
        return _launched_ranks(launcher)
    ranks: int = strategy.ranks(gpus) if launcher.ranks == "auto" else launcher.ranks
    if device == "cuda" and ranks > gpus:
        raise InputError(
            f"launcher.ranks is {ranks}, but this machine has {gpus} GPU{'s' * (gpus != 1)}, and each rank needs "
            f"one; use launcher.ranks={gpus} or device=cpu"
        )
    return ranks


def _launched_ranks(launcher: Any) -> int:
    """The ranks that torchrun has started, which leaves a launcher of ours nothing to do."""
    ranks = int(os.environ["WORLD_SIZE"])
    if launcher.ranks not in ("auto", ranks):
        raise InputError(
            f"launcher.ranks is {launcher.ranks}, but torchrun has started {ranks}; use launcher.ranks=auto, or "
            f"torchrun --nproc-per-node={launcher.ranks}"
        )
    if type(launcher) not in (AutoLauncher, Inline):
        name = type(launcher).__name__.lower()
        restarts = f" --max-restarts={launcher.restarts}" if getattr(launcher, "restarts", 0) else ""
        raise InputError(
            f"launcher={name} starts ranks, but torchrun has started them; use launcher=auto"
            + (f" and torchrun{restarts}" if restarts else "")
        )
    return ranks


def _backend(wanted: Backend, device: str) -> Backend:
    if wanted is Backend.auto:
        return Backend.nccl if device == "cuda" else Backend.gloo
    if wanted is Backend.nccl and device != "cuda":
        raise InputError(f"launcher.backend=nccl needs CUDA GPUs, but device is {device}; use launcher.backend=gloo")
    return wanted


def _threads(launcher: Any, ranks: int, strategy: Any) -> int:
    if isinstance(strategy, Strict) and launcher.threads == "auto":
        return 1  # another number of threads adds in another order
    return max(1, cores() // local_size(ranks)) if launcher.threads == "auto" else int(launcher.threads)


def _check(job: Job) -> None:
    """Everything that can be known without the data, and all that is wrong with it at once."""
    single: list[Callable[[], None]] = [
        lambda: job.strategy.check(job.launcher.ranks, job.device),
        lambda: job.precision.check(job.device),
        job.model.check,
        lambda: _check_crop(job),
        lambda: checks.check_effects(job),
        lambda: checks.check_threads(job, job.device),
        lambda: checks.check_folders(job),
        lambda: checks.check_data_memory(job),
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
    """Boxes that are cut from files need an augmentation that has some, and others in each epoch."""
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
    """Under `repro=strict` no stopwatch may choose the kernels."""
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
    """What torch cannot do with a compiled model on GPUs."""
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


def _check_run(job: Job, folder: Path | None, *, fetch: bool) -> None:
    """The data is there, the plan is possible on it, and a checkpoint to go on from is of this run.

    Missing data is downloaded, if `fetch`: not to where only a run folder says, which can be someone else's.
    """
    if job.init_from is not None:
        checkpoint.weights_file(Path(job.init_from))
    if fetch:
        job.dataset.prepare()
    else:
        _check_data(job.dataset)
    examples = len(job.dataset.train())
    plan = plan_of(job, examples)
    checks.check_memory(job, plan)
    for step in (1, plan.total_steps):
        job.schedule.factor(step, plan)  # its durations are read here for the first time
    # What is damaged is said by the ranks, which look at it again: then there is a log to keep it in.
    found = checkpoint.newest_of_run(RunDir(folder), say=lambda sentence: None) if folder is not None else None
    if found is None and job.resume is not None:
        found = Path(job.resume)
    if found is not None:
        checkpoint.check_identity(identity(job, examples), found)
        step = checkpoint.read_facts(found)["progress"]["step"]
        ended = folder is None or _ended(RunDir(folder))
        if step > plan.total_steps or (step == plan.total_steps and ended):
            raise InputError(
                f"resume: {found} has finished step {step} of {plan.total_steps}, so nothing is left to do; "
                f"train longer with {train_longer(job)}"
            )


def _ended(run_dir: RunDir) -> bool:
    """Whether a run came to its end, and not only to its last step; of a damaged summary a new one is made."""
    try:
        return run_dir.read_summary().get("status") == "completed"
    except UnreadableFile as error:
        log.show_warning(f"{error}; it is written anew")
        return False


def _check_data(dataset: Source) -> None:
    """Both splits can be read as they are."""
    try:
        dataset.train()
        dataset.eval()
    except InputError as error:
        raise InputError(
            f"{error}; a resume downloads nothing to a folder that only the run names: say it with data_root=FOLDER"
        ) from error
