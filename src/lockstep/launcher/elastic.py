"""The launchers for several machines: torch's agents, and SLURM. `lockstep.job.slurm` does the submission."""

import logging
import os
import re
import signal
import socket
from collections.abc import Sequence
from typing import Any, ClassVar

from torch.distributed import DistError

from lockstep.config.options import option
from lockstep.core import launch_env, log, plan
from lockstep.core.errors import InputError, RankFailed, Stopped, reason_of
from lockstep.core.fields import SHELL, TEXT, TIME_CHECK, Check, mapping, personal, ranged, ruled
from lockstep.core.launch_env import AGENT
from lockstep.core.protocols import Entry, Launcher
from lockstep.core.run_dir import RunDir
from lockstep.launcher.inline import Inline
from lockstep.launcher.processes import is_listening, wait
from lockstep.launcher.spawn import Spawn, killed
from lockstep.runtime import addresses
from lockstep.runtime.signals import STOP_SIGNALS

MOST_NODES = 4096
FIRST_S = 600  # the seconds that machines have at least for joining a job
ANSWER_S = 5.0  # seconds after which a network that swallows what it cannot deliver counts as silent
LAST_CALL_S = 5  # how long a job with enough machines waits for more of them
MONITOR_S = 0.1  # how often the agent looks at its ranks


