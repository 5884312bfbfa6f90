"""The threads of the native libraries. They read these settings when NumPy and torch are imported."""

from __future__ import annotations

import importlib
import os

# How often a waiting thread of libgomp (torch's OpenMP on Linux) looks for work before it sleeps: about 250 us.
# The default, 300,000, takes cores from other processes: on two busy cores the default job is up to ten times slower
# with it. On idle cores 5,000 is as fast as the default, and 1,000 a quarter slower.
SPINS = "5000"


def configure_native_threads() -> None:
    """Import NumPy without threads, and let torch's threads sleep soon when they wait.

    Variables that the user has set are left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    key = "OPENBLAS_NUM_THREADS"
    if key not in os.environ:
        # NumPy's threads would be idle, and only a process with one thread can be forked into ranks.
        os.environ[key] = "1"
        importlib.import_module("numpy")
        del os.environ[key]  # torch reads it too where its linear algebra is OpenBLAS
