"""What a run knows of itself at its end, for those who judge it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.runtime import host
from lockstep.training.resolved_job import ResolvedJob


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of a run at its end.

    Fields:
        shares: the shares of the parts in its time (`TimeSpent`).
        spread: how exact the shares of the parts of a step are.
        hardware: the means of the monitor's figures (`cpu_cores`, `gpu_util` and others), and `idle_cores`: how many
            of the machine's nobody used.
        scores: the figures of the best weights.
        labels: of the evaluation split, as in a `Shard`.
        ended_early: why the run ended before its last step, in a sentence; empty if it did not.
        mfu: percent of the devices' peak rate; 0 if it is not known.
        cores: the CPU cores of this machine that the job may use.
    """

    job: ResolvedJob
    world: World
    plan: Plan
    model: nn.Module
    steps: int
    shares: Mapping[str, float]
    spread: Mapping[str, float]
    hardware: Mapping[str, float]
    mfu: float
    scores: Mapping[str, float] = field(default_factory=dict)
    labels: Tensor = field(default_factory=lambda: torch.empty(0))
    ended_early: str = ""
    cores: int = field(default_factory=host.cores)

    def share(self, *parts: str) -> float:
        return sum(self.shares.get(part, 0.0) for part in parts)

    @property
    def on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    @property
    def local_batch(self) -> int:
        return self.job.micro_batch(self.world.size)
