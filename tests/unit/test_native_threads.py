"""The environment variables for the threads of native libraries: our defaults, and the user's values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS")
SHOW = f"import os; print(*map(os.environ.get, {NAMES}))"
CONFIGURE = "import lockstep.core.native_threads as threads; threads.configure_native_threads()"


@pytest.mark.parametrize(
    ("variables", "imported", "expected"),
    [
        ({}, ["5000 None 1", "5000 None None"], "5000 None 1"),
        ({"OMP_WAIT_POLICY": "active"}, ["None active 1", "None active None"], "None active 1"),
        ({"GOMP_SPINCOUNT": "5", "OPENBLAS_NUM_THREADS": "3"}, [], "5 None 3"),
        ({"OPENBLAS_NUM_THREADS": "1", "LOCKSTEP_OPENBLAS": "1"}, ["5000 None 1", "5000 None None"], "5000 None 1"),
    ],
    ids=str,
)
def test_threads_that_wait_give_their_core_up_unless_the_user_says_otherwise(
    tmp_path: Path, variables: dict[str, str], imported: list[str], expected: str
) -> None:
    """The variables when NumPy and torch are imported, and at the end.

    Both libraries are replaced by modules that print the variables: the real ones take four seconds to import.
    """
    for name in ("numpy", "torch"):
        (tmp_path / f"{name}.py").write_text(SHOW)
    clean = {key: value for key, value in os.environ.items() if key not in (*NAMES, "LOCKSTEP_OPENBLAS")}
    environment = {**clean, "PYTHONPATH": str(tmp_path), **variables}
    done = subprocess.run(
        [sys.executable, "-c", f"{CONFIGURE}; {SHOW}"], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [*imported, expected]
