"""The program that SLURM runs on each machine of a job that `launcher=slurm` has submitted.

python -m lockstep.job.slurm_task RUN_FOLDER COMMAND...

It imports little: until it handles SLURM's signals, each of them ends the job.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lockstep.core.errors import InputError, Stopped
from lockstep.core.launch_env import SUBMITTED
from lockstep.core.safe_write import append

# Variables that the command must not get. With the first two, which `srun` sets for a task, the command would run as
# a rank. The last one belongs to the command that submitted the job; SLURM passes it on.
REMOVED_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "HYDRA_FULL_ERROR")
CANCELLED = ("CANCELLED", "COMPLETING")


class SlurmTask:
    """The command on one machine, stopped and queued again when the time limit or a preemption is near."""

    def __init__(self, folder: str, command: Sequence[str]) -> None:
        self.folder, self.command = folder, command
        self.job, self.is_first = os.environ["SLURM_JOB_ID"], os.environ["SLURM_NODEID"] == "0"
        self.process: subprocess.Popen[bytes] | None = None
        self.must_save = self.must_stop = False

    def run(self) -> int:
        """Run the command; returns its exit code. It is queued again if it was stopped, but not by `scancel`.

        Without `save`, SLURM may have sent SIGTERM because it needs the machines for another job; it would count the
        job as failed. After `save`, a fault does not matter: the run resumes from its last checkpoint.
        """
        # SLURM sends its signals to every process of the job. The command handles SIGTERM itself, and only the first
        # machine's task handles SIGUSR2. A handler that does nothing is not inherited, unlike SIG_IGN.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.signal(signal.SIGUSR2, self.save)
        signal.signal(signal.SIGHUP, self.stop)  # of `scancel --signal=HUP`
        environment = {name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES}
        log = Path(self.folder, "logs", f"slurm-{self.job}-{os.environ['SLURM_NODEID']}.log")
        with append(log) as output:
            self.process = subprocess.Popen(
                self.command,
                env={**environment, SUBMITTED: self.job},
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(signal.signal, signal.SIGUSR2, signal.SIG_IGN),
            )
        if self.must_stop:  # the signal came before the process
            self.process.terminate()
        code = self.process.wait()
        try:
            if self.must_save:
                again = code not in (0, InputError.exit_code)
            else:
                again = self.is_first and code == Stopped.exit_code and not _is_cancelled(self.job)
            if again:
                subprocess.run(["scontrol", "requeue", self.job], check=False)
        except OSError as error:  # in a container, SLURM's programs are often missing
            sys.stderr.write(
                f"lockstep: job {self.job} is not queued again, because {error.filename} does not work here "
                f"({error.strerror}); what was saved continues with: scontrol requeue {self.job}\n"
            )
        return code

    def save(self, *signal_and_frame: object) -> None:
        """Have the run save and end, on all machines, to be queued again."""
        if self.is_first:
            self.must_save = True
            self.stop()

    def stop(self, *signal_and_frame: object) -> None:
        self.must_stop = True
        if self.process is not None:
            self.process.terminate()


def _is_cancelled(job: str) -> bool:
    """Whether a job has been cancelled. SLURM shows the new state a moment after it has sent the signal."""
    time.sleep(1)
    reply = subprocess.run(
        ["squeue", "--noheader", "--jobs", job, "--states", "all", "--format", "%T"], capture_output=True, text=True
    )
    return reply.stdout.strip() in CANCELLED


if __name__ == "__main__":
    sys.exit(SlurmTask(sys.argv[1], sys.argv[2:]).run())
