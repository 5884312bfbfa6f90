"""What native libraries need before they are imported: the settings of their threads, and address space."""

import importlib
import os
import resource
import sys

from lockstep.core.errors import InputError

# How many times a waiting thread of libgomp (torch's OpenMP on Linux) looks for work before it sleeps: about 250 us.
# libgomp's default of 300,000 takes cores from other processes: with it, the default job is up to ten times slower on
# two busy cores. On idle cores 5,000 is as fast as libgomp's default, and 1,000 is a quarter slower.
SPINS = "5000"
THREADS_VARIABLE = "OPENBLAS_NUM_THREADS"
# Tells interpreters that inherit the environment that we have set the variable, and not the user.
SET_BY_US = "LOCKSTEP_OPENBLAS"
# The address space of a small job, in bytes. With less, an import of torch or its first threads fail, and C++ ends
# the process before Python can say why. torch 2.15 alone maps 3.1 GB.
LEAST_ADDRESS_SPACE = 4_000_000_000
_own_processes: set[int] = set()


def own_process() -> None:
    """Say that this process is one of Lockstep's: a command or a rank, and not a program that uses the library."""
    _own_processes.add(os.getpid())


def is_own_process() -> bool:
    """Whether settings may change here that nothing can change back."""
    return os.getpid() in _own_processes


def check_address_space() -> None:
    """Refuse a limit of the address space in which torch cannot work."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        raise InputError(
            f"this shell limits the address space of a process to {limit / 1e9:.1f} GB, expected at least "
            f"{LEAST_ADDRESS_SPACE / 1e9:.0f} GB, most of it for PyTorch's libraries: ulimit -v unlimited"
        )


def sleep_soon() -> None:
    """Have the waiting threads of torch sleep soon, unless the user has chosen when, or torch is imported already."""
    if "OMP_WAIT_POLICY" not in os.environ and "torch" not in sys.modules:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def configure_native_threads() -> None:
    """Import NumPy and torch so that NumPy and later libraries start no OpenBLAS threads, which would be idle.

    The reason: only a process with one thread can be forked into ranks. Also makes the waiting threads of torch sleep
    soon. Does not change variables that the user has set. Raises InputError if the address space is too small.
    """
    check_address_space()
    sleep_soon()
    if THREADS_VARIABLE in os.environ and SET_BY_US not in os.environ:
        return
    os.environ.update({THREADS_VARIABLE: "1", SET_BY_US: "1"})
    importlib.import_module("numpy")
    if "torch" not in sys.modules:
        del os.environ[THREADS_VARIABLE]  # torch reads it too if its linear algebra is OpenBLAS
        importlib.import_module("torch")
    os.environ[THREADS_VARIABLE] = "1"  # SciPy ships another OpenBLAS
