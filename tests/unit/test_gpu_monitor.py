"""GPU figures from NVML. The tests replace NVML by a fake with two GPUs, because most test machines have no GPU.

Only the calls to `pynvml` and `torch.cuda` are fakes; the monitor, its thread and its file are real.
"""

# ruff: noqa: N802 (NVML's own names)

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from torch import nn

from lockstep.core.observer import Observer
from lockstep.core.world import World
from lockstep.telemetry import gpu


class Machine:
    """A fake NVML: `load` is the utilisation of each GPU, by UUID. The methods have NVML's names."""

    NVMLError = pynvml.NVMLError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1

    def __init__(self) -> None:
        self.load = {"GPU-aa": 10, "GPU-bb": 90}
        self.calls = 0
        self.fails_after: int | None = None
        self.absent = False
        self.shut = False

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
        self.calls += 1
        if self.fails_after is not None and self.calls > self.fails_after:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(gpu=self.load[handle])

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=2_500_000_000)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 350_000

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 55

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        return 1980


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


def watch(path: Path, uuids: list[str], sink: Recorder) -> dict[str, float]:
    """Run a monitor for a few samples, or until it gives up; returns the means from its `close`."""
    monitor = gpu.Monitor(
        uuids=uuids, path=path / "gpu.jsonl", observer=sink, step=itertools.count(6).__next__, period=0.02
    )
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
    assert sink.lines[0] == (7, {f"gpu/{name}/{rank}": written[rank][name] for rank in (0, 1) for name in means})
    assert means == pytest.approx({"util": 50, "mem_gb": 2.5, "power_w": 350, "temp_c": 55, "sm": 1980})
    assert len(written) == 2 * len(sink.lines) >= 4


@pytest.mark.usefixtures("machine")
def test_a_step_that_lasts_many_samples_has_its_figures_once_and_the_one_before_the_resume_none(
    tmp_path: Path,
) -> None:
    sink, steps = Recorder(), itertools.chain([5, 5, 5, 6, 6, 6, 7], itertools.repeat(7))
    monitor = gpu.Monitor(
        uuids=["GPU-aa"], path=tmp_path / "gpu.jsonl", observer=sink, step=steps.__next__, period=0.01
    )
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
    monitor = gpu.monitor(enabled=True, gpus=gpus, path=tmp_path / "gpu.jsonl", observer=Observer(), step=lambda: 0)
    assert isinstance(monitor, gpu.Monitor)
    assert monitor.handles == ["GPU-bb"]
    monitor.close()
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
    assert means.get("util") == (50 if calls > 1 else None)
    assert capsys.readouterr().out.count("NVML stopped answering") == 1
    assert machine.shut


def test_a_monitor_that_never_started_closes(machine: Machine, tmp_path: Path) -> None:
    assert (
        gpu.Monitor(uuids=["GPU-aa"], path=tmp_path / "gpu.jsonl", observer=Observer(), step=lambda: 0).close() == {}
    )


def test_closing_does_not_wait_for_the_next_sample(machine: Machine, tmp_path: Path) -> None:
    monitor = gpu.Monitor(
        uuids=["GPU-aa"], path=tmp_path / "gpu.jsonl", observer=Observer(), step=lambda: 0, period=60
    )
    monitor.start()
    before = time.perf_counter()
    assert monitor.close() == {}
    assert time.perf_counter() - before < 30, "half of a period"


def test_without_nvml_the_run_goes_on_with_a_warning(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.absent = True
    monitor = gpu.monitor(
        enabled=True, gpus=["GPU-aa"], path=tmp_path / "gpu.jsonl", observer=Observer(), step=lambda: 0
    )
    monitor.start()
    assert monitor.close() == {}
    assert "NVML is not available" in capsys.readouterr().out


@pytest.mark.parametrize(("enabled", "gpus"), [(False, ["GPU-aa", "GPU-bb"]), (True, []), (False, [])])
def test_nothing_is_watched_where_it_is_not_wanted_or_there_is_no_gpu(
    tmp_path: Path, enabled: bool, gpus: list[str]
) -> None:
    monitor = gpu.monitor(
        enabled=enabled, gpus=gpus, path=tmp_path / "gpu.jsonl", observer=Observer(), step=lambda: 0
    )
    assert type(monitor) is gpu.NoMonitor
    assert not (tmp_path / "gpu.jsonl").exists()


def test_a_damaged_line_of_an_earlier_part_is_left_out_and_the_others_stay(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.jsonl"
    whole = '{"time": 1.0, "step": 9, "local_rank": 0, "uuid": "GPU-aa", "util": 50.0}\n'
    path.write_text(f"{whole}\0\n{whole}{whole[:20]}")
    gpu.Monitor(uuids=["GPU-aa"], path=path, observer=Observer(), step=lambda: 0).close()
    assert path.read_text() == 2 * whole
    assert f"{path} is damaged: line 2 and 1 after it cannot be read, and is left out" in capsys.readouterr().out
