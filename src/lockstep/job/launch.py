"""Launching the job of a prepared run folder."""

from __future__ import annotations

from lockstep.config import components, yaml_io
from lockstep.core.protocols import Launcher
from lockstep.core.run_dir import RunDir
from lockstep.job import worker


def launch(run_dir: RunDir) -> float | None:
    """Run the job of a folder in all its ranks by its own launcher, and return its objective.

    Raises:
        LockstepError: what ended it.
    """
    launcher: Launcher = components.build("launcher", yaml_io.load(run_dir.config)["launcher"])
    return launcher.launch(worker.main, run_dir)
