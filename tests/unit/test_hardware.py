"""The figures of the hardware: of GPUs by a fake NVML, as most test machines have none, and of real processes."""

import ctypes
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from torch import nn

from fake_nvml import FakeNvml
from lockstep.core import tags
from lockstep.core.observer import Observer
from lockstep.core.world import World
from lockstep.telemetry import hardware, hardware_watch
from lockstep.telemetry.hardware import ACTIVE, Gpus, Processes, parts_of, watched_gpus
from lockstep.telemetry.hardware_watch import HardwareWatch
from processes import wait_for

# The figures that come from each query of NVML.
QUERIES = {"UtilizationRates": "util", "MemoryInfo": "mem_gb", "PowerUsage": "power_w", "Temperature": "temp_c"}
QUERIES |= {"ClockInfo": "sm", "CurrentClocksEventReasons": "slowed"}
FIGURES: dict[str, set[str]] = {f"nvmlDeviceGet{query}": {figure} for query, figure in QUERIES.items()}
FIGURES |= {
    f"nvmlGpm{query}": {*ACTIVE} for query in ("QueryDeviceSupport", "SampleAlloc", "SampleGet", "MetricsGet")
}
FIGURES |= {"nvmlDeviceGetTotalEnergyConsumption": set(), "nvmlShutdown": set()}


