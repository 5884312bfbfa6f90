"""The two roles of a machine in a job on several: main's, which numbers the attempts and decides when one follows,
and that of the others, which follow main's attempts."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import psutil
from torch.distributed import TCPStore

from lockstep.core import log, network, safe_read
from lockstep.core.errors import InputError, LockstepError, RankFailed, Stopped
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.launcher.agent import Meeting, NotEnough, ranks_here
from lockstep.launcher.attach import is_listening, wait
from lockstep.launcher.base import first_failure, remove_error_files
from lockstep.launcher.machine import CLAIMED, CONNECTED, FIRST_S, JOINED, READ, REFUSED, REPORTED, STATE, Machine
from lockstep.launcher.processes import POLL_S

# Seconds for a file of another machine to become visible (NFS caches the content of a folder for up to a minute, by
# default for 3 to 60 s).
SEEN_S = 30.0
ANSWER_S = 5.0  # seconds to wait for a message of machines that can be gone


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
        log.show(f"waiting at {meeting.endpoint} for {meeting.least - 1} of {meeting.least} machines")
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
        """Why another attempt follows the attempt `number`."""
        joined = store.add(JOINED.format(number), 0)
        codes: dict[int, int] = {}
        wait(lambda: store.add(REPORTED.format(number), 0) >= joined, ANSWER_S)
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
        wait(lambda: self.store.add(READ, 0) >= listeners, ANSWER_S)


class Member(Machine):
    """The role of another machine than main's.

    Args:
        meeting: where the machines meet.
        node_rank: the `launcher.node_rank` of this machine's command; None if this is `auto`.
        overrides: the overrides of this machine's command that must be the same on all machines.
    """

    def __init__(self, meeting: Meeting, *, node_rank: int | None, overrides: Sequence[str]) -> None:
        super().__init__(meeting, "", serves=False)
        self.node_rank = node_rank
        self.overrides = sorted(overrides)

    def lost(self, reason: str) -> LockstepError:
        return RankFailed(f"main's machine, {self.meeting.host}, is gone ({reason})")

    def _talk(self) -> None:
        self._await_main()
        store = self._client()
        # Names in the order of the machines, behind any address of main's machine.
        self.name = f"~{store.add(CONNECTED, 1) + 10_000 if self.node_rank is None else self.node_rank:08}"
        self.state = json.loads(store.get(STATE))
        self._await_attempt(1)
        run_dir = self._confirm_job(store)
        while "end" not in self.state:
            number = self.state["attempt"]
            self._claim(store, number)
            with suppress(NotEnough):  # main says so
                self._run_attempt(store, number, run_dir, int(self.state["ranks"]))
            self._await_attempt(number + 1)
            assert self.request is not None
            if self.request.requested and "end" not in self.state:
                raise Stopped("this machine was stopped and has left the job; the state of the run is saved")
        self.acknowledge(store)
        self.raise_ending()

    def _await_main(self) -> None:
        """Wait until main's machine serves the store."""
        meeting, patience = self.meeting, max(self.meeting.timeout, FIRST_S)
        if is_listening(meeting.host, meeting.port):
            return
        log.show(f"waiting for main at {meeting.endpoint}")
        if not wait(lambda: is_listening(meeting.host, meeting.port), patience):
            raise RankFailed(
                f"nobody has listened at launcher.rendezvous={meeting.endpoint} for {patience:g} s; start the "
                "same command on that machine, or see its output"
            )

    def _await_attempt(self, number: int) -> None:
        """Wait until main has begun this attempt or a later one, or until the job has ended."""
        while self.state.get("attempt", number) < number:
            time.sleep(POLL_S)

    def _confirm_job(self, store: TCPStore) -> RunDir:
        """The run folder, which this machine must see, of a job that was started with the same command."""
        if "end" in self.state:
            return RunDir(Path())
        run_dir = RunDir(Path(self.state["folder"]))
        refusal, seen_s = "", SEEN_S if run_dir.path.parent.is_dir() else 0.0
        if self.overrides != self.state["overrides"]:
            theirs, ours = (" ".join(words) or "nothing" for words in (self.overrides, self.state["overrides"]))
            refusal = f"it was started with {theirs}, and main with {ours}; use the same command on each"
        elif not wait(lambda: _is_locked(run_dir, self.state["lock"]), seen_s):
            refusal = (
                f"the run folder {run_dir.path}, which main on {self.meeting.host} has created, is not visible; put "
                "it on a file system that all machines share: output_root=FOLDER"
            )
        if refusal:
            self._refuse(store, refusal)
        return run_dir

    def _claim(self, store: TCPStore, number: int) -> None:
        """Claim the `launcher.node_rank` of this machine for an attempt."""
        if self.node_rank is None:
            return
        own = [network.machine(), os.getpid()]
        owner = json.loads(store.compare_set(CLAIMED.format(number, self.node_rank), "", json.dumps(own)))
        came_back = owner[0] == own[0] and not psutil.pid_exists(owner[1])
        if owner != own and not came_back:
            self._refuse(
                store,
                f"it was started with launcher.node_rank={self.node_rank}, which another machine has; use another "
                "number on each, or launcher.node_rank=auto",
            )

    def _refuse(self, store: TCPStore, refusal: str) -> NoReturn:
        """Leave the job, and tell main why."""
        sentence = f"machine {socket.gethostname()}: {refusal}"
        store.set(REFUSED, sentence)
        self.acknowledge(store)
        raise InputError(sentence)


def _is_locked(run_dir: RunDir, lock: str) -> bool:
    """Whether this is the folder that main has locked, and not a folder with the same path on another disk."""
    try:
        return safe_read.read_text(run_dir.lock) == lock and run_dir.config.is_file()
    except UnreadableFile:
        return False
