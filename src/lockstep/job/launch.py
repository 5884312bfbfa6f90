"""Launching the job of a prepared run folder."""

from __future__ import annotations

from lockstep.config import components, yaml_io
from lockstep.core.errors import InputError
from lockstep.core.protocols import Launcher
from lockstep.core.run_dir import RunDir
from lockstep.job import worker
from lockstep.launcher import Elastic, Machines


def launch(run_dir: RunDir, machines: Machines | None = None) -> float | None:
    """Run the job of a folder in all its ranks, here and on `machines`, and return its objective.

    Raises:
        LockstepError: the job failed or was stopped.
    """
    launcher: Launcher = components.build("launcher", yaml_io.load(run_dir.config)["launcher"])
    if machines is not None:
        assert isinstance(launcher, Elastic)
        return launcher.launch_on(machines, worker.main, run_dir)
    if isinstance(launcher, Elastic) and launcher.node_range[1] > 1:
        raise InputError(
            f"launcher.nodes is {launcher.nodes}, which only the command line can do; use lockstep train, or "
            "launcher.nodes=1"
        )
    return launcher.launch(worker.main, run_dir)
