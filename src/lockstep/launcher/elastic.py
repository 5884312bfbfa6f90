"""Torch's elastic agent in this process: one command per rank, a rendezvous of its own, restarts."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lockstep import log
from lockstep.errors import InputError, RankFailed
from lockstep.launcher.base import Inline, cause, forget_errors
from lockstep.protocols import Entry
from lockstep.rundir import RunDir

# A restarted rank can find a stale entry of the one before it in a store that the agent shares with the ranks.
_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True, kw_only=True)
class Elastic(Inline):
    """Fields:
    restarts: how often the ranks are started again, from the last checkpoint, after one of them failed.
    """

    restarts: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.restarts < 0:
            raise InputError(f"launcher.restarts is {self.restarts}, expected 0 or more")

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        assert isinstance(self.ranks, int)
        forget_errors(run_dir)
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=self.ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=self.restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(),
        )
        # A command and not a function: a function's worker cannot leave cleanly after a signal.
        command = elastic_launch(launch, sys.executable)
        with log.quiet_libraries(), _scoped(_ENVIRONMENT), _usr1_is_term():
            try:
                command("-m", entry.__module__, str(run_dir.path))
            except ChildFailedError as error:
                codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
                raise cause(run_dir, codes) from None
            except SignalException as error:
                # The agent passed the signal on and waited; the ranks have said how they ended.
                ended = cause(run_dir, {})
                if isinstance(ended, RankFailed) and run_dir.read_summary().get("status") == "completed":
                    return
                raise ended from error


@contextmanager
def _scoped(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables while the context is open."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _usr1_is_term() -> Iterator[None]:
    """The agent passes SIGTERM on to its ranks, but dies of SIGUSR1 and leaves them behind."""

    def terminate(number: int, frame: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGUSR1, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)
