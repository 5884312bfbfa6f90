"""What a GPU does with Lockstep and with a raw loop over the same model: images/s, MFU and peak memory.

    python benchmarks/gpu.py --json gpu.json                                                # resnet50d at 224 and 336
    python benchmarks/gpu.py --folder imagenet_small                                        # also real images
    python benchmarks/gpu.py --device cpu --model resnet18 --sizes 64 --batch 8 --steps 3 --interval 1   # it works

The benchmark covers each size, precision and memory order, with and without `torch.compile`. The raw loop trains
timm's model on one batch on the device, with fused SGD and nothing else. Lockstep runs as `train.py` does, on random
images that are resident on the device, and gathers, normalises, counts and logs. Both wait for the device every
`--interval` steps; the figure is the median over these windows without the first two. The two take turns, and cases
that do not fit into memory are left out. With `--folder` (train/CLASS/*.jpg and val/CLASS/*.jpg) real images are
streamed and augmented as for ImageNet, and compared with random ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import timm
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.config import components, composition
from lockstep.core.errors import LockstepError
from lockstep.core.world import World
from lockstep.job import resolve
from lockstep.models import Timm
from lockstep.telemetry.flops import peak_flops, training_flops
from lockstep.training import dry_run, experiment
from lockstep.training.resolved_job import ResolvedJob
from measure import Figures, Rows, console, in_turns, parser, show, write
from runs import prepared

ROOT = Path(__file__).parent.parent
CLASSES = 1000
Measure = Callable[[], float]


def raw(job: ResolvedJob, steps: int, interval: int) -> float:
    """Images per second of the smallest loop that trains the job's model."""
    device, storage = torch.device(job.device), job.precision.storage
    layout = job.model.memory_format
    assert isinstance(job.model, Timm)
    model: nn.Module = timm.create_model(job.model.name, num_classes=CLASSES)
    model = model.to(device, storage).to(memory_format=layout)
    if job.model.compile:
        model.compile(mode=job.model.compile_mode.replace("_", "-"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    scaler = job.precision.scaler(device)
    images = torch.randn(int(job.batch), *job.dataset.input_shape, device=device, dtype=storage)
    images = images.contiguous(memory_format=layout)
    labels = torch.randint(CLASSES, (len(images),), device=device)
    rates = []
    for _ in range(steps // interval):
        began = time.perf_counter()
        for _ in range(interval):
            with job.precision.autocast(device):
                logits = model(images)
            loss = F.cross_entropy(logits.to(storage), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the device
        rates.append(interval * len(images) / (time.perf_counter() - began))
    return statistics.median(rates[2:])


def lockstep(words: list[str]) -> float:
    """Images per second of the real run."""
    with tempfile.TemporaryDirectory() as folder:
        job, run = prepared(Path(folder) / "run", words)
        with console.capture():
            experiment.run(job, run, World.solo(job.device))
        lines = map(json.loads, run.metrics.read_text().splitlines())
        return statistics.median([line["perf/img_per_s"] for line in lines if "perf/img_per_s" in line][2:])


def words(arguments: argparse.Namespace, size: int, precision: str, *extra: str) -> list[str]:
    """The overrides of a row's job."""
    return [
        f"model={arguments.model}",
        f"precision={precision}",
        f"batch={arguments.batch}",
        f"steps={arguments.steps}",
        f"telemetry.interval={arguments.interval}",
        f"device={arguments.device}",
        "name=gpu",
        "dataset=fake",
        f"dataset.classes={CLASSES}",
        f"dataset.size={size}",
        f"dataset.examples={4 * arguments.batch}",
        "augment=none",
        "optimizer=sgd",
        "optimizer.lr=0.01",
        "train.cudnn_benchmark=true",
        "train.eval_every=100%",
        "checkpoint.every=100%",
        "launcher.ranks=1",
        *extra,
    ]


def built(overrides: list[str]) -> ResolvedJob:
    """The job with its components, checked for this machine."""
    job = resolve.resolve(components.build_job(composition.composed(overrides)), sweep=False)
    job.precision.check(job.device)
    job.precision.configure()
    torch.backends.cudnn.benchmark = job.train.cudnn_benchmark
    return job


def row(arguments: argparse.Namespace, overrides: list[str]) -> Figures:
    """Rates of both, their ratio, memory and MFU; empty if a step does not fit into memory."""
    job = built(overrides)
    device = torch.device(job.device)
    gigabytes: Figures = {}

    def watched(name: str, measure: Measure) -> float:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.compiler.reset()
        rate = measure()
        if device.type == "cuda":
            gigabytes[f"{name}, GB"] = torch.cuda.max_memory_allocated() / 1e9
        return rate

    cases: dict[str, Measure] = {
        "raw": lambda: watched("raw", lambda: raw(job, arguments.steps, arguments.interval)),
        "lockstep": lambda: watched("lockstep", lambda: lockstep(overrides)),
    }
    try:
        rates = in_turns(cases, arguments.repeats)
    except (RuntimeError, LockstepError) as error:
        if not dry_run.is_out_of_memory(error):
            raise
        return {}
    figures = {"raw, img/s": rates["raw"], "lockstep, img/s": rates["lockstep"], **gigabytes}
    figures["ratio"] = rates["lockstep"] / rates["raw"]
    if peak := peak_flops(device, job.precision.dtype, tf32=job.precision.matmul == "high"):
        assert isinstance(job.model, Timm)
        model = timm.create_model(job.model.name, num_classes=CLASSES)
        figures["MFU, %"] = 100 * rates["lockstep"] * training_flops(model, job.dataset.input_shape) / peak
    return figures


def synthetic(arguments: argparse.Namespace) -> Iterator[tuple[str, Rows]]:
    """A table for each size."""
    for size in arguments.sizes:
        rows: Rows = {}
        for precision, last, compiled in itertools.product(arguments.precisions, (False, True), (False, True)):
            name = f"{precision}{', channels_last' * last}{', compiled' * compiled}"
            options = [f"model.channels_last={str(last).lower()}", f"model.compile={str(compiled).lower()}"]
            if compiled and arguments.no_compile:
                continue
            rows[name] = row(arguments, words(arguments, size, precision, *options))
            console.print(f"{size} px, {name}: {rows[name] or 'does not fit into memory'}")
        yield (
            f"{arguments.model} at {size}, batch {arguments.batch}",
            {key: row for key, row in rows.items() if row},
        )


def real(arguments: argparse.Namespace) -> Rows:
    """Images per second on resident random images, and on the folder's images, decoded while the GPU trains."""
    size, precision = arguments.sizes[0], arguments.precisions[-1]
    fast = ["model.channels_last=true", f"model.compile={str(not arguments.no_compile).lower()}"]
    streamed = [
        *(word for word in words(arguments, size, precision, *fast) if not word.startswith(("dataset", "augment"))),
        "dataset=folder",
        f"dataset.path={arguments.folder}",
        f"dataset.input_size={size}",
        "loader=streaming",
        "augment=standard",
    ]
    cases = {
        "random, img/s": lambda: lockstep(words(arguments, size, precision, *fast)),
        "streamed, img/s": lambda: lockstep(streamed),
    }
    rates = in_turns(cases, arguments.repeats)
    return {precision: {**rates, "ratio": rates["streamed, img/s"] / rates["random, img/s"]}}


def main() -> int:
    options = parser(__doc__, repeats=2)
    options.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options.add_argument("--model", default="resnet50d", help="a name of timm")
    options.add_argument("--sizes", type=int, nargs="+", default=[224, 336])
    options.add_argument("--precisions", nargs="+", default=None, help="[fp32 tf32 fp16 bf16; on a CPU fp32 bf16]")
    options.add_argument("--batch", type=int, default=256)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--interval", type=int, default=10, help="steps per window")
    options.add_argument("--no-compile", action="store_true", help="leave the compiled rows out")
    options.add_argument("--folder", type=Path, help="real images to stream")
    arguments = options.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA GPU here; --device cpu shows that the benchmark runs", file=sys.stderr)
        return 2
    if arguments.steps < 3 * arguments.interval:
        print(
            f"--steps is {arguments.steps}: expected three windows of {arguments.interval} or more", file=sys.stderr
        )
        return 2
    if arguments.precisions is None:
        arguments.precisions = ["fp32", "tf32", "fp16", "bf16"] if arguments.device == "cuda" else ["fp32", "bf16"]
    tables: dict[str, Rows] = {}
    for title, rows in synthetic(arguments):
        tables[title] = rows
        show(title, rows, ratios=False)
    if arguments.folder is not None:
        tables["real images"] = real(arguments)
        show("real images", tables["real images"], ratios=False)
    write(arguments.json, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
