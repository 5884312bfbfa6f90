"""`hydra/launcher=ray`: the jobs of a sweep as tasks of Ray, on this machine or on a running cluster.

The ledger, the table and resuming are the pool's; Ray decides where each job runs. Each task runs
the command line of its job, so all nodes need the same environment and the sweep's folder under the same path. When a
node is lost, Ray starts its tasks elsewhere, and each continues from its job's last checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import InputError, Stopped, check_installed, reason_of
from lockstep.core.safe_write import append
from lockstep.records.ledger import Ledger, output_of
from lockstep.records.record import Record
from lockstep.runtime.host import VISIBLE
from lockstep.runtime.signals import STOP_SIGNALS
from lockstep.sweeps.devices import Devices, Needs, Share
from lockstep.sweeps.pool_launcher import PoolLauncher

if TYPE_CHECKING:
    from lockstep.sweeps.pool import Pool, SweepJob
    from lockstep.sweeps.view import SweepView

RAY_POLL_S, CONNECT_S = 0.1, 5.0


class RayLauncher(PoolLauncher):
    begun = "submitted"

    def __init__(self, address: str | None, retries: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.address, self.retries = address, retries

    def _launch(self, ledger: Ledger, job_overrides: Sequence[Sequence[str]], first: int) -> list[Record]:
        check_installed("ray", "hydra/launcher=ray")
        import ray

        try:
            self._connect()
            return super()._launch(ledger, job_overrides, first)
        finally:
            ray.shutdown()  # ends every task of this process

    def _connect(self) -> None:
        """Connect to the cluster, or start Ray here. Raises InputError if there is no cluster at the address."""
        import ray

        # Of a Ray that starts here; without the second its tasks yield to every other process.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")
        before = signal.getsignal(signal.SIGTERM)  # Ray sets a handler that ends the process
        host, _, port = (self.address or "").rpartition("/")[2].rpartition(":")
        try:
            if port.isdecimal():  # Ray itself tries for minutes
                socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
            ray.init(
                self.address or "local",
                log_to_driver=False,
                logging_level="ERROR",
                **({} if self.address else {"include_dashboard": False}),
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(
                f"hydra.launcher.address: Ray cannot be reached at {self.address or 'this machine'} "
                f"({reason_of(error)}); start a cluster with ray start --head, or remove the address for Ray on this "
                "machine alone"
            ) from error
        finally:
            signal.signal(signal.SIGTERM, before)

    def _devices(self) -> Devices:
        return Cluster.of_nodes()

    def _pool(self, ledger: Ledger, devices: Devices, view: SweepView) -> Pool:
        import ray

        from lockstep.sweeps.pool import Pool

        def start(ledger: Ledger, job: SweepJob, share: Share) -> RayTask:
            return RayTask(ledger, job, devices.all, self.retries)

        def wait(tasks: list[Any], seconds: float) -> None:
            if tasks:
                ray.wait(tasks, timeout=seconds)

        return Pool(ledger, devices, view, most=self.jobs, start=start, wait=wait)


class Cluster(Devices):
    """The largest node of a cluster. Every job is submitted at once: Ray shares out the devices."""

    @classmethod
    def of_nodes(cls) -> Cluster:
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus, cpus = (max((int(node.get(name, 0)) for node in nodes), default=0) for name in ("GPU", "CPU"))
        return cls(map(str, range(gpus)), cpus)

    def take(self, needs: Needs) -> Share:
        return Share()

    def give_back(self, share: Share, kind: str = "", measured: int | None = None) -> None:
        """Ray does."""


class RayTask:
    """A job as a task of Ray, for the pool. A stop is sent with `ray.cancel`; other signals do not reach a task."""

    def __init__(self, ledger: Ledger, job: SweepJob, largest: Needs, retries: int) -> None:
        import ray

        gpus = min(job.needs.gpus, largest.gpus)
        remote = ray.remote(
            num_gpus=gpus,
            num_cpus=1 if gpus else min(job.needs.cores, largest.cores),
            max_retries=retries,
            name=job.record.folder,
        )(run_on_node)
        self.output, self.is_stopping = output_of(ledger, job.record), False
        plain = replace(job, function=float)  # its command runs instead; the function refers to this process
        self.sentinel = remote.remote(ledger, plain, dict(os.environ), str(Path.cwd()))

    @property
    def exitcode(self) -> int | None:
        import ray

        if self.is_stopping:
            self.is_stopping = False
            ray.cancel(self.sentinel)  # not in a signal handler, which may have interrupted Ray
        return self._code if ray.wait([self.sentinel], timeout=0)[0] else None

    @cached_property
    def _code(self) -> int:
        import ray

        try:
            return int(ray.get(self.sentinel))
        except ray.exceptions.TaskCancelledError:
            return Stopped.exit_code
        except ray.exceptions.RayError as error:
            with append(self.output) as output:
                output.write(f"{error}\n")
            return -signal.SIGKILL

    def join(self) -> None:
        """The exit code says that it has ended."""

    def send_signal(self, number: int) -> None:
        self.is_stopping |= number in STOP_SIGNALS


def run_on_node(ledger: Ledger, job: SweepJob, environment: Mapping[str, str], folder: str) -> int:
    """Run the command of a job on a node; returns its exit code. Cancelled by Ray, it has the job save its state."""
    from lockstep.sweeps.pool import fresh

    # `ray.cancel` interrupts as Ctrl-C does, which a cluster ignores that a script started in its background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    share = Share(gpus=(os.environ[VISIBLE],) if VISIBLE in os.environ else ())
    process = fresh(ledger, job, share, environment, cwd=folder)
    while (code := process.exitcode) is None:
        with suppress(KeyboardInterrupt):
            time.sleep(RAY_POLL_S)
            continue
        process.send_signal(signal.SIGTERM)
    return code
