"""Plain child processes: what `torch.multiprocessing.spawn` does, with clean signals and a port of its own."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from lockstep.launcher.base import Inline, cause, forget_errors
from lockstep.launcher.ranks import LOOPBACK, POLL_S, failures, forwarding, loopback_store, starting
from lockstep.protocols import Entry
from lockstep.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Spawn(Inline):
    """One fresh interpreter per rank, started by this process."""

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        assert isinstance(self.ranks, int)
        forget_errors(run_dir)
        store = loopback_store()
        context = multiprocessing.get_context("spawn")
        children = Children(
            [
                context.Process(target=_rank, args=(entry, run_dir.path, rank, self.ranks, store.port))
                for rank in range(self.ranks)
            ]
        )
        with forwarding(children) as request:
            children.start()
            request.repeat()
            running = True
            while running:
                time.sleep(POLL_S)
                running = None in children.codes().values()
                if failed := failures(children):
                    raise cause(run_dir, failed)


class Children:
    """The ranks as children of this process."""

    def __init__(self, processes: list[BaseProcess]) -> None:
        self.processes = processes

    def start(self) -> None:
        # Started now, because its start would let the signals through that `starting` holds back.
        resource_tracker.ensure_running()
        with starting():
            for process in self.processes:
                process.start()

    def codes(self) -> dict[int, int | None]:
        return {rank: process.exitcode for rank, process in enumerate(self.processes)}

    def send(self, number: int) -> None:
        for process in self.processes:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)


def _rank(entry: Entry, path: Path, rank: int, ranks: int, port: int) -> None:
    """The child's side: the environment of a rank, then the entry's own way of being a process."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    module = sys.modules[entry.__module__]
    module.exit_as_rank(path)
