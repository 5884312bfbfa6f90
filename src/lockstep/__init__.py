"""Lockstep: one config, any strategy, the same run.

Importing the package imports nothing else, so that `--help` stays fast.
"""

__version__ = "0.1.0"
