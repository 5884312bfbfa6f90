"""Torch's elastic agent in this process: one command per rank, restarts.

The agent starts, watches and restarts the ranks. Rendezvous, signals and the end of the other ranks are done as
under `spawn`: the agent's own rendezvous listens on all interfaces, and its signal handler raises wherever it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.core import log
from lockstep.core.errors import RankFailed
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.launcher.base import first_failure, forget_errors
from lockstep.launcher.processes import (
    LOOPBACK,
    Forwarding,
    failures,
    forwarding,
    loopback_listener,
    loopback_store,
    starting,
)
from lockstep.runtime import child

HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def watch(entry: Entry, run_dir: RunDir, *, ranks: int, restarts: int) -> None:
    """Run `entry` in so many ranks under an agent, and wait for them.

    Raises:
        LockstepError: what ended them.
    """
    forget_errors(run_dir)
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        rdzv_handler=LoopbackRendezvous(),
        # A command, because the agent's worker for a function cannot end cleanly after a signal.
        entrypoint=sys.executable,
        args=("-m", child.__name__, str(os.getpid()), entry.__module__, str(run_dir.path)),
        max_restarts=restarts,
    )
    agent = Agent(spec, run_dir)
    with log.quiet_libraries(), _without_its_signals(), forwarding(agent) as request:
        agent.request = request
        agent.run()
        if agent.failed:
            raise first_failure(run_dir, agent.failed)


class Agent(LocalElasticAgent):
    """The agent, with our own start of ranks, end of the others after a failure, and restart."""

    def __init__(self, spec: WorkerSpec, run_dir: RunDir) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))
        self.run_dir = run_dir
        self.failed: dict[int, int] = {}
        self.request = Forwarding(self)

    def codes(self) -> dict[int, int | None]:
        return {rank: process.poll() for rank, process in self._processes().items()}

    def send(self, number: int) -> None:
        for process in self._processes().values():
            process.send_signal(number)

    def _processes(self) -> dict[int, subprocess.Popen[bytes]]:
        if self._pcontext is None:  # a signal came before the start
            return {}
        assert isinstance(self._pcontext, SubprocessContext)
        return {rank: handler.proc for rank, handler in self._pcontext.subprocess_handlers.items()}

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with starting():
            started = super()._start_workers(worker_group)
        self.request.repeat()
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.failed = failures(self)
        result = super()._monitor_workers(worker_group)
        self.failed = self.failed or {rank: each.exitcode for rank, each in result.failures.items()}
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Called after a failure. Only a fault is tried again: not a stop, nor a mistake of the user."""
        ended = first_failure(self.run_dir, self.failed)
        if self.request.requested or not isinstance(ended, RankFailed):
            raise ended
        log.warn(f"{ended}; all ranks are started again from the last checkpoint")
        forget_errors(self.run_dir)
        super()._restart_workers(worker_group)


class LoopbackRendezvous(RendezvousHandler):
    """On one machine a rendezvous is only a store on the loopback interface.

    Each attempt gets a new store: in an old one a restarted rank could find entries of its predecessor.
    """

    use_agent_store = True

    def next_rendezvous(self) -> RendezvousInfo:
        store = loopback_store(loopback_listener())
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    def get_backend(self) -> str:
        return "loopback"

    def get_run_id(self) -> str:
        return str(os.getpid())

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return None

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


@contextmanager
def _without_its_signals() -> Iterator[None]:
    """Have the agent install no signal handler of its own while the context is open."""
    os.environ[HANDLED] = ""
    try:
        yield
    finally:
        del os.environ[HANDLED]
