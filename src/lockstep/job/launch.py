"""Launching the job of a prepared run folder, and the role of this machine in a job on several machines."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.config import components, messages
from lockstep.config.invocation import Invocation
from lockstep.core.errors import InputError, LockstepError, RankFailed
from lockstep.core.run_dir import RunDir
from lockstep.core.terminal import impatient
from lockstep.job import worker
from lockstep.launcher import Elastic, MainMachine, OtherMachine
from lockstep.training.resolved_job import load_job

# Keys that may differ from machine to machine.
OWN_KEYS = ("launcher.node_rank",)


def launch(run_dir: RunDir, machines: MainMachine | None = None) -> float | None:
    """Run the job of a folder in all its ranks, here and on `machines`, and return its objective.

    Raises:
        LockstepError: the job failed or was stopped.
    """
    launcher = load_job(run_dir.config).launcher
    if machines is not None:
        machines.run(worker.main, run_dir, launcher.ranks)
        objective: float | None = run_dir.read_summary().get("objective")
        return objective
    if launcher.node_range[1] > 1:
        raise InputError(
            f"launcher.nodes asks for {launcher.node_range[1]} machines, which only the command line "
            "can do; use lockstep train, or launcher.nodes=1"
        )
    with impatient():  # train.log has what is shown
        return launcher.launch(worker.main, run_dir)


@contextmanager
def machine_role(launcher: Any, invocation: Invocation) -> Iterator[MainMachine | OtherMachine]:
    """The role of this machine in a job on several machines. At the end, main's machine tells the others the outcome.

    `launcher` is the config node of the launcher.

    Raises:
        InputError: the job cannot run on several machines.
    """
    built = components.build("launcher", launcher).in_allocation()
    assert isinstance(built, Elastic)
    if invocation.sweep:
        raise InputError(
            f"launcher.nodes is {built.nodes}, but the jobs of a sweep run on one machine, or each as a job of "
            "SLURM; use launcher.nodes=1 or launcher=slurm"
        )
    role = built.meet([word for word in invocation.overrides if messages.key_of(word) not in OWN_KEYS])
    error: LockstepError | None = RankFailed("main has ended; its output says why")
    try:
        yield role
        error = None
    except LockstepError as raised:
        error = raised
        raise
    finally:
        if isinstance(role, MainMachine):
            role.end(error)
