"""The functions for other programs, where they refuse at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import lockstep


def test_a_thread_cannot_train() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(lockstep.InputError, match="was called in a thread"):
        pool.submit(lockstep.train).result()
