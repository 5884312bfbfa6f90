"""The loggers (`logger=`) write the figures of a run. Any number of them may be chosen."""

from typing import ClassVar

import torch

from lockstep.config.options import option
from lockstep.core.observer import Observer, RunInfo
from lockstep.core.run import Run
from lockstep.core.safe_read import read_text
from lockstep.telemetry import sinks, tensorboard
from lockstep.telemetry.trackers import MLflow, WandB

__all__ = ["JSONL", "MLflow", "TensorBoard", "WandB"]


@option("logger")
class JSONL:
    """The file `metrics.jsonl` in the run folder."""

    def build(self, run: RunInfo) -> Observer:
        return sinks.JsonLines(run.run_dir.metrics, run.after, run.logged)


@option("logger", "tensorboard")
class TensorBoard:
    """Event files in the run folder."""

    histograms: bool = False

    imports: ClassVar[tuple[str, ...]] = (
        "torch.utils.tensorboard",
        "tensorboard.plugins.hparams.metadata",
        "PIL.PngImagePlugin",
    )

    def build(self, run: RunInfo) -> Observer:
        # In a sweep only what it varies: TensorBoard ticks five keys, and shows ticked ones in parallel coordinates.
        facts = dict(_fact(run, key, value) for key, value in Run(run.folder).swept.items()) or run.hyperparameters
        texts = {"config": run.run_dir.config, "command": run.run_dir.command, "environment": run.run_dir.environment}
        values = run.config.get("input", {})
        mean, std = (
            torch.tensor(values.get(key) or [x]).view(1, -1, 1, 1) for key, x in (("mean", 0.0), ("std", 1.0))
        )
        return tensorboard.TensorBoard(
            run.folder,
            run.after,
            facts,
            tensorboard.layout_of(run.config),
            texts={title: read_text(path) for title, path in texts.items() if path.exists()},
            pixels=lambda images: images * std + mean,
            model=run.model if self.histograms else None,
        )


def _fact(run: RunInfo, key: str, value: str) -> tuple[str, str | float]:
    """A swept key with its value, as the runs that are in no sweep name them if they have it."""
    name = key.rpartition(".")[2]
    if name in run.hyperparameters:
        return name, run.hyperparameters[name]
    try:
        return key, float(value)
    except ValueError:
        return key, value
