"""One job of the command line, from its composed config to its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lockstep.config.invocation import Invocation
from lockstep.core.launched import is_launched
from lockstep.core.native_threads import configure_native_threads
from lockstep.core.slurm import is_submitted
from lockstep.job.resume import launcher_node
from lockstep.job.run_folder import job_lock, lock_run_folder
from lockstep.runtime import program

if TYPE_CHECKING:
    from lockstep.launcher import Machines

SLURM = "lockstep.launcher.Slurm"


def run_job(job: dict[str, Any], invocation: Invocation) -> float | None:
    """Lock, check and launch one job; returns its objective, or nothing where another machine has main.

    Raises:
        LockstepError: the job does not fit, was stopped or failed.
    """
    launcher = launcher_node(job, invocation)
    if is_launched() or str(launcher.get("nodes", 1)) in ("1", "1:1"):
        return _lead(job, invocation)
    configure_native_threads()
    from lockstep.job import worker  # these need torch
    from lockstep.job.meeting import meeting
    from lockstep.launcher import Member

    with meeting(launcher, invocation) as part:
        if not isinstance(part, Member):
            return _lead(job, invocation, part)
        part.run(worker.main)
    return None


def submits(job: dict[str, Any], invocation: Invocation) -> bool:
    """Whether a job is to be submitted to SLURM, and not to be run by this process."""
    if is_submitted() or is_launched():  # a rank that `srun` has started is told that it cannot
        return False
    node = job["launcher"] if invocation.sweep else launcher_node(job, invocation)
    return isinstance(node, Mapping) and node.get("_target_") == SLURM


def submit_job(job: dict[str, Any], invocation: Invocation) -> None:
    """Submit a job to SLURM, or show the script for it. Those of a sweep are submitted together, at its end.

    Raises:
        InputError: the job does not fit, or SLURM does not take it.
    """
    configure_native_threads()
    from lockstep.config import components  # these need torch
    from lockstep.job.submit import submission
    from lockstep.sweep import array

    with job_lock(invocation) as lock:
        node = launcher_node(job, invocation)
        array.WAITING.append(submission(job, components.build("launcher", node), invocation, lock))
    if not invocation.sweep:
        array.submit_all()


def _lead(job: dict[str, Any], invocation: Invocation, machines: Machines | None = None) -> float | None:
    """Run a job on this machine, and on others as its main."""
    with job_lock(invocation) as lock:
        if not is_launched():  # refuse a folder in use before torch is imported
            lock_run_folder(job, invocation, lock)
        configure_native_threads()
        from lockstep.job.launch import launch  # these need torch
        from lockstep.job.prepare import prepare
        from lockstep.launcher import create_on_main

        with create_on_main(lambda: prepare(job, invocation, lock), program.say) as run_dir:
            return launch(run_dir, machines)
