"""The jobs of one `-m`."""

from lockstep.sweep.report import Report

__all__ = ["Report"]
