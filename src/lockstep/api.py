"""What other programs call: `lockstep.main`, `lockstep.train`, `lockstep.load` and `lockstep.option`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.options import option
from lockstep.core.errors import InputError, LockstepError
from lockstep.runtime import signals

if TYPE_CHECKING:  # it needs torch
    from lockstep.inference.predictor import Predictor

__all__ = ["InputError", "LockstepError", "Result", "load", "main", "option", "train"]


def main(extensions: Sequence[str] = ()) -> None:
    """Be the command that trains, as `train.py` is, with packages of your own as extensions.

    Args:
        extensions: names of packages, as they are imported, that need not be installed.
    """
    signals.begin(says=signals.STOPPED_EARLY)
    from lockstep.cli.train import main as train_main

    train_main(extensions)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run.

    Fields:
        folder: of the run.
        objective: the best validation top-1 in percent.
        summary: what `summary.json` says.
        metrics: the lines of `metrics.jsonl`: scalars by tag, with their `step`.
        weights: the best weights, a safetensors file.
    """

    folder: Path
    objective: float | None
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    weights: Path


def train(overrides: Sequence[str] = (), *, extensions: Sequence[str] = ()) -> Result:
    """Train one job from a script or a notebook, and wait for its end.

    The same as the command line: it may have several ranks, and `resume=RUN_FOLDER` goes on with a run.

    Args:
        overrides: as behind `lockstep train`: `["model=resnet18", "epochs=3"]`.
        extensions: names of packages, as they are imported, that need not be installed.

    Raises:
        InputError: the job does not fit.
        LockstepError: what ended it: a stop (Ctrl-C), a loss that is not finite, a rank that failed.
    """
    from lockstep.config import composition
    from lockstep.config import extensions as known
    from lockstep.config.invocation import Invocation
    from lockstep.job.launch import launch
    from lockstep.job.prepare import prepare
    from lockstep.job.run_folder import job_lock

    words = tuple(overrides)
    known.use(extensions)
    command = shlex.join(["lockstep", "train", *words])
    invocation = Invocation(overrides=words, command=command, sweep=False, number=0, folder=None, hydra="{}\n")
    values = composition.composed(list(words))
    with job_lock(invocation) as lock:
        with composition.composing():  # for a resume, which composes the run's own overrides
            prepared = prepare(values, invocation, lock)
        with prepared as run_dir:
            objective = launch(run_dir)
    return Result(
        folder=run_dir.path,
        objective=objective,
        summary=run_dir.read_summary(),
        metrics=[json.loads(line) for line in run_dir.metrics.read_text().splitlines()],
        weights=run_dir.weights,
    )


def load(path: str | Path, *, device: str | None = None, extensions: Sequence[str] = ()) -> Predictor:
    """A trained model, ready to be used: `lockstep.load("outputs/latest").predict("cat.jpg")`.

    It needs the weights alone: no data, no run folder, no download.

    Args:
        path: a run folder (its best weights), `latest`, a checkpoint, or a safetensors file of Lockstep.
        device: `cpu` or `cuda`; None is the GPU if there is one.
        extensions: names of packages, as they are imported, that the model may come from.

    Raises:
        InputError: there are no such weights, they do not say what their model is, or it cannot be built here.
    """
    from lockstep.config import extensions as known
    from lockstep.inference.load import load as load_predictor

    known.use(extensions)
    return load_predictor(path, device=device)
