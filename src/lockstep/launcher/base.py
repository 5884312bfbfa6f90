"""What all launchers have, and the one that launches nothing."""

from __future__ import annotations

import enum
import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import BY_EXIT_CODE, InputError, LockstepError, RankFailed
from lockstep.plan import seconds
from lockstep.protocols import Entry
from lockstep.rundir import RunDir
from lockstep.world import launched_rank


class Backend(enum.Enum):
    """What carries the collectives; `auto` is NCCL on CUDA and gloo on the CPU."""

    auto = "auto"
    nccl = "nccl"
    gloo = "gloo"


@dataclass(frozen=True, kw_only=True)
class Inline:
    """The rank is this process. Also what runs under torchrun, whose ranks exist already.

    Fields:
        ranks: processes of the job; `auto` is one per GPU, or what the strategy needs without one.
        backend: of the process group.
        timeout: after which a collective that does not end is an error.
        threads: CPU threads per rank; `auto` shares the cores out evenly.
    """

    ranks: int | str = "auto"
    backend: Backend = Backend.auto
    timeout: str = "10min"
    threads: int | str = "auto"

    def __post_init__(self) -> None:
        for name in ("ranks", "threads"):
            value = getattr(self, name)
            if value != "auto" and (not isinstance(value, int) or value < 1):
                raise InputError(f"launcher.{name} is {value!r}, expected auto or a number from 1")
        seconds("launcher.timeout", self.timeout)

    def launch(self, entry: Entry, run_dir: RunDir) -> float | None:
        """Run `entry` in every rank, wait for all, and return the job's objective.

        Raises:
            LockstepError: what ended the job, also written to its summary.
        """
        try:
            self.run(entry, run_dir)
        except BaseException as error:
            if launched_rank() in (None, 0):
                run_dir.close(error)
            raise
        return run_dir.read_summary().get("objective")

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        """Bring the ranks to life and wait for them."""
        entry(run_dir.path)


@dataclass(frozen=True, kw_only=True)
class Auto(Inline):
    """`inline` for one rank, `elastic` for several or in a sweep. Resolved before a run starts."""


def cause(run_dir: RunDir, exit_codes: dict[int, int]) -> LockstepError:
    """What ended a job whose ranks left with `exit_codes`: the earliest error that a rank left word of.

    A rank that raises breaks the connections of the others, which then raise too, later.
    """
    errors = [json.loads(path.read_text()) for path in run_dir.logs.glob("rank*.error.json")]
    if errors:
        first: dict[str, Any] = min(errors, key=lambda error: error["time"])
        if kind := BY_EXIT_CODE.get(first["exit_code"]):
            known = kind(first["sentence"])
            known.add_note(f"rank {first['rank']}:\n{first['traceback']}")  # shown by HYDRA_FULL_ERROR=1 only
            return known
        return RankFailed(f"rank {first['rank']} failed: {first['sentence']}", first["traceback"])
    killed = {rank: code for rank, code in exit_codes.items() if code}
    words = ", ".join(f"rank {rank} {_ending(code)}" for rank, code in sorted(killed.items()))
    return RankFailed(f"{words or 'a rank'} without a word of its own; see {run_dir.logs}")


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"


def forget_errors(run_dir: RunDir) -> None:
    """Remove what the ranks of an earlier launch in this folder left word of."""
    for path in Path(run_dir.logs).glob("rank*.error.json"):
        path.unlink()
