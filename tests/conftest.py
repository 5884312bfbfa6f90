"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import helpers
import processes
from lockstep.config import composition


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
