"""The benchmarks that need other hardware than CI has: that they run, and what they compare with."""

from __future__ import annotations

import ast
import importlib
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from helpers import ROOT, Done, forked
from lockstep.models.whitenet import LOGIT_SCALE, WhiteNet

pytestmark = pytest.mark.slow
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/cifar10_reference.py`."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("cifar10_reference")


def benchmark(name: str, *words: str, timeout: float = 240, **environment: str) -> Done:
    """`python benchmarks/NAME.py ...`, in a copy of an interpreter that has imported torch."""
    return forked(f"benchmarks/{name}.py", *words, timeout=timeout, **environment)


def small(record: ModuleType, device: str) -> Any:
    """Three epochs and one, two steps each: with and without the first layer's bias."""
    torch.manual_seed(0)
    images, labels = torch.randint(256, (40, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (40,))
    examples = (images.to(device), labels.to(device))
    channels = {"mean": [0.5] * 3, "std": [0.25] * 3}
    return record.Reference(examples, examples, **channels, epochs=4, batch=20, compiled=False)


def fit(record: ModuleType, reference: Any) -> None:
    """Its training, with all rates alike."""
    reference.model.reset()
    batches = record.Batches(*reference.train, 20)
    sgd = torch.optim.SGD(
        [parameter for parameter in reference.model.parameters() if parameter.dim() < 4], momentum=0.85, fused=True
    )
    muon = record.FilterMuon(list(reference.model.filters.parameters()), reference.orthogonal)
    reference.fit(batches, sgd, [0.01], muon)


def test_the_table_of_bugs_follows_the_source_and_has_the_number_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "reliability")
    table = importlib.import_module("mutants").MUTANTS
    for mutant in table:
        assert (ROOT / mutant.file).read_text().count(mutant.text) == 1, mutant.breaks
        assert all((ROOT / test).is_file() for test in mutant.tests), mutant.breaks
    assert len(table) == 73
    assert "puts seventy-three plausible bugs" in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_the_gpu_benchmark_says_that_there_is_no_gpu() -> None:
    done = benchmark("gpu")
    assert done.code == 2
    assert done.err == "torch finds no CUDA GPU here; --device cpu shows that the benchmark runs\n"


def test_the_gpu_benchmark_compares_lockstep_with_a_raw_loop(tmp_path: Path) -> None:
    json_path = tmp_path / "gpu.json"
    small = ("--device", "cpu", "--model", "resnet10t", "--sizes", "32", "--batch", "4", "--steps", "3")
    quick = ("--interval", "1", "--repeats", "1", "--no-compile", "--precisions", "fp32", "--json", str(json_path))
    done = benchmark("gpu", *small, *quick)
    assert done.code == 0, done.err
    rows = json.loads(json_path.read_text())["resnet10t at 32, batch 4"]
    assert rows.keys() == {"fp32", "fp32, channels_last"}
    assert all(row["raw, img/s"] > 0 and row["lockstep, img/s"] > 0 for row in rows.values())


def test_the_photo_benchmark_times_lockstep_and_says_which_peers_are_absent(tmp_path: Path) -> None:
    json_path = tmp_path / "photos.json"
    small = ("--models", "resnet10t", "--precisions", "fp32", "--batch", "2", "--files", "400", "--device", "cpu")
    done = benchmark("photos", *small, "--every", "1", "--seconds", "0.1", "--repeats", "1", "--json", str(json_path))
    assert done.code == 0, done.err
    printed = " ".join(done.out.split())
    assert "80 photos of" in printed
    assert "500x375" in printed
    assert "resnet10t, fp32: without timm: its train.py is not in its package" in printed
    assert "resnet10t, fp32: without torchvision: its references are not in its package" in printed
    report = json.loads(json_path.read_text())
    assert report["img/s, batch 2, cpu"]["resnet10t, fp32"]["Lockstep"] > 0
    assert report["img/s of a core, batch 2, cpu"]["resnet10t, fp32"]["Lockstep"] > 0


def test_the_speed_benchmark_compares_lockstep_with_the_record(tmp_path: Path) -> None:
    json_path = tmp_path / "speedrun.json"
    small = ("--device", "cpu", "--fake", "80", "--batch", "40", "--epochs", "1", "--seeds", "0", "1")
    done = benchmark("cifar10_speedrun", *small, "--json", str(json_path))
    assert done.code == 0, done.err
    report = json.loads(json_path.read_text())
    assert {name: len(runs) for name, runs in report["runs"].items()} == {"reference": 2, "lockstep": 2}
    seconds = report["1 epochs"]["seconds"]
    assert seconds["ratio"] == pytest.approx(seconds["lockstep"] / seconds["reference"])
    assert all(0 <= run["top1"] <= 100 and run["seconds"] > 0 for runs in report["runs"].values() for run in runs)


def test_the_record_trains_without_asking_the_device_for_a_value(record: ModuleType) -> None:
    reference = small(record, "cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):  # its tensors have no values, and an error is what asks for one
        fit(record, reference)
        with pytest.raises(DataDependentOutputException):
            reference.evaluate()


@pytest.mark.gpu
@needs_gpu
def test_the_record_trains_on_a_gpu_without_waiting_for_it(record: ModuleType) -> None:
    reference = small(record, "cuda")
    fit(record, reference)  # what is loaded at the first use may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        fit(record, reference)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reference.model.head.weight.dtype == torch.float16
    assert all(parameter.isfinite().all() for parameter in reference.model.parameters())


def test_the_record_crops_each_image_at_a_place_of_its_own(record: ModuleType) -> None:
    torch.manual_seed(0)
    images = torch.randn(50, 3, 8, 8)
    batches = record.Batches(images, torch.zeros(50), 50)
    padded, cropped = batches.padded, batches._cropped()
    places = [
        [
            (top, left)
            for top in range(5)
            for left in range(5)
            if torch.equal(crop, whole[top : top + 8, left : left + 8])
        ]
        for whole, crop in zip(padded, cropped, strict=True)
    ]
    assert all(len(place) == 1 for place in places)
    assert {top for ((top, _),) in places} == {left for ((_, left),) in places} == set(range(5))


@pytest.mark.numerics
def test_the_records_network_is_the_recipes(record: ModuleType) -> None:
    torch.manual_seed(0)
    theirs = record.Network(torch.float64).double()
    theirs.reset()
    ours = WhiteNet().build(10, (3, 32, 32)).double()
    for mine, published in zip(ours.parameters(), [*in_order(theirs)], strict=True):
        mine.data.copy_(published)
    ours[-2].weight.data.mul_(1 / 256 / LOGIT_SCALE)
    for norm in (module for module in ours.modules() if isinstance(module, torch.nn.BatchNorm2d)):
        norm.eps = 1e-12
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-9, atol=1e-9)


def in_order(network: Any) -> Any:
    """The parameters of the record's network, layer by layer."""
    yield from network.whitening.parameters()
    for layer, norm in zip(network.filters, network.norms, strict=True):
        yield from (*layer.parameters(), *norm.parameters())
    yield from network.head.parameters()


def test_the_gpu_check_measures_where_there_is_no_gpu(tmp_path: Path) -> None:
    json_path = tmp_path / "check.json"
    done = benchmark("gpu_check", "--device", "cpu", "--only", "host", "--json", str(json_path))
    assert done.code == 0, done.out + done.err
    assert json.loads(json_path.read_text())["host"]["default"]["host us a step"] > 0


def test_the_gpu_check_names_what_a_machine_without_a_network_is_brought() -> None:
    """Every dependency but torch's own, with its version."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {re.split(r"[<>=]", text)[0]: text for text in metadata}
    document = ast.get_docstring(ast.parse((ROOT / "benchmarks" / "gpu_check.py").read_text())) or ""
    brought = {re.split(r"[<>=]", text)[0]: text for text in re.findall(r'"([^" ]+)"', document)}
    assert needed.keys() - brought.keys() == {"torch", "torchvision", "pillow"}
    bounds = {name: text.removeprefix(name) for name, text in brought.items() if "==" not in text}
    assert all(needed[name].endswith(f",{bound}") for name, bound in bounds.items())


def test_the_gpu_check_says_which_parts_there_are() -> None:
    done = benchmark("gpu_check", "--only", "host,speed")
    assert done.code == 2
    assert "there is no 'speed'; choose from tests, model, speedrun, host" in done.err
