"""The two roles of a machine in a job on several: main's, which numbers the attempts and decides when one follows,
and that of the others, which follow main's attempts."""

import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import TCPStore

from lockstep.core import log, network, safe_read
from lockstep.core.errors import BY_EXIT_CODE, InputError, LockstepError, RankFailed, Stopped
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.launcher.agent import Meeting, ranks_here
from lockstep.launcher.attach import is_listening, wait
from lockstep.launcher.base import first_failure
from lockstep.launcher.machine import CONNECTED, FIRST_S, JOINED, LOOK_S, READ, REFUSED, REPORTS, STATE, Machine

# The key of the machine that has a `launcher.node_rank` in an attempt.
CLAIMED = "claimed/{}/{}"
# Seconds for a file of another machine to become visible (NFS caches the content of a folder for up to a minute, by
# default for 3 to 60 s).
SEEN_S = 30.0
ANSWER_S = 5.0  # seconds to wait for a message of machines that can be gone


class MainMachine(Machine):
    """The role of main's machine, which knows the run folder and decides.

    Args:
        store: the store that this machine serves.
        restarts: how often failed ranks are started again. A machine that joins, or leaves by a stop, is no failure.
    """

    def __init__(self, meeting: Meeting, store: TCPStore, *, overrides: Sequence[str], restarts: int) -> None:
        super().__init__(meeting, meeting.host, overrides, f"the store at {meeting.endpoint} has failed")
        self.store, self.restarts = store, restarts
        self._publish(attempt=0)

    def _publish(self, **state: Any) -> None:
        self.state = state
        self.store.set(STATE, json.dumps(state))

    def run(self, entry: Entry, run_dir: RunDir, ranks: int) -> None:
        """Run `entry` in every rank of every machine, which has `ranks` of them.

        Raises:
            LockstepError: the job failed or was stopped.
        """
        meeting, self.run_dir = self.meeting, run_dir
        lock = safe_read.read_text(run_dir.lock)
        self.job = {"folder": str(run_dir.path), "lock": lock, "overrides": self.overrides, "ranks": ranks}
        log.show(f"waiting at {meeting.endpoint} for {meeting.least - 1} of {meeting.least} machines")
        self.run_attempts(entry)

    def look(self) -> bool:
        if self.store.check([REFUSED]):
            sentence = self.store.get(REFUSED).decode()
            self.store.delete_key(REFUSED)
            if self.attempt == 1 and self.meeting.least == self.meeting.most and not ranks_here():
                raise InputError(sentence)
            log.warn(sentence)
        return super().look()

    def _next_attempt(self) -> bool:
        if self.is_done:
            return False
        if self.attempt:
            reason = self._reason_to_restart()
            log.warn(f"{reason}; all ranks are started again from the last checkpoint")
            self.restarts -= isinstance(reason, RankFailed)
        for path in self.run_dir.rank_errors():  # of an earlier attempt
            path.unlink()
        self._publish(attempt=self.attempt + 1, **self.job)
        return True

    def _reason_to_restart(self) -> LockstepError:
        """Why another attempt follows the last one; raises the error that ends the job if none follows."""
        wait(lambda: len(self.lines(REPORTS)) >= len(self.lines(JOINED)), ANSWER_S)
        joined, reports, least = self.lines(JOINED), self.lines(REPORTS), self.meeting.least
        if len(joined) < least:
            raise RankFailed(
                f"{len(joined)} of {least} machines met at {self.meeting.endpoint} in time; start the same command "
                "on each, and see the output of the others"
            )
        codes = {int(rank): code for report in reports for rank, code in report["failed"].items()}
        failure = first_failure(self.run_dir, codes)
        silent = Counter(joined) - Counter(report["host"] for report in reports)
        if silent and isinstance(failure, RankFailed):
            names = ", ".join(silent.elements())
            failure = RankFailed(f"machine {names} is gone: it does not answer, and a rank has failed")
        remaining = sum(not report["is_leaving"] for report in reports)
        if not self.request.requested:
            if isinstance(failure, Stopped) and remaining >= least:
                return Stopped(f"machines have joined or left, and the job goes on with {remaining}")
            if isinstance(failure, RankFailed) and self.restarts > 0:
                return failure
        raise failure

    def end(self, error: LockstepError | None) -> None:
        """Tell all machines how the job ended."""
        code, sentence = (error.exit_code, str(error)) if error is not None else (0, "")
        self._publish(end=code, sentence=sentence)
        told = self.lines(JOINED if self.is_done else REPORTS)
        # If no machine has told, some may be about to connect.
        listeners = len(told) - 1 if told else max(self.store.add(CONNECTED, 0), self.meeting.least - 1)
        wait(lambda: self.store.add(READ, 0) >= listeners, ANSWER_S)


