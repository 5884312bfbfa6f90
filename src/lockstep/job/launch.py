"""Launching the job of a prepared run folder."""

from __future__ import annotations

from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.job import worker
from lockstep.launcher import Machines
from lockstep.training.resolved_job import load_job


def launch(run_dir: RunDir, machines: Machines | None = None) -> float | None:
    """Run the job of a folder in all its ranks, here and on `machines`, and return its objective.

    Raises:
        LockstepError: the job failed or was stopped.
    """
    launcher = load_job(run_dir.config).launcher
    if machines is not None:
        machines.run(worker.main, run_dir, launcher.ranks)
        objective: float | None = run_dir.read_summary().get("objective")
        return objective
    if launcher.node_range[1] > 1:
        raise InputError(
            f"launcher.nodes asks for {launcher.node_range[1]} machines, which only the command line "
            "can do; use lockstep train, or launcher.nodes=1"
        )
    return launcher.launch(worker.main, run_dir)
