"""The functions for other programs: `lockstep.main`, `train`, `sweep`, `compose` and `load`."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import InputError, shown
from lockstep.core.launch_env import check_launched, launched_place
from lockstep.core.native_threads import sleep_soon
from lockstep.runtime import signals

if TYPE_CHECKING:  # importing these modules imports torch
    from torch import Tensor, nn

    from lockstep.core.data_protocols import Source
    from lockstep.core.observer import Callback
    from lockstep.core.protocols import Loss, Model
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
    model: nn.Module | Model | None = None,
    dataset: Source | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | Loss | None = None,
    callbacks: Sequence[Callback] = (),
    ranks: int | None = None,
    extensions: Sequence[str] = (),
    verbose: bool = True,
    **options: Any,
) -> Result:
    """Train one job from a script or a notebook, and wait for its end.

    It works like the command line: the job may have several ranks, and `resume=RUN_FOLDER` resumes a run. A run
    folder has the names of objects, not the objects: a resume is given them again.

    Args:
        overrides: the words after `lockstep train`: `["model=resnet18", "epochs=3"]`.
        model: a module from images (B, C, H, W) to logits (B, classes). A copy of it is trained from its weights.
        dataset: what `lockstep.dataset` returns.
        loss: a function or a module from logits (b, classes) and targets to one loss per example, (b,). Targets are
            as for `lockstep.core.protocols.Loss`.
        callbacks: objects that take part in the run; ranks in other processes have copies.
        ranks: the number of processes that train together: `ranks=2` is the override `launcher.ranks=2`.
        extensions: import names of packages, which need not be installed.
        verbose: whether to show what the command shows: progress, scores and notes. Without, only warnings are
            shown, on standard error; `train.log` in the run folder has the rest.
        options: an object of an option's class in place of its words, by its group: `optimizer=SGD(lr=0.1)`, or
            `metric=[F1()]`. `model`, `dataset` and `loss` may be such objects too.

    Raises:
        InputError: the config, the data or the machine does not fit the job, or this process is one of several ranks.
        LockstepError: the job ended early: by a stop (Ctrl-C), a loss that is not finite, or a rank that failed.
    """
    _check_caller("train")
    sleep_soon()
    _check_words(overrides)
    words = [*overrides, *([f"launcher.ranks={ranks}"] if ranks is not None else [])]
    with _guest(extensions, verbose=verbose):
        words, objects = _with_objects(words, {"model": model, "dataset": dataset, "loss": loss, **options})
        return _trained(words, objects, callbacks)


def sweep(
    overrides: Sequence[str] = (),
    *,
    model: nn.Module | Model | None = None,
    dataset: Source | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | Loss | None = None,
    extensions: Sequence[str] = (),
    verbose: bool = True,
    **options: Any,
) -> Rows:
    """Run a sweep from a script or a notebook, wait for its end, and return its jobs: `lockstep.runs(FOLDER)`.

    It is `lockstep train -m` in a process of its own. The same call resumes a sweep that was stopped, and adds new
    values to one that is done.

    Args:
        overrides: the words after `lockstep train -m`: `["model=resnet18,resnet34", "epochs=3"]`.
        model: as for `lockstep.train`, and so are `dataset`, `loss`, `extensions` and `options`. All jobs have the
            same objects. An object of an option's class can be swept: `model=Net()` and `model.width=8,16`.
        verbose: whether to show what the command shows. Without, only failures are shown, on standard error.

    Raises:
        InputError: the line, the data or the machine does not fit; no job has started.
        LockstepError: the sweep was stopped (Ctrl-C), or jobs have failed, and the others are done. It names them,
            and its class is the one that `lockstep.train` raises for the first.
    """
    _check_caller("sweep")
    _check_words(overrides)
    if flags := [word for word in overrides if word.startswith("-")]:
        raise InputError(f"{shown(flags[0])} is a flag, expected KEY=VALUE")
    from lockstep.cli.sweep import run_sweep

    with _guest(extensions, verbose=verbose):
        words, objects = _with_objects(overrides, {"model": model, "dataset": dataset, "loss": loss, **options})
        folder = run_sweep(words, objects, verbose=verbose)
    return runs(folder)


def _check_words(overrides: Sequence[str]) -> None:
    """Raise InputError for one text or a dictionary, of which each letter or key would be a word."""
    if isinstance(overrides, str | Mapping):
        raise InputError(f'overrides is {shown(overrides)}, expected a list of words: ["epochs=3"]')


def _check_caller(name: str) -> None:
    """Raise InputError if the function of this name was called where it cannot work: in a thread, or in a rank."""
    if threading.current_thread() is not threading.main_thread():
        raise InputError(
            f"lockstep.{name} was called in a thread, where Python hears no signal that stops a run; call it in the "
            "program's main thread, or start the command lockstep train"
        )
    check_launched()
    if (size := launched_place().size) > 1:
        raise InputError(
            f"lockstep.{name} was called in one of {size} ranks, and each would train alone; start the script once "
            "and give ranks=N, or start the command lockstep train in each rank"
        )


@contextmanager
def _guest(extensions: Sequence[str], *, verbose: bool = True) -> Iterator[None]:
    """A context in which a call works in the process of its caller, with these extensions, and can be quiet."""
    from lockstep.config import extensions as known
    from lockstep.core.console import quiet
    from lockstep.runtime.guest import guest

    with guest(), nullcontext() if verbose else quiet():
        known.use(extensions)
        yield


def _with_objects(overrides: Sequence[str], parts: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The words of a call, and the objects for which their options stand."""
    if not (chosen := {group: part for group, part in parts.items() if part is not None}):
        return [*overrides], {}
    from lockstep.training.objects import in_words  # most runs are words alone

    return in_words(chosen, overrides)


