"""Explains a run that has ended: where its time went, the verdict and the checklist."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lockstep.core.model import has_batchnorm
from lockstep.runtime import host
from lockstep.training.dry_run import TRIALS_S, has_convolutions, settings_to_try, takes_channels_last, tried
from lockstep.training.verdict import WORK, WORTH, Evidence, Finding, amdahl, data_findings, verdict

TRIALS_SHARE = 0.02  # the most of the run's time that trials take
LEAST_S = 0.1  # trials that may take less than this say nothing
SMALL_BATCH = 16  # of a rank: batch norm counts over too few images


def explain(evidence: Evidence, seconds: float) -> tuple[Finding, dict[str, Any]]:
    """The verdict on a run of so many seconds, and what its summary says of it. `evidence` has no trials yet.

    Tries other settings for at most a fiftieth of the time that the run took, on main alone: other ranks have ended.
    """
    job, world = evidence.job, evidence.world
    room = min(TRIALS_S, TRIALS_SHARE * seconds)
    if room >= LEAST_S and job.strategy.whole_model and not job.model.compile:
        present, others = settings_to_try(job, world, evidence.model, evidence.cores)
        evidence = replace(evidence, factors=tried(present, others, device=world.device, seconds=room))
    best = verdict(evidence)
    return best, {
        "time": {part: round(share, 4) for part, share in evidence.shares.items() if share},
        "verdict": {**asdict(best), "sentence": str(best)},
        "checklist": [asdict(item) for item in checklist(evidence)],
    }


@dataclass(frozen=True)
class Item:
    """A point of the checklist: `done`, `worth trying` or `not applicable`, and why."""

    item: str
    state: str
    reason: str
    override: str | None = None


def checklist(evidence: Evidence) -> Iterator[Item]:
    """The points that tutorials on fast training go through."""
    job, factors = evidence.job, evidence.factors

    def point(item: str, done: bool, reason: str, override: str | None, obstacle: str = "") -> Item:
        state = "not applicable" if obstacle else "done" if done else "worth trying"
        return Item(item, state, obstacle or reason, override if state == "worth trying" else None)

    def by_trial(item: str, done: bool, override: str, otherwise: str = "not tried", obstacle: str = "") -> Item:
        reason = override if done else otherwise
        if override in factors and not done and not obstacle:
            reason = f"tried: {factors[override]:.2f}x in a step"
            obstacle = reason * (amdahl(evidence.share(*WORK), factors[override]) < WORTH)
        return point(item, done, reason, override, obstacle)

    obstacle = "this processor has no instructions for bfloat16" * (not evidence.on_gpu and not host.has_bfloat16())
    narrow = job.precision.dtype is not torch.float32
    yield by_trial("mixed precision", narrow, "precision=bf16", obstacle=obstacle)
    workers, waits = int(getattr(job.loader, "workers", 0)), evidence.share("data")
    seen = f"{workers} workers, {100 * waits:.0f} % of the time waiting"
    data = next(data_findings(evidence), None)
    yield point("workers and prefetch", data is None, seen, data.override if data is not None else None)
    yield by_trial("a larger batch", False, f"batch={2 * evidence.plan.batch}", "not tried; it is another run")
    obstacle = "the model has no batch norm" * (not has_batchnorm(evidence.model))
    synced = evidence.world.size == 1 or bool(getattr(job.strategy, "sync_batchnorm", True))
    done = synced or evidence.local_batch >= SMALL_BATCH
    seen = f"{evidence.local_batch} images of a rank at a time"
    yield point("synchronised batch norm", done, seen, "strategy.sync_batchnorm=true", obstacle)
    obstacle = "the model has no convolutions" * (not takes_channels_last(job, evidence.model))
    last = job.model.memory_format is torch.channels_last
    yield by_trial("channels_last", last, "model.channels_last=true", obstacle=obstacle)
    obstacle = "cuDNN is for convolutions on a GPU" * (not evidence.on_gpu or not has_convolutions(evidence.model))
    seen = "not the same bits every time"
    yield point("cudnn.benchmark", job.train.cudnn_benchmark, seen, "train.cudnn_benchmark=true", obstacle)
    compiled = "takes about a minute at the first start"
    yield point("torch.compile", job.model.compile, compiled, "model.compile=true")
