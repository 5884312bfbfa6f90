"""Runs the jobs of a sweep on this machine: as many at once as its devices allow, each in its own process.

Uses no trainer and nothing of Hydra: a job is a function, and what it needs. The ledger says how each ended.
"""

import functools
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.config.commands import override
from lockstep.core.errors import Interrupted, LockstepError, Stopped
from lockstep.core.run import Run, State
from lockstep.core.safe_write import append
from lockstep.launcher.processes import KILLED, Fresh, Process, forwarding
from lockstep.records.ledger import Ledger, output_of, recorded
from lockstep.records.record import Record
from lockstep.runtime.forking import Fork, can_fork
from lockstep.runtime.program import explain
from lockstep.runtime.signals import PARENT, STOP_SIGNALS, leave, not_begun
from lockstep.sweeps.devices import Devices, Needs, Share
from lockstep.sweeps.view import SweepView

REFRESH_S = 0.5
CONTEXT_BYTES = 2**30  # CUDA's context and its libraries take half of it to all of it


@dataclass(frozen=True)
class SweepJob:
    record: Record
    needs: Needs
    function: Callable[[], float | None]  # does the job, and returns its score
    command: tuple[str, ...]  # the words that do the same in a fresh interpreter, without its folder
    environment: Mapping[str, str] = field(default_factory=dict)


class Pool:
    """The jobs of one call that wait and that run, at `most` so many at once; None is as many as fit.

    `start` starts the process of a job on its share of the devices; `wait` waits for sentinels, for seconds at most.
    """

    def __init__(
        self,
        ledger: Ledger,
        devices: Devices,
        view: SweepView,
        *,
        most: int | None = None,
        start: Callable[[Ledger, SweepJob, Share], Process],
        wait: Callable[[list[Any], float], object] = multiprocessing.connection.wait,
    ) -> None:
        self.ledger, self.devices, self.view, self.most = ledger, devices, view, most
        self.start, self.wait = start, wait
        self.running: list[tuple[SweepJob, Share, Process]] = []
        self.cut: set[int] = set()  # the numbers of the jobs that were asked to save and end
        self.has_killed = False

    def run(
        self,
        jobs: Sequence[SweepJob],
        enough: Callable[[Record], bool] = lambda record: False,
        more: Callable[[Record], Sequence[SweepJob]] = lambda record: (),
        cut: State = State.waiting,
    ) -> None:
        """Run all jobs, and `more` that follow the end of a job. One that fails or dies ends no other.

        A running job that has trained `enough` for now saves, and has the state `cut`. Raises Stopped after a signal,
        when every running job has saved its state; Interrupted after a second SIGINT.
        """
        waiting, stopping, self.has_killed = list(jobs), False, False
        with forwarding(self.send) as request:
            try:
                while waiting or self.running:
                    if request.requested and not stopping:
                        stopping = True
                        waiting.clear()
                        request.repeat()  # for a job that began while the stop arrived
                    self._start_what_fits(waiting)
                    self.wait([process.sentinel for _, _, process in self.running], REFRESH_S)
                    ended = self._collect(enough, cut)
                    if not request.requested:
                        waiting += [job for record in ended for job in more(record)]
                    self._cut(enough)
                    self.view.refresh(len(waiting))
            finally:
                self.send(signal.SIGKILL)  # an error here leaves no job alive
            if request.requested:
                raise Stopped("stopped; running jobs are saved. Rerun the command to continue")

    def _start_what_fits(self, waiting: list[SweepJob]) -> None:
        """Start jobs in their order, and later ones where an earlier one has to wait for more devices."""
        for job in list(waiting):
            if self.most is not None and len(self.running) >= self.most:
                return
            alone = self.most == 1 or len(waiting) + len(self.running) == 1
            if (share := self.devices.take(job.needs)) is not None:
                share = replace(share, alone=alone)
                waiting.remove(job)
                self.running.append((job, share, self.start(self.ledger, job, share)))
                self.view.started(job.record)

    def _collect(self, enough: Callable[[Record], bool], cut: State) -> list[Record]:
        """Free the devices of the jobs that have ended, and record those that could not do so themselves."""
        ended = []
        for entry in [entry for entry in self.running if entry[2].exitcode is not None]:
            job, share, process = entry
            process.join()
            self.running.remove(entry)
            record = self.ledger.read(job.record)
            self.devices.give_back(share, job.needs.kind, memory_of_job(self.ledger, record))
            if record.state in (State.running, State.waiting):
                record = self._without_record(record, process.exitcode or 0)
            if record.state is State.stopped and (record.number in self.cut or enough(record)):
                record = self.ledger.write(replace(record, state=cut, exit_code=0, error=""))
            self.cut.discard(record.number)
            self.view.ended(record)
            ended.append(record)
        return ended

    def _cut(self, enough: Callable[[Record], bool]) -> None:
        """Have the jobs that have trained enough for now save their state and end."""
        for job, _, process in self.running:
            if job.record.number not in self.cut and enough(job.record):
                self.cut.add(job.record.number)
                process.send_signal(signal.SIGTERM)

    def _without_record(self, record: Record, code: int) -> Record:
        """Record the end of a job if its process did not: it was killed, or stopped before its first step."""
        if code == 0:  # a fresh interpreter of an app that knows no ledger
            return self.ledger.end(record, State.done)
        if code == Stopped.exit_code:
            error = str(not_begun(Run(self.ledger.folder / record.folder).saved))
            return self.ledger.end(record, State.stopped, exit_code=code, error=error)
        if code == -signal.SIGKILL and self.has_killed:
            forced = Interrupted()
            return self.ledger.end(record, State.stopped, exit_code=forced.exit_code, error=str(forced))
        how = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        fewer = f"hydra.launcher.jobs={len(self.running)}" if self.running else "train.micro_batches=auto"
        why = f"{KILLED}; use {fewer}" if code == -signal.SIGKILL else "and nothing says why"
        error = f"the process {how}, {why}; its output is in {output_of(self.ledger, record)}"
        return self.ledger.end(record, State.failed, exit_code=LockstepError.exit_code, error=error)

    def send(self, number: int) -> None:
        self.has_killed |= number == signal.SIGKILL
        for _, _, process in self.running:
            process.send_signal(number)
            if number == signal.SIGTERM:
                process.send_signal(signal.SIGCONT)  # a job that was suspended on its own hears it too


