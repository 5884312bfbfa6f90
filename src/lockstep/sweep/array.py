"""Submitting the jobs of a sweep as one SLURM array."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core import log
from lockstep.sweep.ledger import record_of

if TYPE_CHECKING:
    from lockstep.job.submit import Submission

# The jobs of the present command that wait for their submission.
WAITING: list[Submission] = []


def submit_all(folder: Path | None = None) -> None:
    """Submit the waiting jobs; `folder` is the folder of their sweep.

    Consecutive jobs with the same launcher settings become one array.

    Raises:
        InputError: SLURM refuses the jobs.
    """
    from lockstep.job.submit import preview, submit  # needs torch

    waiting = [*WAITING]
    WAITING.clear()
    for launcher, same in groupby(waiting, key=lambda submission: submission.launcher):
        if launcher.dry_run:
            for line in preview([*same], folder).splitlines():
                log.console.print(line, soft_wrap=True)
            continue
        for number, path in submit([*same], folder):
            if entry := record_of(path):
                entry[0].write(replace(entry[1], submitted=number))
            log.console.print(f"submitted job {number} of SLURM: {path}", soft_wrap=True)
