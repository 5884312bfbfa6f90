"""Running a job on several machines, on main's machine: attempts, and when an attempt ends or a new one begins."""

from __future__ import annotations

import multiprocessing.connection
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.core import log
from lockstep.core.errors import LockstepError, RankFailed, Stopped
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.launcher.base import first_failure, remove_error_files
from lockstep.launcher.machines import Machines
from lockstep.launcher.processes import LOOPBACK, POLL_S, Forwarding, failures, forwarding, starting, store
from lockstep.launcher.spawn import Children, environment, fresh_rank


class AllRanks:
    """The ranks of all machines."""

    def __init__(self, local: Children, machines: Machines) -> None:
        self.local = local
        self.machines = machines

    def codes(self) -> dict[int, int | None]:
        self.machines.poll()
        return {**self.local.codes(), **self.machines.codes()}

    def send(self, number: int) -> None:
        self.local.send(number)
        self.machines.send(number)


@dataclass(frozen=True, kw_only=True)
class Lead:
    """The role of main's machine in a job on several machines.

    Fields:
        machines: the other machines.
        ranks: the ranks of each machine.
        restarts: how often failed ranks are started again. A machine that joins, or leaves by a stop, is no failure.
    """

    machines: Machines
    ranks: int
    restarts: int

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        """Run `entry` in every rank of every machine.

        Raises:
            LockstepError: the job failed or was stopped.
        """
        restarts = self.restarts
        while reason := self._attempt(entry, run_dir, can_restart=restarts > 0):
            log.warn(f"{reason}; all ranks are started again from the last checkpoint")
            restarts -= isinstance(reason, RankFailed)

    def _attempt(self, entry: Entry, run_dir: RunDir, *, can_restart: bool) -> LockstepError | None:
        """Start the ranks of all machines that have joined, and wait for them.

        Returns:
            The reason to start the ranks again; None if they are done.

        Raises:
            LockstepError: the ranks ended for a reason that ends the job.
        """
        remove_error_files(run_dir)
        machines, local = self.machines, Children()
        all_ranks = AllRanks(local, machines)
        with local, forwarding(all_ranks) as request:
            machines.gather(run_dir, _stop_waiting(request))
            self._start(local, entry, run_dir)
            request.repeat()
            failed, joined = self._wait(all_ranks)
            if not failed:
                return None
            failure = first_failure(run_dir, failed)
            if isinstance(failure, RankFailed):
                failure = machines.failure() or failure
            changed = joined or any(member.leaving for member in machines.members)
            if not request.requested:
                if isinstance(failure, Stopped) and changed and machines.remaining >= machines.least:
                    return Stopped(f"machines have joined or left, and the job goes on with {machines.remaining}")
                if isinstance(failure, RankFailed) and can_restart:
                    return failure
            raise failure

    def _start(self, local: Children, entry: Entry, run_dir: RunDir) -> None:
        machines = self.machines
        address = machines.address if machines.members else LOOPBACK
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        port, size = listener.getsockname()[1], self.ranks * (1 + len(machines.members))
        with starting():
            for rank in range(self.ranks):
                variables = environment(rank, size, address, port, range(self.ranks))
                local.ranks.append(fresh_rank(entry, run_dir, variables))
        local.store = store(listener)
        for number, member in enumerate(machines.members, start=1):
            first = number * self.ranks
            member.codes = dict.fromkeys(range(first, first + self.ranks))
            member.give_up_at = None
            member.send(start={"first": first, "ranks": self.ranks, "size": size, "address": address, "port": port})

    def _wait(self, all_ranks: AllRanks) -> tuple[dict[int, int], bool]:
        """Wait until all ranks have ended.

        Returns:
            The exit codes of the ranks that failed, and whether a machine has joined, so that the ranks had to save.
        """
        joined = False
        while True:
            running = [rank.sentinel for rank in all_ranks.local.ranks if rank.code() is None]
            multiprocessing.connection.wait(running, POLL_S)
            ended = None not in all_ranks.codes().values()  # before `failures`, so that it sees every rank that ended
            failed = failures(all_ranks)
            if failed or ended:
                return failed, joined
            if self.machines.newcomers and not joined:
                joined = True
                all_ranks.send(signal.SIGTERM)


def _stop_waiting(request: Forwarding) -> Callable[[], None]:
    def check() -> None:
        if request.requested:
            raise Stopped("stopped while waiting for machines; start the same command on each again")

    return check
