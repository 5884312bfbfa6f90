"""Tests Lockstep's promises on this machine's GPU and measures its speed there, with one command.

    python benchmarks/gpu_check.py --json gpu_check.json
    python benchmarks/gpu_check.py --only tests -k "strict or resume"      # some of the tests
    python benchmarks/gpu_check.py --only model,host
    python benchmarks/gpu_check.py --device cpu                            # the figures of small jobs: it works

The promises are the tests marked `gpu`. It is made for a machine with one card, torch 2.11 or newer and no network.
On another machine, with a network, fetch the wheels that are missing there; the versions are those of pyproject.toml
and requirements-dev.txt. 3.12 stands for the machine's Python:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
        --platform manylinux_2_17_x86_64 --dest wheels "hydra-core==1.4.0rc3" "omegaconf==2.4.1rc1" "simplejpeg<2" \\
        "timm<1.1" "tensorboard<2.22" "nvidia-ml-py<14" "scikit-learn<1.10" "safetensors<0.9" "rich<16" \\
        "filelock<5" "psutil<8" "pyyaml<7" "torchmetrics<2" lightning-utilities "jinja2<4" markupsafe \\
        "matplotlib<4" contourpy cycler fonttools kiwisolver pyparsing python-dateutil six \\
        pytest pytest-timeout pytest-xdist execnet iniconfig pluggy pygments

Then, on the machine with the card and in the checkout:

    python -m pip install --no-index --no-deps --target packages wheels/*.whl
    PYTHONPATH=$PWD/packages:$PWD/src python benchmarks/gpu_check.py --json gpu_check.json

Exits with 1 if a test fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import simplejpeg
import torch
from torch.profiler import ProfilerActivity, profile

from lockstep.core.world import World
from lockstep.training import experiment
from measure import Figures, Rows, parser, show, write
from runs import prepared

ROOT = Path(__file__).parent.parent

# CUDA calls that start work on the device; a whole graph is one call.
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
# The first steps allocate memory. CUDA lets the host run about a thousand launches ahead: the timed steps stay below.
WARM, TIMED, PROFILED = 20, 5, 5


@dataclass(frozen=True)
class Place:
    """Where a measure runs: on `cpu` or `cuda`, and in a folder of its own."""

    device: str
    folder: Path

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"


def model(place: Place) -> Rows:
    """Images per second of Lockstep and of a raw loop over the same model, by the functions of `gpu.py`."""
    import gpu  # imports timm, which takes a second, and which no other measure needs

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
        if not figures:
            raise RuntimeError(f"{name}: a step of {arguments.batch} images does not fit into memory")
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
    subprocess.run([*script, *words, "--seeds", "0", "--json", str(figures)], cwd=ROOT, check=True)
    report = json.loads(figures.read_text())
    tables = (table for title, table in report.items() if title.endswith("epochs"))
    return {name: row for table in tables for name, row in table.items()}


def host(place: Place) -> Rows:
    """Host time and launches of a step between log points. It fails if the host waits for the device."""
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
    words = ("name=check", "logger=jsonl", "telemetry.interval=1", f"device={place.device}")
    resolved, run = prepared(place.folder / name, [*words, *job, *quiet])
    torch.set_num_threads(int(resolved.launcher.threads))
    experiment.run(resolved, run, World.solo("cuda:0" if place.cuda else "cpu"), heartbeat=ended)
    window = ends[WARM - 1 : WARM + TIMED]
    figures = {"host us a step": 1e6 * statistics.median(b - a for a, b in itertools.pairwise(window))}
    if place.cuda:
        figures["launches a step"] = launches(profiler) / PROFILED
    return figures


def launches(profiler: Any) -> int:
    """The number of launches in a profile."""
    return sum(event.count for event in profiler.key_averages() if event.key.startswith(LAUNCHES))


MEASURES: dict[str, Callable[[Place], Rows]] = {"model": model, "speedrun": speedrun, "host": host}
TITLES = {
    "model": "a timm model beside a raw loop",
    "speedrun": "the speed recipe beside its reference",
    "host": "launches and host time of a step",
}


def names(text: str) -> list[str]:
    """Names with commas between them."""
    known = ["tests", *MEASURES]
    if unknown := [name for name in text.split(",") if name not in known]:
        raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; choose from {', '.join(known)}")
    return text.split(",")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", type=names, metavar="NAME[,NAME]", help=f"tests, {', '.join(MEASURES)}")
    options.add_argument("--device", choices=["cpu", "cuda"], help="[cuda, where there is one]")
    options.add_argument("-k", default="", metavar="EXPRESSION", help="the tests to run, in the words of pytest")
    arguments = options.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA GPU here; --device cpu shows that the benchmark runs", file=sys.stderr)
        return 2
    chosen = arguments.only or [*["tests"] * (device == "cuda"), *MEASURES]
    code = 0
    if "tests" in chosen:
        code = subprocess.call([sys.executable, "-m", "pytest", "-m", "gpu", "-k", arguments.k], cwd=ROOT)
    tables: dict[str, Rows] = {}
    for name in (name for name in MEASURES if name in chosen):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            tables[name] = MEASURES[name](Place(device, Path(folder)))
        show(TITLES[name], tables[name], ratios=False)
    write(arguments.json, tables, device=device, tests="not run" if "tests" not in chosen else f"exit code {code}")
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())
