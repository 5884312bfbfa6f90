"""The benchmarks that need other hardware than CI has, or hours: that they run, and what they compare with."""

from __future__ import annotations

import ast
import difflib
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import psutil
import pytest
import torch

import lockstep
from helpers import ROOT, Done, command, forked, not_installed, photos_of_two_classes
from processes import wait_for

pytestmark = pytest.mark.slow
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


def benchmark(name: str, *words: str, timeout: float = 240, **environment: str) -> Done:
    """`python benchmarks/NAME.py ...`, in a copy of an interpreter that has imported torch."""
    return forked(f"benchmarks/{name}.py", *words, timeout=timeout, **environment)


def test_the_table_of_bugs_follows_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "reliability")
    mutants = importlib.import_module("mutants")
    bugs = mutants.bugs_of_table(mutants.TABLE)  # ends if a text is not in its file
    assert len(bugs) > 100
    assert all(bug.source != (ROOT / bug.file).read_text() for bug in bugs)


def test_bugs_are_drawn_anew_by_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "reliability")
    drawn = importlib.import_module("fresh_bugs").fresh_bugs
    bugs = drawn(40, seed=3)
    assert bugs == drawn(40, seed=3)
    both = {bug.breaks for bug in bugs} & {bug.breaks for bug in drawn(40, seed=4)}
    assert len(both) < 5, "two seeds may draw a few of the same among thousands of functions"
    assert len({(bug.file, bug.breaks.partition(",")[0]) for bug in bugs}) == 40
    for bug in bugs:
        before = (ROOT / bug.file).read_text()
        assert ast.dump(ast.parse(bug.source)) != ast.dump(ast.parse(before)), bug.breaks
        changed = difflib.SequenceMatcher(None, before.splitlines(), bug.source.splitlines(), autojunk=False)
        starts = [first + 1 for kind, first, *_ in changed.get_opcodes() if kind != "equal"]
        assert all(number in bug.lines for number in starts), bug.breaks


def test_a_bug_is_found_by_the_tests_that_execute_its_lines(tmp_path: Path) -> None:
    tests = [f"tests/unit/test_log.py::test_no_cell_is_a_formula[{begin!r}]" for begin in "=@"]
    table, covering, results = (tmp_path / name for name in ("table", "map.json", "results.json"))
    table.write_text(
        """core/figures.py: a cell is a formula
- ["'" * bool(
+ ["" * bool(
core/figures.py: a control character stays
- writerow(escaped(cell, keep="") for cell in cells)
+ writerow(cell for cell in cells)
core/figures.py: a number has another end
- str(number).removesuffix(".0")
+ str(number)
"""
    )
    source = (ROOT / "src" / "lockstep" / "core" / "figures.py").read_text().splitlines()
    lines = {
        str(number): [0, 1] for number, line in enumerate(source, 1) if "_FORMULA.match" in line or "writerow" in line
    }
    measured = {"tests": tests, "seconds": [1.0, 0.5], "lines": {"src/lockstep/core/figures.py": lines}}
    covering.write_text(json.dumps(measured))
    words = ("--table", table, "--map", covering, "--json", results)
    command = [sys.executable, ROOT / "benchmarks" / "reliability" / "mutants.py", *words]  # it imports lockstep anew
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 1, done.stderr
    assert "1 of 3 bugs were found" in done.stdout
    rows = [(row["bug"], row["test"], row["tests"]) for row in json.loads(results.read_text())]
    assert rows == [
        ("a cell is a formula", tests[1], 2),
        ("a control character stays", "", 2),
        ("a number has another end", "", 0),
    ]


def test_the_tests_of_a_module_come_first_and_then_the_quick_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "reliability")
    covering = importlib.import_module("covering").Covering
    tests = [f"tests/unit/test_{name}.py::test" for name in ("sampler", "log", "schedule", "augment")]
    measured = covering(tests, [0.1, 3.0, 0.2, 0.3], {"core/figures.py": {"7": [0, 1, 3], "8": [2]}})
    assert measured.of("core/figures.py", [7, 9]) == [tests[1], tests[0], tests[3]]


def test_what_a_test_has_started_ends_with_it_when_its_time_is_over(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(
        """import subprocess, time
def test() -> None:
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    open("pid", "w").write(str(child.pid))
    time.sleep(300)
"""
    )
    script = (
        "import sys, pathlib, covering; print(covering.first_failing(pathlib.Path(), ['test_hangs.py::test'], 30))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "benchmarks" / "reliability")},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.stdout.strip() == "None", done.stderr
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


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
