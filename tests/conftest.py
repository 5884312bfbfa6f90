"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from lockstep.config import composition


@pytest.fixture(autouse=True, scope="session")
def _schema() -> None:
    """The schema of the config, which `train.py` registers for itself."""
    composition.register()


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """No test changes the threads or the environment of the next."""
    before, threads = dict(os.environ), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)
