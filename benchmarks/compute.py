"""What a step's arithmetic costs besides the network itself: memory, compilation, averaged weights.

    python benchmarks/compute.py --json compute.json

Memory: a training step of the speed recipe's network on the CPU, with the C library's default settings and with
freed memory kept, as in a run; each in its own process. Figures are seconds of processor time, with the kernel's
part on its own, because other work on the machine changes the elapsed time more. Averaged weights: one update for a
resnet50d, by torch's `AveragedModel` and by ours, which gives the same numbers. Compiled: milliseconds per step of
the real command on random images, with and without `model.compile`. Compiling: the seconds that the real command
reports for it, for a small job and each of its shapes of batches, with an empty cache and with the cache of the
command before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import timm
import torch
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.core.world import World
from lockstep.models import WhiteNet
from lockstep.optim.ema import EMA
from lockstep.training.micro_batch_search import keep_freed_memory
from measure import Rows, in_turns, parser, report, scaled, step_ms, timed

ROOT = Path(__file__).parent.parent
BATCH, STEPS = 1000, 2
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive"}


def step_in_process(keep: bool) -> None:
    """Print the processor time of a step, in user mode and in the kernel, in seconds."""
    if keep:
        keep_freed_memory(World.solo(), keep=True)
    model = WhiteNet().build(10, (3, 32, 32)).to(memory_format=torch.channels_last)
    images = torch.randn(BATCH, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (BATCH,))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        model.zero_grad()

    step()
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(STEPS):
        step()
    after = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([(after.ru_utime - before.ru_utime) / STEPS, (after.ru_stime - before.ru_stime) / STEPS]))


def memory(repeats: int) -> Rows:
    """Seconds of a step of 1,000 images in bfloat16."""
    kernel_seconds: dict[str, list[float]] = {}

    def run(*words: str) -> float:
        done = subprocess.run(
            [sys.executable, __file__, "--step", *words], env=ENVIRONMENT, stdout=subprocess.PIPE, check=True
        )
        user, kernel = json.loads(done.stdout.splitlines()[-1])
        kernel_seconds.setdefault(" ".join(words), []).append(kernel)
        return float(user + kernel)

    both = in_turns({"default": partial(run, "plain"), "in a run": partial(run, "kept")}, repeats)
    kernel = {name: sorted(figures)[len(figures) // 2] for name, figures in kernel_seconds.items()}
    return {"processor time": both, "the kernel's part": {"default": kernel["plain"], "in a run": kernel["kept"]}}


def average(repeats: int) -> Rows:
    """Milliseconds of one update."""
    model = timm.create_model("resnet50d")
    torchs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
    ours = EMA(model, 0.999)
    for average in (torchs, ours):
        average.update_parameters(model)
    cases = {
        "torch": partial(timed, partial(torchs.update_parameters, model)),
        "lockstep": partial(timed, partial(ours.update_parameters, model)),
    }
    return {"resnet50d": scaled(in_turns(cases, 20 * repeats), 1000)}


def compiled(repeats: int) -> Rows:
    """Milliseconds per step of the real command."""
    small = ("dataset=fake", "dataset.size=32", "dataset.classes=10", "batch=64", "steps=24", "telemetry.interval=4")
    rows = {}
    for name, words in {
        "resnet18": ("model=resnet18",),
        "resnet18, bf16": ("model=resnet18", "precision=bf16"),
        "resnet18, bf16, channels_last": ("model=resnet18", "precision=bf16", "model.channels_last=true"),
    }.items():
        step = partial(step_ms, *small, *words)
        rows[name] = in_turns({"eager": step, "compiled": partial(step, "model.compile=true")}, repeats)
    return rows


def compiling() -> Rows:
    """Seconds of all compilations of a run, and how many there were."""
    with tempfile.TemporaryDirectory() as folder:

        def run() -> dict[str, float]:
            words = ["model.compile=true", "batch=200", "steps=20", "train.eval_batch=150", "launcher.ranks=1"]
            done = subprocess.run(
                [sys.executable, "train.py", *words, "device=cpu", f"output_root={folder}"],
                cwd=ROOT,
                env={**ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            seconds = [float(match) for match in re.findall(r"compiled in ([\d.]+) s", done.stdout)]
            return {"compilations": len(seconds), "seconds": sum(seconds), "the longest": max(seconds)}

        return {"empty cache": run(), "the next command": run()}


def main() -> None:
    options = parser(__doc__, repeats=3)
    options.add_argument("--step", choices=["plain", "kept"], help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.step is not None:
        step_in_process(arguments.step == "kept")
        return
    measures: dict[str, Callable[[], Rows]] = {
        "averaged weights, ms an update": partial(average, arguments.repeats),
        "a step of whitenet, 1,000 images, bf16, seconds of processor time": partial(memory, arguments.repeats),
        "a step at 32 px, batch 64, ms": partial(compiled, arguments.repeats),
        "compiling digitnet, four shapes of batches": compiling,
    }
    report(arguments.json, measures, unlike="compiling digitnet, four shapes of batches")


if __name__ == "__main__":
    main()
