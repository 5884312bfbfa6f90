"""The role of another machine than main's in a job on several machines: it follows main's attempts."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil
from torch.distributed import TCPStore

from lockstep.core import log, network, safe_read
from lockstep.core.errors import InputError, LockstepError, RankFailed, Stopped
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.launcher.agent import Meeting, NotEnough
from lockstep.launcher.attach import is_listening
from lockstep.launcher.machine import CLAIMED, CONNECTED, FIRST_S, LOOK_S, REFUSED, STATE, Machine, wait
from lockstep.launcher.processes import POLL_S

# Seconds for a file of another machine to become visible (NFS caches the content of a folder for up to a minute, by
# default for 3 to 60 s).
SEEN_S = 30.0


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

    def run(self, entry: Entry) -> None:
        """Run the ranks of this machine in each attempt, until the job ends.

        Raises:
            LockstepError: the job failed or was stopped.
        """
        self.run_attempts(entry)

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
        """Wait until main's machine serves the store.

        Raises:
            RankFailed: it does not in time.
        """
        meeting, patience = self.meeting, max(self.meeting.timeout, FIRST_S)
        until, announced = time.monotonic() + patience, False
        while not is_listening(meeting.host, meeting.port):
            if time.monotonic() > until:
                raise RankFailed(
                    f"nobody has listened at launcher.rendezvous={meeting.endpoint} for {patience:g} s; start the "
                    "same command on that machine, or see its output"
                )
            if not announced:
                log.console.print(f"waiting for main at {meeting.endpoint}")
                announced = True
            time.sleep(LOOK_S)

    def _await_attempt(self, number: int) -> None:
        """Wait until main has begun this attempt or a later one, or until the job has ended."""
        while self.state.get("attempt", number) < number:
            time.sleep(POLL_S)

    def _confirm_job(self, store: TCPStore) -> RunDir:
        """The run folder, which this machine must see, of a job that was started with the same command.

        Raises:
            InputError: this machine cannot take part.
        """
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
        """Claim the `launcher.node_rank` of this machine for an attempt.

        Raises:
            InputError: another machine, or another process of this one, has it.
        """
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
