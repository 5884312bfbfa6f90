"""Launching the job of a prepared run folder."""

from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.core.terminal import impatient
from lockstep.job import worker
from lockstep.training.resolved_job import load_job


def launch(run_dir: RunDir) -> float | None:
    """Run the job of a folder in all its ranks, and return its objective.

    Raises:
        LockstepError: the job failed or was stopped.
    """
    launcher = load_job(run_dir.config).launcher
    if launcher.node_range[1] > 1:
        raise InputError(
            f"launcher.nodes asks for {launcher.node_range[1]} machines, which only the command line "
            "can do; use lockstep train, or launcher.nodes=1"
        )
    with impatient():  # train.log has what is shown
        return launcher.launch(worker.main, run_dir)
