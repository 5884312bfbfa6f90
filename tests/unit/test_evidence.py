"""`benchmarks/evidence.py`: the documents have the figures of figures.json, and what fell behind is told."""

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from helpers import ROOT


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("evidence")


def test_the_documents_have_the_figures_of_the_last_run(evidence: ModuleType) -> None:
    for path, text in evidence.documents().items():
        assert path.read_text() == text, "run `python benchmarks/evidence.py --documents`"


def test_the_readme_has_the_ratio_of_the_loop() -> None:
    part = json.loads((ROOT / "docs/evidence/figures.json").read_text())["overhead"]
    steps = part["tables"]["us per step"]["linear, batch 64"]
    (row,) = re.findall(r"\| linear model: .*", (ROOT / "README.md").read_text())
    assert f"a step takes {steps['Lockstep'] / steps['bare']:.2f}x of a bare loop's time" in row
    assert row.endswith(f"| {part['date']} |")


def test_every_part_has_its_place_and_names_files_that_exist(evidence: ModuleType) -> None:
    text = (ROOT / "docs/evidence/benchmarks.md").read_text()
    for name, part in evidence.PARTS.items():
        assert f"evidence.py: {name} -->" in text or not part.has_ratios
        for file in re.findall(r"\S+\.py", part.line):
            assert (ROOT / file).is_file()
    assert evidence.RESULTS.keys() <= evidence.PARTS.keys()


def test_the_ladder_climbs_every_script_that_has_a_name_there(evidence: ModuleType) -> None:
    scripts = (ROOT / "benchmarks/peers").glob("*.py")
    assert {path.stem for path in scripts if "# lockstep ladder calls it" in path.read_text()} == {*evidence.SCRIPTS}


def test_a_ratio_beyond_the_noise_is_behind(evidence: ModuleType) -> None:
    last = {"a save, ms": {"": {"torch": 10, "lockstep": 10}}, "img/s": {"": {"torch": 10, "lockstep": 10}}}
    now = {"a save, ms": {"": {"torch": 20, "lockstep": 22}}, "img/s": {"": {"torch": 10, "lockstep": 8}}}
    assert evidence.fallen_behind(now, last) == ["img/s, , lockstep: 0.80x, and 1.00x the time before"]
    assert len(evidence.fallen_behind({"a save, ms": {"": {"torch": 10, "lockstep": 12}}}, last)) == 1
    assert not evidence.fallen_behind({"img/s": {"": {"torch": 10, "lockstep": 18}}}, last)
    assert not evidence.fallen_behind({"img/s": {"": {"torch": 10, "lockstep": 3}}}, {}), "the first time"
    assert not evidence.fallen_behind({"img/s": {"": {"timm": 10, "lockstep": 3}}}, last), "another contender"


def test_a_part_without_its_data_is_skipped_and_a_failed_one_is_told(evidence: ModuleType, tmp_path: Path) -> None:
    skipped = evidence.measure("ladder", evidence.PARTS["ladder"], tmp_path, quick=True)
    assert skipped == "ladder is skipped: there is no DATA/MNIST"
    part = evidence.Part("-c 'import sys; sys.exit({})'", "3")
    assert evidence.measure("bad", part, None, quick=False).startswith("bad failed with exit code 3")


def test_the_readme_names_no_contender_that_was_not_measured(evidence: ModuleType) -> None:
    parts = json.loads((ROOT / "docs/evidence/figures.json").read_text())
    del parts["overhead"]["tables"]["us per step"]["linear, batch 64"]["Fabric"]
    row = evidence.result_rows(parts).splitlines()[2]
    assert "Fabric" not in row


def test_the_spread_of_repeats_is_no_figure_of_the_networks(evidence: ModuleType, tmp_path: Path) -> None:
    tables = {f"img/s{ending}": {"resnet18": {"Lockstep": 1.5}} for ending in ("", evidence.SPREAD)}
    (tmp_path / "figures.json").write_text(json.dumps(tables))
    assert evidence.of_networks(tmp_path, "").keys() == {"img/s"}


@pytest.mark.slow
def test_a_part_is_measured_by_its_command(evidence: ModuleType) -> None:
    part = evidence.Part(
        "-m lockstep --version {}", full="", read=lambda _, printed: {"t": {"r": {printed: 1.23456}}}
    )
    facts = evidence.measure("version", part, None, quick=False)
    assert facts["command"] == "lockstep --version"
    assert [*facts["tables"]["t"]["r"].values()] == [1.235]
    assert facts["python"] == sys.version.split()[0]
