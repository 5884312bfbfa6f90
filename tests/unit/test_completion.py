"""Completion of words with TAB."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import forked, train
from lockstep.config.commands import quoted_path
from lockstep.config.completion import matches


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for run in ("outputs/1-digits", "outputs/sweeps/s/000-seed=1,lr=2"):
        (tmp_path / run / ".hydra").mkdir(parents=True)
        (tmp_path / run / ".hydra" / "overrides.yaml").touch()
    (tmp_path / "outputs" / "latest").write_text("1-digits\n")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photo.jpg").touch()
    for name in ("photos\x1b[2J", "photos\nrm", "outputs/1-\u202edigits"):  # a terminal would obey them
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra" / "overrides.yaml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("word", "completed"),
    [
        ("resume=", ["resume=latest", "resume=outputs/1-digits", "resume=outputs/sweeps/"]),
        ("resume=la", ["resume=latest"]),
        ("init_from=outputs/1", ["init_from=outputs/1-digits"]),
        ("resume=outputs/sweeps/s/", ["resume=outputs/sweeps/s/000-seed=1,lr=2"]),
        ("resume=outputs/s", ["resume=outputs/sweeps/"]),
        ("resume=./outputs", None),
        ("model=resnet50.a1_", ["model=resnet50.a1_in1k"]),
        ("model=no_such.", []),
        ("model=resnet5", None),
        ("opt", None),
    ],
)
@pytest.mark.usefixtures("place")
def test_runs_and_tagged_weights_are_ours_to_complete(word: str, completed: list[str] | None) -> None:
    assert matches(word) == completed


def test_a_path_that_is_there_needs_no_quotes_of_hydra(place: Path) -> None:
    run = "outputs/sweeps/s/000-seed=1,lr=2"
    assert quoted_path(f"resume={run}") == f'resume="{run}"'
    Path("outputs/sweeps/latest").write_text("s/000-seed=1,lr=2\n")
    assert quoted_path("init_from=outputs/sweeps/latest") == f'init_from="{run}"'
    assert quoted_path("resume=outputs/1-digits") == "resume=outputs/1-digits"
    assert quoted_path("seed=1,2") == "seed=1,2"
    assert quoted_path("dataset.path=~/my photos") == 'dataset.path="~/my photos"'  # no shell replaces this ~
    assert quoted_path("data_root=a,b") == "data_root=a,b"  # two folders, to sweep over


def test_a_shell_is_answered(place: Path) -> None:
    query = ("-sc", "query=bash")
    assert train(*query, cwd=place, COMP_LINE="python train.py resume=l").out.split() == ["resume=latest"]
    paths = train(*query, cwd=place, COMP_LINE="python train.py dataset.path=./pho").out.split()
    assert "dataset.path=./photos" in paths
    for line, completed in (("lockstep e", ["evaluate", "export"]), ("lockstep evaluate ", [])):
        assert forked("lockstep", *query, cwd=place, COMP_LINE=line).out.split() == completed
