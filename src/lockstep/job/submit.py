"""Submitting jobs to SLURM through submitit: one job, or the jobs of a sweep as an array."""

from __future__ import annotations

import importlib.util
import math
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import components, messages
from lockstep.config.commands import override
from lockstep.config.invocation import Invocation
from lockstep.config.program_words import program_words
from lockstep.core.durations import parse_time
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.job.resume import Resume, named_checkpoint
from lockstep.job.run_folder import lock_run_folder, sweep_job_folder
from lockstep.job.run_lock import Lock
from lockstep.job.slurm_task import Task
from lockstep.launcher import Slurm

# How often a job may reach its time limit; submitit requires a number.
MOST_REQUEUES = 1_000_000
REASON_CHARACTERS = 300
# The folder, next to the run folders, for submitit's files: scripts, pickled tasks, and its own output.
SUBMITIT_FOLDER = ".slurm"


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job to submit.

    Fields:
        launcher: the settings for SLURM.
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

    def task(self, folder: Path) -> Task:
        words = () if self.resumes else (override("hydra.run.dir", folder),)
        return Task([*self.command, *words], str(folder))


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
    if resume.run is None:
        components.build_job(resume.values)
    overrides = [word for word in invocation.overrides if messages.key_of(word) not in ("launcher.dry_run", "resume")]
    source = resume.run or named_checkpoint(resume.values["resume"])
    words = [override("resume", source)] if source is not None else []
    if invocation.sweep:
        folder = sweep_job_folder(invocation)
    return Submission(
        launcher=launcher,
        name=str(resume.values["name"]),
        command=(*_program(), *invocation.configs.words, *overrides, *words),
        folder=folder,
        root=Path(resume.values["output_root"]).expanduser().absolute(),
        resumes=resume.run is not None,
    )


def _program() -> list[str]:
    """The words that start this program on another machine."""
    if program_words()[0] == "python":
        return [sys.executable, str(Path(sys.argv[0]).absolute())]
    return [sys.executable, "-m", "lockstep", "train"]


def script(submissions: Sequence[Submission]) -> str:
    """The script that SLURM would get for one job or for an array of jobs, with the commands in comments."""
    first = submissions[0]
    executor = _executor(first.launcher, first.name, first.root / SUBMITIT_FOLDER)
    if len(submissions) > 1:
        executor.parameters["map_count"] = len(submissions)
    text = str(executor._make_submission_file_text(executor._submitit_command_str, ""))
    commands = [f"# on each machine: {shlex.join(submission.command)}" for submission in submissions]
    return "\n".join([text.rstrip(), *commands])


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
    first = submissions[0]
    existed = [submission.folder is not None and submission.folder.exists() for submission in submissions]
    runs = [
        RunDir.at(submission.folder)
        if submission.folder is not None
        else RunDir.create(submission.root, submission.name)
        for submission in submissions
    ]
    try:
        executor = _executor(first.launcher, first.name, (folder or first.root) / SUBMITIT_FOLDER)
        with executor.batch():
            jobs = [
                executor.submit(submission.task(run.path)) for submission, run in zip(submissions, runs, strict=True)
            ]
    except Exception as error:
        for run, existed_before in zip(runs, existed, strict=True):
            if not existed_before:
                shutil.rmtree(run.path)
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1][:REASON_CHARACTERS]
        raise InputError(
            f"launcher=slurm: the job was not submitted ({reason}); change it with launcher.KEY=..."
        ) from (error)
    return [(str(job.job_id), run.path) for job, run in zip(jobs, runs, strict=True)]


def _executor(launcher: Slurm, name: str, folder: Path) -> Any:
    """submitit's executor with the parameters of a launcher."""
    if importlib.util.find_spec("submitit") is None:
        raise InputError(
            "launcher=slurm needs the package submitit, which is not installed; install it with pip install "
            "'lockstep[slurm]'"
        )
    import submitit

    class Executor(submitit.SlurmExecutor):
        """submitit's executor, which can also show a script on a machine without SLURM."""

        @classmethod
        def affinity(cls) -> int:
            return 1

    seconds = {key: parse_time(getattr(launcher, key)) or 0.0 for key in ("time", "save_before")}
    parameters = {
        "job_name": name,
        "nodes": launcher.nodes,
        "ntasks_per_node": 1,
        "time": math.ceil(seconds["time"] / 60),
        "signal_delay_s": math.ceil(seconds["save_before"]),
        "gpus_per_node": launcher.gpus,
        "cpus_per_task": launcher.cpus,
        "mem": f"{launcher.memory}G" if launcher.memory is not None else None,
        **{key: getattr(launcher, key) for key in ("partition", "account", "qos", "constraint")},
        # A job must not import from the folder in which it was submitted, which can be somebody else's run folder.
        "setup": ["export PYTHONSAFEPATH=1", *launcher.setup],
        "stderr_to_stdout": True,
        "additional_parameters": {"requeue": True},
    }
    executor = Executor(folder, max_num_timeout=MOST_REQUEUES)
    executor.update_parameters(**{key: value for key, value in parameters.items() if value is not None})
    return executor
