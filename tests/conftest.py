"""Fixtures that all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

# The compiler of torch believes the kernel about the CPU's vector instructions. Else it would compile and load a
# program for each kind of them, which takes 8 s, for each new cache. Before the import of torch, which reads this.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import torch

# Under nohup or in the background of a shell they are ignored, and the processes of the tests would ignore them too.
# Before the import of `lockstep`, which asks.
for number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

import helpers  # noqa: E402
import processes  # noqa: E402
from lockstep.config import composition  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def _schema() -> None:
    """Register the schema of the config, as `train.py` does."""
    composition.register()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Compute with one thread: test files run in parallel, and torch's waiting threads would spin on their cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _copies() -> Iterator[None]:
    """End the interpreter that commands are forked from when the tests end."""
    yield
    if helpers.forks.cache_info().currsize:
        helpers.forks().close()


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """Restore threads and environment after each test, and end the processes that it left."""
    before, threads, started = dict(os.environ), torch.get_num_threads(), len(processes.STARTED)
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)
    processes.close(processes.STARTED[started:])
    del processes.STARTED[started:]
