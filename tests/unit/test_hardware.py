"""The figures of the hardware. NVML is a fake with two GPUs here, because most test machines have no GPU.

Only the calls to `pynvml` and `torch.cuda` are fakes; the monitor, its thread and its file are real.
"""

# ruff: noqa: N802 (NVML's own names)

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from torch import nn

from lockstep.core.observer import Observer
from lockstep.core.world import World
from lockstep.telemetry import gpu, hardware
from lockstep.telemetry.hardware import Monitor, Processes, parts_of
from lockstep.telemetry.report import HARDWARE
from processes import wait_for


class Machine:
    """A fake NVML: `load` is the utilisation of each GPU, by UUID. The methods have NVML's names."""

    NVMLError = pynvml.NVMLError
    NVMLError_NotSupported, NVMLError_FunctionNotFound = (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_FunctionNotFound,
    )
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1, 0, 1

    def __init__(self) -> None:
        self.load = {"GPU-aa": 10, "GPU-bb": 90}
        self.calls = self.millijoules = 0
        self.fails_after: int | None = None
        self.absent = False
        self.shut = False
        self.part_of_a_gpu = False
        self.answers = threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(Counting("old driver"), name)

    def nvmlInit(self) -> None:
        if self.absent:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def nvmlShutdown(self) -> None:
        self.shut = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.load:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self.answers.wait(60)
        if self.part_of_a_gpu:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self.calls += 1
        self.check()
        return SimpleNamespace(gpu=self.load[handle])

    def check(self) -> None:
        if self.fails_after is not None and self.calls > self.fails_after:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self.check()
        return SimpleNamespace(used=2_500_000_000)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self.check()
        return 350_000

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        self.check()
        return 55

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        self.check()
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        self.check()
        return pynvml.nvmlClocksEventReasonSwThermalSlowdown if handle == "GPU-bb" else 1

    def nvmlDeviceGetPcieThroughput(self, handle: str, counter: int) -> int:
        self.check()
        return [1000, 250_000][counter]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if self.part_of_a_gpu:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self.millijoules += 1500
        return self.millijoules


class Counting:
    """A fake NVML of a GPU with counters: 1,000 KiB come over NVLink from one look to the next, and 500 leave.

    `offers` is what the GPU has of `nvlink` and `gpm`; a sample of GPM is a number, which says when it was taken.
    """

    def __init__(self, *offers: str) -> None:
        self.offers, self.looks, self.held = offers, itertools.count(), 0
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[tuple[int, int]]) -> list[SimpleNamespace]:
        assert {scope for _, scope in fields} == {2**32 - 1}
        look, there = next(self.looks), "nvlink" in self.offers
        kib = {pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: 1000, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: 500}
        code = pynvml.NVML_SUCCESS if there else pynvml.NVML_ERROR_NOT_SUPPORTED
        return [
            SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(ullVal=look * kib[field])) for field, _ in fields
        ]

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> SimpleNamespace:
        if "old driver" in self.offers:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(isSupportedDevice=int("gpm" in self.offers))

    def nvmlGpmSampleAlloc(self) -> Any:
        self.held += 1
        return pynvml.c_nvmlGpmSample_t()

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.held -= 1

    def nvmlGpmSampleGet(self, handle: str, sample: Any) -> None:
        if self.broken:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    def nvmlGpmMetricsGet(self, request: Any) -> None:
        assert request.numMetrics == 3
        shares = {
            pynvml.NVML_GPM_METRIC_SM_UTIL: (80.0, pynvml.NVML_SUCCESS),
            pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: (12.5, pynvml.NVML_SUCCESS),
            pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: (0.0, pynvml.NVML_ERROR_NOT_SUPPORTED),
        }
        for metric in request.metrics[: request.numMetrics]:
            metric.value, metric.nvmlReturn = shares[metric.metricId]


