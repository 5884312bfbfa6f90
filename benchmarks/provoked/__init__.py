"""Parts of jobs that are slow on purpose, for `benchmarks/verdicts.py`."""

from provoked.halting import Halting

__all__ = ["Halting"]
