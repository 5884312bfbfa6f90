"""Jobs of SLURM: submitting one, or those of a sweep as an array, and the program that runs on each machine.

python -m lockstep.job.slurm RUN_FOLDER COMMAND...

Imports no torch, so that the program is there at once.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config import components
from lockstep.config.commands import command_of_program, key_of, override, parsed
from lockstep.config.composition import Invocation
from lockstep.core import plan
from lockstep.core.errors import InputError, Stopped, is_one_line, shown
from lockstep.core.launch_env import SUBMITTED
from lockstep.core.locks import Lock
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import append
from lockstep.job.run_folder import lock_run_folder

if TYPE_CHECKING:
    from lockstep.job.resume import Resume
    from lockstep.launcher import Slurm

REASON_CHARACTERS = 300
# Variables that the command must not get. With the first two, which `srun` sets for a task, the command would run as
# a rank. The last one belongs to the command that submitted the job; SLURM passes it on.
REMOVED_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID", "HYDRA_FULL_ERROR")
CANCELLED = ("CANCELLED", "COMPLETING")


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job to submit.

    Fields:
        name: the name of the job in SLURM's lists.
        command: the command for each machine, without the run folder.
        folder: the run folder; None for a new one below `root`.
        root: the folder for new run folders.
        resumes: whether the job resumes the run in `folder`; the command then names that folder.
    """

    launcher: Slurm
    name: str
    command: tuple[str, ...]
    folder: Path | None
    root: Path
    resumes: bool = False

    def words(self, folder: Path) -> list[str]:
        """The command for each machine, with the run folder that the job gets."""
        return [*self.command, *(() if self.resumes else (override("hydra.run.dir", folder),))]


def submission(resume: Resume, launcher: Slurm, invocation: Invocation, lock: Lock) -> Submission:
    """The submission for a composed job.

    Checks that depend on the machine, such as its devices and data, happen on the machine that runs the job.

    Raises:
        InputError: a value of the job is wrong, or its folder is in use.
    """
    folder = resume.folder
    if folder is not None:
        lock_run_folder(folder, lock)
        lock.close()  # the job takes the lock when it starts
    _check_setup(launcher.setup)
    if resume.run is None:
        components.build_job(resume.values)
    overrides = [word for word in invocation.overrides if key_of(word) not in ("launcher.dry_run", "resume")]
    source = resume.run or resume.values["resume"]
    words = [override("resume", source)] if source is not None else []
    return Submission(
        launcher=launcher,
        name=str(resume.values["name"]),
        command=(*command_of_program(), *invocation.configs.words, *overrides, *words),
        folder=folder,
        root=Path(resume.values["output_root"]).expanduser().absolute(),
        resumes=resume.run is not None,
    )


def _check_setup(setup: list[str]) -> None:
    """Refuse lines of shell that the present command does not have.

    Somebody else may have written a config file, or the overrides of a run folder.
    """
    words = [word for word in sys.argv[1:] if key_of(word) == "launcher.setup"]
    typed = [list(map(str, value)) for value in map(parsed, words) if isinstance(value, list)]
    if setup and setup not in typed:
        raise InputError(
            f"launcher.setup is {shown(setup)} in a config file or in the run folder, but lines of shell come from "
            "the command line alone; type them again, or leave them out with launcher=slurm launcher.setup=[]"
        )


