"""The floating-point operations of a step, the peak rate of a GPU, and the profile of a few steps."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import nn

from helpers import train_here
from lockstep.telemetry.profile import AFTER, PROFILED_STEPS, peak_flops, profiled, training_flops

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_training_on_an_example_is_three_times_the_known_forward() -> None:
    flops = training_flops(timm.create_model("resnet18"), (3, 224, 224))
    assert flops == pytest.approx(3 * 2 * 1.82e9, rel=0.02)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    assert training_flops(model, (1, 8, 8)) == 3 * 2 * 64 * 10


def test_counting_leaves_a_module_that_two_parts_share_as_it_was() -> None:
    class Sharing(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.shared = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.shared(x)
            return y

    shared, tied = nn.Linear(8, 8), nn.Linear(8, 8)
    tied.weight = shared.weight
    model = nn.Sequential(shared, Sharing(shared), Sharing(shared), tied, nn.BatchNorm1d(8)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert training_flops(model, (8,)) == 3 * 4 * 2 * 64
    assert not [name for name, tensor in model.named_parameters() if tensor.is_meta]
    assert tied.weight is shared.weight
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_model_that_decides_by_values_is_not_counted_and_stays_as_it_was() -> None:
    class Deciding(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    model = Deciding(8, 8).train()
    assert training_flops(model, (8,)) == 0
    assert model.training
    assert model.weight.device == CPU
    model.forward = lambda x: {}["no such key"]  # type: ignore[method-assign]
    assert training_flops(model, (8,)) == 0


@pytest.mark.parametrize(
    ("name", "dtype", "tf32", "expected"),
    [
        ("NVIDIA H200", torch.bfloat16, False, 989e12),
        ("NVIDIA H100 80GB HBM3", torch.float16, False, 989e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, False, 756e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, True, 156e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, False, 19.5e12),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, True, 312e12),
        ("NVIDIA H200", torch.float64, True, 0),
        ("NVIDIA L40S", torch.bfloat16, False, 362e12),
        ("NVIDIA H100 NVL", torch.bfloat16, False, 836e12),
        ("NVIDIA GH200 480GB", torch.bfloat16, False, 989e12),
        ("NVIDIA A100 80GB PCIe", torch.bfloat16, False, 312e12),
        ("Tesla V100-SXM2-16GB", torch.float16, False, 125e12),
        ("Tesla T4", torch.float32, False, 8.1e12),
        ("GeForce RTX 2080 Ti", torch.float16, False, 53.8e12),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", torch.bfloat16, False, 0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, False, 0),
        ("NVIDIA H200", torch.float64, False, 0),
        ("NVIDIA GB200", torch.float32, False, 80e12),
        ("NVIDIA B200", torch.bfloat16, False, 2250e12),
        ("NVIDIA B100", torch.float32, True, 875e12),
        ("NVIDIA H100 80GB HBM3", torch.float32, True, 494e12),
        ("NVIDIA H200", torch.float32, False, 67e12),
        ("NVIDIA H200 NVL", torch.float32, True, 418e12),
        ("NVIDIA H100 PCIe", torch.float32, False, 51e12),
        ("NVIDIA H20", torch.bfloat16, False, 148e12),
        ("NVIDIA A40", torch.float32, True, 74.8e12),
        ("NVIDIA A30", torch.bfloat16, False, 165e12),
        ("NVIDIA A10", torch.bfloat16, False, 125e12),
        ("NVIDIA A10G", torch.bfloat16, False, 70e12),
        ("NVIDIA A2", torch.float32, True, 9e12),
        ("NVIDIA L40S", torch.float32, True, 183e12),
        ("NVIDIA L40", torch.bfloat16, False, 181e12),
        ("NVIDIA L20", torch.bfloat16, False, 119.5e12),
        ("NVIDIA L4", torch.bfloat16, False, 121e12),
        ("NVIDIA RTX 6000 Ada Generation", torch.float32, True, 182e12),
        ("NVIDIA RTX A6000", torch.bfloat16, False, 155e12),
        ("Tesla V100-SXM2-16GB", torch.float32, True, 15.7e12),
        ("Tesla V100-PCIE-32GB", torch.float16, False, 112e12),
        ("Tesla T4", torch.float16, False, 65e12),
        ("NVIDIA GeForce RTX 5090", torch.bfloat16, False, 210e12),
        ("NVIDIA GeForce RTX 4090", torch.float32, False, 82.6e12),
        ("NVIDIA GeForce RTX 4080", torch.bfloat16, False, 97.5e12),
        ("NVIDIA GeForce RTX 3090", torch.bfloat16, False, 71e12),
        ("NVIDIA GeForce RTX 3090 Ti", torch.float32, True, 40e12),
        ("NVIDIA GeForce RTX 2080 Ti", torch.float32, True, 13.4e12),
        ("Some GPU", torch.bfloat16, False, 0),
    ],
)
def test_the_peak_of_a_gpu_is_that_of_its_data_sheet_or_unknown(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, tf32: bool, expected: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(CUDA, dtype, tf32=tf32) == pytest.approx(expected)
    assert peak_flops(CPU, torch.float32, tf32=False) == 0


def test_a_profile_is_a_trace_and_a_table_and_changes_no_bit(tmp_path: Path) -> None:
    job = ("model=linear", "steps=12", "batch=50", "precision=fp64")
    plain = train_here(tmp_path / "plain", *job)
    profiled = train_here(tmp_path / "profiled", *job, "telemetry.profile=true")
    folder = profiled.logs / "profile"
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::addmm") == PROFILED_STEPS
    assert "aten::addmm" in (folder / "operators.txt").read_text()
    assert profiled.weights.read_bytes() == plain.weights.read_bytes()
    assert not (plain.logs / "profile").exists()


@pytest.mark.parametrize("total", [1, 2, 3, 4, 5, 12, 102, 103, 300])
def test_a_profile_has_the_steps_in_the_middle_of_a_few_or_those_behind_the_first(
    total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    fake = SimpleNamespace(
        start=lambda: events.append("start"),
        stop=lambda: events.append("stop"),
        export_chrome_trace=lambda path: None,
        key_averages=lambda: SimpleNamespace(table=lambda **options: ""),
    )
    monkeypatch.setattr(torch.profiler, "profile", lambda **options: fake)
    for shard in profiled(iter(range(total)), tmp_path, total, on_gpu=False):  # type: ignore[arg-type]
        events.append(shard)
    number = min(PROFILED_STEPS, total)
    first = min(AFTER, (total - number) // 2)
    steps = [*range(first, first + number)]
    assert events == [*range(first), "start", *steps, "stop", *range(steps[-1] + 1, total)]


def test_a_resumed_run_has_a_profile_of_the_steps_that_are_left(tmp_path: Path) -> None:
    job = ("model=linear", "steps=12", "batch=50")
    train_here(tmp_path / "run", *job, stop_at=9)
    run = train_here(tmp_path / "run", *job, "telemetry.profile=true")
    assert (run.logs / "profile" / "operators.txt").is_file()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_profile_of_a_gpu_waits_for_it_and_the_table_has_what_takes_longest(
    on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def profile(*, activities: list[Any], acc_events: bool) -> SimpleNamespace:
        calls.extend(activity.name for activity in activities)
        averages = SimpleNamespace(table=lambda **options: calls.append(options) or "a table")
        return SimpleNamespace(
            start=lambda: None,
            stop=lambda: calls.append("stop"),
            export_chrome_trace=calls.append,
            key_averages=lambda: averages,
        )

    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    assert [*profiled(iter(range(2)), tmp_path / "profile", 2, on_gpu=on_gpu)] == [0, 1]  # type: ignore[arg-type]
    trace, kind = str(tmp_path / "profile" / "trace.json.gz"), "cuda" if on_gpu else "cpu"
    table = {"sort_by": f"self_{kind}_time_total", "row_limit": 30}
    assert calls == ["CPU", *["CUDA", "wait"] * on_gpu, "stop", trace, table]
    assert (tmp_path / "profile" / "operators.txt").read_text() == "a table\n"
    assert f"profile  2 steps in {trace}, for chrome://tracing" in " ".join(capsys.readouterr().out.split("\n"))
