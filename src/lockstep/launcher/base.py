"""What all launchers have, and the one that launches nothing."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core import safe_read
from lockstep.core.errors import BY_EXIT_CODE, LockstepError, RankFailed, Stopped, StorageError
from lockstep.core.fields import Time, ranged, ruled
from lockstep.core.launched import is_launched, launched
from lockstep.core.process_group import Backend
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.runtime.signals import NOT_BEGUN, StopNow


@dataclass(frozen=True, kw_only=True)
class Inline:
    """The rank is this process. Also what runs under torchrun, whose ranks exist already.

    Fields:
        ranks: processes of the job; `auto` is one per GPU, or what the strategy needs without one.
        backend: of the process group.
        timeout: without a finished step after which a job is ended as hanging.
        threads: CPU threads per rank; `auto` shares the cores out evenly.
    """

    ranks: int | str = ranged("auto", least=1, most=65_536, words=("auto",))
    backend: Backend = Backend.auto
    timeout: str = ruled("10min", Time())
    threads: int | str = ranged("auto", least=1, most=1024, words=("auto",))

    def launch(self, entry: Entry, run_dir: RunDir) -> float | None:
        """Run `entry` in every rank, wait for all, and return the job's objective.

        Raises:
            LockstepError: what ended the job, also written to its summary.
        """
        try:
            self.run(entry, run_dir)
        except BaseException as error:
            # The handler of a stop was not yet, or no longer, that of the ranks or of what forwards it to them.
            ended = Stopped(NOT_BEGUN) if isinstance(error, StopNow) else error
            if not is_launched() or launched().rank == 0:
                run_dir.close(ended)
            raise ended from None
        return run_dir.read_summary().get("objective")

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        """Bring the ranks to life and wait for them."""
        entry(run_dir.path)


@dataclass(frozen=True, kw_only=True)
class Auto(Inline):
    """`inline` for one rank, `spawn` for several or in a sweep. Resolved before a run starts."""


def first_failure(run_dir: RunDir, exit_codes: dict[int, int]) -> LockstepError:
    """What ended a job whose ranks failed with `exit_codes`, before any were ended by us.

    A rank that a signal ended left no word, so it is looked for first. Else it is the earliest error that a rank
    left word of: a rank that raises breaks the connections of the others, which then raise too, later.
    """
    if killed := {rank: signal.Signals(-code) for rank, code in exit_codes.items() if code < 0}:
        words = ", ".join(f"rank {rank} was ended by {number.name}" for rank, number in sorted(killed.items()))
        hint = ", often for lack of memory" if signal.SIGKILL in killed.values() else ""
        return RankFailed(f"{words}{hint}; see {run_dir.rank_log(min(killed))}")
    errors = _left_errors(run_dir)
    if not errors and set(exit_codes.values()) == {Stopped.exit_code}:  # before they could leave word
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
    # A rank that hangs says where, and whether another one was stopped; each knows a part.
    places: dict[str, str] = {}
    for error in errors:
        places = {**error["places"], **places}
    where = ", ".join(f"rank {rank} {place}" for rank, place in sorted(places.items()))
    known = BY_EXIT_CODE.get(first["exit_code"], RankFailed)(first["sentence"] + (f"; {where}" if where else ""))
    known.add_note(f"rank {first['rank']}:\n{first['traceback']}")  # shown by HYDRA_FULL_ERROR=1 only
    return known


def _left_errors(run_dir: RunDir) -> list[dict[str, Any]]:
    """What the ranks left word of, as far as it can be read: a rank may have been killed by the disk it wrote to."""
    errors = []
    for path in run_dir.logs.glob("rank*.error.json"):
        with suppress(UnreadableFile):
            errors.append(safe_read.read_json(path))
    return errors


def forget_errors(run_dir: RunDir) -> None:
    """Remove what the ranks of an earlier launch in this folder left word of."""
    for path in Path(run_dir.logs).glob("rank*.error.json"):
        path.unlink()
