"""The threads of the native libraries: settled before NumPy and torch are imported, which then read it."""

from __future__ import annotations

import importlib
import os

# Turns that a thread of libgomp (torch's OpenMP on Linux) looks for work before it sleeps: about 250 us. Its own
# number is 300,000, which keeps the cores of whoever else computes there: on two busy cores the default job takes
# up to ten times as long with it. On quiet ones 5,000 are as fast, and 1,000 a quarter slower.
SPINS = "5000"


def configure_native_threads() -> None:
    """Import NumPy without threads of its own, and have those of torch give their cores up when they wait.

    What the user's environment says of it stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    key = "OPENBLAS_NUM_THREADS"
    if key not in os.environ:
        # NumPy's would idle here, and only a process of one thread is forked into ranks.
        os.environ[key] = "1"
        importlib.import_module("numpy")
        del os.environ[key]  # torch has linear algebra of its own, which on some processors is OpenBLAS too
