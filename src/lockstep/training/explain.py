"""Explains a run that has ended: where its time went, the verdict and the checklist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.runtime import host
from lockstep.training.checklist import checklist
from lockstep.training.resolved_job import ResolvedJob
from lockstep.training.trials import LONGEST_S, settings_to_try, tried
from lockstep.training.verdict import Evidence, Finding, verdict

TRIALS_SHARE = 0.02  # the most of the run's time that trials take
LEAST_S = 0.1  # trials that may take less than this say nothing


def explain(
    *,
    job: ResolvedJob,
    world: World,
    plan: Plan,
    model: nn.Module,
    shares: Mapping[str, float],
    hardware: Mapping[str, float],
    mfu: float,
    seconds: float,
) -> tuple[Finding, dict[str, Any]]:
    """The verdict on a run of so many seconds, and what its summary says of it.

    Tries other settings for at most a fiftieth of the time that the run took, on main alone: other ranks have ended.
    """
    cores = host.cores()
    factors: dict[str, float] = {}
    room = min(LONGEST_S, TRIALS_SHARE * seconds)
    if room >= LEAST_S and job.strategy.whole_model and not job.model.compile:
        present, others = settings_to_try(job, world, model, cores)
        factors = tried(present, others, device=world.device, seconds=room)
    evidence = Evidence(
        job=job,
        world=world,
        plan=plan,
        model=model,
        shares=shares,
        hardware=hardware,
        mfu=mfu,
        factors=factors,
        cores=cores,
    )
    best = verdict(evidence)
    return best, {
        "time": {part: round(share, 4) for part, share in shares.items() if share},
        "verdict": {**asdict(best), "sentence": str(best)},
        "checklist": [asdict(item) for item in checklist(evidence)],
    }
