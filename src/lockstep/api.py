"""The functions for other programs: `lockstep.main`, `train`, `compose` and `load`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import InputError
from lockstep.core.launch_env import check_launched, launched_place
from lockstep.runtime import signals

if TYPE_CHECKING:  # importing these modules imports torch
    from lockstep.core.observer import Callback
    from lockstep.inference.predictor import Predictor
    from lockstep.training.experiment import Parts


def main(extensions: Sequence[str] = ()) -> None:
    """Run the training command, as `train.py` does: this process is then the command's, and ends with its exit code.

    `extensions` are import names of your packages, which need not be installed.
    """
    signals.begin(says=signals.STOPPED_EARLY)
    from lockstep.cli.train import train_command as train_main

    train_main(extensions)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run.

    Fields:
        folder: the run folder.
        objective: the best validation top-1 in percent.
        summary: the content of `summary.json`.
        metrics: the lines of `metrics.jsonl`, if `jsonl` is among the loggers: scalars by tag, with their `step`.
        weights: the path of the best weights, a safetensors file.
    """

    folder: Path
    objective: float | None
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    weights: Path

    def __repr__(self) -> str:
        summary, score = self.summary, "no score" if self.objective is None else f"{self.objective:.4g}"
        return (
            f"Result: {summary.get('monitor', 'objective')} {score} at step {summary.get('best_step')}\n"
            f"  folder   {self.folder}\n"
            f"  weights  {self.weights}"
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: the headline, a table and the curves of the run's report."""
        from lockstep.core.run import Run
        from lockstep.report.run_page import rendered, summary_of

        return rendered(
            "result.html", folder=str(self.folder), weights=str(self.weights), **summary_of(Run(self.folder))
        )


def train(
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    extensions: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train one job from a script or a notebook, and wait for its end.

    It works like the command line: the job may have several ranks, and `resume=RUN_FOLDER` resumes a run.

    Args:
        overrides: the words after `lockstep train`: `["model=resnet18", "epochs=3"]`.
        ranks: the number of processes that train together: `ranks=2` is the override `launcher.ranks=2`.
        extensions: import names of packages, which need not be installed.
        callbacks: objects that take part in a run on one rank; the run folder does not know them, so a resume names
            them again. On several ranks, callbacks are options: `callback=[NAME]`.

    Raises:
        InputError: the config, the data or the machine does not fit the job, or this process is one of several ranks.
        LockstepError: the job ended early: by a stop (Ctrl-C), a loss that is not finite, or a rank that failed.
    """
    if threading.current_thread() is not threading.main_thread():
        raise InputError(
            "lockstep.train was called in a thread, where Python hears no signal that stops a run; call it in the "
            "program's main thread, or start the command lockstep train"
        )
    check_launched()
    if (size := launched_place().size) > 1:
        raise InputError(
            f"lockstep.train was called in one of {size} ranks, and each would train alone; start the script once "
            "and give ranks=N, or start the command lockstep train in each rank"
        )
    from lockstep.config import composition
    from lockstep.config import extensions as known
    from lockstep.core.figures import read_figures
    from lockstep.core.locks import Lock
    from lockstep.core.run import Run
    from lockstep.core.safe_write import absent, remove_empty, storing
    from lockstep.job.prepare import create_run
    from lockstep.job.resume import decide_resume
    from lockstep.job.validate import named_objects
    from lockstep.job.worker import start_job
    from lockstep.runtime.guest import guest

    words = [*overrides, *([f"launcher.ranks={ranks}"] if ranks is not None else [])]
    with guest(), ExitStack() as locked:
        known.use(extensions)
        with composition.invoked(words) as (values, invocation):
            if invocation.folder is not None:  # for a command, Hydra creates the folder
                locked.callback(remove_empty, absent(invocation.folder))
                with storing(invocation.folder):
                    invocation.folder.mkdir(parents=True, exist_ok=True)
            lock = locked.enter_context(closing(Lock()))
            prepared, job = create_run(decide_resume(values, invocation), lock)
        with prepared as run_dir:
            objective = start_job(run_dir, job, named_objects(job, callbacks))
    return Result(
        folder=run_dir.path,
        objective=objective,
        summary=Run(run_dir.path).summary,
        metrics=[{"step": step, **scalars} for step, scalars in read_figures(run_dir.metrics)],
        weights=run_dir.weights,
    )


def compose(overrides: Sequence[str] = (), *, extensions: Sequence[str] = ()) -> Parts:
    """The parts of a job for your own training loop: its data, model, optimizer, schedule and loss, on one device.

    No run folder is created, and nothing is written.

    Args:
        overrides: the words after `lockstep train`.
        extensions: import names of packages, which need not be installed.

    Raises:
        InputError: the config, the data or the machine does not fit the job, or the job has several ranks.
    """
    from lockstep.config import extensions as known
    from lockstep.job.prepare import job_of
    from lockstep.runtime.guest import guest
    from lockstep.training.experiment import build_parts

    with guest():
        known.use(extensions)
        job = job_of(overrides)
        if job.launcher.ranks > 1:
            raise InputError(
                f"launcher.ranks is {job.launcher.ranks}, but a loop of your own has one rank; use launcher.ranks=1, "
                "or lockstep.train"
            )
        return build_parts(job)


def load(path: str | Path, *, device: str | None = None, extensions: Sequence[str] = ()) -> Predictor:
    """A trained model, ready to be used: `lockstep.load("outputs/latest").predict("cat.jpg")`.

    The model only needs the weights: no data, no run folder, no download. Its probabilities are the softmax of the
    logits and add up to 1. After a training with `loss=bce`, which judges each class by itself, they are the sigmoid
    of each logit and do not add up to 1.

    Args:
        path: a run folder (its best weights), `latest`, a checkpoint, or a safetensors file of Lockstep.
        device: `cpu` or `cuda`; None is the GPU if there is one.
        extensions: import names of packages from which the model may come.

    Raises:
        InputError: the weights do not exist, they have no description of their model, or the model cannot be built.
    """
    from lockstep.config import extensions as known
    from lockstep.inference.predictor import load_predictor
    from lockstep.runtime.guest import guest

    with guest():
        known.use(extensions)
        return load_predictor(path, device=device)
