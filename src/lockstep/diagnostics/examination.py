"""`lockstep doctor`'s checks of one job on this machine before a long run, besides the checks of every start."""

import itertools
import math
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lockstep.core.errors import reason_of
from lockstep.core.world import World
from lockstep.data.loading.loaders import Streaming
from lockstep.diagnostics.inspection import Finding, Level
from lockstep.diagnostics.settings import lighter_work, other_settings
from lockstep.job.prepare import check_resumable
from lockstep.job.resume import Resume
from lockstep.job.validate_with_data import check_plan
from lockstep.models.nets import sketch
from lockstep.runtime.gpus import name_in_nvml, path_between
from lockstep.runtime.host import GB, cores, format_bytes, free_memory
from lockstep.strategy.base import DataParallel, Single
from lockstep.telemetry.progress import format_duration
from lockstep.training.banner import sizes_of_checkpoints
from lockstep.training.build_data import balance_note, build_data
from lockstep.training.dry_run import FEW_EXAMPLES, micro_batches_that_fit, training_rate
from lockstep.training.evaluate import outputs_of
from lockstep.training.experiment import Parts, build_parts, configure_torch
from lockstep.training.network import Freezing, batches_without_single, check_single_examples, frozen_names
from lockstep.training.resolved_job import ResolvedJob
from lockstep.training.train_state import without_start

STEPS, MOST_TRIAL_S = 5, 10.0  # at most so many steps and seconds are timed, after the first step
LONG_CPU_STEP_S = 2.0  # a longer step on a CPU is timed with few images
LONG_RUN_S = 12 * 3600.0  # a longer run on a CPU is worth a doubt
OUTPUTS = 10e6  # bytes of the logs and figures of a run, at most about
COPIED = 2**20  # numbers that are sent from GPU to GPU: 8 MB
# Broken copies between GPUs usually come from the IOMMU or from ACS of the PCIe bridges, which redirect them.
WITHOUT_P2P = (
    "set NCCL_P2P_DISABLE=1, which has NCCL go through host memory, or turn off the IOMMU and ACS in the BIOS; "
    "strategy=dp needs the latter"
)
SKEW_S = 2.0  # the clocks of two machines may differ by this


def devices(job: ResolvedJob) -> Iterator[Finding]:
    """The devices of this machine, and whether NCCL works between them."""
    ranks, threads = job.launcher.ranks, job.launcher.threads
    shown = f"{ranks} rank{'s' * (ranks != 1)} with {threads} thread{'s' * (threads != 1)}, {cores()} CPU cores"
    if ranks * threads > cores():
        yield Finding("devices", f"{shown}, so ranks wait for others: launcher.threads=auto", Level.warning)
    else:
        yield Finding("devices", shown)
    gpus = torch.cuda.device_count() if isinstance(job.strategy, DataParallel) else ranks
    for number in range(gpus if job.device == "cuda" else 0):
        free, total = torch.cuda.mem_get_info(number)
        room = f"{format_bytes(free)} of {format_bytes(total)} free"
        text = f"GPU {number}, {torch.cuda.get_device_name(number)}, {room}"
        busy = free < 0.9 * total
        yield Finding("devices", text + ": another process uses it" * busy, Level.warning if busy else Level.ok)
    if job.device == "cuda":
        yield from _between_gpus(gpus, with_nccl=job.launcher.backend == "nccl")


