"""What all launchers share, and `inline`, which starts no process."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core import safe_read
from lockstep.core.errors import BY_EXIT_CODE, LockstepError, RankFailed, Stopped, StorageError
from lockstep.core.fields import ranged, ruled
from lockstep.core.process_group import Backend
from lockstep.core.protocols import Entry
from lockstep.core.rules import Time
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.runtime.signals import NOT_BEGUN, StopNow


@dataclass(frozen=True, kw_only=True)
class Inline:
    """This process is the rank. Also used under torchrun, which has started the ranks already.

    Fields:
        ranks: processes of the job; `auto` is one per GPU, or what the strategy needs without one.
        backend: of the process group.
        timeout: how long no step may be finished before the job is ended as hanging.
        threads: CPU threads per rank; `auto` shares the cores out evenly.
    """

    ranks: int | str = ranged("auto", least=1, most=65_536, words=("auto",))
    backend: Backend = Backend.auto
    timeout: str = ruled("10min", Time())
    threads: int | str = ranged("auto", least=1, most=1024, words=("auto",))

    @property
    def world_size(self) -> int:
        """The ranks of the job, once they are resolved."""
        return int(self.ranks)

    def launch(self, entry: Entry, run_dir: RunDir) -> float | None:
        """Run `entry` in every rank, wait for all, and return the job's objective.

        Raises:
            LockstepError: what ended the job.
        """
        try:
            self.run(entry, run_dir)
        except StopNow:  # the handlers of the ranks were not set yet, or not any more
            raise Stopped(NOT_BEGUN) from None
        return run_dir.read_summary().get("objective")

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        """Start the ranks and wait for them."""
        entry(run_dir.path)


@dataclass(frozen=True, kw_only=True)
class Auto(Inline):
    """`inline` for one rank, `spawn` for several or in a sweep. Resolved before a run starts."""


def first_failure(run_dir: RunDir, exit_codes: dict[int, int]) -> LockstepError:
    """The error that ended a job whose ranks failed with `exit_codes`, before the launcher ended the others.

    A rank that was killed by a signal left no error file, so it is looked for first. Otherwise it is the earliest
    error in the files: a rank that raises breaks the connections of the others, which raise later.
    """
    if killed := {rank: signal.Signals(-code) for rank, code in exit_codes.items() if code < 0}:
        words = ", ".join(f"rank {rank} was ended by {number.name}" for rank, number in sorted(killed.items()))
        hint = ", often for lack of memory" if signal.SIGKILL in killed.values() else ""
        return RankFailed(f"{words}{hint}; see {run_dir.rank_log(min(killed))}")
    errors = _left_errors(run_dir)
    if not errors and set(exit_codes.values()) == {Stopped.exit_code}:  # before they could write an error file
        return Stopped(NOT_BEGUN)
    if not errors:
        if StorageError.exit_code in exit_codes.values():
            return StorageError(f"{run_dir.path} cannot be written, nor why; make room there, and resume the run")
        words = ", ".join(f"rank {rank} left with exit code {code}" for rank, code in sorted(exit_codes.items()))
        return RankFailed(f"{words or 'a rank left'} without a word of its own; see {run_dir.logs}")
    errors.sort(key=lambda error: error["time"])
    first: dict[str, Any] = errors[0]
    if not first["known"]:
        return RankFailed(f"rank {first['rank']} failed: {first['sentence']}", first["traceback"])
    # A rank that hangs knows where it was and which of its neighbours were suspended: put all of it together.
    places: dict[str, str] = {}
    for error in errors:
        places = {**error["places"], **places}
    where = ", ".join(f"rank {rank} {place}" for rank, place in sorted(places.items()))
    known = BY_EXIT_CODE.get(first["exit_code"], RankFailed)(first["sentence"] + (f"; {where}" if where else ""))
    known.add_note(f"rank {first['rank']}:\n{first['traceback']}")  # shown by HYDRA_FULL_ERROR=1 only
    return known


def _left_errors(run_dir: RunDir) -> list[dict[str, Any]]:
    """The error files of the ranks. One that cannot be read is left out: the disk may be what ended its rank."""
    errors = []
    for path in run_dir.logs.glob("rank*.error.json"):
        with suppress(UnreadableFile):
            errors.append(safe_read.read_json(path))
    return errors


def forget_errors(run_dir: RunDir) -> None:
    """Remove the error files of an earlier launch in this folder."""
    for path in Path(run_dir.logs).glob("rank*.error.json"):
        path.unlink()
