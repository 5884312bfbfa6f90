"""Lockstep: one config, any strategy, the same run.

Importing the package imports no torch, so that `--help` stays fast.
"""

from lockstep.api import (
    InputError,
    LockstepError,
    Observer,
    Result,
    RunInfo,
    compose,
    load,
    main,
    option,
    train,
)

__all__ = [
    "InputError",
    "LockstepError",
    "Observer",
    "Result",
    "RunInfo",
    "compose",
    "load",
    "main",
    "option",
    "train",
]
__version__ = "0.1.0"
