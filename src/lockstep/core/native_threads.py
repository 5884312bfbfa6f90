"""The threads of the native libraries. They read these settings when NumPy and torch are imported."""

from __future__ import annotations

import importlib
import os
import sys

# How often a waiting thread of libgomp (torch's OpenMP on Linux) looks for work before it sleeps: about 250 us.
# The default, 300,000, takes cores from other processes: on two busy cores the default job is up to ten times slower
# with it. On idle cores 5,000 is as fast as the default, and 1,000 a quarter slower.
SPINS = "5000"
KEY = "OPENBLAS_NUM_THREADS"
# Says that we have set KEY, and not the user, to interpreters that inherit the environment.
OURS = "LOCKSTEP_OPENBLAS"


def configure_native_threads() -> None:
    """Import NumPy and torch. NumPy and later libraries start no threads of OpenBLAS, which would be idle.

    Only a process with one thread can be forked into ranks. torch's threads sleep soon when they wait. Variables that
    the user has set are left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if KEY in os.environ and OURS not in os.environ:
        return
    os.environ.update({KEY: "1", OURS: "1"})
    importlib.import_module("numpy")
    if "torch" not in sys.modules:
        del os.environ[KEY]  # torch reads it too where its linear algebra is OpenBLAS
        importlib.import_module("torch")
    os.environ[KEY] = "1"  # SciPy has an OpenBLAS of its own
