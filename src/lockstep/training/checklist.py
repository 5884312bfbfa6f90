"""The checklist of the tutorials on fast training: what a run does of it, and what is worth trying."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lockstep.core.model import has_batchnorm
from lockstep.runtime import host
from lockstep.telemetry.flops import peak_flops
from lockstep.training.dry_run import has_convolutions, takes_channels_last
from lockstep.training.verdict import Evidence, data_findings

NOT_TRIED = "lockstep doctor tries it"
SMALL_BATCH = 16  # of a rank: batch norm counts over too few images


@dataclass(frozen=True)
class Item:
    """A point of the checklist: `done`, `worth trying` or `not applicable`, and why."""

    item: str
    state: str
    reason: str
    override: str | None = None


def checklist(evidence: Evidence) -> Iterator[Item]:
    """The points that tutorials on fast training go through."""
    job = evidence.job

    def point(item: str, done: bool, reason: str, override: str | None, obstacle: str = "") -> Item:
        state = "not applicable" if obstacle else "done" if done else "worth trying"
        return Item(item, state, obstacle or reason, override if state == "worth trying" else None)

    obstacle = "this processor has no instructions for bfloat16" * (not evidence.on_gpu and not host.has_bfloat16())
    narrow = job.precision.dtype is not torch.float32
    yield point("mixed precision", narrow, NOT_TRIED, "precision=bf16", obstacle)
    device, dtype = evidence.world.device, job.precision.dtype
    exact, rounded = (peak_flops(device, dtype, tf32=tf32) for tf32 in (False, True))
    obstacle = "" if exact < rounded and not narrow else "no float32 on a GPU that is known to be faster in TF32"
    seen = f"torch's default in convolutions: 10 bits of mantissa at up to {rounded / (exact or 1):.1f}x the rate"
    yield point("TF32", job.precision.matmul == "high", seen, "precision=tf32", obstacle)
    workers, waits = int(getattr(job.loader, "workers", 0)), evidence.share("data")
    seen = f"{workers} workers, {100 * waits:.0f} % of the time waiting"
    data = next(data_findings(evidence), None)
    yield point("workers and prefetch", data is None, seen, data.override if data is not None else None)
    yield point("a larger batch", False, f"{NOT_TRIED}; it is another run", f"batch={2 * evidence.plan.batch}")
    obstacle = "the model has no batch norm" * (not has_batchnorm(evidence.model))
    synced = evidence.world.size == 1 or bool(getattr(job.strategy, "sync_batchnorm", True))
    done = synced or evidence.local_batch >= SMALL_BATCH
    seen = f"{evidence.local_batch} images of a rank at a time"
    yield point("synchronised batch norm", done, seen, "strategy.sync_batchnorm=true", obstacle)
    obstacle = "the model has no convolutions" * (not takes_channels_last(job, evidence.model))
    last = job.model.memory_format is torch.channels_last
    yield point("channels_last", last, NOT_TRIED, "model.channels_last=true", obstacle)
    obstacle = "cuDNN is for convolutions on a GPU" * (not evidence.on_gpu or not has_convolutions(evidence.model))
    seen = "not the same bits every time"
    yield point("cudnn.benchmark", job.train.cudnn_benchmark, seen, "train.cudnn_benchmark=true", obstacle)
    compiled = "takes about a minute at the first start"
    yield point("torch.compile", job.model.compile, compiled, "model.compile=true")
