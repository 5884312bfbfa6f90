"""One attempt on this machine by torch's elastic agent, the agent of torchrun, and the ranks that it has started."""

import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass

import psutil
from torch.distributed import DistError

from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.launcher.processes import starting
from lockstep.runtime import child

# Seconds that a job with enough machines waits for more of them.
LAST_CALL_S = 5
MONITOR_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the machines of a job meet, and which.

    Fields:
        host, port: the address of the store that main's machine serves.
        least, most: the smallest and the largest number of machines.
        timeout: seconds of silence after which a machine counts as gone.
    """

    host: str
    port: int
    least: int
    most: int
    timeout: float

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def run_agent(
    meeting: Meeting,
    attempt: int,
    entry: Entry,
    run_dir: RunDir,
    *,
    ranks: int,
    own_name: str,
    patience: float,
) -> tuple[bool, dict[int, int]]:
    """Meet the other machines within `patience` seconds, and run `entry` in the `ranks` of this machine.

    Call it in a thread: its waits for other machines have no limit if the network is cut. The first machine in the
    order of `own_name` gets rank 0; its name is the address where the ranks meet.

    Returns:
        Whether all ranks are done, and the exit code of the first rank of this machine that failed. There is none if
        another machine has ended the attempt, or if too few machines have met in time.
    """
    # Not needed by other jobs, and slow to import.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=meeting.least,
        max_nodes=meeting.most,
        nproc_per_node=ranks,
        run_id=f"attempt-{attempt}",
        rdzv_backend="c10d",
        rdzv_endpoint=meeting.endpoint,
        rdzv_configs={
            "is_host": own_name == meeting.host,
            "join_timeout": round(patience),
            "last_call_timeout": LAST_CALL_S,
            "close_timeout": 5,
            "read_timeout": max(1, round(meeting.timeout)),
        },
        max_restarts=0,  # main decides for all machines: a stop is no reason to restart
        monitor_interval=MONITOR_S,
        local_addr=own_name,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # a folder would stay behind after a kill
    )
    command = ("-m", child.__name__, str(os.getpid()), entry.__module__, str(run_dir.path))
    _silence_agent()
    # After a restart, the store of an agent can have entries of the attempt before, so main's rank serves a store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        with starting():
            elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        rank, failure = next(iter(error.failures.items()))
        return False, {rank: failure.exitcode}
    # A machine that was not needed gets no result, which torch's launcher takes for one (AttributeError).
    except (RendezvousError, DistError, AttributeError):
        return False, {}
    return True, {}


def _silence_agent() -> None:
    """Show no warnings of torch's agent: they are about ranks and signals, which this launcher reports itself."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())


def ranks_here() -> list[psutil.Process]:
    """The processes that the agent of this process has started as ranks."""
    ranks = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended
            if child.__name__ in process.cmdline():
                ranks.append(process)
    return ranks


def send_to_ranks(number: int) -> None:
    for rank in ranks_here():
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)