@pytest.mark.parametrize(
    ("offers", "figures"),
    [
        (("nvlink", "gpm"), {"nvlink_in_mb_s", "nvlink_out_mb_s", "sm_active", "tensor_active"}),
        (("nvlink",), {"nvlink_in_mb_s", "nvlink_out_mb_s"}),
        (("gpm",), {"sm_active", "tensor_active"}),
        (("old driver",), set()),
    ],
)
def test_counters_are_figures_where_the_gpu_offers_them(
    monkeypatch: pytest.MonkeyPatch, offers: tuple[str, ...], figures: set[str]
) -> None:
    nvml = Counting(*offers)
    clock = itertools.count(step=2.0)
    monkeypatch.setattr(gpu, "pynvml", nvml)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    counters = gpu.Counters("GPU-aa")
    first = counters.sample()
    assert set(first) == figures
    expected = {"nvlink_in_mb_s": 0.512, "nvlink_out_mb_s": 0.256, "sm_active": 80.0, "tensor_active": 12.5}
    assert first == counters.sample() == pytest.approx({name: expected[name] for name in figures})
    nvml.broken = True  # the driver refuses later: the counters are left out, and the rest goes on
    assert set(counters.sample()) == figures - {"sm_active", "tensor_active"}
    counters.close()
    assert nvml.held == 0


