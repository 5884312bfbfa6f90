"""The base class of observers, the facts of a run that they get, the protocol of loggers, and who reads every run."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from lockstep.core.fields import Component
from lockstep.core.run import Run

if TYPE_CHECKING:  # importing the package must be fast
    from torch import Tensor, nn

    from lockstep.core.data_protocols import Shard
    from lockstep.core.figures import Predictions
    from lockstep.core.plan import Plan
    from lockstep.core.run_dir import RunDir

Outcome = Literal["completed", "stopped", "failed"]
# Modules whose `Listener` observes every run. Training needs none of them: an absent package does not listen.
LISTENERS = ("lockstep.diagnostics.listener", "lockstep.report.listener")


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run that an observer watches.

    Fields:
        run_dir: the folder of the run.
        plan: the plan of the run, in steps.
        step: the last finished step. An observer that wrote later steps before a kill removes or skips them.
        after: `step`, and half a step more if it was evaluated: the evaluation may have been written before a kill,
            and will be made again.
        config: the resolved config, as in `config.yaml`.
        hyperparameters: the values to compare between runs; every run has the same keys.
        tags: the tags of what its evaluations, its task and its loggers log; a metric that has a score for each class
            is one tag.
        model: the model on main, which has only a part of the weights where the strategy cuts them.
        log: logs a number under one of the `figures` of a logger. In `Observer.write` it joins the figures that are
            written, in `Observer.evaluated` the figures of the evaluation; otherwise it is written with the next
            figures, or before the next checkpoint.
    """

    run_dir: RunDir
    plan: Plan
    step: int
    after: float
    config: Mapping[str, Any]
    hyperparameters: Mapping[str, str | float]
    tags: Sequence[str] = ()
    model: nn.Module | None = None
    log: Callable[[str, float], None] = lambda name, value: None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run_dir.path

    @property
    def id(self) -> str:
        """What no other run has, and a resume keeps, wherever the folder is."""
        return Run(self.folder).id or ""

    @property
    def name(self) -> str:
        """The name of the run folder, which is unique under one `output_root`."""
        return self.folder.name


class Observer:
    """The base class of observers. Main calls them between two steps; a subclass overrides the methods that it needs.

    An observer is created when the run starts or is resumed. If it raises, the run ends and can be resumed.
    """

    @property
    def commands(self) -> Sequence[str]:
        """What a user types to look at what was written; shown at the end of the run."""
        return ()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the figures of a log point or of an evaluation, by tag. A figure without a value is NaN."""

    def first_batch(self, micro: Shard, images: Tensor) -> None:
        """Take the images (b, C, H, W) of a micro-batch of the first step, as the model gets them."""

    def write_gpu(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take a sample of the GPUs, by tag; called at most once for a step."""

    def evaluated(self, step: int, scores: Mapping[str, float], best: bool) -> None:
        """An evaluation is done, and its scores are written next. `best` is whether no earlier step was better."""

    def predicted(self, predictions: Predictions) -> None:
        """An evaluation is the best so far: take what the model predicts, after `evaluated`."""

    def saved(self, step: int, checkpoint: Path) -> None:
        """The checkpoint in the folder `checkpoint` is on the disk."""

    def flush(self) -> None:
        """Flush everything to the files, because a checkpoint is about to be saved."""

    def end(self, outcome: Outcome) -> None:
        """The run ends; only a completed run calls more. A `stopped` run can be resumed."""

    def findings(self, evidence: Any) -> Mapping[str, Any]:
        """Return what `summary.json` should say of a completed run, by key, from its `training.evidence.Evidence`."""
        return {}

    def completed(self, summary: Mapping[str, Any]) -> None:
        """The run is complete and shown, and `summary` is what `summary.json` says of it; this is the last call."""


class Logger(Component, Protocol):
    """A place for the figures of a run. Any number of them may be chosen."""

    figures: ClassVar[tuple[str, ...]] = ()
    """The figures that its observer logs, as `Task.figures`; such an observer is called before others."""
    package: ClassVar[str | None] = None
    """The package that it needs."""

    @abstractmethod
    def build(self, run: RunInfo) -> Observer:
        """The observer that writes the figures, on main only. Raises InputError without a package that it needs."""


def listeners() -> list[Callable[[RunInfo], Observer]]:
    """The classes of `LISTENERS`, of the packages that are here."""
    present = [name for name in LISTENERS if importlib.util.find_spec(name.rpartition(".")[0])]
    return [importlib.import_module(name).Listener for name in present]
