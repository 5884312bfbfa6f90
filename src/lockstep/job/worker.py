"""Launching a job, and one rank of it, which has its place from the environment.

A rank in the launching process gets the job; another one reads it from the run folder, once. The rank joins the
process group and runs the experiment. It writes an error to `logs/rank<N>.error.json` for the launcher. Ranks of our
launchers begin in `lockstep.runtime.child`.
"""

import json
import os
import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import current_process
from pathlib import Path
from typing import NoReturn

from lockstep.core import log, plan
from lockstep.core.errors import InputError, LockstepError, RankFailed, StorageError, as_known, out_of_memory
from lockstep.core.launch_env import is_launched, launched_place
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import full_disk, write_atomic
from lockstep.core.terminal import impatient
from lockstep.job import process_group
from lockstep.launcher.processes import Fork
from lockstep.runtime import program, watchdog
from lockstep.runtime.signals import LAUNCHER, StopRequest, leave, listen, stop_signals
from lockstep.training import experiment
from lockstep.training.resolved_job import ResolvedJob, load_job


def launch(run_dir: RunDir, job: ResolvedJob) -> float | None:
    """Run a job in its folder in all its ranks, and return its objective.

    Raises:
        LockstepError: the job failed or was stopped.
    """
    if job.launcher.node_range[1] > 1:
        raise InputError(
            f"launcher.nodes asks for {job.launcher.node_range[1]} machines, which only the command line "
            "can do; use lockstep train, or launcher.nodes=1"
        )
    with impatient():  # train.log has what is shown
        return job.launcher.launch(lambda path: main(path, job), run_dir)


def main(path: Path, job: ResolvedJob | None = None) -> None:
    """Run one rank of a job, by default of the one in the folder `path`. Raises the error that ended the rank."""
    run_dir = RunDir(path)
    errors = RankErrorFile(run_dir, launched_place().rank if is_launched() else 0)
    with (
        log.rank_logging(run_dir, errors.rank, separate=is_launched()),
        watchdog.dump_stacks_on_signal(run_dir.rank_log(errors.rank)) as stacks,
        errors.record_exception(),
        full_disk(run_dir.path),
    ):
        job, stop = job or load_job(run_dir.config), StopRequest()
        stop.saved = Run(path).saved
        if job.repro == "strict":  # cuBLAS reads the variable when it starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        timeout = plan.seconds("launcher.timeout", job.launcher.timeout)
        with (
            # A process of ours exits after this. It keeps its handlers: a late signal has no effect.
            stop_signals(stop, restore=not (is_launched() or isinstance(current_process(), Fork))),
            watchdog.Watchdog(
                errors.rank, timeout=timeout, stop=stop, file=stacks, record_error=errors.record_hang
            ) as dog,
            process_group.join(
                device=job.device,
                backend=job.launcher.backend,
                timeout=watchdog.GROUP_TIMEOUT_S,
                threads=job.launcher.threads,
            ) as joined,
        ):
            dog.local_peer_pids = joined.local_peer_pids
            experiment.run(job, run_dir, joined, stop=stop, heartbeat=dog.heartbeat)


class RankErrorFile:
    """The error file of a rank for the launcher. It has the time, so that the launcher finds the first error."""

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self.run_dir = run_dir
        self.rank = rank
        run_dir.rank_error(rank).unlink(missing_ok=True)

    @contextmanager
    def record_exception(self) -> Iterator[None]:
        """Write the error that the context raises. One of a lack of memory is explained."""
        try:
            yield
        except Exception as error:
            if (explained := out_of_memory(error)) is None:
                self._write(error)
                raise
            explained.__cause__ = error
            self._write(explained)
            raise explained from error

    def record_hang(self, error: LockstepError, places: Mapping[int, str]) -> None:
        """Write an error in the watchdog's thread, which then ends the process; show it if there is no launcher."""
        if isinstance(error, RankFailed):
            error = RankFailed(f"{error}; the stacks are in {self.run_dir.logs}/rank*.log")
        else:  # after a stop, it does not matter where each rank was
            places = {}
        self._write(error, places)
        if LAUNCHER not in os.environ:
            error = type(error)("; ".join([str(error), *(f"rank {rank} {place}" for rank, place in places.items())]))
            self.run_dir.write_ending(error)
            program.say(error)

    def _write(self, error: Exception, places: Mapping[int, str] | None = None) -> None:
        known = as_known(error)
        facts = {
            "time": time.time(),
            "rank": self.rank,
            "exit_code": known.exit_code,
            "known": known is error,
            "sentence": str(known),
            "places": places or {},
            "traceback": "".join(traceback.format_exception(error)),
        }
        with suppress(StorageError):  # on a full disk, the launcher only gets the exit code
            write_atomic(self.run_dir.rank_error(self.rank), json.dumps(facts, indent=2) + "\n")
        log.logger.error("rank %d: %s\n%s", self.rank, facts["sentence"], facts["traceback"])


def exit_as_rank(path: Path) -> NoReturn:
    """Run `main` in a process that only serves as this rank, and exit with the code of its error."""
    code = 0
    try:
        main(path)
    except LockstepError as error:
        code = error.exit_code
    except Exception:  # the error file has the traceback; the launcher shows it
        code = LockstepError.exit_code
    listen(signal.SIG_IGN)
    leave(code)
