"""Looks for mistakes and lost time: in a run that has ended, and in a job before it is run."""
