"""The job that ranks get, from `lockstep.job.resolve`. Only what needs the memory or data of a rank may be `auto`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from lockstep.config import components
from lockstep.config.schema import InputBlock, Job, TrainBlock
from lockstep.core.errors import InputError
from lockstep.core.protocols import Launcher, Optimizer


class ResolvedLauncher(Launcher, Protocol):
    """A launcher that knows its numbers."""

    ranks: int
    threads: int


class ResolvedOptimizer(Optimizer, Protocol):
    """An optimizer that knows its learning rate."""

    lr: float


@dataclass(frozen=True, kw_only=True)
class ResolvedTrainBlock(TrainBlock):
    """`train.*`. What the memory of the ranks allows is known later: until then, `micro_batches` may be `auto`."""

    eval_batch: int


@dataclass(frozen=True, kw_only=True)
class ResolvedInputBlock(InputBlock):
    """`input.*`, with a mean and a standard deviation for each channel."""

    mean: list[float]
    std: list[float]


@dataclass(frozen=True, kw_only=True)
class ResolvedJob(Job):
    """A job for this machine. Only the ranks, which have the data, choose its loader and `train.micro_batches`."""

    batch: int
    train: ResolvedTrainBlock
    input: ResolvedInputBlock
    launcher: ResolvedLauncher
    optimizer: ResolvedOptimizer

    def micro_batch(self, ranks: int) -> int:
        """The largest number of examples in one forward pass on one of `ranks` ranks."""
        return math.ceil(self.batch / ranks / self.train.passes)

    @classmethod
    def of(cls, job: Job) -> ResolvedJob:
        """The same job with narrower types.

        Raises:
            InputError: a value is open, because somebody has edited the config of a run.
        """
        values: dict[str, Any] = {
            "batch": job.batch,
            "train.eval_batch": job.train.eval_batch,
            "input.mean": job.input.mean,
            "input.std": job.input.std,
            "launcher.ranks": job.launcher.ranks,
            "launcher.threads": job.launcher.threads,
            "optimizer.lr": job.optimizer.lr,
        }
        if unknown := [key for key, value in values.items() if value is None or isinstance(value, str)]:
            raise InputError(
                f"{unknown[0]} is {values[unknown[0]]}, expected a value that is known when ranks start; start the "
                "job again with resume=RUN_FOLDER, which makes its config anew"
            )
        blocks = {"train": ResolvedTrainBlock(**vars(job.train)), "input": ResolvedInputBlock(**vars(job.input))}
        return cls(**{field.name: getattr(job, field.name) for field in fields(Job)} | blocks)


def load_job(path: Path) -> ResolvedJob:
    """The job that a run folder's `config.yaml` describes.

    Raises:
        InputError: the file is missing, or does not describe a resolved job.
    """
    return ResolvedJob.of(components.build_job(components.load(path)))
