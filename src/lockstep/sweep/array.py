"""The jobs of a sweep as one array of SLURM."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core import log

if TYPE_CHECKING:
    from lockstep.job.submit import Submission

# Those of the present command.
WAITING: list[Submission] = []


def submit_all(folder: Path | None = None) -> None:
    """Submit the jobs that wait; `folder` is that of their sweep.

    Jobs that ask SLURM for other machines than the ones before become an array of their own.

    Raises:
        InputError: SLURM does not take them.
    """
    from lockstep.job.submit import script, submit  # needs torch

    waiting = [*WAITING]
    WAITING.clear()
    for launcher, same in groupby(waiting, key=lambda submission: submission.launcher):
        if launcher.dry_run:
            log.console.print(script([*same]), soft_wrap=True)
            continue
        for number, path in submit([*same], folder):
            log.console.print(f"submitted job {number} of SLURM: {path}", soft_wrap=True)
