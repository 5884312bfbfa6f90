"""The role of main's machine in a job on several machines: it numbers the attempts, and decides when one follows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from typing import Any

from torch.distributed import TCPStore

from lockstep.core import log, safe_read
from lockstep.core.errors import InputError, LockstepError, RankFailed, Stopped
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.launcher.agent import Meeting, NotEnough, ranks_here
from lockstep.launcher.base import first_failure, remove_error_files
from lockstep.launcher.machine import CONNECTED, JOINED, READ, REFUSED, REPORTED, STATE, Machine, wait


class Machines(Machine):
    """The role of main's machine, which knows the run folder and decides.

    Args:
        meeting: where the machines meet.
        store: the store that this machine serves.
        overrides: the overrides of main's command; the commands of the other machines must have the same.
        restarts: how often failed ranks are started again. A machine that joins, or leaves by a stop, is no failure.
    """

    def __init__(self, meeting: Meeting, store: TCPStore, *, overrides: Sequence[str], restarts: int) -> None:
        super().__init__(meeting, meeting.host, serves=True)
        self.store = store
        self.overrides = sorted(overrides)
        self.restarts = restarts
        self.listeners: int | None = None  # the other machines that will read how the job ended, if it is known
        self._publish(attempt=0)

    def _publish(self, **state: Any) -> None:
        self.state = state
        self.store.set(STATE, json.dumps(state))

    def run(self, entry: Entry, run_dir: RunDir, ranks: int) -> None:
        """Run `entry` in every rank of every machine, which has `ranks` of them.

        Raises:
            LockstepError: the job failed or was stopped.
        """
        self.run_dir, self.ranks = run_dir, ranks
        meeting = self.meeting
        log.console.print(f"waiting at {meeting.endpoint} for {meeting.least - 1} of {meeting.least} machines")
        self.run_attempts(entry)

    def lost(self, reason: str) -> LockstepError:
        return RankFailed(f"the store at {self.meeting.endpoint} has failed ({reason})")

    def _talk(self) -> None:
        run_dir, store, restarts = self.run_dir, self._client(), self.restarts
        lock = safe_read.read_text(run_dir.lock)
        for number in count(1):
            remove_error_files(run_dir)
            self.listeners = None
            self._publish(
                attempt=number, folder=str(run_dir.path), lock=lock, overrides=self.overrides, ranks=self.ranks
            )
            try:
                done = self._run_attempt(store, number, run_dir, self.ranks)
            except NotEnough as error:
                joined = store.add(JOINED.format(number), 0)
                raise RankFailed(
                    f"{joined} of {self.meeting.least} machines met at {self.meeting.endpoint} in time; start the "
                    "same command on each, and see the output of the others"
                ) from error
            if done:
                self.listeners = store.add(JOINED.format(number), 0) - 1
                return
            reason = self._reason_to_restart(store, number, can_restart=restarts > 0)
            log.warn(f"{reason}; all ranks are started again from the last checkpoint")
            restarts -= isinstance(reason, RankFailed)

    def _reason_to_restart(self, store: TCPStore, number: int, *, can_restart: bool) -> LockstepError:
        """Why another attempt follows the attempt `number`.

        Raises:
            LockstepError: none follows.
        """
        joined = store.add(JOINED.format(number), 0)
        codes: dict[int, int] = {}
        wait(lambda: store.add(REPORTED.format(number), 0) >= joined)
        reports, silent = [], []
        for turn in range(1, joined + 1):
            if store.check([key := f"{REPORTED.format(number)}/{turn}"]):
                reports.append(json.loads(store.get(key)))
                codes.update({int(rank): code for rank, code in (reports[-1]["codes"] or {}).items()})
            else:
                silent.append(store.get(f"{JOINED.format(number)}/{turn}").decode())
        self.listeners = len(reports) - 1
        failure = first_failure(self.run_dir, codes)
        if silent and isinstance(failure, RankFailed):
            failure = RankFailed(f"machine {', '.join(silent)} is gone: it does not answer, and a rank has failed")
        assert self.request is not None
        remaining = sum(not report["leaving"] for report in reports)
        if not self.request.requested:
            if isinstance(failure, Stopped) and remaining >= self.meeting.least:
                return Stopped(f"machines have joined or left, and the job goes on with {remaining}")
            if isinstance(failure, RankFailed) and can_restart:
                return failure
        raise failure

    def _see(self, store: TCPStore) -> None:
        if not store.check([REFUSED]):
            return
        sentence = store.get(REFUSED).decode()
        store.delete_key(REFUSED)
        if self.attempt == 1 and self.meeting.least == self.meeting.most and not ranks_here():
            raise InputError(sentence)
        log.warn(sentence)

    def end(self, error: LockstepError | None) -> None:
        """Tell all machines how the job ended."""
        code, sentence = (error.exit_code, str(error)) if error is not None else (0, "")
        self._publish(end=code, sentence=sentence)
        listeners = self.listeners
        if listeners is None:  # no attempt has told: machines may be about to connect
            listeners = max(self.store.add(CONNECTED, 0), self.meeting.least - 1)
        wait(lambda: self.store.add(READ, 0) >= listeners)