def _trained(words: list[str], objects: Mapping[str, Any], callbacks: Sequence[Callback]) -> Result:
    """Train the job of these words, from its config to its result."""
    from lockstep.config import composition
    from lockstep.core.figures import read_figures
    from lockstep.core.run import Run
    from lockstep.core.safe_write import Lock, absent, remove_empty, storing
    from lockstep.job.prepare import create_run
    from lockstep.job.resume import decide_resume
    from lockstep.job.validate import named_objects
    from lockstep.job.worker import start_job
    from lockstep.runtime.guest import sleeping_soon

    with ExitStack() as ending:
        with composition.invoked(words) as (values, invocation):
            if invocation.folder is not None:  # for a command, Hydra creates the folder
                ending.callback(remove_empty, absent(invocation.folder))
                with storing(invocation.folder):
                    invocation.folder.mkdir(parents=True, exist_ok=True)
            lock = ending.enter_context(closing(Lock()))
            resume = replace(decide_resume(values, invocation), objects=objects, callbacks=callbacks)
            job_folder, job = create_run(resume, lock)
        with job_folder as run_dir, nullcontext() if job.launcher.starts_ranks else sleeping_soon():
            objective = start_job(run_dir, job, named_objects(job, callbacks))
    return Result(
        folder=run_dir.path,
        objective=objective,
        summary=Run(run_dir.path).summary,
        metrics=[{"step": step, **scalars} for step, scalars in read_figures(run_dir.metrics)],
        weights=run_dir.weights,
    )


