"""This machine in a job on several machines, and what the machines tell each other in the meeting's store.

Main's machine serves the store and numbers the attempts. In each attempt, torch's agents meet there and start the
ranks. Then each machine reports how its ranks ended, and main decides whether another attempt follows.

An agent or a store can wait for a quarter of an hour for a machine that is silent. So each call of them has a thread,
and the main thread bounds its wait: it handles signals, ends ranks whose attempt has ended elsewhere, and gives up
when the store has been silent for too long.
"""

import json
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import DistError, TCPStore

from lockstep.core.errors import RankFailed, Stopped
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.launcher.agent import Meeting, ranks_here, run_agent, send_to_ranks
from lockstep.launcher.attach import in_thread
from lockstep.launcher.processes import RANKS_GRACE_S, Forwarding, forwarding

Answer = TypeVar("Answer")

FIRST_S = 600.0  # the seconds that machines have at least for joining a new job
LOOK_S = 0.25  # seconds between two looks at the store
# The keys of the store. Main sets STATE; the other machines count themselves when they connect, and when they have
# read how the job ended; one that leaves the job sets why. Each machine of an attempt adds a line when it joins it,
# and one when it has ended there.
STATE, CONNECTED, READ, REFUSED = "state", "connected", "read", "refused"
JOINED, REPORTS = "joined/{}", "reports/{}"


class Machine(ABC):
    """This machine in a job on several.

    Args:
        meeting: where the machines meet.
        name: the name of this machine for torch's agents, which number the machines in the order of the names.
        overrides: the overrides of this machine's command that must be the same on all machines.
        lost: what it means that the store does not answer.
    """

    store: TCPStore
    request: Forwarding

    def __init__(self, meeting: Meeting, name: str, overrides: Sequence[str], lost: str) -> None:
        self.meeting, self.name, self.overrides, self.lost = meeting, name, sorted(overrides), lost
        self.state: dict[str, Any] = {}  # what main has told last: the attempt and its job, or how the job ended
        self.attempt = 0  # the last attempt that this machine has joined
        self.has_run = self.is_done = False  # whether it has run ranks here, and whether all its ranks are done

    def run_attempts(self, entry: Entry) -> None:
        """Run the ranks of this machine in each attempt, until the job ends.

        Raises:
            LockstepError: the job failed or was stopped.
        """
        with forwarding(send_to_ranks) as self.request:
            try:
                while self._next_attempt():
                    self._run_attempt(entry)
            finally:
                send_to_ranks(signal.SIGKILL)

    @abstractmethod
    def _next_attempt(self) -> bool:
        """Bring `state` to the next attempt; returns False if the job is done."""

    def ask(self, call: Callable[..., Answer], *arguments: Any, limit: float | None = None) -> Answer:
        """The answer to a call that can wait for another machine, by default at most the meeting's timeout.

        Raises:
            LockstepError: there is no answer, or this machine was stopped while it waited for others.
        """
        answer, silent, limit = in_thread(partial(call, *arguments)), 0.0, limit or self.meeting.timeout
        while True:
            self.has_run |= bool(ranks_here())
            if self.request.requested and not self.has_run:
                raise Stopped("stopped while waiting for machines; start the same command on each again")
            self.request.repeat()
            if futures.wait([answer], LOOK_S).done:
                break
            silent += LOOK_S  # counted in turns: time in which this process was suspended is no silence
            if silent > limit:
                raise RankFailed(f"{self.lost} (no answer for {limit:g} s)")
        try:
            return answer.result()
        except DistError as error:
            raise RankFailed(f"{self.lost} ({str(error).splitlines()[0]})") from error

    def look(self) -> bool:
        """Look at the store; returns whether ranks of another machine have ended before they were done."""
        return any(report["is_over"] for report in self.lines(REPORTS))

    def lines(self, key: str) -> list[Any]:
        """What the machines of this attempt have added to a key."""
        key = key.format(self.attempt)
        return [json.loads(line) for line in self.store.get(key).splitlines()] if self.store.check([key]) else []

    def add_line(self, key: str, line: object) -> None:
        self.ask(self.store.append, key.format(self.attempt), json.dumps(line) + "\n")  # type: ignore[attr-defined]

    def _run_attempt(self, entry: Entry) -> None:
        """Run the ranks of this machine in the attempt of the state, and report how they ended."""
        number = self.attempt = int(self.state["attempt"])
        self.has_run, host = False, socket.gethostname()
        self.add_line(JOINED, host)
        patience = max(self.meeting.timeout, FIRST_S if number == 1 else 0.0)
        run_dir, ranks = RunDir(Path(self.state["folder"])), int(self.state["ranks"])
        agent = in_thread(
            lambda: run_agent(
                self.meeting, number, entry, run_dir, ranks=ranks, own_name=self.name, patience=patience
            )
        )
        over = 0.0  # seconds since the attempt has ended elsewhere
        ended_ranks = False
        while not futures.wait([agent], LOOK_S).done:
            is_over, has_ranks = self.ask(self.look), bool(ranks_here())
            if "end" in self.state and not has_ranks:  # the agent may wait for machines for minutes
                return
            if is_over and has_ranks:
                ended_ranks = True
                send_to_ranks(signal.SIGKILL if over > RANKS_GRACE_S else signal.SIGTERM)
            over = over + LOOK_S if is_over else 0.0
        self.is_done, failed = agent.result()
        is_over = bool(failed) or (self.has_run and not self.is_done)  # a machine that was not needed ends nothing
        report = {"host": host, "is_over": is_over, "is_leaving": self.request.requested}
        self.add_line(REPORTS, {**report, "failed": {} if ended_ranks else failed})
