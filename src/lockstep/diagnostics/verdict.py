"""What limits the speed of a run, and what to change: the verdict, and the checklist of the tutorials.

Both rest on the run's own measurements. Every gain is for the whole run, and follows from a part's share of the time
by Amdahl's law. Only `lockstep doctor` tries other settings.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.core.errors import percent
from lockstep.core.model import has_batchnorm
from lockstep.core.plan import Plan
from lockstep.runtime import host
from lockstep.telemetry.profile import peak_flops
from lockstep.training.resolved_job import ResolvedJob, larger_batch
from lockstep.training.run_record import Evidence

# The smallest gain that is worth a change, and the share of the time from which a part is considered.
WORTH, NOTABLE = 1.1, 0.05
# A GPU that is busy for this share of the time (percent), at less than this share of its peak rate, is kept busy by
# operations that move memory or are launched one by one.
BUSY, LOW_MFU = 90.0, 20.0
SHORT = 50  # steps; in fewer, starting up takes too much of the time for shares to say anything
SLOW_BF16 = 2.0  # how many times as long as in float32 a step in bfloat16 takes at least, without instructions for it
NOT_TRIED = "lockstep doctor tries it"
SMALL_BATCH = 16  # of a rank: batch norm counts over too few images
WORK = ("forward", "backward", "optimizer", "step")


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Something that takes time, and what to change about it.

    Fields:
        sentence: what it is, and the advice.
        gain: how many times as fast the run should be; None if it cannot be said.
        override: what to type; None if no setting helps.
        another_run: whether the change makes the run another one, and not the same one faster.
    """

    sentence: str
    evidence: str
    gain: float | None = None
    override: str | None = None
    another_run: bool = False

    def __str__(self) -> str:
        if self.override is None:
            return self.sentence
        gain = "" if self.gain is None else f" should make the run {self.gain:.1f}x as fast"
        other = ", which makes it another run," if self.another_run else ""
        return f"{self.sentence}; {self.override}{other}{gain or ' may help'}"


def verdict(evidence: Evidence) -> Advice:
    """The finding with the largest gain; without one worth a change, a sentence that says so."""
    worth = [finding for finding in findings(evidence) if finding.gain is None or finding.gain >= WORTH]
    if worth:
        return max(worth, key=lambda finding: finding.gain or 1.0)
    spread = max(evidence.spread.values(), default=0.0)
    if evidence.steps < SHORT or amdahl(min(1.0, spread), 2) >= WORTH:  # such a share would be worth a change
        reason = "the timed steps differ too much, as on a busy machine"
        if evidence.steps < SHORT:
            few = "1 step is" if evidence.steps == 1 else f"{evidence.steps} steps are"
            reason = f"{few} too few, {SHORT} are enough"
        return Advice(
            sentence=f"nothing could be measured: {reason}",
            evidence=f"the shares of a step are exact to {percent(spread)}" * (spread > 0),
        )
    part, share = max(evidence.shares.items(), key=lambda item: item[1], default=("step", 0.0))
    work = evidence.share(*WORK)
    return Advice(
        sentence=f"nothing stands out: {percent(work)} of the time are the model's own steps",
        evidence=f"the largest part is {part} with {percent(share)}",
    )


def findings(evidence: Evidence) -> Iterator[Advice]:
    """Everything that takes a notable share of the time, with what to change."""
    yield from data_findings(evidence)
    if evidence.steps >= SHORT:
        yield from _interruptions(evidence)
        yield from _ranks(evidence)
    yield from _work(evidence)


def amdahl(share: float, factor: float) -> float:
    """How many times as fast a run is (Amdahl) when a part with a share of its time is `factor` times as fast."""
    return 1 / (1 - share + share / factor)


def data_findings(evidence: Evidence) -> Iterator[Advice]:
    share = evidence.share("data")
    loader = evidence.job.loader
    if share < NOTABLE or evidence.steps < SHORT or loader.decodes_once:  # nothing is read while the run trains
        return
    workers = int(loader.workers)
    cores = evidence.cores / evidence.world.local_size
    unused = evidence.cores - evidence.hardware.get("cpu_cores", evidence.cores)
    idle = min(unused, evidence.hardware.get("idle_cores", unused)) / evidence.world.local_size  # others work too
    sentence = f"training waits for images in {percent(share)} of the time"
    seen = f"{workers} workers, {max(0.0, idle):.1f} of {cores:g} cores of a rank idle"
    if idle < 0.5:  # more threads would only share the cores
        pack = ": `lockstep pack` decodes the images once and for all" * evidence.job.dataset.reads_files
        yield Advice(
            sentence=f"{sentence}, and the cores are busy{pack}",
            evidence=seen,
            gain=1 / (1 - share),
        )
        return
    # The loader is as fast as the run now, in proportion to its workers; the rest takes what it takes.
    needed = math.ceil(1.25 * max(1, workers) / (1 - share)) + (workers == 0)
    more = min(needed, max(1, workers) * max(2, math.ceil(4 * cores)))
    yield Advice(
        sentence=sentence,
        evidence=seen,
        gain=1 / max(1 - share, max(1, workers) / more),
        override=f"loader.workers={more}",
    )


