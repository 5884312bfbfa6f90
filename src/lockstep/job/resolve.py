"""What `auto` becomes on this machine: the device, the ranks, the strategy, the launcher, absolute paths."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lockstep.config import components
from lockstep.config.schema import Job
from lockstep.core.errors import InputError
from lockstep.core.process_group import launched_rank, local_size
from lockstep.core.run_dir import MANIFEST
from lockstep.launcher import Auto as AutoLauncher
from lockstep.launcher import Inline, Spawn
from lockstep.launcher.base import Backend
from lockstep.runtime.host import cores
from lockstep.strategy import DDP, Single, Strict
from lockstep.strategy import Auto as AutoStrategy


def resolve(job: dict[str, Any], *, sweep: bool) -> dict[str, Any]:
    """A plain config with device, ranks, strategy, launcher and paths decided.

    Raises:
        InputError: the machine does not have what was asked for.
    """
    built = components.build_all(job)
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
        "strategy": components.node(strategy),
        "launcher": components.node(launcher),
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
