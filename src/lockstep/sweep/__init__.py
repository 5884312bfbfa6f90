"""Sweeps: the jobs of one command with `-m`."""

from lockstep.sweep.report import Report

__all__ = ["Report"]
