"""The benchmarks that need other hardware than CI has, or hours: that they run, and what they compare with."""

from __future__ import annotations

import ast
import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest
import torch

import lockstep
from helpers import ROOT, Done, command, forked, not_installed, photos_of_two_classes

pytestmark = pytest.mark.slow
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


def benchmark(name: str, *words: str, timeout: float = 240, **environment: str) -> Done:
    """`python benchmarks/NAME.py ...`, in a copy of an interpreter that has imported torch."""
    return forked(f"benchmarks/{name}.py", *words, timeout=timeout, **environment)


def test_the_table_of_bugs_follows_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "reliability")
    for mutant in importlib.import_module("mutants").MUTANTS:
        assert (ROOT / mutant.file).read_text().count(mutant.text) == 1, mutant.breaks
        assert all((ROOT / test).is_file() for test in mutant.tests), mutant.breaks


def test_the_photo_benchmark_times_lockstep_and_says_which_peers_are_absent(tmp_path: Path) -> None:
    json_path = tmp_path / "photos.json"
    small = ("--models", "resnet10t", "--precisions", "fp32", "--batch", "2", "--files", "64", "--device", "cpu")
    short = ("--every", "1", "--seconds", "0.1", "--repeats", "1", "--workers", "1", "--json", str(json_path))
    photos = photos_of_two_classes(tmp_path, 64, "jpg") / "photos" / "train"
    done = benchmark("photos", *small, *short, "--photos", str(photos))
    assert done.code == 0, done.err
    printed = " ".join(done.out.split())
    assert "54 photos of" in printed
    assert "64x64" in printed
    assert "resnet10t, fp32: without timm: its train.py is not in its package" in printed
    assert "resnet10t, fp32: without torchvision: its references are not in its package" in printed
    report = json.loads(json_path.read_text())
    assert report["img/s, batch 2, cpu"]["resnet10t, fp32"]["Lockstep"] > 0
    assert report["img/s of a core, batch 2, cpu"]["resnet10t, fp32"]["Lockstep"] > 0


def test_the_gpu_check_measures_where_there_is_no_gpu(tmp_path: Path) -> None:
    json_path = tmp_path / "check.json"
    done = benchmark("gpu_check", "--device", "cpu", "--json", str(json_path))
    assert done.code == 0, done.out + done.err
    tables = json.loads(json_path.read_text())
    assert tables["model"].keys() == {f"resnet10t at 32, fp32{last}" for last in ("", ", channels_last")}
    assert all(row["raw, img/s"] > 0 and row["lockstep, img/s"] > 0 for row in tables["model"].values())
    assert all(row["raw, us"] > 0 and row["lockstep, us"] > 0 for row in tables["step"].values())
    assert tables["speedrun"]["cifar10_speedrun, second"]["img/s"] > 0
    assert tables["host"]["default"]["host us a step"] > 0
    assert tables["watch"] == {"watch": {"samples": 0}}
    assert tables["dropout"]["dropout"]["lockstep, ms"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_the_gpu_check_says_that_there_is_no_gpu() -> None:
    done = benchmark("gpu_check", "--device", "cuda", "--only", "host")
    assert done.code == 2
    assert done.err == "torch finds no CUDA GPU here; --device cpu shows that the benchmark runs\n"


def test_the_gpu_check_names_what_a_machine_without_a_network_is_brought() -> None:
    """Every dependency but torch's own, with its version."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {re.split(r"[<>=]", text)[0]: text for text in metadata}
    document = ast.get_docstring(ast.parse((ROOT / "benchmarks" / "gpu_check.py").read_text())) or ""
    brought = {re.split(r"[<>=]", text)[0]: text for text in re.findall(r'"([^" ]+)"', document)}
    assert needed.keys() - brought.keys() == {"torch", "torchvision", "pillow"}
    bounds = {name: text.removeprefix(name) for name, text in brought.items() if "==" not in text}
    assert all(needed[name].endswith(f",{bound}") for name, bound in bounds.items())


def test_the_gpu_check_runs_where_nothing_but_the_packages_of_a_run_is_installed(tmp_path: Path) -> None:
    python = not_installed(tmp_path / "environment")
    assert command(str(python), "-c", "import torchmetrics").code == 1
    assert command(str(python), "-m", "lockstep", "--version").out == f"lockstep {lockstep.__version__}\n"
    done = command(str(python), "benchmarks/gpu_check.py", "--device", "cpu", "--only", "tests")
    assert done.code == 0, done.out + done.err
    assert re.search(r"= \d+ skipped in", done.out), done.out


def test_the_gpu_check_says_which_parts_there_are() -> None:
    done = benchmark("gpu_check", "--only", "host,speed")
    assert done.code == 2
    assert "there is no 'speed'; choose from tests, model, step, speedrun, host, watch, dropout" in done.err


# Its buffers are infinite, until published weights replace them. An average of the weights must keep them.
GEMMA = ("+model.options={depth:1,embed_dim:32,num_heads:2,head_dim:16,intermediate_size:64}", "train.ema=0.9")


@pytest.mark.parametrize(
    ("model", "size", "words"),
    [
        ("test_vit", 32, ()),
        ("rexnet_100", 32, ()),  # after two steps it amplifies the roundings of float32
        ("gemma4_vit_167m", 96, GEMMA),
    ],
)
def test_the_smallest_of_a_family_goes_the_whole_way(
    model: str, size: int, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    stages = importlib.import_module("timm_coverage").stages
    assert [(name, stage()) for name, stage in stages(model, size, tmp_path, *words)] == [
        (name, None) for name in ("train", "resume", "export", "predict")
    ]
