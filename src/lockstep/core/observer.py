"""Observers of a run: its own files of figures, the loggers, and the classes that a project adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # importing the package has to be fast
    from lockstep.core.plan import Plan
    from lockstep.core.run_dir import RunDir

Outcome = Literal["completed", "stopped", "failed"]


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run that an observer is made for.

    Fields:
        run_dir: its folder.
        plan: in steps.
        step: the last finished one; an observer that wrote later steps before a kill removes them or skips them.
        logged: the last step whose figures the run has written.
        config: the resolved config, as in `config.yaml`.
        hyperparameters: what is compared between runs; every run has the same keys.
    """

    run_dir: RunDir
    plan: Plan
    step: int
    logged: int
    config: Mapping[str, Any]
    hyperparameters: Mapping[str, str | float]

    @property
    def folder(self) -> Path:
        return self.run_dir.path

    @property
    def name(self) -> str:
        """The name of its folder, which no other run under the same `output_root` has."""
        return self.folder.name


class Observer:
    """The base class of observers. Main calls it between two steps; a subclass overrides the methods that it needs.

    It is made when the run begins or goes on. What it raises ends the run, which can be resumed.
    """

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the figures of a log point or of an evaluation, by tag."""

    def write_gpu(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take a sample of the GPUs, by tag: at most one for a step."""

    def evaluated(self, step: int, scores: Mapping[str, float], best: bool) -> None:
        """An evaluation is done; its scores were written. `best` is whether no step before was better."""

    def saved(self, step: int, checkpoint: Path) -> None:
        """A checkpoint is on the disk: the folder `checkpoint`."""

    def flush(self) -> None:
        """Have the files hold all that was written, because a checkpoint is about to be saved."""

    def end(self, outcome: Outcome) -> None:
        """The run ends, and nothing follows. A `stopped` one can go on."""
