"""One job of the command line, from its composed config to its end."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.composition import Invocation
from lockstep.core.errors import InputError
from lockstep.core.launch_env import RUN_FOLDER, is_submitted
from lockstep.core.run import Run, State
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import Lock, remove_empty
from lockstep.core.terminal import forgive_output
from lockstep.job.prepare import create_run, prepare
from lockstep.job.resume import Resume, decide_resume
from lockstep.job.worker import start_job
from lockstep.training.resolved_job import load_job

if TYPE_CHECKING:
    from lockstep.job.slurm import Submission


def run_job(resume: Resume, lock: Lock) -> float | Submission | None:
    """Lock, check and launch one job, or say what to submit to SLURM.

    Returns its objective; None if main is elsewhere. A job of a sweep that is resumed alone updates its record.
    """
    launcher = resume.job.launcher
    if launcher.submits and not is_submitted():
        from lockstep.job.slurm import submission  # imported late: few jobs are for a cluster
        from lockstep.launcher.elastic import Slurm

        if isinstance(launcher, Slurm):
            return submission(resume, launcher, lock)
    run = partial(_run_agent, resume) if resume.has_several_machines else partial(_run_here, resume, lock)
    if resume.folder is None or resume.invocation.sweep:
        return run()
    from lockstep.records.ledger import record_of, recorded  # imported late: most jobs are no part of a sweep

    entry = record_of(resume.folder)
    return run() if entry is None or entry[1].state is State.done else recorded(*entry, run)


def _run_here(resume: Resume, lock: Lock) -> float | None:
    """Run a job in this process, or in ranks that it starts."""
    folder, job = create_run(resume, lock)
    with folder as run_dir:
        return start_job(run_dir, job)


def _run_agent(resume: Resume) -> float | None:
    """Run a job of several machines: here and there, torch's agent starts this command again, once for each rank."""
    if resume.invocation.sweep:
        raise InputError(
            f"launcher.nodes is {resume.values['launcher']['nodes']}, but the jobs of a sweep run on one machine, or "
            "each as a job of SLURM; use launcher.nodes=1 or launcher=slurm"
        )
    from lockstep.launcher.elastic import Elastic  # imported late: few jobs have several machines

    job = prepare(resume)
    launcher = job.launcher
    assert isinstance(launcher, Elastic)
    os.environ["HYDRA_FULL_ERROR"] = "0"  # `command_line` has set it, for this process
    command = [sys.executable, *sys.orig_argv[1:]]
    if not launcher.is_host:
        launcher.run_agent(command)
        forgive_output()
        return None
    run_dir, new = RunDir.provide(resume.folder, Path(job.output_root), job.name)
    os.environ[RUN_FOLDER] = str(run_dir.path)  # each attempt of the ranks continues in it
    try:
        launcher.run_agent(command)
    finally:
        remove_empty(new)
    forgive_output()  # train.log has the lines of the run
    return Run(run_dir.path).summary.get("objective")


def lead(values: dict[str, Any], invocation: Invocation, lock: Lock) -> float | None:
    """Run a job as the main of ranks that torchrun, srun or a script has started; returns its objective."""
    from lockstep.launcher.attach import leading  # imported late: most jobs start their ranks themselves

    with leading() as followers:
        folder, job = create_run(decide_resume(values, invocation, followers.earlier), lock)
        with folder as run_dir:
            followers.send(run_dir)
            return start_job(run_dir, job)


def follow() -> float | None:
    """Run a job as another of these ranks, in the folder that main has created; returns its objective."""
    from lockstep.launcher.attach import following  # imported late, as in `lead`

    with following() as run_dir:
        return start_job(run_dir, load_job(run_dir.config))
