"""What all launchers share, and `inline`, which starts no process."""

import signal
from contextlib import suppress
from typing import Any

from lockstep.config.options import option
from lockstep.core import safe_read
from lockstep.core.errors import BY_EXIT_CODE, LockstepError, RankFailed, Stopped, StorageError
from lockstep.core.fields import TIME, choice, ranged, ruled
from lockstep.core.protocols import Entry, Launcher
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.launcher.processes import KILLED
from lockstep.runtime.signals import StopNow, not_begun


@option("launcher")
class Inline(Launcher):
    """This process is the rank. Also used under torchrun, which has started the ranks already.

    What the keys of the launchers mean is said in `conf/launcher/`.
    """

    ranks: int | str = ranged("auto", least=1, most=65_536, words=("auto",))
    backend: str = choice("auto", "auto", "nccl", "gloo")
    timeout: str = ruled("10min", TIME)
    threads: int | str = ranged("auto", least=1, most=1024, words=("auto",))

    def launch(self, entry: Entry, run_dir: RunDir) -> float | None:
        try:
            self.run(entry, run_dir)
        except StopNow:  # the stop came before the rank had set its handlers, or after it had restored them
            raise not_begun(Run(run_dir.path).saved) from None
        return Run(run_dir.path).summary.get("objective")

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        entry(run_dir.path)


@option("launcher")
class Auto(Inline):
    """`inline` for one rank, `spawn` for several ranks or in a sweep. Resolved before a run starts."""


def killed(exit_codes: dict[int, int]) -> str:
    """Which signals have ended ranks, by their negative exit codes."""
    signals = {rank: signal.Signals(-code) for rank, code in sorted(exit_codes.items())}
    words = ", ".join(f"rank {rank} was ended by {number.name}" for rank, number in signals.items())
    hint = f", {KILLED}; use train.micro_batches=auto, or fewer ranks" * (signal.SIGKILL in signals.values())
    return words + hint


def first_failure(run_dir: RunDir, exit_codes: dict[int, int]) -> LockstepError:
    """The error that ended a job. `exit_codes` has the ranks that failed before the launcher ended the others.

    A rank that was killed by a signal left no error file, so the exit codes are checked first. Otherwise the earliest
    error in the files is the cause: a rank that raises breaks the connections of other ranks, which raise later.
    """
    if by_signal := {rank: code for rank, code in exit_codes.items() if code < 0}:
        return RankFailed(f"{killed(by_signal)}; see {run_dir.rank_log(min(by_signal))}")
    errors = []
    for path in run_dir.rank_errors():
        with suppress(UnreadableFile):  # a full disk may have ended its rank
            errors.append(safe_read.read_json(path))
    if not errors and set(exit_codes.values()) == {Stopped.exit_code}:  # stopped before they could write error files
        return not_begun(Run(run_dir.path).saved)
    if not errors:
        if StorageError.exit_code in exit_codes.values():
            return StorageError(
                f"{run_dir.path} cannot be written, not even the error; make room there, and resume the run"
            )
        words = ", ".join(f"rank {rank} left with exit code {code}" for rank, code in sorted(exit_codes.items()))
        return RankFailed(f"{words or 'a rank left'} and wrote no error; see {run_dir.logs}")
    errors.sort(key=lambda error: error["time"])
    first: dict[str, Any] = errors[0]
    if not first["known"]:
        return RankFailed(f"rank {first['rank']} failed: {first['sentence']}", first["traceback"])
    # A rank that hangs wrote where it was and which ranks of its machine were suspended: combine these facts.
    places: dict[str, str] = {}
    for error in errors:
        places = {**error["places"], **places}
    where = ", ".join(f"rank {rank} {place}" for rank, place in sorted(places.items()))
    known = BY_EXIT_CODE.get(first["exit_code"], RankFailed)(first["sentence"] + (f"; {where}" if where else ""))
    known.add_note(f"rank {first['rank']}:\n{first['traceback']}")  # shown by HYDRA_FULL_ERROR=1 only
    return known