def _between_gpus(number: int, *, with_nccl: bool) -> Iterator[Finding]:
    """How GPUs are connected, whether copies between all pairs arrive whole, and whether NCCL adds right."""
    paths = defaultdict(list)
    for first, second in itertools.combinations(range(number), 2):
        paths[path_between(name_in_nvml(first), name_in_nvml(second))].append(f"{first}-{second}")
    for path, pairs in paths.items():
        yield Finding("topology", f"{path} (see nvidia-smi topo -m) between GPUs {', '.join(pairs)}")
    ways = list(itertools.permutations(range(number), 2))
    wrong = [f"{way[0]} to {way[1]}" for n, way in enumerate(ways) if not _copies(*way, torch.arange(n, n + COPIED))]
    level = Level.warning if os.environ.get("NCCL_P2P_DISABLE") == "1" else Level.error
    if wrong:
        text = f"numbers that are copied from GPU {', '.join(wrong)} arrive changed: {WITHOUT_P2P}"
        yield Finding("copies", text, level)
    elif ways:
        yield Finding("copies", f"numbers that are copied between {number} GPUs arrive as they were")
    if not with_nccl or (wrong and level is Level.error):  # over a broken path NCCL may never return
        return
    gpus = f"{number} GPU{'s' * (number != 1)}"
    try:
        values = torch.arange(COPIED) % 1024  # their sums are whole numbers that float32 has
        tensors = [(values * (rank + 1)).float().to(f"cuda:{rank}") for rank in range(number)]
        torch.cuda.nccl.all_reduce(tensors)
        right = values * number * (number + 1) // 2
        if all(torch.equal(tensor.cpu(), right.float()) for tensor in tensors):
            yield Finding("nccl", f"{'.'.join(map(str, torch.cuda.nccl.version()))} adds over {gpus}")
        else:
            yield Finding("nccl", f"adds wrong over {gpus}: {WITHOUT_P2P}", Level.error)
    except RuntimeError as error:
        text = f"does not work here ({reason_of(error)}); launcher.backend=gloo works without"
        yield Finding("nccl", text, Level.error)


def _copies(source: int, target: int, values: Tensor) -> bool:
    """Whether values arrive as they were. Each call needs other values: old ones may lie in the target's memory."""
    return torch.equal(values.to(f"cuda:{source}").to(f"cuda:{target}").cpu(), values)


def batches(job: ResolvedJob, resume: Resume) -> Iterator[Finding]:
    """How the global batch and the epochs are cut, and the bytes that the run takes."""
    steps = check_plan(job)
    check_resumable(resume, job, steps)
    ranks = job.strategy.data_world(replace(World.solo(), size=job.launcher.world_size)).size
    pieces, last = ranks * steps.micro_batches, steps.examples % steps.batch
    text = f"{steps.batch} = {ranks} rank{'s' * (ranks != 1)} x {steps.micro_batches} micro-batch"
    text += (
        f"{'es' * (steps.micro_batches != 1)} x {math.ceil(steps.batch / pieces)}; {steps.steps_per_epoch:,} steps "
    )
    text += f"an epoch, the last of {last or steps.batch}, {steps.total_steps:,} in all"
    usable = partial(batches_without_single, steps, job.strategy, ranks)
    if uneven := steps.batch % pieces:
        even = next((size for size in usable() if size % pieces == 0), None)
        text += "; devices wait for others" + f", which batch={even} avoids" * (even is not None)
    yield Finding("batch", text, Level.warning if uneven else Level.ok)
    if 0 < last < (least := max(2, pieces)):
        full = next((size for size in usable() if not 0 < steps.examples % size < least), None)
        text = "the last batch of an epoch has one image, which counts as much as a whole batch"
        if last < pieces:
            text = f"the last batch of an epoch has {last} images for {pieces} micro-batches"
        text += f"; batch={full} leaves more" * (full is not None)
        yield Finding("batch", text, Level.warning)
    for note in balance_note(job, job.dataset.train().labels):
        yield Finding("classes", note, Level.warning)
    if job.model.pretrained and resume.checkpoint is None:
        text = "the published weights are fetched at the start if no cache has them; nothing is fetched here"
        yield Finding("weights", text, Level.warning)
    model = job.precision.convert(sketch(job.model, job.dataset.classes, job.dataset.input_shape))
    size = sizes_of_checkpoints(job, model)[1] + OUTPUTS
    yield Finding("files", f"the run takes up to {format_bytes(size)}", amount=size)
    blank = torch.empty((2, *job.dataset.input_shape), device="meta", dtype=job.precision.storage)
    frozen, until = frozen_names(model, job.train.freeze), job.train.freeze_until
    until = None if until is None else steps.in_steps("train.freeze_until", until)
    check_single_examples(model, (blank,), steps, job.strategy, ranks, Freezing.of(model, frozen, until))


