"""The record of a job of a sweep: how far it is, how good, and which of several is the best."""

import socket
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lockstep.core.errors import InputError
from lockstep.core.run import State, born


class Direction(StrEnum):
    """Which score is better: the larger or the smaller one."""

    maximize = "maximize"
    minimize = "minimize"

    def gain(self, score: float) -> float:
        """A score as a number that is larger for a better one."""
        return score if self is Direction.maximize else -score


@dataclass(frozen=True, kw_only=True)
class Record:
    """A job of a sweep.

    Fields:
        number: the number of the job in its sweep, from 0.
        state: how far it is.
        host, pid, born: the process that runs the job, or ran it last; `born` is the kernel's start time of it.
        started, ended: seconds since 1970.
        objective: the score of a finished job.
        exit_code, error: of a failed or stopped job.
        submitted: the number of the job of a cluster that runs it; empty without one.
        rung: the round of a successive halving that it is in, or was left behind after: `1 of 3`; empty without one.
    """

    number: int
    overrides: tuple[str, ...]
    folder: str
    state: State = State.waiting
    host: str = ""
    pid: int = 0
    born: str = ""
    started: float = 0.0
    ended: float = 0.0
    objective: float | None = None
    exit_code: int = 0
    error: str = ""
    submitted: str = ""
    rung: str = ""

    @property
    def score(self) -> float | None:
        """The objective of a job that has trained to its end."""
        return None if self.state is State.pruned else self.objective

    @property
    def runs_elsewhere(self) -> bool:
        """Whether a cluster has the job, in its queue or on a machine, as far as its record says."""
        return bool(self.submitted) and self.state in (State.waiting, State.running)

    @property
    def runs_here(self) -> bool:
        """Whether a living process of this machine runs the job. A killed one leaves `running` behind."""
        return self.state is State.running and self.host == socket.gethostname() and self.born == born(self.pid) != ""

    @property
    def present_state(self) -> State:
        """The state, as far as this machine can see: the record of a killed job still says `running`."""
        was_here = self.state is State.running and self.host == socket.gethostname()
        return State.killed if was_here and not self.runs_here else self.state


Identify = Callable[[Sequence[str]], Hashable]  # what a job is, by its overrides


def job_key(overrides: Sequence[str]) -> frozenset[str]:
    """What a job is where nobody can compose its config: its overrides in any order, wherever the sweep is."""
    return frozenset(word for word in overrides if not word.startswith("output_root="))


def checked_direction(name: Any) -> Direction:
    try:
        return Direction(name)
    except ValueError:
        raise InputError(
            f"the direction of the scores is {name!r}, expected {' or '.join(Direction)}: "
            "hydra.launcher.direction=minimize, or hydra.sweeper.direction=minimize in a search"
        ) from None


def best_of(records: Iterable[Record], direction: Direction) -> Record | None:
    """The job with the best score, the first of equal ones; None without any."""
    gains = {r: (direction.gain(r.score), -r.number) for r in records if r.score is not None}
    return max(gains, key=gains.__getitem__, default=None)


def score_text(score: float | None) -> str:
    return "" if score is None else f"{score:.2f}"