def script(submissions: Sequence[Submission], folders: Sequence[Path], root: Path) -> str:
    """The script for one job or for an array of jobs, in `folders`. The output of an array's scripts goes to `root`.

    Raises:
        InputError: a line has a control character, which could end it.
    """
    first, several = submissions[0], len(submissions) > 1
    launcher = first.launcher
    output = root / "slurm-%A_%a.log" if several else folders[0] / "logs" / "slurm-%j.log"
    seconds = {key: plan.seconds(f"launcher.{key}", getattr(launcher, key)) for key in ("time", "save_before")}
    options = {
        "job-name": first.name,
        "output": str(output.parent).replace("%", "%%") + f"/{output.name}",
        "open-mode": "append",  # the job continues after it was queued again
        "array": f"0-{len(submissions) - 1}" if several else None,
        "nodes": launcher.nodes,
        "ntasks-per-node": 1,
        "time": math.ceil(seconds["time"] / 60),
        "signal": f"USR2@{math.ceil(seconds['save_before'])}",
        "gpus-per-node": launcher.gpus,
        "cpus-per-task": launcher.cpus,
        "mem": f"{launcher.memory}G" if launcher.memory is not None else None,
        **{key: getattr(launcher, key) for key in ("partition", "account", "qos", "constraint")},
    }
    # Since SLURM 22.05, srun does not take the cores per task from the script.
    srun = ["srun", "--unbuffered", *([f"--cpus-per-task={launcher.cpus}"] if launcher.cpus is not None else [])]
    srun += [sys.executable, "-m", __name__]
    commands = [
        shlex.join([*srun, str(folder), *submission.words(folder)])
        for submission, folder in zip(submissions, folders, strict=True)
    ]
    if several:
        cases = (f"{number}) {command} ;;" for number, command in enumerate(commands))
        commands = ["case $SLURM_ARRAY_TASK_ID in", *cases, "esac"]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{key}={shlex.quote(str(value))}" for key, value in options.items() if value is not None),
        "#SBATCH --requeue",
        # A job must not import from the folder in which it was submitted, which can be somebody else's run folder.
        "export PYTHONSAFEPATH=1",
        *launcher.setup,
        *commands,
    ]
    for line in lines:
        if not is_one_line(line):
            raise InputError(f"launcher=slurm: the line {shown(line)} has a control character; leave it out")
    return "\n".join([*lines, ""])


def preview(submissions: Sequence[Submission], folder: Path | None = None) -> str:
    """The script that `submit` would give to SLURM, with `RUN_FOLDER` for a folder that it would create."""
    folders = [submission.folder or submission.root / "RUN_FOLDER" for submission in submissions]
    return script(submissions, folders, folder or submissions[0].root)


def submit(submissions: Sequence[Submission], folder: Path | None = None) -> list[tuple[str, Path]]:
    """Submit jobs; returns the number in SLURM and the run folder of each.

    Several jobs become an array and must have the same launcher. `folder` is the folder of their sweep.

    Raises:
        InputError: SLURM refuses the jobs. The folders that were created for them are removed.
    """
    if shutil.which("sbatch") is None:
        raise InputError(
            "launcher=slurm needs the commands of SLURM (sbatch), which this machine does not have; start it on one "
            "that has them, see the script with launcher.dry_run=true, or use launcher=auto here"
        )
    preview(submissions, folder)  # raises before a folder is created
    existed = [submission.folder is not None and submission.folder.exists() for submission in submissions]
    runs = [
        RunDir.at(submission.folder)
        if submission.folder is not None
        else RunDir.create(submission.root, submission.name)
        for submission in submissions
    ]
    text = script(submissions, [run.path for run in runs], folder or submissions[0].root)
    sbatch = subprocess.run(["sbatch", "--parsable"], input=os.fsencode(text), capture_output=True)
    if sbatch.returncode != 0:
        for run, existed_before in zip(runs, existed, strict=True):
            if not existed_before:
                shutil.rmtree(run.path)
        reason = (os.fsdecode(sbatch.stderr).strip() or "no reason given").splitlines()[-1][:REASON_CHARACTERS]
        raise InputError(f"launcher=slurm: the job was not submitted ({reason}); change it with launcher.KEY=...")
    number = os.fsdecode(sbatch.stdout).split()[-1].partition(";")[0]  # JOB or JOB;CLUSTER
    if len(runs) == 1:
        return [(number, runs[0].path)]
    return [(f"{number}_{index}", run.path) for index, run in enumerate(runs)]


class Task:
    """The command on one machine. It is stopped and queued again when the time limit or a preemption is near.

    Args:
        folder: the run folder. The command's output goes to a log there.
    """

    def __init__(self, folder: str, command: Sequence[str]) -> None:
        self.folder, self.command = folder, command
        self.job, self.is_first = os.environ["SLURM_JOB_ID"], os.environ["SLURM_NODEID"] == "0"
        self.process: subprocess.Popen[bytes] | None = None
        self.must_save = self.must_stop = False

    def run(self) -> int:
        """Run the command; returns its exit code. It is queued again if it was stopped, but not by `scancel`.

        Without `save`, SLURM may have sent SIGTERM because it needs the machines for another job; it would count the
        job as failed. After `save`, a fault is no obstacle: the run resumes from its last checkpoint.
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
        if self.must_save:
            again = code not in (0, InputError.exit_code)
        else:
            again = self.is_first and code == Stopped.exit_code and not _is_cancelled(self.job)
        if again:
            subprocess.run(["scontrol", "requeue", self.job], check=False)
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
    sys.exit(Task(sys.argv[1], sys.argv[2:]).run())