def folder(path: Path, need: float, free_bytes: Callable[[Path], float]) -> Iterator[Finding]:
    """Whether runs of `need` bytes can be written below `path`, and whether its clock is this machine's."""
    root = next(parent for parent in (path, *path.parents) if parent.exists())
    disk_free = free_bytes(root)
    text = f"{root} has {format_bytes(disk_free)} free, the runs take up to {format_bytes(need)}"
    if need > disk_free:
        remedy = "free disk space, or use checkpoint.keep=1 or output_root=FOLDER"
        yield Finding("disk", f"{text}: {remedy}", Level.error)
    else:
        yield Finding("disk", text)
    try:
        with tempfile.TemporaryDirectory(prefix=".lockstep-doctor-", dir=root) as temporary:
            skew = Path(temporary).stat().st_mtime - time.time()
    except OSError as error:
        text = f"{root} cannot be written ({error.strerror}): output_root=FOLDER names another"
        yield Finding("disk", text, Level.error)
        return
    if abs(skew) > SKEW_S:
        text = f"the clock of {root} is {skew:+.0f} s off this machine's: synchronise them (NTP)"
        yield Finding("clock", text, Level.warning)
    else:
        yield Finding("clock", f"the clock of {root} is this machine's")


def step(job: ResolvedJob) -> Iterator[Finding]:
    """Take a step of a rank for its memory, then a few on real images and an evaluation block for the time."""
    world = World.solo("cuda:0" if job.device == "cuda" else job.device)
    ranks = job.launcher.world_size
    torch.set_num_threads(job.launcher.threads)
    whole, auto = job.strategy.whole_model or ranks == 1, job.train.micro_batches == "auto"
    job = replace(without_start(job), strategy=Single())
    least = job.train.passes
    shared = replace(world, size=ranks, local_size=job.launcher.ranks)
    room = f"{format_bytes(GB * free_memory(shared))} are free for a rank"
    if (rate := _slow_rate(job, shared)) is not None:
        images = job.micro_batch(ranks)
        text = f"a step in micro-batches of {images} images takes about {images / rate:.0f} s: it was not tried"
        yield Finding("memory", f"{text} ({room})", Level.warning)
        yield _time(replace(job, train=replace(job.train, micro_batches=least)), world, most=FEW_EXAMPLES)
        yield lighter_work(job, shared, rate)
        return
    fitting = micro_batches_that_fit(job, shared, least=least)
    if fitting is None or (fitting > least and not auto):
        remedy = f"train.micro_batches={fitting} fits" if fitting else "use a smaller model or dataset.input_size"
        text = f"a micro-batch of {job.micro_batch(ranks)} images does not fit ({room}); {remedy}"
        text += ", where a rank has the whole model" * (not whole)
        yield Finding("memory", text, Level.error if whole else Level.warning)
        return
    job = replace(job, train=replace(job.train, micro_batches=fitting))
    yield Finding("memory", f"a step in micro-batches of {job.micro_batch(ranks)} images fits ({room})")
    yield _time(job, world)
    if not job.model.compile:
        yield other_settings(job, shared)


def _slow_rate(job: ResolvedJob, world: World) -> float | None:
    """The images per second, by steps of few, of a job whole steps of which take long on the CPU; else None."""
    if world.device.type != "cpu" or job.model.compile or job.micro_batch(world.size) <= FEW_EXAMPLES:
        return None
    rate = training_rate(job, world)
    return None if rate is None or job.micro_batch(world.size) / rate <= LONG_CPU_STEP_S else rate


