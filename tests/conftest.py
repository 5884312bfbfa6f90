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
    """The schema of the config, which `train.py` registers for itself."""
    composition.register()


@pytest.fixture(autouse=True, scope="session")
def _copies() -> Iterator[None]:
    """The interpreter that commands are copies of ends with the tests."""
    yield
    if helpers.forks.cache_info().currsize:
        helpers.forks().close()


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """No test changes the threads or the environment of the next, or leaves it a process that runs."""
    before, threads, started = dict(os.environ), torch.get_num_threads(), len(processes.STARTED)
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)
    processes.close(processes.STARTED[started:])
    del processes.STARTED[started:]
