"""Submitting a job to SLURM, or a sweep's jobs as an array. Imports no torch."""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config import components
from lockstep.config.commands import command_of_program, key_of, override
from lockstep.core import log, plan
from lockstep.core.errors import InputError, is_one_line, shown
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import Lock, remove_empty
from lockstep.job.prepare import lock_run_folder

if TYPE_CHECKING:
    from lockstep.job.resume import Resume
    from lockstep.launcher.elastic import Slurm

REASON_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class Submission:
    launcher: Slurm
    name: str
    command: tuple[str, ...]  # for each machine, without the run folder
    folder: Path | None  # the run folder; None for a new one below `root`
    root: Path
    resumes: bool = False  # the run in `folder`, which the command then names

    def words(self, folder: Path) -> list[str]:
        """The command for each machine, with the run folder that the job gets."""
        return [*self.command, *(() if self.resumes else (override("hydra.run.dir", folder),))]


def submission(resume: Resume, launcher: Slurm, lock: Lock) -> Submission:
    """The submission for a composed job, whose machine is checked where it runs. Raises InputError."""
    folder = resume.folder
    if folder is not None:
        lock_run_folder(folder, lock)
        lock.close()  # the job takes the lock when it starts
    resume.check_personal(launcher, "launcher.")
    if resume.run is None:
        resume.check_personal(components.build_job(resume.values))
    overrides = [word for word in resume.typed if key_of(word) not in ("launcher.dry_run", "resume")]
    source = resume.run or resume.values["resume"]
    words = [override("resume", source)] if source is not None else []
    workers = resume.values["loader"].get("workers")
    if launcher.cpus is None and isinstance(workers, int):
        ranks = launcher.ranks if isinstance(launcher.ranks, int) else launcher.gpus or 1
        launcher = replace(launcher, cpus=ranks * (1 + workers))
    return Submission(
        launcher=launcher,
        name=str(resume.values["name"]),
        command=(*command_of_program(), *resume.invocation.configs.words, *overrides, *words),
        folder=folder,
        root=Path(resume.values["output_root"]).expanduser().absolute(),
        resumes=resume.run is not None,
    )


def _check_imports() -> None:
    """Refuse a program that a job could not start: its interpreter does not import from the program's folder."""
    words, environment = [*command_of_program(), "--help"], {**os.environ, "PYTHONSAFEPATH": "1"}
    trial = subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if trial.returncode != 0:
        reason = (os.fsdecode(trial.stderr).strip() or "no reason given").splitlines()[-1][:REASON_CHARACTERS]
        raise InputError(
            f"launcher=slurm: the job could not start its program, because it imports nothing from a folder that is "
            f"not installed ({reason}); install the project: pip install -e {Path(sys.argv[0]).absolute().parent}"
        )


