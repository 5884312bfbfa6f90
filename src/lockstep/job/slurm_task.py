"""The program that SLURM runs on each machine of a job that `launcher=slurm` has submitted. Imports no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep.core.errors import InputError, Stopped
from lockstep.core.slurm import SUBMITTED

# Variables that the command must not get. With the first two, which `srun` sets for a task, the command would run as
# a rank. The last one belongs to the command that submitted the job; SLURM passes it on.
REMOVED_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "HYDRA_FULL_ERROR")
CANCELLED = ("CANCELLED", "COMPLETING")


class Task:
    """The command on one machine. submitit calls it, and calls `checkpoint` when the time limit is near.

    Args:
        command: the words of the command.
        folder: the run folder. The command's output goes to a log there.
    """

    def __init__(self, command: Sequence[str], folder: str) -> None:
        self.command = list(command)
        self.folder = folder
        self.pid = 0

    def __call__(self) -> None:
        """Run the command, and exit with its code.

        If the run was stopped, but not by `checkpoint`, either the user called `scancel`, or SLURM sent SIGTERM
        because it needs the machines for another job. In the second case SLURM would count the job as failed, so it
        is queued again here.
        """
        job, node = os.environ["SLURM_JOB_ID"], os.environ["SLURM_NODEID"]
        environment = {name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES}
        with Path(self.folder, "logs", f"slurm-{job}-{node}.log").open("a") as log:
            process = subprocess.Popen(
                self.command,
                env={**environment, SUBMITTED: job},
                stdout=log,
                stderr=subprocess.STDOUT,
                # SLURM sends this signal to every process of the job. Only this process must handle it, in
                # `checkpoint`.
                preexec_fn=partial(signal.signal, signal.SIGUSR2, signal.SIG_IGN),
            )
        self.pid = process.pid
        # `scancel --signal=HUP` sends it to all processes of the job; this one must live to report the code.
        signal.signal(signal.SIGHUP, self._stop)
        # Not `Popen.wait`, which holds a lock: `checkpoint`, called by a signal handler meanwhile, would block on it.
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == Stopped.exit_code and node == "0" and not _is_cancelled(job):
            subprocess.run(["scontrol", "requeue", job], check=False)
        sys.exit(code)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(self.pid, signal.SIGTERM)

    def checkpoint(self) -> Any:
        """Have the run save, and queue the same command again. It resumes in its folder."""
        import submitit

        os.kill(self.pid, signal.SIGTERM)
        _, status = os.waitpid(self.pid, 0)
        # After a mistake of the user the job would fail again; after a fault it resumes from its last checkpoint.
        if (code := os.waitstatus_to_exitcode(status)) in (0, InputError.exit_code):
            sys.exit(code)
        return submitit.helpers.DelayedSubmission(Task(self.command, self.folder))


def _is_cancelled(job: str) -> bool:
    """Whether a job has been cancelled. SLURM shows the new state a moment after it has sent the signal."""
    time.sleep(1)
    reply = subprocess.run(
        ["squeue", "--noheader", "--jobs", job, "--states", "all", "--format", "%T"], capture_output=True, text=True
    )
    return reply.stdout.strip() in CANCELLED