def dataset(
    train: Any,
    val: Any = None,
    test: Any = None,
    *,
    classes: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **keys: Any,
) -> Source:
    """Datasets of torch as the data of a run: `lockstep.train(dataset=lockstep.dataset(train=A, val=B))`.

    `lockstep.data.datasets.items.DatasetOption` says what their items may be.

    Args:
        train: the Dataset to train on.
        val: the Dataset to evaluate; None to evaluate a part of `train` (`val_share=0.1` or `folds=5`).
        test: the Dataset to test the best weights on, once; None for no test.
        classes: the names of the classes, labels or values; by default those of the Dataset, or else by the targets.
        mean: of each channel, for pixels from 0 to 1; `std` is the standard deviation. By default ImageNet's.
        keys: further keys of the data set, such as `decode_size=64`, `skip=3` or `limit=1000`.
    """
    from lockstep.training.objects import DatasetObject

    return DatasetObject(
        type=type(train).__name__,
        module=type(train).__module__,
        labels=None if classes is None else list(classes),
        channel_mean=None if mean is None else list(mean),
        channel_std=None if std is None else list(std),
        original=(train, val, test),
        **keys,
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
    _check_words(overrides)
    from lockstep.job.prepare import job_of
    from lockstep.training.experiment import build_parts

    with _guest(extensions):
        job = job_of(overrides)
        if job.launcher.ranks > 1:
            raise InputError(
                f"launcher.ranks is {job.launcher.ranks}, but a loop of your own has one rank; use launcher.ranks=1, "
                "or lockstep.train"
            )
        return build_parts(job)


def load(
    path: str | Path, *, device: str | None = None, model: nn.Module | None = None, extensions: Sequence[str] = ()
) -> Predictor:
    """A trained model, ready to be used: `lockstep.load("outputs/latest").predict("cat.jpg")`.

    The model only needs the weights: no data, no run folder, no download. Its probabilities are the softmax of the
    logits and add up to 1. After a training with `loss=bce`, which judges each class by itself, they are the sigmoid
    of each logit and do not add up to 1.

    Args:
        path: a run folder (its best weights), `latest`, a checkpoint, or a safetensors file of Lockstep.
        device: `cpu` or `cuda`; None is the GPU if there is one.
        model: the module that was given to `lockstep.train`, if one was; its weights do not matter.
        extensions: import names of packages from which the model may come.

    Raises:
        InputError: the weights do not exist, they have no description of their model, or the model cannot be built.
    """
    from lockstep.inference.predictor import load_predictor

    with _guest(extensions):
        return load_predictor(path, device=device, module=model)


class Rows(list[dict[str, Any]]):
    """The rows of a table, dictionaries by column.

    Fields:
        folder: where the runs are that the rows are about, below which each has its `name`; None if `compare` has
            several.
    """

    folder: Path | None = None

    def _repr_html_(self) -> str:
        """What a notebook shows: names, scores and states, and the columns in which rows differ."""
        from lockstep.core.table import html_table

        first = ("name", "score", "state")
        all_names = dict.fromkeys([*first, *(key for row in self for key in row)])
        names = [name for name in all_names if name in first or len({str(row.get(name)) for row in self}) > 1]
        return html_table([{name: row[name] for name in names if name in row} for row in self])

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame`. Raises InputError without pandas."""
        if importlib.util.find_spec("pandas") is None:
            raise InputError("to_pandas() needs pandas, which is not installed: pip install pandas")
        return importlib.import_module("pandas").DataFrame(self)


def runs(
    folder: str | Path = "outputs", *, sort: str = "when", filters: Sequence[str] = (), columns: Sequence[str] = ()
) -> Rows:
    """The runs of a folder, or the jobs of a sweep: the rows of `lockstep runs FOLDER --json`.

    The arguments are those of the command: `runs("outputs", filters=["model=resnet18"], sort="score")`. Raises
    InputError: there are no runs, or one is damaged.
    """
    from lockstep.core.table import json_lines
    from lockstep.records.runs import existing
    from lockstep.report.runs import list_runs, without_status

    root = existing(str(folder))
    listed_rows, _, damaged = list_runs(root, sort=sort, filters=filters, columns=columns)
    if damaged:
        raise InputError(*damaged)
    rows = Rows(json.loads("\n".join(json_lines([without_status(row) for row in listed_rows]))))
    rows.folder = root
    return rows


def compare(*paths: str | Path, by: Sequence[str] = (), sort: str | None = None, columns: Sequence[str] = ()) -> Rows:
    """Runs side by side: the rows of `lockstep compare PATH... --json`.

    They are the differences between two runs, or the scores of more runs by the keys that differ. Raises InputError:
    there are no runs, or one is damaged.
    """
    from lockstep.core.table import json_lines
    from lockstep.report.compare import compare_runs

    _, rows, damaged, _ = compare_runs([str(path) for path in paths], by=by, sort=sort, columns=columns)
    if damaged:
        raise InputError(*damaged)
    return Rows(json.loads("\n".join(json_lines(rows))))
