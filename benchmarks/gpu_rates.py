"""The steps of `gpu_check.py` that measure. Each returns rows of figures, and fails only if a result is wrong."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import simplejpeg
import torch
from torch.profiler import ProfilerActivity, profile

from gpu_jobs import ROOT, Place, expect, trained
from measure import Figures, Rows

# CUDA calls that start work on the device; a whole graph is one call.
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
# The first steps allocate memory. CUDA lets the host run about a thousand launches ahead: the timed steps stay below.
WARM, TIMED, PROFILED = 20, 5, 5


def model(place: Place) -> Rows:
    """Images per second of Lockstep and of a raw loop over the same model, by the functions of `gpu.py`."""
    import gpu  # imports timm, which takes a second, and which no other step needs

    small = {"model": "resnet10t", "batch": 4, "steps": 4, "interval": 1}
    large = {"model": "resnet50d", "batch": 256, "steps": 40, "interval": 5}
    arguments = argparse.Namespace(device=place.device, repeats=1, **(large if place.cuda else small))
    rows: Rows = {}
    for name, compiled in {"eager": "false", "compiled": "true"}.items():
        if compiled == "true" and not place.cuda:
            continue
        words = gpu.words(
            arguments,
            224 if place.cuda else 32,
            "bf16" if place.cuda else "fp32",
            "model.channels_last=true",
            f"model.compile={compiled}",
        )
        figures = gpu.row(arguments, words)
        expect(bool(figures), f"{name}: a step of {arguments.batch} images does not fit into memory")
        rows[f"{arguments.model}, {name}"] = figures
    return rows


def speedrun(place: Place) -> Rows:
    """The speed recipe and its reference, by the command that compares them, on random pixels."""
    script = (sys.executable, "benchmarks/cifar10_speedrun.py")
    folder, figures = place.folder / "pixels", place.folder / "speedrun.json"
    images, epochs = (2000, "8") if place.cuda else (200, "1")  # of a class; the recipe's batch is 2,000
    generator = torch.Generator().manual_seed(0)
    for split, number in {"train": images, "val": images // 10}.items():
        for label in range(10):
            (folder / split / str(label)).mkdir(parents=True)
            pixels = torch.randint(256, (number, 32, 32, 3), dtype=torch.uint8, generator=generator).numpy()
            for index, image in enumerate(pixels):
                (folder / split / str(label) / f"{index}.jpg").write_bytes(simplejpeg.encode_jpeg(image))
    words = ["--folder", str(folder), "--val-folder", "val", "--device", place.device, "--epochs", epochs]
    code = subprocess.call([*script, *words, "--seeds", "0", "--json", str(figures)], cwd=ROOT)
    expect(code == 0, f"cifar10_speedrun.py ended with {code}")
    report = json.loads(figures.read_text())
    tables = (table for title, table in report.items() if title.endswith("epochs"))
    return {name: row for table in tables for name, row in table.items()}


def host(place: Place) -> Rows:
    """Host time and launches of a step between log points. The step fails if the host waits for the device."""
    speed = ("experiment=cifar10_speedrun", "dataset=fake", "dataset.size=32", "dataset.classes=10")
    batch = 2000 if place.cuda else 16
    narrow = () if place.cuda else ("precision=fp32",)  # a CPU may have no instructions for bfloat16
    jobs: dict[str, tuple[str, ...]] = {
        "default": (),
        **({"default, train.cuda_graph=true": ("train.cuda_graph=true", "batch=103")} if place.cuda else {}),
        "cifar10_speedrun": (
            *speed,
            f"batch={batch}",
            f"dataset.examples={4 * batch}",
            "model.compile=false",
            *narrow,
        ),
    }
    return {name: host_figures(place, name, *job) for name, job in jobs.items()}


def host_figures(place: Place, name: str, *job: str) -> Figures:
    """Host time and launches per step of one job.

    Raises:
        RuntimeError: torch's, if a step waits for the device.
    """
    steps = WARM + TIMED + PROFILED + 1
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * place.cuda]
    profiler = profile(activities=activities)
    ends: list[float] = []

    def ended() -> None:
        """Called at the end of each step, before logging."""
        step = len(ends) + 1
        if place.cuda:
            torch.cuda.set_sync_debug_mode("default")
        if place.cuda and step == WARM:
            torch.cuda.synchronize()  # the timed steps start with an idle device
        if step == WARM + TIMED:
            profiler.start()
        if step == WARM + TIMED + PROFILED:
            profiler.stop()
        if place.cuda and WARM <= step < steps - 1:
            torch.cuda.set_sync_debug_mode("error")
        ends.append(time.perf_counter())

    quiet = ("telemetry.interval=100%", "train.eval_every=100%", "checkpoint.every=100%", f"steps={steps}")
    trained(place, name, *job, *quiet, heartbeat=ended)
    window = ends[WARM - 1 : WARM + TIMED]
    figures = {"host us a step": 1e6 * statistics.median(b - a for a, b in itertools.pairwise(window))}
    if place.cuda:
        figures["launches a step"] = launches(profiler) / PROFILED
    return figures


def launches(profiler: Any) -> int:
    """The number of launches in a profile."""
    return sum(event.count for event in profiler.key_averages() if event.key.startswith(LAUNCHES))
