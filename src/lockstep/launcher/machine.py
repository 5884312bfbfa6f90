"""This machine in a job on several machines, and what the machines tell each other in the meeting's store.

Main's machine serves the store and numbers the attempts. In each attempt, torch's agents meet there and start the
ranks. Then each machine reports how its ranks ended, and main decides whether another attempt follows.

A store or an agent can wait for a quarter of an hour for a machine that is silent. So threads talk to them, and the
main thread bounds their waits: it handles signals, ends ranks whose attempt has ended elsewhere, and gives up when
the store has been silent for too long.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

from torch.distributed import DistError, TCPStore

from lockstep.core.errors import BY_EXIT_CODE, LockstepError, RankFailed, Stopped
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.launcher.agent import Meeting, ranks_here, run_agent, send_to_ranks
from lockstep.launcher.processes import GRACE_S, POLL_S, Forwarding, forwarding

# The seconds that machines have at least for joining a new job.
FIRST_S = 600.0
LOOK_S = 0.25  # seconds between two looks at the store
# How long torch's agent may go on waiting for machines after the job has ended.
ENDED_S = 1.0
# The keys of the store. Main sets STATE; the others are numbers that a machine increases, most of them per attempt.
STATE, REFUSED, CONNECTED, READ = "state", "refused", "connected", "read"
JOINED, REPORTED, OVER = "joined/{}", "reported/{}", "over/{}"
# The machine that has a `launcher.node_rank` in an attempt.
CLAIMED = "claimed/{}/{}"


class Machine(ABC):
    """This machine in a job on several.

    Args:
        meeting: where the machines meet.
        name: the name of this machine for torch's agents, which number the machines in the order of the names.
        serves: whether this machine serves the store.
    """

    def __init__(self, meeting: Meeting, name: str, *, serves: bool) -> None:
        self.meeting, self.name = meeting, name
        self.serves = serves
        self.attempt = 0
        self.state: dict[str, Any] = {}  # the newest value of STATE
        self.looks = 0  # how often the store has answered
        self.over = 0  # the newest attempt that is known to have ended on a machine
        self.gathering = False  # whether torch's agent waits for machines, or its ranks run
        self.ended_ranks = False
        self.error: BaseException | None = None
        self.request: Forwarding | None = None

    def run_attempts(self, entry: Entry) -> None:
        """Run the ranks of this machine in each attempt, until the job ends.

        Raises:
            LockstepError: the job failed or was stopped.
        """
        with forwarding(send_to_ranks) as self.request:
            talk, look = (Thread(target=self._run, args=[work], daemon=True) for work in (self._talk, self._look))
            self._entry = entry
            try:
                talk.start()
                look.start()
                self._watch(talk)
            finally:
                send_to_ranks(signal.SIGKILL)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except DistError as error:
            self.error = self.error or self.lost(str(error).splitlines()[0])
        except BaseException as error:
            self.error = self.error or error

    @abstractmethod
    def _talk(self) -> None:
        """Take part in the attempts, in a thread; returns when the job is done."""

    @abstractmethod
    def lost(self, reason: str) -> LockstepError:
        """The error for a store that does not answer."""

    def raise_ending(self) -> None:
        """Raise the error with which main has ended the job, if it has ended it with one."""
        if code := self.state["end"]:
            raise BY_EXIT_CODE.get(code, RankFailed)(self.state["sentence"])

    def acknowledge(self, store: TCPStore) -> None:
        """Tell main that this machine has read how the job ended. It counts once, whichever thread was first."""
        if store.add(f"{READ}/{socket.gethostname()}/{os.getpid()}", 1) == 1:
            store.add(READ, 1)

    def _client(self) -> TCPStore:
        """A connection to the store. Each thread needs its own."""
        meeting = self.meeting
        timeout = timedelta(seconds=meeting.timeout)
        return TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=timeout)

    def _watch(self, talk: Thread) -> None:
        """Wait until the job has ended; runs in the main thread."""
        assert self.request is not None
        silent = over = ended = 0.0
        stopping, began = False, 0  # the last attempt whose ranks have been seen
        while talk.is_alive() and self.error is None:
            looks = self.looks
            talk.join(LOOK_S)
            began = self.attempt if ranks_here() else began
            # Counted in turns: time in which this process was suspended is no silence.
            silent = 0.0 if self.looks != looks else silent + LOOK_S
            if self.looks and silent > self.meeting.timeout:
                raise self.lost(f"no answer for {self.meeting.timeout:g} s")
            if self.request.requested:
                gathering = self.gathering and began != self.attempt
                if not stopping and (gathering or not self.attempt) and not ranks_here():
                    raise Stopped("stopped while waiting for machines; start the same command on each again")
                stopping = True
                self.request.repeat()
            over = over + LOOK_S if self.attempt and self.over >= self.attempt and self.gathering else 0.0
            ended = ended + LOOK_S if "end" in self.state and not ranks_here() else 0.0
            if ended >= ENDED_S:
                with suppress(DistError):  # main has left
                    self.acknowledge(self._client())
                self.raise_ending()
                return
            if over and ranks_here():
                self.ended_ranks = True
                send_to_ranks(signal.SIGKILL if over > GRACE_S else signal.SIGTERM)
        if self.error is not None:
            raise self.error

    def _look(self) -> None:
        """Look at the store again and again, in a thread."""
        while not self.state:
            time.sleep(POLL_S)
        store = self._client()
        while "end" not in self.state:
            attempt = self.attempt
            self.state = json.loads(store.get(STATE))
            if store.add(OVER.format(attempt), 0) or "end" in self.state:
                self.over = max(self.over, attempt)
            self._see(store)
            self.looks += 1
            time.sleep(LOOK_S)

    def _see(self, store: TCPStore) -> None:  # noqa: B027  (only main is told something)
        """Look at what only this role is told."""

    def _run_attempt(self, store: TCPStore, number: int, run_dir: RunDir, ranks: int) -> bool:
        """Run the ranks of this machine, and report how they ended; returns whether they are done.

        Raises:
            NotEnough: too few machines have met in time.
        """
        turn = store.add(JOINED.format(number), 1)
        store.set(f"{JOINED.format(number)}/{turn}", socket.gethostname())
        patience = self.meeting.timeout if number > 1 else max(self.meeting.timeout, FIRST_S)
        self.attempt, self.ended_ranks, self.gathering = number, False, True
        codes: dict[int, int] | None = {}
        try:
            codes = run_agent(
                self.meeting,
                f"attempt-{number}",
                self._entry,
                run_dir,
                ranks=ranks,
                own_name=self.name,
                serves=self.serves,
                patience=patience,
            )
        finally:
            self.gathering = False
            if codes is not None:
                store.add(OVER.format(number), 1)
            assert self.request is not None
            report = {"codes": {} if self.ended_ranks else codes, "leaving": self.request.requested}
            store.set(f"{REPORTED.format(number)}/{turn}", json.dumps(report))
            store.add(REPORTED.format(number), 1)
        return codes is None
