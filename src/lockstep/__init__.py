"""Lockstep: one config, any strategy, the same run.

Importing the package imports no torch, so that `--help` stays fast.
"""

from lockstep.core.errors import InputError, LockstepError  # noqa: I001  # first: it refuses Windows
from lockstep.api import Result, Rows, compare, compose, dataset, load, main, runs, sweep, train
from lockstep.config.options import option
from lockstep.core.observer import Callback, Observer, RunInfo, TrainingRun

__all__ = [
    "Callback",
    "InputError",
    "LockstepError",
    "Observer",
    "Result",
    "Rows",
    "RunInfo",
    "TrainingRun",
    "compare",
    "compose",
    "dataset",
    "load",
    "main",
    "option",
    "runs",
    "sweep",
    "train",
]
__version__ = "1.0.0"