def script(submissions: Sequence[Submission], folders: Sequence[Path], root: Path) -> str:
    """The script for a job, or an array whose output goes to `root`. Raises InputError for a control character."""
    first, several = submissions[0], len(submissions) > 1
    launcher = first.launcher
    output = root / "slurm-%A_%a.log" if several else folders[0] / "logs" / "slurm-%j.log"
    seconds = {key: plan.seconds(f"launcher.{key}", getattr(launcher, key)) for key in ("time", "save_before")}
    at_once = f"%{launcher.at_once}" if launcher.at_once is not None else ""
    options = {
        "job-name": first.name,
        "output": str(output.parent).replace("%", "%%") + f"/{output.name}",
        "open-mode": "append",  # the job continues after it was queued again
        "array": f"0-{len(submissions) - 1}{at_once}" if several else None,
        "nodes": launcher.nodes,
        "ntasks-per-node": 1,
        "time": math.ceil(seconds["time"] / 60),
        "signal": f"USR2@{math.ceil(seconds['save_before'])}",
        "gpus-per-node": launcher.gpus,
        "cpus-per-task": launcher.cpus,
        "mem": f"{launcher.memory}G" if launcher.memory is not None else None,
        **{key: getattr(launcher, key) for key in ("partition", "account", "qos", "constraint")},
    }
    for key in launcher.sbatch:
        if key in options or not re.fullmatch(r"[a-z][a-z-]*", key):
            own = f", which Lockstep sets: see {shown('lockstep train launcher=slurm --help')}" * (key in options)
            raise InputError(
                f"launcher.sbatch has {shown(key)}{own}; expected a long option of sbatch: "
                "'launcher.sbatch={gres: \"gpu:2\"}'"
            )
    options |= launcher.sbatch
    # Since SLURM 22.05, srun does not take the cores per task from the script.
    srun = ["srun", "--unbuffered", *([f"--cpus-per-task={launcher.cpus}"] if launcher.cpus is not None else [])]
    srun += [sys.executable, "-m", f"{__package__}.slurm_task"]
    commands = [
        shlex.join([*srun, str(folder), *submission.words(folder)])
        for submission, folder in zip(submissions, folders, strict=True)
    ]
    if several:
        cases = (f"{number}) {command} ;;" for number, command in enumerate(commands))
        commands = ["case $SLURM_ARRAY_TASK_ID in", *cases, "esac"]
    lines = [
        "#!/bin/bash",
        # null and false leave an option out, and 0 is a value.
        *(_directive(key, value) for key, value in options.items() if value is not None and value is not False),
        "#SBATCH --requeue",
        # A job must not import from the folder in which it was submitted, which can be somebody else's run folder.
        "export PYTHONSAFEPATH=1",
        *launcher.setup,
        *commands,
    ]
    for line in lines:
        if not is_one_line(line):
            raise InputError(f"launcher=slurm: the line {shown(line)} has a control character; remove it")
    return "\n".join([*lines, ""])


def _directive(key: str, value: object) -> str:
    """A line for sbatch; an option without a value has the value true."""
    return f"#SBATCH --{key}" if value is True else f"#SBATCH --{key}={shlex.quote(str(value))}"


def preview(submissions: Sequence[Submission], folder: Path | None = None) -> str:
    """The script that `submit` would give to SLURM, with `RUN_FOLDER` for a folder that it would create."""
    folders = [submission.folder or submission.root / "RUN_FOLDER" for submission in submissions]
    return script(submissions, folders, folder or submissions[0].root)


def submit(submissions: Sequence[Submission], folder: Path | None = None) -> list[tuple[str, Path]]:
    """Submit jobs; returns the number in SLURM and the run folder of each.

    Several jobs, with the same launcher, become an array; `folder` is the folder of their sweep. Raises InputError if
    SLURM refuses the jobs: the folders that were created for them are removed.
    """
    if shutil.which("sbatch") is None:
        raise InputError(
            "launcher=slurm needs the commands of SLURM (sbatch), which this machine does not have; start it on one "
            "that has them, see the script with launcher.dry_run=true, or use launcher=auto here"
        )
    if not submissions[0].launcher.setup:  # its lines may change what can be imported
        _check_imports()
    preview(submissions, folder)  # raises before a folder is created
    provided = [RunDir.provide(waiting.folder, waiting.root, waiting.name) for waiting in submissions]
    runs = [run for run, _ in provided]
    text = script(submissions, [run.path for run in runs], folder or submissions[0].root)
    sbatch = subprocess.run(["sbatch", "--parsable"], input=os.fsencode(text), capture_output=True)
    if sbatch.returncode != 0:
        for _, new in reversed(provided):
            remove_empty(new)
        reason = (os.fsdecode(sbatch.stderr).strip() or "no reason given").splitlines()[-1][:REASON_CHARACTERS]
        raise InputError(f"launcher=slurm: the job was not submitted ({reason}); change it with launcher.KEY=...")
    launcher = submissions[0].launcher
    if launcher.cpus is None and not any("cpus" in key for key in launcher.sbatch):
        log.show(
            "no launcher.cpus says how many cores the job gets, so the cluster decides, often one; "
            "loader.workers=auto has no more workers than cores. Ask for more: launcher.cpus=8"
        )
    number = os.fsdecode(sbatch.stdout).split()[-1].partition(";")[0]  # JOB or JOB;CLUSTER
    if len(runs) == 1:
        return [(number, runs[0].path)]
    return [(f"{number}_{index}", run.path) for index, run in enumerate(runs)]