def _interruptions(evidence: Evidence) -> Iterator[Advice]:
    for part, key, every in (
        ("evaluation", "train.eval_every", evidence.plan.eval_every),
        ("checkpoint", "checkpoint.every", evidence.plan.save_every),
    ):
        share = evidence.share(part)
        if share >= NOTABLE and 2 * every <= evidence.plan.total_steps:
            yield Advice(
                sentence=f"{part}s take {percent(share)} of the time",
                evidence=f"one every {every} steps",
                gain=amdahl(share, 2),
                override=f"{key}={_duration(2 * every, evidence.plan)}",
            )


def _duration(steps: int, plan: Plan) -> str:
    return f"{steps // plan.steps_per_epoch}ep" if steps % plan.steps_per_epoch == 0 else str(steps)


def _ranks(evidence: Evidence) -> Iterator[Advice]:
    behind = evidence.share("slowest_rank")
    if behind >= NOTABLE:
        yield Advice(
            sentence=f"the ranks wait for the slowest one in {percent(behind)} of the time; look at what else "
            "runs on its cores or GPU, and at its data",
            evidence=f"{evidence.world.size} ranks",
            gain=1 / (1 - behind),
        )
    for part, sentence in (
        ("communication", "the ranks exchange gradients"),
        ("optimizer", "the optimizer updates the weights"),
    ):
        share = evidence.share(part) - evidence.spread.get(part, 0.0)  # what is certain of it
        if share >= NOTABLE:
            larger = larger_batch(evidence.plan.batch, evidence.plan.examples)
            yield Advice(
                sentence=f"{sentence} in {percent(share)} of the time; a larger batch does so less often",
                evidence=f"{evidence.world.size} ranks, {evidence.local_batch} images of a rank at a time",
                gain=amdahl(share, 2) if larger is not None else None,
                override=larger,
                another_run=larger is not None,
            )


def _work(evidence: Evidence) -> Iterator[Advice]:
    work = evidence.share(*WORK)
    if evidence.job.precision.dtype is torch.bfloat16 and not (evidence.on_gpu or host.has_bfloat16()):
        yield Advice(
            sentence=f"this processor has no instructions for {type(evidence.job.precision).__name__.lower()}",
            evidence=f"a step takes at least {SLOW_BF16:g} times as long as in float32",
            gain=amdahl(work, SLOW_BF16),
            override="precision=fp32",
            another_run=True,
        )
    threads, fair = evidence.job.launcher.threads, max(1, evidence.cores // evidence.world.local_size)
    if threads > fair:
        yield Advice(
            sentence=f"{threads} threads of a rank share {fair} core{'s' * (fair != 1)}",
            evidence=f"{evidence.cores} cores, {evidence.world.local_size} ranks on this machine",
            override=f"launcher.threads={fair}",
        )
    util = evidence.hardware.get("gpu_util", 0.0)
    if util >= BUSY and 0 < evidence.mfu < LOW_MFU:
        yield Advice(
            sentence=f"the GPU is busy {util:.0f} % of the time, but at {evidence.mfu:.0f} % of its peak rate",
            evidence="operations that move memory, or small ones launched one by one, keep it busy",
            override=None if evidence.job.model.compile else "model.compile=true",
        )
    elif evidence.on_gpu and "gpu_util" in evidence.hardware and util < BUSY and work > 1 - 2 * NOTABLE:
        yield Advice(
            sentence=f"the GPU is busy {util:.0f} % of the time, and waits for the host to launch its work",
            evidence=f"{percent(work)} of the time are steps",
            override=None if evidence.job.train.cuda_graph else "train.cuda_graph=true",
        )


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
    workers, waits = int(job.loader.workers), evidence.share("data")
    seen = f"{workers} workers, {percent(waits)} of the time waiting"
    data = next(data_findings(evidence), None)
    yield point("workers and prefetch", data is None, seen, data.override if data is not None else None)
    larger, examples = larger_batch(evidence.plan.batch, evidence.plan.examples), evidence.plan.examples
    obstacle = f"twice the batch is more than the {examples:,} examples of the training split" * (larger is None)
    yield point("a larger batch", False, f"{NOT_TRIED}; it makes another run", larger, obstacle)
    obstacle = "the model has no batch norm" * (not has_batchnorm(evidence.model))
    synced = evidence.world.size == 1 or job.strategy.sync_batchnorm is not False
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


def takes_channels_last(job: ResolvedJob, model: nn.Module) -> bool:
    """Whether the model has convolutions and a key for their order of memory; an extension's may have none."""
    return has_convolutions(model) and job.model.channels_last is not None


def has_convolutions(model: nn.Module) -> bool:
    return any(parameter.dim() == 4 for parameter in model.parameters())
