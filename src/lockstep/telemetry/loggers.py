"""The loggers (`logger=`) write the figures of a run. Any number of them may be chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lockstep.core.observer import Observer, RunInfo
from lockstep.telemetry import sinks
from lockstep.telemetry.trackers import MLflow, WandB

__all__ = ["JSONL", "MLflow", "TensorBoard", "WandB"]


@dataclass(frozen=True, kw_only=True)
class JSONL:
    """The file `metrics.jsonl` in the run folder."""

    def build(self, run: RunInfo) -> Observer:
        return sinks.JsonLines(run.run_dir.metrics, run.after, run.logged)


@dataclass(frozen=True, kw_only=True)
class TensorBoard:
    """An event file in the run folder."""

    imports: ClassVar[tuple[str, ...]] = ("torch.utils.tensorboard",)

    def build(self, run: RunInfo) -> Observer:
        # In a sweep only what it varies: TensorBoard ticks five keys, and shows ticked ones in parallel coordinates.
        facts = dict(_fact(run, key, value) for key, value in run.run_dir.swept().items()) or run.hyperparameters
        return sinks.TensorBoard(run.folder, run.after, facts, sinks.layout_of(run.config))


def _fact(run: RunInfo, key: str, value: str) -> tuple[str, str | float]:
    """A swept key with its value, as the runs that are in no sweep name them if they have it."""
    name = key.rpartition(".")[2]
    if name in run.hyperparameters:
        return name, run.hyperparameters[name]
    try:
        return key, float(value)
    except ValueError:
        return key, value