class OtherMachine(Machine):
    """The role of another machine than main's.

    Args:
        node_rank: the `launcher.node_rank` of this machine's command; None if this is `auto`.
    """

    def __init__(self, meeting: Meeting, *, node_rank: int | None, overrides: Sequence[str]) -> None:
        super().__init__(meeting, "", overrides, f"main's machine, {meeting.host}, is gone")
        self.node_rank = node_rank

    def look(self) -> bool:
        self.state = json.loads(self.store.get(STATE))
        return "end" in self.state or super().look()

    def _next_attempt(self) -> bool:
        if not self.attempt:
            self.ask(self._await_main, limit=math.inf)
            self.ask(self._connect)
        self.ask(self.look)
        while self.state.get("attempt", math.inf) <= self.attempt:
            time.sleep(LOOK_S)
            self.ask(self.look)
        if "end" in self.state:
            with suppress(RankFailed):  # main has left
                self.ask(self.store.add, READ, 1)
            if code := self.state["end"]:
                raise BY_EXIT_CODE.get(code, RankFailed)(self.state["sentence"])
            return False
        if self.attempt and self.request.requested:
            raise Stopped("this machine was stopped and has left the job; the state of the run is saved")
        if refusal := self.ask(self._refusal, limit=SEEN_S + self.meeting.timeout):
            sentence = f"machine {socket.gethostname()}: {refusal}"
            self.ask(self.store.set, REFUSED, sentence)
            self.ask(self.store.add, READ, 1)
            raise InputError(sentence)
        return True

    def _await_main(self) -> None:
        """Wait until main's machine serves the store."""
        meeting, patience = self.meeting, max(self.meeting.timeout, FIRST_S)
        if is_listening(meeting.host, meeting.port, ANSWER_S):  # a network can swallow what it cannot deliver
            return
        log.show(f"waiting for main at {meeting.endpoint}")
        if not wait(lambda: is_listening(meeting.host, meeting.port), patience):
            raise RankFailed(
                f"nobody has listened at launcher.rendezvous={meeting.endpoint} for {patience:g} s; start the "
                "same command on that machine, or see its output"
            )

    def _connect(self) -> None:
        meeting, timeout = self.meeting, timedelta(seconds=self.meeting.timeout)
        self.store = TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=timeout)
        arrival = self.store.add(CONNECTED, 1)
        # Names in the order of the machines, behind any address of main's machine.
        self.name = f"~{arrival + 10_000 if self.node_rank is None else self.node_rank:08}"

    def _refusal(self) -> str:
        """Why this machine cannot take part in the attempt; empty if it can. Claims its `launcher.node_rank`."""
        run_dir, main = RunDir(Path(self.state["folder"])), self.meeting.host
        if self.overrides != self.state["overrides"]:
            theirs, ours = (" ".join(words) or "nothing" for words in (self.overrides, self.state["overrides"]))
            return f"it was started with {theirs}, and main with {ours}; use the same command on each"
        if not wait(lambda: _is_locked(run_dir, self.state["lock"]), SEEN_S if run_dir.path.parent.is_dir() else 0.0):
            return (
                f"the run folder {run_dir.path}, which main on {main} has created, is not visible; put it on a file "
                "system that all machines share: output_root=FOLDER"
            )
        if self.node_rank is not None:
            own, key = [network.machine(), os.getpid()], CLAIMED.format(self.state["attempt"], self.node_rank)
            owner = json.loads(self.store.compare_set(key, "", json.dumps(own)))
            came_back = owner[0] == own[0] and not psutil.pid_exists(owner[1])
            if owner != own and not came_back:
                return (
                    f"it was started with launcher.node_rank={self.node_rank}, which another machine has; use "
                    "another number on each, or launcher.node_rank=auto"
                )
        return ""


def _is_locked(run_dir: RunDir, lock: str) -> bool:
    """Whether this is the folder that main has locked, and not a folder with the same path on another disk."""
    try:
        return safe_read.read_text(run_dir.lock) == lock and run_dir.config.is_file()
    except UnreadableFile:
        return False
