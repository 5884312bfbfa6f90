"""Chooses what is `auto` by the initial weights, then the number of images. Sources: conf/experiment/photos.yaml."""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.config import components
from lockstep.config.schema import Job
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.data.datasets.sizes import AUTO
from lockstep.optim.optimizers import OptimizerOption
from lockstep.training.network import BACKBONE
from lockstep.training.resolved_job import ResolvedJob

LONGER = 3  # times as many epochs from random weights
FROZEN, PATIENCE = "10%", "50%"  # of the run: with frozen layers, and without a better score
LEAST_EPOCHS = 4  # epochs of a run with patience


@dataclass(frozen=True)
class Choices:
    """The choices for fewer than `below` training images."""

    below: float
    epochs: int
    ema: float
    mixup: float = 0.0


CHOICES = (
    *(Choices(500, 40, 0.99), Choices(5_000, 20, 0.99)),
    *(Choices(20_000, 10, 0.999), Choices(math.inf, 10, 0.999, mixup=0.1)),
)


def by_weights(job: Job, resumed: Path | None) -> Job:
    """The job with its weights and frozen layers chosen."""
    model: Any = job.model
    if model.pretrained == AUTO:
        job = replace(job, model=replace(model, pretrained=_has_weights(job, resumed)))
    train, layers = job.train, job.train.freeze
    if AUTO in layers:
        layers = [name for name in layers if name != AUTO] + [BACKBONE] * job.starts_trained
    if train.freeze_until == AUTO:
        train = replace(train, freeze_until=FROZEN if layers else None)
    return replace(job, train=replace(train, freeze=layers))


def by_images(job: Job, images: int | None = None) -> Job:
    """The job with the choices for so many training images; for many, while the number is not known (None)."""
    choices = CHOICES[-1] if images is None else next(choices for choices in CHOICES if images < choices.below)
    epochs = choices.epochs * (1 if job.starts_trained else LONGER) if job.epochs == AUTO else int(job.epochs)
    train = replace(job.train, ema=choices.ema) if job.train.ema == AUTO else job.train
    train = replace(train, mixup=choices.mixup) if train.mixup == AUTO else train
    if train.patience == AUTO:  # half of a run of few evaluations would end it at once
        train = replace(train, patience=PATIENCE if job.steps is None and epochs >= LEAST_EPOCHS else None)
    return replace(job, epochs=epochs, train=train)


def fitted(job: ResolvedJob, composed: Job, images: int) -> ResolvedJob:
    """A resolved job, whose choices are those for many images, with those for `images`; `composed` has the `auto`."""
    chosen = by_images(replace(composed, model=job.model), images)
    train = {name: getattr(chosen.train, name) for name in ("ema", "mixup", "patience")}
    return replace(job, epochs=int(chosen.epochs), train=replace(job.train, **train))


def _has_weights(job: Job, resumed: Path | None) -> bool:
    """Whether to start from published weights: as the run did that is continued, else if they can be had."""
    if resumed is not None:
        with suppress(InputError, KeyError):  # a checkpoint that was copied on its own
            return bool(components.read_config(RunDir(resumed.parents[1]).config)["model"]["pretrained"])
    return job.init_from is None and not job.model.missing_weights()


def notes(job: Job, resolved: Job, images: int) -> list[str]:
    """What was chosen for a job's images and weights, as overrides; why these weights; and a usual learning rate."""
    chosen: dict[str, object] = {}
    if (share := resolved.dataset.val_share) != job.dataset.val_share:
        chosen["dataset.val_share"] = share
    if job.epochs == AUTO and job.steps is None:
        chosen["epochs"] = resolved.epochs
    for name in ("freeze", "freeze_until", "mixup", "ema", "patience"):
        typed, value = getattr(job.train, name), getattr(resolved.train, name)
        if value and (typed == AUTO or (name == "freeze" and AUTO in typed)):
            chosen[f"train.{name}"] = f"[{','.join(value)}]" if name == "freeze" else value
    words = " ".join(f"{key}={value}" for key, value in chosen.items())
    lines = [_about_weights(job, trained=resolved.starts_trained)] * (job.model.pretrained == AUTO)
    optimizer = job.optimizer
    if isinstance(optimizer, OptimizerOption) and optimizer.lr == AUTO and not optimizer.says_usual:
        lines.append(
            f"optimizer.lr is {resolved.optimizer.lr:.3g}, which is usual for Adam, because "
            f"{type(optimizer).__name__} has no usual rate; use optimizer.lr=NUMBER, or define usual in it"
        )
    return lines + [f"chosen for {images:,} images: {words}"] * bool(words)


def _about_weights(job: Job, *, trained: bool) -> str:
    if job.init_from is not None:
        return "model.pretrained is false: init_from has the weights"
    if trained:
        return "model.pretrained is true: published weights are on this machine or can be downloaded"
    return (
        f"model.pretrained is false: {job.model.missing_weights() or 'the run began without them'}. Random weights "
        "need many more images: run this once with a network, or name a weights file with init_from=FILE"
    )
