"""Plain child processes: what `torch.multiprocessing.spawn` does, with clean signals and a port of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from torch.distributed import TCPStore

from lockstep.launcher.base import Inline, cause, forget_errors
from lockstep.protocols import Entry
from lockstep.rundir import RunDir

GRACE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Spawn(Inline):
    """One fresh interpreter per rank, started by this process."""

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        assert isinstance(self.ranks, int)
        forget_errors(run_dir)
        # The store is bound before its port is told to anyone, so no two jobs can meet on one.
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        children: dict[int, BaseProcess] = {
            rank: context.Process(
                target=_rank, args=(entry, run_dir.path, rank, self.ranks, store.port), name=f"rank{rank}"
            )
            for rank in range(self.ranks)
        }
        with _forwarding(children):
            for child in children.values():
                child.start()
            codes = _outcome(children)
        if any(codes.values()):
            raise cause(run_dir, codes)


def _rank(entry: Entry, path: Path, rank: int, ranks: int, port: int) -> None:
    """The child's side: the environment of a rank, then the entry's own way of being a process."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    module = sys.modules[entry.__module__]
    module.exit_as_rank(path)


def _outcome(children: dict[int, BaseProcess]) -> dict[int, int]:
    """Wait for all; when one fails the others cannot go on, and are ended. Returns their exit codes."""
    running = dict(children)
    while running:
        wait([child.sentinel for child in running.values()])
        running = {rank: child for rank, child in running.items() if child.exitcode is None}
        if any(child.exitcode for child in children.values()):
            _end(list(running.values()))
            break
    return {rank: child.exitcode or 0 for rank, child in children.items()}


def _end(children: list[BaseProcess]) -> None:
    for child in children:
        child.terminate()
    for child in children:
        child.join(GRACE_S)
        if child.exitcode is None:
            child.kill()
            child.join()


@contextmanager
def _forwarding(children: dict[int, BaseProcess]) -> Iterator[None]:
    """Pass a wish to stop on to the ranks, as SIGTERM: a second SIGINT would end them at once."""

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children.values():
            if child.is_alive():
                child.terminate()

    before = {each: signal.signal(each, forward) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