def _is_node_range(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return False
    match = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", str(value))
    return match is not None and 1 <= int(match[1]) <= int(match[2] or match[1]) <= MOST_NODES


def _is_host_and_port(value: Any) -> bool:
    # An IPv6 address is written in brackets.
    match = re.fullmatch(r"([\w.-]{1,253}|\[[\da-fA-F:.%\w]{2,60}\]):(\d{1,5})", str(value))
    return match is not None and 1 <= int(match[2]) <= 65_535


NODES = Check(f"a whole number from 1 to {MOST_NODES:,}, or the fewest and the most, such as 2:4", _is_node_range)
RENDEZVOUS = Check("HOST:PORT with a port from 1 to 65,535, such as 10.0.0.1:29500", _is_host_and_port)


@option("launcher")
class Elastic(Spawn):
    """One fresh interpreter per rank, with restarts after a fault, also on several machines."""

    # how often failed ranks are started again from the last checkpoint
    restarts: int = ranged(0, least=0, most=1_000_000)
    # machines of the job, each with `launcher.ranks` processes. Start the same command on each machine, see
    # docs/clusters.md. `2:4`: the job begins with two machines; machines may join, up to four, and leave
    nodes: int | str = ruled(1, NODES)
    # where the machines meet: an address of main's machine and a free port there, `HOST:PORT`
    rendezvous: str | None = ruled(None, RENDEZVOUS)
    # number of this machine; 0 is main's. `auto`: 0 on the machine with the address of `launcher.rendezvous`, the
    # other numbers in the order of the names of the machines
    node_rank: int | str = ranged("auto", least=0, most=MOST_NODES - 1, words=("auto",))

    @property
    def node_range(self) -> tuple[int, int]:
        least, _, most = str(self.nodes).partition(":")
        return int(least), int(most or least)

    def check(self) -> None:
        for key, neutral in (("rendezvous", None), ("node_rank", "auto")):
            if self.node_range[1] == 1 and (value := getattr(self, key)) != neutral:
                raise InputError(
                    f"launcher.{key} is {value}, but launcher.nodes is 1, so no machines meet; use launcher.nodes=2, "
                    f"or remove launcher.{key}"
                )

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        restarts = self.restarts
        while failure := self.attempt(entry, run_dir, can_restart=restarts > 0):
            log.warn(f"{failure}; all ranks are started again")
            restarts -= 1

    def can_fork(self) -> bool:
        return False

    def as_rank(self) -> Launcher:
        return Inline(backend=self.backend, timeout=self.timeout, threads=self.threads)

    def try_address(self) -> str:
        if self.node_range[1] == 1:
            return super().try_address()
        host, port = self._meeting()
        family, address = addresses.resolve_host(host, port)[0]
        if not self.is_host:
            return f"{host} has an address; it listens at {self.rendezvous} when the job starts there"
        # As torch's agent will, on all interfaces if the name is a loopback one. A machine can resolve its own name
        # to such an address, which other machines do not reach.
        try:
            socket.create_server((address, port), family=family).close()
        except OSError as error:
            raise InputError(
                f"launcher.rendezvous: this machine cannot listen at {address}:{port} ({error.strerror}); use an "
                "address of it and a free port, or launcher.node_rank=1 if this is not main's machine"
            ) from error
        return f"this machine can listen at {self.rendezvous}"

    @property
    def is_host(self) -> bool:
        return self.node_rank == 0 or (self.node_rank == "auto" and addresses.is_own_address(*self._meeting()))

    def run_agent(self, command: Sequence[str]) -> None:
        """Run `command` as each local rank by torch's elastic agent. Raises LockstepError, or SystemExit."""
        # Not needed by other jobs, and slow to import.
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher.api import elastic_launch

        timeout = max(1, round(plan.seconds("launcher.timeout", self.timeout)))
        patience = max(timeout, FIRST_S)
        self._await_main(patience)
        logger = logging.getLogger("torch.distributed.elastic")
        logger.propagate = False  # its warnings are about ranks and signals, which the ranks report themselves
        logger.addHandler(logging.NullHandler())
        # Else a machine that joins gets no address of the store: main's rank serves one of each round.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        try:
            elastic_launch(self._launch_config(timeout, patience), command[0])(*command[1:])
        except SignalException as stop:
            raise SystemExit(Stopped.exit_code) from stop
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:  # the others say why they have ended
                raise RankFailed(killed({rank: failure.exitcode})) from error
            raise SystemExit(failure.exitcode) from error
        # A machine that was not needed gets no result, which torch's launcher takes for one (AttributeError).
        except (RendezvousError, DistError, AttributeError) as error:
            raise RankFailed(
                f"no {self.node_range[0]} machines have met at {self.rendezvous}, or main's is gone "
                f"({reason_of(error)}); start the same command on each, and see the output of the others"
            ) from error

    def _launch_config(self, timeout: int, patience: int) -> Any:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
        from torch.distributed.launcher.api import LaunchConfig

        (host, _), (least, most) = self._meeting(), self.node_range
        return LaunchConfig(
            min_nodes=least,
            max_nodes=most,
            nproc_per_node=int(self.ranks),
            run_id=AGENT,
            rdzv_backend="c10d",
            rdzv_endpoint=str(self.rendezvous),
            rdzv_configs={
                "is_host": self.is_host,
                "join_timeout": patience,
                "last_call_timeout": LAST_CALL_S,
                "read_timeout": timeout,
            },
            max_restarts=self.restarts,
            monitor_interval=MONITOR_S,
            # The agents number the machines in the order of these names, and the first one is where the ranks meet.
            local_addr=host if self.is_host else f"~{self.node_rank:>8}~{socket.gethostname()}",
            logs_specs=DefaultLogsSpecs(log_dir=os.devnull),  # a folder would stay behind after a kill
            signals_to_handle=",".join(stop.name for stop in signal.Signals if stop in STOP_SIGNALS),
        )

    def _await_main(self, patience: float) -> None:
        """Check the place where the machines meet; on another machine than main's, wait until main listens there."""
        self.try_address()
        if self.is_host:
            least = self.node_range[0]
            log.show(f"waiting at {self.rendezvous} for {least - 1} of {least} machines")
            return
        host, port = self._meeting()
        if is_listening(host, port, ANSWER_S):  # a network can swallow what it cannot deliver
            return
        log.show(f"waiting for main at {self.rendezvous}")
        if not wait(lambda: is_listening(host, port), patience):
            raise RankFailed(
                f"nobody has listened at launcher.rendezvous={self.rendezvous} for {patience:g} s; start the same "
                "command on that machine, or see its output"
            )

    def _meeting(self) -> tuple[str, int]:
        if self.rendezvous is None:
            raise InputError(
                f"launcher.nodes is {self.nodes}, but nothing says where the machines meet; name main's machine and "
                "a free port of it, the same on each: launcher.rendezvous=10.0.0.1:29500"
            )
        if isinstance(self.node_rank, int) and self.node_rank >= (most := self.node_range[1]):
            raise InputError(f"launcher.node_rank is {self.node_rank}, expected a number from 0 to {most - 1}")
        host, _, port = self.rendezvous.rpartition(":")
        return host.strip("[]"), int(port)


@option("launcher")
class Slurm(Spawn):
    """A SLURM job with one task on each machine, which starts the ranks. A sweep is an array."""

    submits: ClassVar[bool] = True
    # how often failed ranks are started again from the last checkpoint
    restarts: int = ranged(0, least=0, most=1_000_000)
    nodes: int = ranged(1, least=1, most=MOST_NODES)  # machines of the job, each with `launcher.ranks` processes
    gpus: int | None = ranged(None, least=0, most=1024)  # GPUs of each machine
    # cores of each machine; null: one for each rank and each of its `loader.workers`, if that is a number
    cpus: int | None = ranged(None, least=1, most=65_536)
    memory: int | None = ranged(None, least=1, most=1_000_000)  # memory of each machine, in GB
    # time limit of the job, in whole minutes. A run that needs longer is saved and queued again
    time: str = ruled("1h", TIME_CHECK)
    # how long before the time limit, or before a preemption, the run is saved and queued again
    save_before: str = ruled("2min", TIME_CHECK)
    partition: str | None = ruled(None, TEXT)  # passed to `sbatch`
    account: str | None = ruled(None, TEXT)  # passed to `sbatch`
    qos: str | None = ruled(None, TEXT)  # passed to `sbatch`
    constraint: str | None = ruled(None, TEXT)  # passed to `sbatch`
    at_once: int | None = ranged(None, least=1, most=65_536)  # jobs of a sweep's array that run at a time; null: all
    # further options of `sbatch`, e.g. `{gres: "gpu:a100:2", exclude: node7}`; only the command line can set them
    sbatch: dict[str, Any] = personal(mapping(most=1e9), SHELL)
    # shell commands to run before the job; only the command line can set them
    setup: list[str] = personal(ruled([], TEXT), SHELL)
    dry_run: bool = False  # show the script and submit nothing

    def in_allocation(self) -> Spawn:
        """The launcher of the ranks on a machine of the job: `elastic` if it needs that, else `spawn`."""
        if not launch_env.is_submitted():
            raise InputError(
                "launcher=slurm submits the job, which only the command line can do; use lockstep train, or "
                "launcher=auto here"
            )
        here = Spawn(ranks=self.ranks, backend=self.backend, timeout=self.timeout, threads=self.threads)
        if self.nodes == 1:
            return Elastic(**vars(here), restarts=self.restarts) if self.restarts else here
        return Elastic(
            **vars(here),
            restarts=self.restarts,
            nodes=self.nodes,
            rendezvous=launch_env.rendezvous(),
            node_rank=int(os.environ["SLURM_NODEID"]),
        )