class Recorder(Observer):
    """An observer that records what it gets."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def write_gpu(self, step: int, scalars: Mapping[str, float]) -> None:
        self.lines.append((step, dict(scalars)))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return FakeNvml({"GPU-aa": 10, "GPU-bb": 90}).plug_in(monkeypatch.setattr)


@pytest.fixture
def gpus(nvml: FakeNvml, tmp_path: Path) -> Iterator[Callable[..., Gpus]]:
    """Makes the sampler of these GPUs, or of one."""
    opened = []

    def open_gpus(*uuids: str) -> Gpus:
        opened.append(Gpus([*uuids] or ["GPU-aa"], tmp_path / "gpu.jsonl"))
        return opened[-1]

    yield open_gpus
    for part in opened:
        part.close()


def monitor_of(
    path: Path, uuids: list[str], sink: Observer, step: Callable[[], int] = lambda: 0, period: float = 1.0
) -> HardwareWatch:
    """A monitor of these GPUs alone."""
    watching = HardwareWatch([Gpus(uuids, path / "gpu.jsonl")], sink, step)
    watching.period = period
    return watching


def watch(path: Path, uuids: list[str], sink: Recorder) -> dict[str, float]:
    """Run a monitor for a few samples, or until it gives up; returns the means from its `close`."""
    watching = monitor_of(path, uuids, sink, itertools.count(6).__next__, period=0.02)
    watching.start()
    wait_for(lambda: len(sink.lines) >= 4 or not watching.is_alive())
    return watching.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "gpu.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("nvml")
def test_each_gpu_is_a_line_by_local_rank(tmp_path: Path) -> None:
    sink = Recorder()
    means = watch(tmp_path, ["GPU-bb", "GPU-aa"], sink)
    written = lines(tmp_path)
    shown = [(line["step"], line["local_rank"], line["uuid"], line["util"]) for line in written[:4]]
    assert shown == [(7, 0, "GPU-bb", 90), (7, 1, "GPU-aa", 10), (8, 0, "GPU-bb", 90), (8, 1, "GPU-aa", 10)]
    expected = {"util": 50, "mem_gb": 2.5, "power_w": 350, "temp_c": 55, "sm": 1980, "slowed": 0.5}
    assert {name: written[0][name] for name in expected} == expected | {"util": 90, "slowed": 1}
    assert {name: means[f"gpu_{name}"] for name in expected} == pytest.approx(expected)
    step, figures = sink.lines[0]
    assert step == 7
    assert {name: figures[f"gpu/{name}/1"] for name in expected} == expected | {"util": 10, "slowed": 0}
    assert len(written) == 2 * len(sink.lines) >= 4


def test_the_active_shares_of_a_gpu_are_figures_where_it_knows_them(gpus: Callable[..., Gpus]) -> None:
    part = gpus()
    for _ in range(2):
        figures = {tag.split("/")[1]: value for tag, value in part.sample(1).items()}
        active = {name: figures[name] for name in figures if name in ACTIVE}
        assert active == pytest.approx({"sm_active": 80.0, "tensor_active": 12.5})


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN])
def test_a_refused_query_loses_its_own_figures_only(nvml: FakeNvml, gpus: Callable[..., Gpus], code: int) -> None:
    usual = {f"gpu/{name}/0" for name in set().union(*FIGURES.values())} - {"gpu/memory_active/0"}
    for query, lost in FIGURES.items():
        for late in (False, True):
            nvml.refused = {} if late else {query: code}
            part = gpus()
            nvml.refused = {query: code}
            counted = late and query in ("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc")  # asked at the start only
            assert set(part.sample(1)) == usual - {f"gpu/{name}/0" for name in lost if not counted}, query
            assert (part.joules is None) == (query == "nvmlDeviceGetTotalEnergyConsumption" and not late)
            assert part.joules is None or part.joules >= 0, "what was counted stays"


def test_a_gpu_of_which_one_query_is_answered_has_its_figure(nvml: FakeNvml, gpus: Callable[..., Gpus]) -> None:
    part = gpus()
    for query, figures in FIGURES.items():
        if query.startswith("nvmlDeviceGet") and figures:
            nvml.refused = dict.fromkeys(FIGURES.keys() - {query}, pynvml.NVML_ERROR_NOT_SUPPORTED)
            assert set(part.sample(1)) == {f"gpu/{name}/0" for name in figures}


def test_a_gpu_of_which_nothing_is_answered_is_lost(nvml: FakeNvml, gpus: Callable[..., Gpus]) -> None:
    part = gpus()
    nvml.refused = dict.fromkeys(FIGURES, pynvml.NVML_ERROR_GPU_IS_LOST)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        part.sample(1)


@pytest.mark.usefixtures("nvml")
def test_a_step_of_many_samples_has_its_figures_once_and_the_one_before_the_resume_none(tmp_path: Path) -> None:
    sink, steps = Recorder(), itertools.chain([5, 5, 5, 6, 6, 6, 7], itertools.repeat(7))
    watching = monitor_of(tmp_path, ["GPU-aa"], sink, steps.__next__, period=0.01)
    watching.start()
    wait_for(lambda: len(lines(tmp_path)) >= 9)
    watching.close()
    assert [step for step, _ in sink.lines] == [6, 7]


def test_the_gpus_that_cuda_shows_are_found_by_uuid_and_not_by_number(
    nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CUDA_VISIBLE_DEVICES=1: CUDA's only GPU, number 0, is NVML's number 1.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=["bb"][index]))
    gpus = watched_gpus(nn.Linear(2, 2), World.solo("cuda:0"))
    assert gpus == ["GPU-bb"]
    part, _ = parts_of(gpus=gpus, path=tmp_path / "gpu.jsonl", processes=[os.getpid()])
    assert isinstance(part, Gpus)
    assert [gpu.uuid for gpu in part.gpus] == ["GPU-bb"]
    part.close()
    assert nvml.calls["nvmlShutdown"]


@pytest.mark.parametrize("shown", [1, 4])
def test_each_rank_reports_its_gpu_and_main_watches_those_of_its_machine(
    monkeypatch: pytest.MonkeyPatch, shown: int
) -> None:
    """Four ranks on two machines: this one is the first of the second machine, and sees one GPU or all four."""
    names = ["aa", "bb", "cc", "dd"][:shown]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=names[index]))
    uuids_by_rank = {0: ["GPU-xx"], 1: ["GPU-yy"], 3: ["GPU-bb"]}
    monkeypatch.setattr(World, "gather", lambda self, own: [uuids_by_rank.get(rank, own) for rank in range(4)])
    here = World(rank=2, local_rank=0, size=4, local_size=2, device=torch.device("cuda:0"), local_peer_pids={3: 1234})
    assert watched_gpus(nn.Linear(2, 2), here) == ["GPU-aa", "GPU-bb"]
    last = World(rank=2, local_rank=1, size=4, local_size=2, device=torch.device("cuda:0"), local_peer_pids={1: 1234})
    assert watched_gpus(nn.Linear(2, 2), last) == ["GPU-yy", "GPU-aa"]


def test_dp_has_all_gpus_of_its_process_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=["aa", "bb"][index]))
    replica = nn.DataParallel(nn.Linear(2, 2))
    replica.device_ids = [0, 1]  # as on a machine with two GPUs
    assert watched_gpus(replica, World.solo("cuda:0")) == ["GPU-aa", "GPU-bb"]
    assert watched_gpus(replica, World.solo()) == []


@pytest.mark.parametrize("calls", [0, 1, 4, 5])
def test_nvml_that_stops_answering_is_reported_once_and_ends_the_figures_only(
    nvml: FakeNvml, tmp_path: Path, capsys: pytest.CaptureFixture[str], calls: int
) -> None:
    nvml.lost_after = calls
    sink = Recorder()
    means = watch(tmp_path, ["GPU-aa", "GPU-bb"], sink)
    assert len(sink.lines) == calls // 2
    assert len(lines(tmp_path)) == 2 * (calls // 2)
    assert means.get("gpu_util") == (50 if calls > 1 else None)
    assert capsys.readouterr().out.count("the hardware stopped answering") == 1
    assert nvml.calls["nvmlShutdown"]


def test_closing_does_not_wait_for_the_next_sample(nvml: FakeNvml, tmp_path: Path) -> None:
    watching = monitor_of(tmp_path, ["GPU-aa"], Observer(), period=60)
    watching.start()
    before = time.perf_counter()
    assert watching.close() == {}
    assert time.perf_counter() - before < 30, "half of a period"


def test_a_driver_that_never_answers_does_not_keep_a_run_from_ending(
    nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hardware_watch, "LAST_SAMPLE_S", 0.05)
    watching = monitor_of(tmp_path, ["GPU-aa"], Observer(), period=0.001)
    watching._sample()
    nvml.answers.clear()
    watching.start()
    wait_for(lambda: (tmp_path / "gpu.jsonl").exists())
    time.sleep(0.05)  # it asks now
    assert watching.close()["gpu_util"] == 10, "what it has answered is shown"
    assert capsys.readouterr().out.count("NVML does not answer") == 1
    nvml.answers.set()
    watching.join(30)
    assert not watching.is_alive()
    watching.parts[0].close()


def test_energy_is_what_the_counters_have_risen_by(gpus: Callable[..., Gpus]) -> None:
    part = gpus("GPU-aa", "GPU-bb")
    assert part.joules == 0
    part.sample(1)
    part.sample(2)
    assert part.joules == pytest.approx(2 * 2 * 3.0)  # one counter for both GPUs of the fake: each sees both rises


def test_without_nvml_the_run_goes_on_with_a_warning(
    nvml: FakeNvml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml.refused = {"nvmlInit": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}
    (part,) = parts_of(gpus=["GPU-aa"], path=tmp_path / "gpu.jsonl", processes=[os.getpid()])
    assert isinstance(part, Processes)
    assert "NVML is not available" in capsys.readouterr().out


def test_without_a_gpu_only_the_processes_that_have_not_ended_are_watched(tmp_path: Path) -> None:
    (part,) = parts_of(gpus=[], path=tmp_path / "gpu.jsonl", processes=[os.getpid()])
    assert isinstance(part, Processes)
    assert not (tmp_path / "gpu.jsonl").exists()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert parts_of(gpus=[], path=tmp_path / "gpu.jsonl", processes=[os.getpid(), ended.pid]) == []


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
    counters = [tmp_path / "one", tmp_path / "two"]
    for counter in counters:
        counter.write_text("5000000\n")
    part = Processes([os.getpid()], counters=counters)
    assert part.joules == 0
    for microjoules, joules in ((9_000_000, 4), (2_000_000, 4), (3_000_000, 5)):  # the second began again at zero
        counters[0].write_text(f"{microjoules}\n")
        assert (part.sample(1)["cpu/power_w"] > 0) == (microjoules != 2_000_000)
        assert part.joules == joules
    assert Processes([os.getpid()], counters=[*counters, tmp_path / "secret"]).joules is None


def test_a_rank_that_has_ended_ends_the_figures_of_processes_only(nvml: FakeNvml, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    parts = [Processes([child.pid], counters=[]), Gpus(["GPU-aa"], tmp_path / "gpu.jsonl")]
    watching = HardwareWatch(parts, Observer(), step=lambda: 0)
    watching.period = 0.01
    child.kill()
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
    watching.start()
    wait_for(lambda: len(lines(tmp_path)) > 3)
    assert watching.close()["gpu_util"] == 10


def test_a_damaged_line_of_an_earlier_part_is_left_out_and_the_others_stay(
    nvml: FakeNvml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.jsonl"
    whole = '{"time": 1.0, "step": 9, "local_rank": 0, "uuid": "GPU-aa", "util": 50.0}\n'
    path.write_text(f"{whole}\0\n{whole}{whole[:20]}")
    Gpus(["GPU-aa"], path).close()
    assert path.read_text() == 2 * whole
    assert f"{path} is damaged: line 2 cannot be read, and is skipped" in capsys.readouterr().out


def test_of_memory_the_largest_sample_counts(tmp_path: Path, nvml: FakeNvml) -> None:
    nvml.sizes = itertools.cycle([1e9, 3e9, 2e9])
    assert watch(tmp_path, ["GPU-aa"], Recorder())["gpu_mem_gb"] == 3.0


def test_the_table_of_figures_has_each_measurement_of_the_hardware(tmp_path: Path) -> None:
    joules = tmp_path / "energy_uj"
    joules.write_text("0")
    of_cpu = Processes([os.getpid()], counters=[joules]).sample(0)
    of_gpu = set().union(*FIGURES.values())
    rows = {figure.tag for figure in tags.FIGURES if figure.tag.startswith((tags.CPU, tags.GPU))}
    assert rows == {*of_cpu, *(f"{tags.GPU}{name}/" for name in of_gpu)}


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
    processes = Processes([1, 2], counters=[])
    expected = {"cpu/cores": 4.0, "cpu/mem_gb": 3.0, "cpu/read_mb_s": 3.0, "cpu/write_mb_s": 4.0}
    for now in (2.0, 2.5):
        clock[0] = now
        assert processes.sample(1) == pytest.approx(expected)
    without = process(1)
    del without.io_counters  # as on macOS
    monkeypatch.setattr(hardware.psutil, "Process", lambda number: without)
    assert Processes([1], counters=[]).sample(1)["cpu/read_mb_s"] == 0


def test_the_counters_of_whole_processors_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "RAPL", tmp_path)
    for name in ("intel-rapl:0", "intel-rapl:0:0", "intel-rapl:1", "intel-rapl-mmio:0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text("0")
    processes = Processes([os.getpid()])
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("3000000")
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("2000000")  # a part of it
    assert processes.sample(1)["cpu/power_w"] > 0
    assert processes.joules == 3.0
    assert Processes([os.getpid()], counters=[]).joules is None
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    (tmp_path / "intel-rapl:1" / "energy_uj").mkdir()  # as one that only root may read
    refused = Processes([os.getpid()])
    assert (refused.joules, "cpu/power_w" in refused.sample(1)) == (None, False), "it does not tell, which is not 0"
    monkeypatch.setattr(hardware, "RAPL", tmp_path / "none")
    assert Processes([os.getpid()]).joules is None


def test_each_reason_for_which_the_hardware_lowers_the_clocks_is_known(
    gpus: Callable[..., Gpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits of NVML: 1 idle, 2 set by the user, 4 power cap, 8 hardware, 0x10 sync boost, 0x20 heat, 0x100 display."""
    part = gpus()
    for reasons, slowed in ((0, 0), (1, 0), (2, 0), (4, 1), (8, 1), (0x10, 0), (0x20, 1), (0x100, 0), (0x24, 1)):
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda gpu, reasons=reasons: reasons)
        assert part.sample(1)["gpu/slowed/0"] == slowed, reasons