class Recorder(Observer):
    """An observer that records what it gets."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def write_gpu(self, step: int, scalars: Mapping[str, float]) -> None:
        self.lines.append((step, dict(scalars)))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    nvml = Machine()
    monkeypatch.setattr(gpu, "pynvml", nvml)
    return nvml


def monitor_of(
    path: Path, uuids: list[str], sink: Observer, step: Callable[[], int] = lambda: 0, period: float = 1.0
) -> Monitor:
    """A monitor of these GPUs alone."""
    return Monitor(parts=[gpu.Gpus(uuids, path / "gpu.jsonl")], observer=sink, step=step, period=period)


def watch(path: Path, uuids: list[str], sink: Recorder) -> dict[str, float]:
    """Run a monitor for a few samples, or until it gives up; returns the means from its `close`."""
    monitor = monitor_of(path, uuids, sink, itertools.count(6).__next__, period=0.02)
    monitor.start()
    end = time.monotonic() + 30
    while len(sink.lines) < 4 and monitor.thread.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    return monitor.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "gpu.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("machine")
def test_each_gpu_is_a_line_by_local_rank(tmp_path: Path) -> None:
    sink = Recorder()
    means = watch(tmp_path, ["GPU-bb", "GPU-aa"], sink)
    written = lines(tmp_path)
    assert [(line["local_rank"], line["uuid"], line["util"]) for line in written[:2]] == [
        (0, "GPU-bb", 90),
        (1, "GPU-aa", 10),
    ]
    assert [line["step"] for line in written[:4]] == [7, 7, 8, 8]
    assert (written[0]["mem_gb"], written[0]["power_w"], written[0]["temp_c"], written[0]["sm"]) == (
        2.5,
        350,
        55,
        1980,
    )
    expected = {"util": 50, "mem_gb": 2.5, "power_w": 350, "temp_c": 55, "sm": 1980, "slowed": 0.5}
    expected |= {"pcie_in_mb_s": 250, "pcie_out_mb_s": 1}
    assert sink.lines[0] == (7, {f"gpu/{name}/{rank}": written[rank][name] for rank in (0, 1) for name in expected})
    assert means == pytest.approx({f"gpu_{name}": value for name, value in expected.items()})
    assert len(written) == 2 * len(sink.lines) >= 4


@pytest.mark.usefixtures("machine")
def test_a_step_that_lasts_many_samples_has_its_figures_once_and_the_one_before_the_resume_none(
    tmp_path: Path,
) -> None:
    sink, steps = Recorder(), itertools.chain([5, 5, 5, 6, 6, 6, 7], itertools.repeat(7))
    monitor = monitor_of(tmp_path, ["GPU-aa"], sink, steps.__next__, period=0.01)
    monitor.start()
    while len(lines(tmp_path)) < 9:
        time.sleep(0.01)
    monitor.close()
    assert [step for step, _ in sink.lines] == [6, 7]


def test_the_gpus_that_cuda_shows_are_found_by_uuid_and_not_by_number(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CUDA_VISIBLE_DEVICES=1: CUDA's only GPU, number 0, is NVML's number 1.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=["bb"][index]))
    gpus = gpu.watched_gpus(nn.Linear(2, 2), World.solo("cuda:0"))
    assert gpus == ["GPU-bb"]
    part, _ = parts_of(gpus=gpus, path=tmp_path / "gpu.jsonl", processes=[os.getpid()])
    assert isinstance(part, gpu.Gpus)
    assert part.handles == ["GPU-bb"]
    part.close()
    assert machine.shut


@pytest.mark.parametrize("shown", [1, 4])
def test_each_rank_reports_its_gpu_and_main_watches_those_of_its_machine(
    monkeypatch: pytest.MonkeyPatch, shown: int
) -> None:
    """Four ranks on two machines: this one is the first of the second machine, and sees one GPU or all four."""
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(uuid=["aa", "bb", "cc", "dd"][:shown][index]),
    )
    uuids_by_rank = {0: ["GPU-xx"], 1: ["GPU-yy"], 3: ["GPU-bb"]}
    monkeypatch.setattr(World, "gather", lambda self, own: [uuids_by_rank.get(rank, own) for rank in range(4)])
    here = World(rank=2, local_rank=0, size=4, local_size=2, device=torch.device("cuda:0"), local_peer_pids={3: 1234})
    assert gpu.watched_gpus(nn.Linear(2, 2), here) == ["GPU-aa", "GPU-bb"]


def test_dp_has_all_gpus_of_its_process_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=["aa", "bb"][index]))
    replica = nn.DataParallel(nn.Linear(2, 2))
    replica.device_ids = [0, 1]  # as on a machine with two GPUs
    assert gpu.watched_gpus(replica, World.solo("cuda:0")) == ["GPU-aa", "GPU-bb"]
    assert gpu.watched_gpus(replica, World.solo()) == []


@pytest.mark.parametrize("calls", [0, 1, 4, 5])
def test_nvml_that_stops_answering_is_reported_once_and_ends_the_figures_only(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str], calls: int
) -> None:
    machine.fails_after = calls
    sink = Recorder()
    means = watch(tmp_path, ["GPU-aa", "GPU-bb"], sink)
    assert len(sink.lines) == calls // 2
    assert len(lines(tmp_path)) == 2 * (calls // 2)
    assert means.get("gpu_util") == (50 if calls > 1 else None)
    assert capsys.readouterr().out.count("NVML stopped answering") == 1
    assert machine.shut


def test_a_monitor_that_never_started_closes(machine: Machine, tmp_path: Path) -> None:
    assert monitor_of(tmp_path, ["GPU-aa"], Observer()).close() == {}


def test_closing_does_not_wait_for_the_next_sample(machine: Machine, tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, ["GPU-aa"], Observer(), period=60)
    monitor.start()
    before = time.perf_counter()
    assert monitor.close() == {}
    assert time.perf_counter() - before < 30, "half of a period"


def test_a_driver_that_never_answers_does_not_keep_a_run_from_ending(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware, "LAST_SAMPLE_S", 0.05)
    machine.answers.clear()
    monitor = monitor_of(tmp_path, ["GPU-aa"], Observer(), period=0.001)
    monitor.start()
    wait_for(lambda: (tmp_path / "gpu.jsonl").exists())
    time.sleep(0.05)  # it asks now
    assert monitor.close() == {}
    assert capsys.readouterr().out.count("NVML does not answer") == 1
    machine.answers.set()
    monitor.thread.join(30)
    assert not monitor.thread.is_alive()
    monitor.parts[0].close()


def test_energy_is_what_the_counters_have_risen_by(machine: Machine, tmp_path: Path) -> None:
    part = gpu.Gpus(["GPU-aa", "GPU-bb"], tmp_path / "gpu.jsonl")
    assert part.joules == 0
    part.sample(1)
    part.sample(2)
    assert part.joules == pytest.approx(2 * 2 * 3.0)  # one counter for both GPUs of the fake: each sees both rises
    part.close()


def test_a_part_of_a_gpu_has_the_figures_that_nvml_offers(machine: Machine, tmp_path: Path) -> None:
    machine.part_of_a_gpu = True
    part = gpu.Gpus(["GPU-aa"], tmp_path / "gpu.jsonl")
    figures = part.sample(1)
    assert "gpu/util/0" not in figures
    assert figures["gpu/mem_gb/0"] == 2.5
    assert part.joules is None
    part.close()


def test_without_nvml_the_run_goes_on_with_a_warning(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.absent = True
    (part,) = parts_of(gpus=["GPU-aa"], path=tmp_path / "gpu.jsonl", processes=[os.getpid()])
    assert isinstance(part, Processes)
    assert "NVML is not available" in capsys.readouterr().out


def test_without_a_gpu_only_the_processes_are_watched(tmp_path: Path) -> None:
    (part,) = parts_of(gpus=[], path=tmp_path / "gpu.jsonl", processes=[os.getpid()])
    assert isinstance(part, Processes)
    assert not (tmp_path / "gpu.jsonl").exists()


def test_the_processes_of_the_ranks_have_their_cores_memory_and_traffic(tmp_path: Path) -> None:
    part = Processes([os.getpid()], counters=[])
    began, end = time.perf_counter(), time.process_time() + 0.2
    while time.process_time() < end:
        pass
    (tmp_path / "file").write_bytes(b"x" * 4_000_000)
    share = 0.2 / (time.perf_counter() - began)  # of a core; other processes take the rest
    figures = part.sample(1)
    assert 0.7 * share < figures["cpu/cores"] < 1.5 * (os.cpu_count() or 1)
    assert 0.01 < figures["cpu/mem_gb"] < 100
    assert set(figures) == {"cpu/cores", "cpu/mem_gb", "cpu/read_mb_s", "cpu/write_mb_s"}
    assert part.joules is None


def test_the_energy_of_the_processors_is_counted_where_it_can_be_read(tmp_path: Path) -> None:
    counters = [tmp_path / "one", tmp_path / "two", tmp_path / "secret"]
    for counter in counters[:2]:
        counter.write_text("5000000\n")
    part = Processes([os.getpid()], counters=counters)
    assert part.joules == 0
    counters[0].write_text("9000000\n")  # four joules more
    counters[1].write_text("1000000\n")  # it began again at zero
    assert part.sample(1)["cpu/power_w"] > 0
    assert part.joules == 4
    counters[1].unlink()
    counters[0].write_text("9500000\n")
    part.sample(2)
    assert part.joules == 4.5


def test_a_rank_that_has_ended_ends_the_figures_of_processes_only(machine: Machine, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monitor = Monitor(
        parts=[Processes([child.pid], counters=[]), gpu.Gpus(["GPU-aa"], tmp_path / "gpu.jsonl")],
        observer=Observer(),
        step=lambda: 0,
        period=0.01,
    )
    child.kill()
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
    monitor.start()
    wait_for(lambda: len(lines(tmp_path)) > 3)
    assert monitor.close()["gpu_util"] == 10


def test_a_damaged_line_of_an_earlier_part_is_left_out_and_the_others_stay(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.jsonl"
    whole = '{"time": 1.0, "step": 9, "local_rank": 0, "uuid": "GPU-aa", "util": 50.0}\n'
    path.write_text(f"{whole}\0\n{whole}{whole[:20]}")
    gpu.Gpus(["GPU-aa"], path).close()
    assert path.read_text() == 2 * whole
    assert f"{path} is damaged: line 2 and 1 after it cannot be read, and is left out" in capsys.readouterr().out


def test_of_memory_the_largest_sample_counts(tmp_path: Path, machine: Machine) -> None:
    sizes = iter([1e9, 3e9, 2e9])
    machine.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=next(sizes, 2e9))  # type: ignore[method-assign]
    assert watch(tmp_path, ["GPU-aa"], Recorder())["gpu_mem_gb"] == 3.0


def test_a_rank_that_has_ended_already_is_not_sampled(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert parts_of(gpus=[], path=tmp_path / "gpu.jsonl", processes=[os.getpid(), ended.pid]) == []


@pytest.mark.usefixtures("machine")
def test_the_page_of_a_run_has_a_name_for_each_figure(tmp_path: Path) -> None:
    joules = tmp_path / "energy_uj"
    joules.write_text("0")
    of_cpu = Processes([os.getpid()], counters=[joules]).sample(0)
    of_gpu = {*gpu.sample("GPU-aa"), *gpu.ACTIVE, *gpu.LINKS}
    assert {tag.removeprefix("cpu/") for tag in of_cpu} | of_gpu == {*HARDWARE}


def test_the_processor_time_of_all_ranks_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def process(number: int) -> Any:
        return SimpleNamespace(
            cpu_times=lambda: SimpleNamespace(user=number * clock[0], system=0.5 * clock[0]),
            memory_info=lambda: SimpleNamespace(rss=number * 1e9),
            io_counters=lambda: SimpleNamespace(read_bytes=number * 1e6 * clock[0], write_bytes=2e6 * clock[0]),
        )

    monkeypatch.setattr(hardware.psutil, "Process", process)
    monkeypatch.setattr(hardware.time, "monotonic", lambda: clock[0])
    processes = hardware.Processes([1, 2], counters=[])
    clock[0] = 2.0
    assert processes.sample(1) == pytest.approx(
        {"cpu/cores": 4.0, "cpu/mem_gb": 3.0, "cpu/read_mb_s": 3.0, "cpu/write_mb_s": 4.0}
    )
