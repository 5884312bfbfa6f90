"""One rank of a job, given nothing but the run folder: `python -m lockstep.worker RUN_DIR` under a launcher.

It reads the resolved config from there, joins the world and runs the experiment. What ends it is left for the
launcher in `logs/rank<N>.error.json`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from lockstep import config, experiment, log, plan, refusals, watchdog, world
from lockstep.errors import Interrupted, LockstepError, RankFailed, Stopped, StorageError
from lockstep.rundir import RunDir
from lockstep.signals import LAUNCHER, StopRequest, die_with_parent, listen, stop_signals
from lockstep.storage import full_disk, write_atomic

NOT_BEGUN = "stopped before a step was finished; nothing is lost: the same command, or resume=latest, goes on"


def main(path: Path) -> None:
    """Be one rank of the job in `path`; raises what ended it."""
    run_dir = RunDir(path)
    resolved = config.load(run_dir.config)
    launcher = config.build("launcher", resolved["launcher"])
    timeout = plan.seconds("launcher.timeout", launcher.timeout)
    launched = world.launched_rank()
    if launched is not None:
        die_with_parent(int(os.environ[LAUNCHER]) if LAUNCHER in os.environ else None)
    word = Word(run_dir, launched or 0)
    stop = Stop()
    with (
        log.rank_logging(run_dir, word.rank, separate=launched is not None),
        watchdog.stacks(run_dir.rank_log(word.rank)) as file,
        word.of_an_error(),
        full_disk(run_dir.path),
        stop_signals(stop),
        world.join(
            device=resolved["device"],
            backend=launcher.backend.value,
            timeout=timeout + watchdog.GROUP_SLACK_S,
            threads=launcher.threads,
        ) as joined,
        watchdog.watched(joined, timeout=timeout, file=file, leave_word=word.of_a_hang) as alive,
    ):
        experiment.run(joined, run_dir, stop_requested=stop.requested, alive=alive)


class Stop(StopRequest):
    """A wish to stop, kept for the end of the step. While no step has ended there is nothing to save."""

    def __init__(self) -> None:
        super().__init__()
        self.training = False

    def requested(self) -> bool:
        """Whether to stop. Asked at the end of every step."""
        self.training = True
        return self.heard

    def __call__(self, number: int, frame: FrameType | None) -> None:
        first = not self.heard
        self.take(number)
        if self.at_once:
            raise Interrupted
        if first and not self.training:
            raise Stopped(NOT_BEGUN)


class Word:
    """What a rank leaves for the launcher, with the time, so that it can tell cause from effect."""

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self.run_dir = run_dir
        self.rank = rank
        run_dir.rank_error(rank).unlink(missing_ok=True)

    @contextmanager
    def of_an_error(self) -> Iterator[None]:
        """Leave word of what is raised."""
        try:
            yield
        except Exception as error:
            self._leave(error)
            raise

    def of_a_hang(self, sentence: str, places: Mapping[int, str]) -> None:
        """Leave word from the watchdog's thread, after which the process ends; say it, if no launcher is above."""
        sentence = f"{sentence}; the stacks are in {self.run_dir.logs}/rank*.log"
        self._leave(RankFailed(sentence), places)
        if LAUNCHER not in os.environ:
            error = RankFailed("; ".join([sentence, *(f"rank {rank} {place}" for rank, place in places.items())]))
            self.run_dir.close(error)
            refusals.say(error)

    def _leave(self, error: Exception, places: Mapping[int, str] | None = None) -> None:
        known = isinstance(error, LockstepError)
        facts = {
            "time": time.time(),
            "rank": self.rank,
            "exit_code": error.exit_code if isinstance(error, LockstepError) else LockstepError.exit_code,
            "known": known,
            "sentence": str(error) if known else f"{type(error).__name__}: {error}",
            "places": places or {},
            "traceback": "".join(traceback.format_exception(error)),
        }
        with suppress(StorageError):  # on a full disk the exit code has to say it
            write_atomic(self.run_dir.rank_error(self.rank), json.dumps(facts, indent=2) + "\n")
        log.logger.error("rank %d: %s\n%s", self.rank, facts["sentence"], facts["traceback"])


def exit_as_rank(path: Path) -> NoReturn:
    """Run `main` as a process of its own and leave with the exit code of what ended it."""
    listen(_too_late)  # between the end of `main` and that of the process
    code = 0
    try:
        main(path)
    except LockstepError as error:
        code = error.exit_code
    except Exception:  # recorded with its traceback; the launcher shows it
        code = LockstepError.exit_code
    listen(signal.SIG_IGN)
    sys.exit(code)


def _too_late(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which would drop the signals that are held back until `main` listens."""


if __name__ == "__main__":
    exit_as_rank(Path(sys.argv[1]))