def test_a_sample_has_the_time_in_milliseconds_and_a_gpu_without_counters_no_active_shares(
    gpus: Callable[..., Gpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsupported = SimpleNamespace(isSupportedDevice=0)
    monkeypatch.setattr(pynvml, "nvmlGpmQueryDeviceSupport", lambda gpu: unsupported)
    monkeypatch.setattr(hardware.time, "time", lambda: 1234.56789)
    part = gpus("GPU-bb")
    figures = part.sample(4)
    part.file.flush()
    assert not [tag for tag in figures if "active" in tag]
    (line,) = lines(tmp_path)
    assert (line["time"], line["step"]) == (1234.568, 4)


def test_gpus_whose_file_cannot_be_written_are_left_out(
    nvml: FakeNvml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (part,) = parts_of(gpus=["GPU-aa"], path=tmp_path / "none" / "gpu.jsonl", processes=[os.getpid()])
    assert isinstance(part, Processes)
    assert "; the run continues without GPU figures" in capsys.readouterr().out


def test_a_part_that_fails_is_sampled_no_more_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    def part(figures: dict[str, float] | Exception, joules: float | None = None) -> Any:
        def sample(step: int) -> dict[str, float]:
            calls.append(figures)
            if isinstance(figures, Exception):
                raise figures
            return figures

        return SimpleNamespace(sample=sample, joules=joules)

    calls: list[Any] = []
    sink, ended, full = Recorder(), hardware.psutil.AccessDenied(7), OSError("the disk is full")
    whole = {"gpu/util/0": 40.0, "gpu/util/1": 20.0}
    parts = [part(ended), part(full, 0.0), part({}), part(whole, 3.0)]
    watching = HardwareWatch(parts, sink, itertools.count().__next__)
    for _ in range(2):
        watching._sample()
    watching.sampling = [parts[2]]
    watching._sample()
    assert calls == [ended, full, {}, whole, {}, whole, {}]
    assert [step for step, _ in sink.lines] == [1, 2], "a sample of nothing is no line"
    shown = capsys.readouterr().out
    assert shown.count("warning") == shown.count("the hardware stopped answering (the disk is full)") == 1
    assert watching.joules == 3.0
    assert HardwareWatch(parts[:2], sink, lambda: 0).joules == 0
    assert HardwareWatch(parts[:1], sink, lambda: 0).joules is None
    assert watching.close() == {"gpu_util": 30.0}
    begun = threading.Event()

    def last(step: int) -> dict[str, float]:
        begun.set()
        final.done.wait(60)  # the run ends while the hardware is asked
        return {"gpu/util/0": 80.0}

    final = HardwareWatch([SimpleNamespace(sample=last, joules=None)], sink, lambda: 9)
    final.period = 0.0
    final.start()
    assert begun.wait(60)
    assert final.close() == {"gpu_util": 80.0}, "with the last sample"
    followed, left = HardwareWatch(parts, sink, lambda: 0), list[int]()
    followed.period = 0.0

    def follow() -> None:
        left.append(len(followed.sampling))
        if len(left) == 3:
            followed.done.set()

    followed.sampled = follow
    followed.run()
    assert left == [2, 2, 2], "who follows the samples goes on"


def test_the_clock_and_the_temperature_are_those_of_the_multiprocessors(
    nvml: FakeNvml, gpus: Callable[..., Gpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = {pynvml.NVML_CLOCK_GRAPHICS: 1, pynvml.NVML_CLOCK_SM: 2, pynvml.NVML_CLOCK_MEM: 3}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda gpu, clock: clocks[clock])
    sensors = {pynvml.NVML_TEMPERATURE_GPU: 61}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", lambda gpu, sensor: sensors[sensor])
    figures = gpus().sample(1)
    assert (figures["gpu/sm/0"], figures["gpu/temp_c/0"]) == (2, 61)


def test_each_active_share_is_of_the_time_since_the_sample_before(
    nvml: FakeNvml, gpus: Callable[..., Gpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses, clock, intervals = itertools.count(1), itertools.count(1), list[tuple[int, int]]()
    moments: dict[int, int] = {}  # by the address of a sample, the time of its last reading

    def address(sample: Any) -> int:
        number = ctypes.cast(sample, ctypes.c_void_p).value
        assert number is not None
        return number

    def measured(request: Any) -> None:
        assert request.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        intervals.append((moments[address(request.sample1)], moments[address(request.sample2)]))
        nvml.shares(request)

    monkeypatch.setattr(pynvml, "nvmlGpmSampleAlloc", lambda: ctypes.cast(next(addresses), pynvml.c_nvmlGpmSample_t))
    monkeypatch.setattr(
        pynvml, "nvmlGpmSampleGet", lambda gpu, sample: moments.update({address(sample): next(clock)})
    )
    monkeypatch.setattr(pynvml, "nvmlGpmMetricsGet", measured)
    part = gpus()
    for _ in range(4):
        part.sample(1)
    assert intervals == [(1, 2), (2, 3), (3, 4), (4, 5)]


def test_the_power_of_the_processors_is_what_their_energy_has_risen_by_in_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, counter = [0.0], tmp_path / "energy_uj"
    monkeypatch.setattr(hardware.time, "monotonic", lambda: now[0])
    counter.write_text("7000000")
    part, watts = Processes([os.getpid()], counters=[counter]), []
    for seconds, microjoules in ((4.0, 17_000_000), (4.5, 18_000_000), (5.5, 18_000_000)):
        now[0] = seconds
        counter.write_text(str(microjoules))
        watts.append(part.sample(1)["cpu/power_w"])
    assert watts == [2.5, 2.0, 0.0]
    assert part.joules == 11.0


def test_who_follows_the_samples_is_called_after_each_of_them(tmp_path: Path, nvml: FakeNvml) -> None:
    sink, shown_after, steps = Recorder(), list[int](), itertools.count(6)

    def step() -> int:
        if (number := next(steps)) == 9:
            watching.done.set()
        return number

    watching = monitor_of(tmp_path, ["GPU-aa"], sink, step, period=0.001)
    watching.sampled = lambda: shown_after.append(len(sink.lines))
    watching.run()
    assert shown_after == [1, 2, 3]
    assert [step for step, _ in sink.lines] == [7, 8, 9]
    watching.close()


def test_the_gpus_are_watched_although_a_rank_has_ended(nvml: FakeNvml, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    (part,) = parts_of(gpus=["GPU-aa"], path=tmp_path / "gpu.jsonl", processes=[ended.pid])
    assert isinstance(part, Gpus)
    part.close()
    assert part.file.closed


def test_why_there_are_no_figures_of_gpus_is_said(
    nvml: FakeNvml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts_of(gpus=["GPU-zz"], path=tmp_path / "gpu.jsonl", processes=[os.getpid()])
    reason = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    sentence = f"warning: NVML is not available ({reason}); the run continues without GPU figures\n"
    assert capsys.readouterr().out == sentence
    parts_of(gpus=["GPU-aa"], path=tmp_path / "none" / "gpu.jsonl", processes=[os.getpid()])
    shown = capsys.readouterr().out
    assert shown.startswith(f"warning: {tmp_path / 'none'}")
    assert shown.endswith(" (No such file or directory); the run continues without GPU figures\n")


def test_ranks_that_have_ended_are_a_line_of_the_log_alone(
    nvml: FakeNvml, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO", "lockstep")
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert parts_of(gpus=[], path=tmp_path / "gpu.jsonl", processes=[ended.pid]) == []
    assert caplog.messages[0].startswith("the processes of the ranks are not sampled: process")
    assert str(ended.pid) in caplog.messages[0]
    part = Processes([os.getpid()], counters=[])
    part.processes = [SimpleNamespace(cpu_times=lambda: fail(ended.pid))]  # type: ignore[list-item]
    watching = HardwareWatch([part], Observer(), step=lambda: 0)
    watching.period = 0.01
    watching.start()
    watching.join(60)
    assert watching.sampling == []
    assert caplog.messages[1].startswith("the processes of the ranks are no longer sampled: process")
    assert capsys.readouterr().out == ""


def fail(number: int) -> Any:
    raise hardware.psutil.NoSuchProcess(number)


def test_no_thread_of_figures_keeps_a_program_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    watching = HardwareWatch([], Observer(), lambda: 0)
    assert (watching.daemon, watching.name) == (True, "hardware")
    watching.start()
    watching.join(60)
    assert not watching.is_alive(), "there is nothing to sample"
    assert watching.close() == {}
    assert watching.joules is None


def test_a_sample_of_many_gpus_is_counted_for_each_of_them() -> None:
    samples = iter(
        [{"gpu/util/0": 10.0, "gpu/util/1": 30.0, "cpu/mem_gb": 2.0}, {"gpu/util/0": 50.0, "cpu/mem_gb": 1.0}]
    )
    part: Any = SimpleNamespace(sample=lambda step: next(samples), joules=None)
    sink = Recorder()
    watching = HardwareWatch([part], sink, itertools.count(3).__next__)
    watching._sample()
    watching._sample()
    assert [step for step, _ in sink.lines] == [4, 5]
    assert watching.close() == {"gpu_util": 30.0, "cpu_mem_gb": 2.0}


def test_the_gpus_of_a_machine_come_by_rank_however_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="own"))
    monkeypatch.setattr(World, "gather", lambda self, own: [[f"GPU-{rank}"] for rank in range(32)])
    for ranks in ((7, 8), (15, 16, 17), (1, 8, 16, 31)):
        rank, *peers = ranks[::-1]
        pids = {number: 1000 + number for number in peers}
        here = replace(World.solo("cuda:0"), rank=rank, size=32, local_size=len(ranks), local_peer_pids=pids)
        assert watched_gpus(nn.Linear(2, 2), here) == [f"GPU-{number}" for number in ranks]