def forked(ledger: Ledger, job: SweepJob, share: Share) -> Fork:
    """The process of a job as a fork of this one."""
    process = Fork(functools.partial(_serve, ledger, job, share))
    held = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # the child unblocks them when it can act on them
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    return process


def _serve(ledger: Ledger, job: SweepJob, share: Share) -> None:
    with append(output_of(ledger, job.record)) as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    os.environ.update({**share.environment, **job.environment})
    code = 0
    try:
        recorded(ledger, job.record, job.function)
    except LockstepError as error:
        explain(error)
        code = error.exit_code
    except Exception:
        traceback.print_exc()
        code = LockstepError.exit_code
    leave(code)


def fresh(
    ledger: Ledger, job: SweepJob, share: Share, environment: Mapping[str, str] = os.environ, **options: Any
) -> Fresh:
    """The process of a job as a fresh interpreter, which does not outlive this one, which cannot be forked."""
    words = [*job.command, override("hydra.run.dir", ledger.folder / job.record.folder)]
    variables = {**environment, **share.environment, **job.environment, PARENT: str(os.getpid())}
    with append(output_of(ledger, job.record)) as output:
        return Fresh(words, variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, **options)


def start_process(ledger: Ledger, job: SweepJob, share: Share) -> Process:
    return forked(ledger, job, share) if can_fork() else fresh(ledger, job, share)


def memory_of_job(ledger: Ledger, record: Record) -> int | None:
    """What a job that is done took of its GPU, if its `summary.json` says so, with the context of CUDA."""
    taken = Run(ledger.folder / record.folder).summary.get("gpu_memory")
    return int(taken) + CONTEXT_BYTES if taken is not None and record.state is State.done else None


def to_run(records: Sequence[Record], *, retry: bool) -> list[Record]:
    """The records of the jobs to run; with `retry`, also of those that failed, or that a cluster may have lost."""
    runs = [record for record in records if record.state is not State.done and not record.runs_here]
    return runs if retry else [r for r in runs if r.state is not State.failed and not r.runs_elsewhere]
