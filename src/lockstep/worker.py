"""One rank of a job, given nothing but the run folder: `python -m lockstep.worker RUN_DIR` under a launcher.

It reads the resolved config from there, joins the world and runs the experiment. What ends it is left for the
launcher in `logs/rank<N>.error.json`.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from lockstep import config, experiment, log, plan, world
from lockstep.errors import Interrupted, LockstepError
from lockstep.rundir import RunDir, write_atomic

PR_SET_PDEATHSIG = 1


def main(path: Path) -> None:
    """Be one rank of the job in `path`; raises what ended it."""
    run_dir = RunDir(path)
    resolved = config.load(run_dir.config)
    launcher = config.build("launcher", resolved["launcher"])
    rank = world.launched_rank()
    with (
        log.rank_logging(run_dir, rank or 0, separate=rank is not None),
        _recorded(run_dir, rank or 0),
        stop_signals() as stop,
        world.join(
            device=resolved["device"],
            backend=launcher.backend.value,
            timeout=plan.seconds("launcher.timeout", launcher.timeout),
            threads=launcher.threads,
        ) as joined,
    ):
        experiment.run(joined, run_dir, stop_requested=stop.requested)


class StopSignals:
    """Whether a signal asked the job to stop."""

    def __init__(self) -> None:
        self.interrupts = 0
        self.heard = False

    def requested(self) -> bool:
        return self.heard

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.heard = True
        self.interrupts += number == signal.SIGINT
        if self.interrupts > 1:
            raise Interrupted("interrupted twice: stopped at once; the last checkpoint is what a resume goes on from")


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Turn SIGTERM, SIGUSR1 and the first SIGINT into a wish to stop; a second SIGINT stops at once."""
    heard = StopSignals()
    before = {each: signal.signal(each, heard) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _recorded(run_dir: RunDir, rank: int) -> Iterator[None]:
    """Leave word of what ended this rank, with the time, so that the launcher can tell cause from effect."""
    run_dir.rank_error(rank).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        known = isinstance(error, LockstepError)
        facts = {
            "time": time.time(),
            "rank": rank,
            "exit_code": error.exit_code if isinstance(error, LockstepError) else LockstepError.exit_code,
            "sentence": str(error) if known else f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }
        write_atomic(run_dir.rank_error(rank), json.dumps(facts, indent=2) + "\n")
        log.logger.error("rank %d: %s\n%s", rank, facts["sentence"], facts["traceback"])
        raise


def die_with_parent() -> None:
    """Have the kernel end this process when the one that launched it is gone: no orphans (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_as_rank(path: Path) -> NoReturn:
    """Run `main` as a process of its own and leave with the exit code of what ended it."""
    die_with_parent()
    try:
        main(path)
    except LockstepError as error:
        sys.exit(error.exit_code)
    except Exception:  # recorded with its traceback; the launcher shows it
        sys.exit(LockstepError.exit_code)
    sys.exit(0)


if __name__ == "__main__":
    exit_as_rank(Path(sys.argv[1]))
