"""Lockstep: one config, any strategy, the same run.

Importing the package imports no torch, so that `--help` stays fast.
"""

from lockstep.api import main, option

__all__ = ["main", "option"]
__version__ = "0.1.0"
