"""Tests Lockstep's promises on this machine's GPU and measures its speed there, with one command.

    python benchmarks/gpu_check.py --json gpu_check.json
    python benchmarks/gpu_check.py --only tests -k "strict or resume"      # some of the tests
    python benchmarks/gpu_check.py --only model,host --precisions fp32 bf16 --sizes 224
    python benchmarks/gpu_check.py --device cpu                            # the figures of small jobs: it works

The promises are the tests in `tests/gpu`. `model` trains a model of timm on random images that are on the device, in
each precision, with and without channels_last and `torch.compile`, beside the smallest loop that trains the same
model on one batch. Both wait for the device every few steps; the figure is the median over these windows without the
first two, and the two take turns. Cases that do not fit into memory are left out. `step` does the same with the
smallest networks, with and without CUDA graphs. `speedrun` is the CIFAR-10 speed recipe, on random pixels unless
`--cifar10` has the real ones, twice: the second time all is compiled. `host` is the time of the host and the launches
of a step, `watch` what the watch on the GPU sees at full load, beside nvidia-smi, and `dropout` the time of a pass
with torch's masks and with ours. `photos.py` trains on real photos.

It is made for a machine with one card, torch 2.11 or newer and no network.
On another machine, with a network, fetch the wheels that are missing there; the versions are those of pyproject.toml
and requirements-dev.txt. 3.12 stands for the machine's Python:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 \\
        --platform manylinux_2_17_x86_64 --dest wheels "hydra-core==1.4.0rc3" "omegaconf==2.4.1rc1" "simplejpeg<2" \\
        "timm<1.1" "tensorboard<2.22" "nvidia-ml-py<14" "scikit-learn<1.10" "safetensors<0.9" "rich<16" \\
        "psutil<8" "pyyaml<7" "jinja2<4" markupsafe "matplotlib<4" contourpy cycler fonttools kiwisolver pyparsing \\
        python-dateutil six pytest pytest-timeout pytest-xdist execnet iniconfig pluggy pygments
    python -m pip install --no-index --no-deps --target packages wheels/*.whl            # there, in the checkout
    PYTHONPATH=$PWD/packages:$PWD/src python benchmarks/gpu_check.py --json gpu_check.json

Exits with 1 if a test fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import timm
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from lockstep.core import rng
from lockstep.core.errors import LockstepError
from lockstep.core.world import World
from lockstep.models.zoo import Timm
from lockstep.runtime.host import is_out_of_memory
from lockstep.stochastic import KeyedModel, key_draws
from lockstep.telemetry.profile import peak_flops, training_flops
from lockstep.training import experiment
from lockstep.training.resolved_job import ResolvedJob
from measure import Figures, Rows, console, in_turns, parser, show, write
from runs import prepared

ROOT = Path(__file__).parent.parent

# CUDA calls that start work on the device; a whole graph is one call.
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
# The first steps allocate memory. CUDA lets the host run about a thousand launches ahead: the timed steps stay below.
WARM, TIMED, PROFILED = 20, 5, 5
CLASSES = 1000
# The speed recipe on a CPU, which may have no instructions for bfloat16.
SMALL = ("precision=fp32", "model.widths=[8,16,16]")
QUIET = ("train.eval_every=100%", "checkpoint.every=100%")
PIXELS = ("dataset=fake", "dataset.size=32", "dataset.classes=10")
# What nvidia-smi is asked, and what the watch calls it.
SMI = {"memory.used": "mem_gb", "temperature.gpu": "temp_c", "power.draw": "power_w", "utilization.gpu": "util"}


@dataclass(frozen=True)
class Setting:
    """The model, the sizes and the device of the measures; small ones on the CPU, which only show that it works."""

    device: str
    model: str
    sizes: list[int]
    precisions: list[str]
    batch: int
    steps: int
    interval: int
    repeats: int
    cases: re.Pattern[str] = re.compile("")
    cifar10: Path | None = None

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    def words(self, size: int, precision: str, *extra: str) -> list[str]:
        """The overrides of a job on random images."""
        job = (f"model={self.model}", f"precision={precision}", f"batch={self.batch}", f"steps={self.steps}")
        here = (f"telemetry.interval={self.interval}", f"device={self.device}", "name=gpu", "launcher.ranks=1")
        images = ("dataset=fake", f"dataset.classes={CLASSES}", f"dataset.size={size}")
        fast = (f"dataset.examples={min(self.steps, 4) * self.batch}", "augment=none", "train.cudnn_benchmark=true")
        return [*job, *here, *images, *fast, "optimizer=sgd", "optimizer.lr=0.01", *QUIET, *extra]


def network(job: ResolvedJob) -> nn.Module:
    """The model of a job; one of timm as timm makes it."""
    if isinstance(job.model, Timm):
        return timm.create_model(job.model.name, num_classes=CLASSES)
    return job.model.build(job.dataset.classes, job.dataset.input_shape)


def raw(job: ResolvedJob, setting: Setting) -> float:
    """Images per second of the smallest loop that trains the job's model."""
    device, storage = torch.device(job.device), job.precision.storage
    layout = job.model.memory_format
    model = network(job).to(device, storage).to(memory_format=layout)
    if job.model.compile:
        model.compile(mode=job.model.compile_mode.replace("_", "-"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    scaler = job.precision.scaler(device)
    images = torch.randn(int(job.batch), *job.dataset.input_shape, device=device, dtype=storage)
    images = images.contiguous(memory_format=layout)
    labels = torch.randint(CLASSES, (len(images),), device=device)
    rates = []
    for _ in range(setting.steps // setting.interval):
        began = time.perf_counter()
        for _ in range(setting.interval):
            with job.precision.autocast(device):
                logits = model(images)
            loss = F.cross_entropy(logits.to(storage), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        loss.item()  # waits for the device
        rates.append(setting.interval * len(images) / (time.perf_counter() - began))
    return statistics.median(rates[2:])


def lines(words: list[str], name: str = "metrics.jsonl") -> list[Figures]:
    """The lines of a file that the real run writes."""
    with tempfile.TemporaryDirectory() as folder:
        job, run = prepared(Path(folder) / "run", words)
        with console.capture():
            experiment.run(job, run, World.solo(torch.device(job.device, 0) if job.device == "cuda" else "cpu"))
        file = run.path / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def lockstep(words: list[str]) -> float:
    """Images per second of the real run."""
    return statistics.median([line["perf/img_per_s"] for line in lines(words) if "perf/img_per_s" in line][2:])


def beside_raw(setting: Setting, words: list[str]) -> Figures:
    """Rates of both, their ratio, memory and MFU; empty if a step does not fit into memory."""
    with tempfile.TemporaryDirectory() as folder:
        job, _ = prepared(Path(folder), words)
    job.precision.check(job.device)
    job.precision.configure()
    torch.backends.cudnn.benchmark = job.train.cudnn_benchmark
    gigabytes: Figures = {}

    def watched(name: str, measure: Callable[[], float]) -> float:
        torch.compiler.reset()
        if not setting.cuda:
            return measure()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        rate = measure()
        gigabytes[f"{name}, GB"] = torch.cuda.max_memory_allocated() / 1e9
        return rate

    cases: dict[str, Callable[[], float]] = {
        "raw": lambda: watched("raw", lambda: raw(job, setting)),
        "lockstep": lambda: watched("lockstep", lambda: lockstep(words)),
    }
    try:
        rates = in_turns(cases, setting.repeats)
    except (RuntimeError, LockstepError) as error:
        if not is_out_of_memory(error):
            raise
        return {}
    figures = {f"{name}, img/s": rate for name, rate in rates.items()} | gigabytes
    figures["ratio"] = rates["lockstep"] / rates["raw"]
    if peak := peak_flops(torch.device(job.device), job.precision.dtype, tf32=job.precision.matmul == "high"):
        figures["MFU, %"] = 100 * rates["lockstep"] * training_flops(network(job), job.dataset.input_shape) / peak
    return figures


def model(setting: Setting) -> Rows:
    """Images per second of Lockstep and of a raw loop over the same model."""
    rows: Rows = {}
    for size, precision, last, compiled in itertools.product(
        setting.sizes, setting.precisions, (False, True), (False, True)[: 1 + setting.cuda]
    ):
        name = f"{setting.model} at {size}, {precision}{', channels_last' * last}{', compiled' * compiled}"
        options = (f"model.channels_last={str(last).lower()}", f"model.compile={str(compiled).lower()}")
        if setting.cases.search(name):
            rows[name] = beside_raw(setting, setting.words(size, precision, *options))
            console.print(f"{name}: {rows[name] or 'does not fit into memory'}")
    return {name: row for name, row in rows.items() if row}


def step(setting: Setting) -> Rows:
    """Microseconds of a step of the smallest networks, whose kernels are as short as a launch."""
    steps = 1500 if setting.cuda else 20
    small = replace(setting, batch=64, steps=steps, interval=max(1, steps // 10))
    rows: Rows = {}
    for words, graph in itertools.product(
        (("model=digitnet",), ("model=digitnet", "model.dropout=0"), ("model=linear",)),
        (False, True)[: 1 + setting.cuda],
    ):
        extra = (*words, f"train.cuda_graph={str(graph).lower()}", "dataset.examples=6400", "dataset.channels=1")
        figures = beside_raw(small, small.words(8, "fp32", *extra))
        name = " ".join([*words, "train.cuda_graph=true"] if graph else words)
        rows[name] = {f"{name}, us": 1e6 * small.batch / figures[f"{name}, img/s"] for name in ("raw", "lockstep")}
    return rows


def speedrun(setting: Setting) -> Rows:
    """Seconds, images per second and accuracy of the CIFAR-10 speed recipe; the first time with compilation."""
    small = () if setting.cuda else ("batch=20", "epochs=1", *SMALL, "model.compile=false")
    examples = 50_000 if setting.cuda else 80
    images: tuple[str, ...] = (*PIXELS, f"dataset.examples={examples}")
    if setting.cifar10 is not None:
        size = ("dataset.decode_size=32", "dataset.input_size=32")
        images = ("dataset=folder", f"dataset.path={setting.cifar10}", *size)
    here = (f"device={setting.device}", "name=gpu", "launcher.ranks=1", "logger=jsonl")
    rows: Rows = {}
    for turn in ("first", "second"):
        began = time.perf_counter()
        written = lines(["experiment=cifar10_speedrun", *images, *small, *here])
        rates = [line["perf/img_per_s"] for line in written if "perf/img_per_s" in line]
        best = max(line.get("acc/val_top1", 0.0) for line in written)
        rows[f"cifar10_speedrun, {turn}"] = {
            "seconds": time.perf_counter() - began,
            "img/s": statistics.median(rates),
            "top-1": best,
        }
    return rows


def host(setting: Setting) -> Rows:
    """Host time and launches of a step between log points. It fails if the host waits for the device."""
    batch = 2000 if setting.cuda else 16
    speed = ("experiment=cifar10_speedrun", *PIXELS, f"batch={batch}", f"dataset.examples={4 * batch}")
    jobs: dict[str, tuple[str, ...]] = {
        "default": (),
        **({"default, train.cuda_graph=true": ("train.cuda_graph=true", "batch=103")} if setting.cuda else {}),
        "cifar10_speedrun": (*speed, "model.compile=false", *(() if setting.cuda else SMALL)),
    }
    return {name: host_figures(setting, *job) for name, job in jobs.items()}


def host_figures(setting: Setting, *job: str) -> Figures:
    """Host time and launches per step of one job. Raises RuntimeError, torch's, if a step waits for the device."""
    steps = WARM + TIMED + PROFILED + 1
    profiler = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * setting.cuda])
    ends: list[float] = []

    def ended() -> None:
        """Called at the end of each step, before logging."""
        step = len(ends) + 1
        if setting.cuda:
            torch.cuda.set_sync_debug_mode("default")
        if setting.cuda and step == WARM:
            torch.cuda.synchronize()  # the timed steps start with an idle device
        if step == WARM + TIMED:
            profiler.start()
        if step == WARM + TIMED + PROFILED:
            profiler.stop()
        if setting.cuda and WARM <= step < steps - 1:
            torch.cuda.set_sync_debug_mode("error")
        ends.append(time.perf_counter())

    words = ("name=check", "logger=jsonl", "launcher.threads=1", f"device={setting.device}", *job)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        resolved, run = prepared(Path(folder) / "run", [*words, "telemetry.interval=100%", *QUIET, f"steps={steps}"])
        experiment.run(resolved, run, World.solo("cuda:0" if setting.cuda else "cpu"), heartbeat=ended)
    window = ends[WARM - 1 : WARM + TIMED]
    figures = {"host us a step": 1e6 * statistics.median(b - a for a, b in itertools.pairwise(window))}
    if setting.cuda:
        launches = sum(event.count for event in profiler.key_averages() if event.key.startswith(LAUNCHES))
        figures["launches a step"] = launches / PROFILED
    return figures


def watch(setting: Setting) -> Rows:
    """What the watch on the GPU has written at full load, beside nvidia-smi, which is asked right after it."""
    words = setting.words(setting.sizes[0], setting.precisions[-1], "telemetry.interval=20", "logger=jsonl")
    samples = lines([*words, "model.channels_last=true", f"steps={2 * setting.steps}"], "gpu.jsonl")
    seen = samples[len(samples) // 3 :]
    medians = {key: statistics.median([line[key] for line in seen if key in line]) for key in SMI.values() if seen}
    rows: Rows = {"watch": {"samples": len(samples), **medians}}
    if setting.cuda:
        query = ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader,nounits", "--id=0"]
        shown = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")
        rows["nvidia-smi"] = dict(zip(SMI.values(), map(float, shown), strict=True))
        rows["torch"] = {"mem_gb": torch.cuda.max_memory_reserved() / 1e9}
    return rows


def dropout(setting: Setting) -> Rows:
    """Milliseconds of a pass of an MLP with torch's masks, and with those of keys."""
    size, batch, times = (4096, 2048, 30) if setting.cuda else (64, 8, 3)
    layers = [nn.Linear(size, size), nn.GELU(), nn.Dropout(0.1), nn.Linear(size, size), nn.Dropout(0.1)]
    plain = nn.Sequential(*layers).to(setting.device, torch.bfloat16).train()
    images = torch.randn(batch, size, device=setting.device, dtype=torch.bfloat16)
    keys = rng.sample_keys(3, 1, torch.arange(batch, device=setting.device), rng.FORWARD)
    keyed = KeyedModel(plain, key_draws(plain, images[:1], 0))

    def milliseconds(forward: Callable[[], torch.Tensor]) -> float:
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            forward().sum().backward()
            if setting.cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return 1e3 * statistics.median(seconds[1:])

    ours = milliseconds(lambda: keyed(images, torch.stack([keys, keys], 1)))
    return {"dropout": {"torch, ms": milliseconds(lambda: plain(images)), "lockstep, ms": ours}}


MEASURES: dict[str, Callable[[Setting], Rows]] = {
    "model": model,
    "step": step,
    "speedrun": speedrun,
    "host": host,
    "watch": watch,
    "dropout": dropout,
}


def names(text: str) -> list[str]:
    """Names with commas between them."""
    known = ["tests", *MEASURES]
    if unknown := [name for name in text.split(",") if name not in known]:
        raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; choose from {', '.join(known)}")
    return text.split(",")


def main() -> int:
    options = parser(__doc__, repeats=2)
    options.add_argument("--only", type=names, metavar="NAME[,NAME]", help=f"tests, {', '.join(MEASURES)}")
    options.add_argument("--device", choices=["cpu", "cuda"], help="[cuda, where there is one]")
    options.add_argument("-k", default="", metavar="EXPRESSION", help="the tests to run, in the words of pytest")
    options.add_argument("--model", help="a name of timm [resnet50d]")
    options.add_argument("--sizes", type=int, nargs="+", help="[224]")
    options.add_argument("--precisions", nargs="+", help="[fp32 tf32 fp16 bf16; on a CPU fp32]")
    options.add_argument(
        "--cases", type=re.compile, default="", metavar="REGEX", help="the cases of `model` to measure"
    )
    options.add_argument("--cifar10", type=Path, metavar="FOLDER", help="the images of CIFAR-10, for `speedrun`")
    arguments = options.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA GPU here; --device cpu shows that the benchmark runs", file=sys.stderr)
        return 2
    cuda = device == "cuda"
    torch.set_num_threads(1)  # of the host, which only launches; on a CPU the figures mean nothing
    setting = Setting(
        device=device,
        model=arguments.model or ("resnet50d" if cuda else "resnet10t"),
        sizes=arguments.sizes or ([224] if cuda else [32]),
        precisions=arguments.precisions or (["fp32", "tf32", "fp16", "bf16"] if cuda else ["fp32"]),
        cases=arguments.cases,
        cifar10=arguments.cifar10,
        batch=256 if cuda else 4,
        steps=100 if cuda else 4,
        interval=10 if cuda else 1,
        repeats=arguments.repeats if cuda else 1,
    )
    chosen = arguments.only or [*["tests"] * cuda, *MEASURES]
    code = 0
    if "tests" in chosen:
        code = subprocess.call([sys.executable, "-m", "pytest", "tests/gpu", "-k", arguments.k], cwd=ROOT)
    tables: dict[str, Rows] = {}
    for name in (name for name in MEASURES if name in chosen):
        tables[name] = MEASURES[name](setting)
        show(name, tables[name], ratios=False)
    write(arguments.json, tables, device=device, tests="not run" if "tests" not in chosen else f"exit code {code}")
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())
