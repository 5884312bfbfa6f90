"""The launcher that submits the job to SLURM. `lockstep.job.submit` does the submission."""

import os
from dataclasses import dataclass
from typing import ClassVar

from lockstep.core import slurm
from lockstep.core.errors import InputError
from lockstep.core.fields import ranged, ruled
from lockstep.core.rules import Text, Time
from lockstep.launcher.elastic import MOST_NODES, Elastic
from lockstep.launcher.spawn import Spawn


@dataclass(frozen=True, kw_only=True)
class Slurm(Spawn):
    """A SLURM job with one task on each machine, which starts the ranks there."""

    submits: ClassVar[bool] = True
    restarts: int = ranged(0, least=0, most=1_000_000)
    nodes: int = ranged(1, least=1, most=MOST_NODES)
    gpus: int | None = ranged(None, least=0, most=1024)
    cpus: int | None = ranged(None, least=1, most=65_536)
    memory: int | None = ranged(None, least=1, most=1_000_000)
    time: str = ruled("1h", Time())
    save_before: str = ruled("2min", Time())
    partition: str | None = ruled(None, Text())
    account: str | None = ruled(None, Text())
    qos: str | None = ruled(None, Text())
    constraint: str | None = ruled(None, Text())
    setup: list[str] = ruled([], Text())
    dry_run: bool = False

    def in_allocation(self) -> Spawn:
        """The launcher that starts the ranks on a machine of the job: `elastic` if the job needs it, else `spawn`.

        Raises:
            InputError: SLURM has not started this process.
        """
        if not slurm.is_submitted():
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
            rendezvous=slurm.rendezvous(),
            node_rank=int(os.environ["SLURM_NODEID"]),
        )