def _time(job: ResolvedJob, world: World, most: int | None = None) -> Finding:
    """The time of a run, estimated from a few micro-batches, of `most` images, that are run as separate steps."""
    chosen, data = build_data(job, world)
    whole, ranks, steps = job.micro_batch(job.launcher.world_size), job.launcher.world_size, data.plan
    micro = min(whole, most or whole)
    configure_torch(job, world)
    train = replace(job.train, micro_batches=1)
    trial = replace(steps, batch=micro, micro_batches=1, total_steps=STEPS + 1)
    micro = next(batches_without_single(trial, job.strategy, 1), micro)
    parts = build_parts(replace(job, batch=micro, steps=2 * STEPS + 2, loader=Streaming(workers=0), train=train))
    reading, updating = _seconds_of_step(parts)
    image = reading / micro / cores()  # seconds to read one with all cores
    # On the CPU, the ranks of a machine share its cores. On a GPU, images are read while it computes.
    on_cpu, nodes = world.device.type == "cpu", job.launcher.node_range[1]
    crowd = max(1.0, job.launcher.ranks * job.launcher.threads / cores()) if on_cpu else 1.0
    computed, read, once = crowd * updating * whole / micro * job.train.passes, image * steps.batch / nodes, 0.0
    if data.train.images is not None:
        read = 0.0
    elif chosen.loader.decodes_once:
        read, once = 0.0, image * (len(data.train) + len(data.val))
    update = computed + read if on_cpu else max(computed, read)
    evaluation = crowd * job.train.eval_views * _seconds_of_evaluated_image(parts, most) * len(data.val) / ranks
    evaluation *= 1 + job.train.averages
    seconds = once + steps.total_steps * update + math.ceil(steps.total_steps / steps.eval_every) * evaluation
    text = f"the run takes about {format_duration(seconds)}: {1000 * update:,.1f} ms a step, "
    text += f"{evaluation:,.1f} s an evaluation"
    text += ", without communication" * (ranks > 1) + ", not compiled" * job.model.compile
    spent = {"hours": seconds / 3600}
    if job.cost.usd_per_gpu_hour is not None and not on_cpu:
        spent["usd"] = spent["hours"] * ranks * job.cost.usd_per_gpu_hour
        text += f", {spent['usd']:,.2f} USD"
    short = [f"budget.{key}={most:g}" for key, most in vars(job.budget).items() if most and spent.get(key, 0) > most]
    text += f"; {' and '.join(short)} ends it before" * bool(short)
    too_long = on_cpu and seconds > LONG_RUN_S
    return Finding("time", text, Level.warning if short or too_long else Level.ok, seconds)


def _seconds_of_step(parts: Parts) -> tuple[float, float]:
    """The medians for whole batches: seconds to read one in one thread, and of a step on it."""
    groups = parts.loader.train(after=0)
    reading, updating = list[float](), list[float]()
    parts.model.train()
    ended = time.perf_counter() + MOST_TRIAL_S
    while (began := time.perf_counter()) < ended or len(updating) < 2:
        if (group := next(groups, None)) is None or len(updating) > STEPS:
            break
        if len(group.indices) < parts.plan.batch:  # the end of an epoch
            continue
        read = time.perf_counter()
        for shard in parts.transforms.train([group]):
            parts.loss_of_step(shard)  # returns the loss, so it waits for the device
        reading.append(read - began)
        updating.append(time.perf_counter() - read)
    return sorted(reading)[len(reading) // 2], sorted(updating[1:] or updating)[(len(updating) - 1) // 2]


def _seconds_of_evaluated_image(parts: Parts, most: int | None) -> float:
    """Seconds of the second of two passes over a block of the evaluation split, for each of `most` images."""
    images, labels = (part[:most] for part in next(parts.loader.eval()))
    transforms = parts.transforms
    parts.model.eval()
    for _ in range(2):
        began = time.perf_counter()
        with torch.inference_mode():
            seen = transforms.eval(images)
            outputs_of(parts.model, seen, parts.job.precision, transforms.memory_format, views=1).sum().item()
    return (time.perf_counter() - began) / len(labels)
