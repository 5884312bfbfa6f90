"""The role of this machine in a job on several machines."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.config import components, messages
from lockstep.config.invocation import Invocation
from lockstep.core.errors import InputError, LockstepError, RankFailed
from lockstep.launcher import Elastic, MainMachine, OtherMachine

# Keys that may differ from machine to machine.
OWN_KEYS = ("launcher.node_rank",)


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
