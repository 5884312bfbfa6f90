"""What other programs call: `lockstep.main`, `lockstep.train` and `lockstep.option`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.options import option
from lockstep.core.errors import InputError, LockstepError
from lockstep.runtime import signals

__all__ = ["InputError", "LockstepError", "Result", "main", "option", "train"]


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
