"""A profile of a few steps: a trace for Chrome's viewer, a table of operators, and what a GPU does meanwhile."""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity

from lockstep.core import log
from lockstep.core.data_protocols import Stepped
from lockstep.core.safe_write import make_folder, storing, write_atomic

S = TypeVar("S", bound=Stepped)

AFTER, STEPS = 50, 3  # the profile begins after so many steps, when the first ones' warm-up is over
OPERATORS = 30  # rows of the table
# Categories of a trace's events that are on the GPU, and those that launch them.
ON_GPU, LAUNCHES = ("kernel", "gpu_memcpy", "gpu_memset"), ("cuda_runtime", "cuda_driver")


class Profile:
    """Passes shards on, and profiles `STEPS` steps of this process, as one rank sees them.

    Writes `trace.json.gz` and `operators.txt` to `folder`. Of `total` steps, if they are few, the middle is profiled.
    `gpu_time` is the split of a GPU's time (`gpu_shares`), once it is known.
    """

    def __init__(self, folder: Path, total: int, *, on_gpu: bool) -> None:
        self.folder, self.on_gpu = folder, on_gpu
        self.first = min(AFTER, total // 2) + 1
        self.gpu_time: dict[str, float] = {}

    def __call__(self, shards: Iterator[S]) -> Iterator[S]:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.on_gpu else [])]
        profiler = torch.profiler.profile(activities=activities)
        for number, shard in enumerate(shards, start=1):
            if number == self.first:
                profiler.start()
            yield shard
            if number == self.first + STEPS - 1:
                if self.on_gpu:
                    torch.cuda.synchronize()
                profiler.stop()
                self.write(profiler)

    def write(self, profiler: torch.profiler.profile) -> None:
        """Write the trace and the table, and split the GPU's time."""
        trace = self.folder / "trace.json.gz"
        with storing(self.folder):
            make_folder(self.folder)
        with storing(trace):
            profiler.export_chrome_trace(str(trace))
        own = "self_cuda_time_total" if self.on_gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=own, row_limit=OPERATORS)
        write_atomic(self.folder / "operators.txt", f"{table}\n")
        if self.on_gpu:
            with gzip.open(trace, "rt") as file:  # just written
                self.gpu_time = gpu_shares(json.load(file)["traceEvents"])
        log.say_row("profile", f"{STEPS} steps in {trace}, for chrome://tracing or ui.perfetto.dev")


class NullProfile(Profile):
    """Passes shards on."""

    def __init__(self) -> None:
        self.gpu_time = {}

    def __call__(self, shards: Iterator[S]) -> Iterator[S]:
        return shards


def gpu_shares(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """What a GPU does between its first and its last kernel: shares that sum to 1; empty without a kernel.

    As in Holistic Trace Analysis (Meta): `computing` and `communicating` (NCCL's kernels while no other one runs);
    `waiting_for_host` if a kernel was launched only after the one before it had ended; `waiting_for_kernel` if it was
    launched before, and waited for another stream or for its launch.

    Args:
        events: the events of a Chrome trace by torch's profiler; times in microseconds.
    """
    launched: dict[int, float] = {}
    kernels: list[tuple[float, float, bool, int]] = []
    for event in events:
        number = event.get("args", {}).get("correlation")
        if event.get("cat") in LAUNCHES:
            launched[number] = event["ts"]
        elif event.get("cat") in ON_GPU:
            communicates = event["name"].lower().startswith("nccl")
            kernels.append((event["ts"], event["ts"] + event["dur"], communicates, number))
    if not kernels:
        return {}
    kernels.sort()
    begins, ends = kernels[0][0], max(end for _, end, _, _ in kernels)
    busy = _covered((begin, end) for begin, end, _, _ in kernels)
    computing = _covered((begin, end) for begin, end, communicates, _ in kernels if not communicates)
    waiting_for_host, until = 0.0, begins
    for begin, end, _, number in kernels:
        if begin > until and launched.get(number, begin) > until:
            waiting_for_host += begin - until
        until = max(until, end)
    whole = ends - begins
    parts = {
        "computing": computing,
        "communicating": busy - computing,
        "waiting_for_host": waiting_for_host,
        "waiting_for_kernel": whole - busy - waiting_for_host,
    }
    return {name: part / whole for name, part in parts.items()}


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length that sorted spans cover together."""
    covered, until = 0.0, float("-inf")
    for begin, end in spans:
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered
