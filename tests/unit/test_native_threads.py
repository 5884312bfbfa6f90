"""The environment variables for the threads of native libraries: our defaults, and the user's values."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = "import os, lockstep.core.native_threads as t; t.configure_native_threads(); print([os.environ.get(k) for k in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY', 'OPENBLAS_NUM_THREADS')])"  # noqa: E501


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ["5000", None, "1"]),
        ({"OMP_WAIT_POLICY": "active"}, [None, "active", "1"]),
        ({"GOMP_SPINCOUNT": "5", "OPENBLAS_NUM_THREADS": "3"}, ["5", None, "3"]),
        ({"OPENBLAS_NUM_THREADS": "1", "LOCKSTEP_OPENBLAS": "1"}, ["5000", None, "1"]),
    ],
    ids=str,
)
def test_threads_that_wait_give_their_core_up_unless_the_user_says_otherwise(
    variables: dict[str, str], expected: list[str | None]
) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS")
    clean = {key: value for key, value in os.environ.items() if key not in (*names, "LOCKSTEP_OPENBLAS")}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env=clean | variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(expected)
