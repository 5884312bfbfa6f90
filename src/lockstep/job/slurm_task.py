"""What SLURM runs on each machine of a job that `launcher=slurm` has submitted. Imports no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.core.errors import InputError, Stopped
from lockstep.core.slurm import SUBMITTED

# What `srun` tells a task, from which a command would take itself for a rank; and what the command that submitted has
# set for itself, and SLURM hands on.
NOT_HANDED_ON = ("SLURM_PROCID", "SLURM_LOCALID", "HYDRA_FULL_ERROR")
CANCELLED = ("CANCELLED", "COMPLETING")


class Task:
    """The command on one machine. submitit calls it, and tells it when its time is over.

    Args:
        command: the words.
        folder: the run folder, where the command's output goes.
    """

    def __init__(self, command: Sequence[str], folder: str) -> None:
        self.command = list(command)
        self.folder = folder
        self.pid = 0

    def __call__(self) -> None:
        """Run the command, and exit with its code.

        A stop that did not come from here is of `scancel`, or SLURM needs the machines for another job and has only
        said so by SIGTERM. Of a job that leaves then SLURM says that it has failed, so it is queued again from here.
        """
        job, node = os.environ["SLURM_JOB_ID"], os.environ["SLURM_NODEID"]
        environment = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
        with Path(self.folder, "logs", f"slurm-{job}-{node}.log").open("a") as log:
            process = subprocess.Popen(
                self.command,
                env={**environment, SUBMITTED: job},
                stdout=log,
                stderr=subprocess.STDOUT,
                # SLURM sends it to every process of the job. Only this one answers, by `checkpoint`.
                preexec_fn=partial(signal.signal, signal.SIGUSR2, signal.SIG_IGN),
            )
        self.pid = process.pid
        # Not by `Popen.wait`: the lock that it holds would stop `checkpoint`, which a signal calls in between.
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == Stopped.exit_code and node == "0" and not _is_cancelled(job):
            subprocess.run(["scontrol", "requeue", job], check=False)
        sys.exit(code)

    def checkpoint(self) -> Any:
        """Have the run saved, and the same command queued again. It goes on in its folder."""
        import submitit

        os.kill(self.pid, signal.SIGTERM)
        _, status = os.waitpid(self.pid, 0)
        # After a mistake it would end in the same way again; after a fault it goes on from its last checkpoint.
        if (code := os.waitstatus_to_exitcode(status)) in (0, InputError.exit_code):
            sys.exit(code)
        return submitit.helpers.DelayedSubmission(Task(self.command, self.folder))


def _is_cancelled(job: str) -> bool:
    """Whether a job is to end for good. SLURM says so a moment after it has sent the signal."""
    time.sleep(1)
    said = subprocess.run(
        ["squeue", "--noheader", "--jobs", job, "--states", "all", "--format", "%T"], capture_output=True, text=True
    )
    return said.stdout.strip() in CANCELLED
