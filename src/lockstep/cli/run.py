"""One job of the command line, from its composed config to its end, and what the pool asks about it before."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config import components, composition
from lockstep.config.composition import Invocation
from lockstep.config.roles import identity_of, values_with
from lockstep.core.errors import InputError
from lockstep.core.fields import Role, leaves
from lockstep.core.launch_env import RUN_FOLDER, is_submitted
from lockstep.core.locks import Lock
from lockstep.core.monitor import monitor_of
from lockstep.core.run import Run, State
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import remove_empty
from lockstep.core.tags import LOSS
from lockstep.core.terminal import forgive_output
from lockstep.job.prepare import create_run, prepare
from lockstep.job.resume import Resume, decide_resume, refuse_in_sweep
from lockstep.job.slurm import Submission, submission
from lockstep.job.worker import start
from lockstep.launcher.attach import following, leading
from lockstep.runtime.forking import import_for_ranks
from lockstep.sweep.devices import Needs
from lockstep.sweep.ledger import Ledger, record_of, recorded
from lockstep.sweep.runs import is_below
from lockstep.training.resolved_job import load_job


def run_job(resume: Resume, lock: Lock) -> float | Submission | None:
    """Lock, check and launch one job, or say what to submit to SLURM.

    Returns its objective; None if main is on another machine. A sweep's job that is resumed alone updates its record
    in the sweep.
    """
    launcher = resume.job.launcher
    if launcher.submits and not is_submitted():
        from lockstep.launcher.elastic import Slurm  # imported late: few jobs are for a cluster

        if isinstance(launcher, Slurm):
            return submission(resume, launcher, lock)
    run = partial(_run_agent, resume) if resume.has_several_machines else partial(_run_here, resume, lock)
    entry = record_of(resume.folder) if resume.folder is not None and not resume.invocation.sweep else None
    return run() if entry is None or entry[1].state is State.done else recorded(*entry, run)


def _run_here(resume: Resume, lock: Lock) -> float | None:
    """Run a job in this process, or in ranks that it starts."""
    preparation, job = create_run(resume, lock)
    with preparation as run_dir:
        return start(run_dir, job)


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
    objective: float | None = Run(run_dir.path).summary.get("objective")
    return objective


def lead(values: dict[str, Any], invocation: Invocation, lock: Lock) -> float | None:
    """Run a job as the main of ranks that torchrun, srun or a script has started; returns its objective."""
    with leading() as followers:
        preparation, job = create_run(decide_resume(values, invocation, followers.earlier), lock)
        with preparation as run_dir:
            followers.send(run_dir)
            return start(run_dir, job)


def follow() -> float | None:
    """Run a job as another of these ranks, in the folder that main has created; returns its objective."""
    with following() as run_dir:
        return start(run_dir, load_job(run_dir.config))


def kind(values: Mapping[str, Any]) -> str:
    """The values that decide how much memory a job takes."""
    deciding = values_with(values, Role.identity, Role.pixels, Role.rounding)
    return json.dumps(deciding, sort_keys=True, default=str)


def needs_of(composed: Any, machine: Needs) -> Needs:
    """What the pool asks about a job before any starts: its devices on a `machine` that has these, and what it is.

    On the CPU a job has the cores that it would have alone: another number of threads would change its last bits.
    With fewer threads (`launcher.threads=1`), more jobs run at once.
    """
    values = composition.of_sweep(composed)
    job = components.build_job(values)
    refuse_in_sweep(job.resume)
    launcher = job.launcher
    built, ledger = components.plain(job), Ledger(Path(composed.hydra.sweep.dir))
    swept = ledger.identity().swept if ledger.exists else ()  # jobs that differ in any of these are not one job
    deciding = identity_of(built) | {key: value for key, value in leaves(built) if is_below(key, swept)}
    identity = frozenset(
        (key, str(value) if isinstance(value, list | dict) else value) for key, value in deciding.items()
    )
    metrics = components.metrics_of(job.task, job.metric)
    monitor, figures = monitor_of(job.monitor, job.task.monitor, metrics), [LOSS, *job.task.counted, *metrics]
    needs = Needs(identity=identity, monitor=str(monitor), figures=figures)
    if launcher.submits:
        return replace(needs, cores=0, submits=True)
    import_for_ranks(job)
    gpus = 0 if job.device == "cpu" else machine.gpus
    # A strategy that takes what is there gets one device: several jobs train more than one on several devices.
    ranks = 1 if job.strategy.adapts else job.strategy.ranks(gpus)
    ranks = ranks if launcher.ranks == "auto" else int(launcher.ranks)
    if gpus:
        shared = kind(values) if job.sweep.gpu_share else ""
        return replace(needs, gpus=job.strategy.devices(ranks, gpus), kind=shared)
    cores = machine.cores if launcher.threads == "auto" else ranks * int(launcher.threads)
    return replace(needs, cores=cores)
