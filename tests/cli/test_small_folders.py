"""Folders of a few photos: the batch that nobody has typed is that of the split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from helpers import Done, forked, train
from lockstep import compose
from lockstep.config import yaml_io

JOB = ("dataset=folder", "dataset.path=photos", "dataset.input_size=8", "model=linear", "epochs=2", "device=cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `photos`: 54 images to train on, and 10 to evaluate."""
    folder = tmp_path_factory.mktemp("small")
    for number in range(64):
        name = f"{'train' if number < 54 else 'val'}/{'mug' if number % 2 else 'lamp'}/{number}.png"
        path = folder / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (4 * number, 9, 9)).save(path)
    return folder


def said_once(done: Done) -> bool:
    return done.err.count("batch is 54, all images of the training split; it would be 64 with more images") == 1


def test_a_batch_that_nobody_typed_is_at_most_the_split(place: Path) -> None:
    done = train(*JOB, "hydra.run.dir=run", cwd=place)
    assert done.code == 0, done.err
    assert said_once(done)
    job = yaml_io.load(place / "run" / "config.yaml")
    typed = train(*JOB, "batch=54", "hydra.run.dir=typed", cwd=place)
    assert "batch is" not in typed.err
    assert {**yaml_io.load(place / "typed" / "config.yaml"), "name": None} == {**job, "name": None}
    resumed = train("resume=run", "epochs=3", cwd=place)
    assert resumed.code == 0, resumed.err
    assert json.loads((place / "run" / "summary.json").read_text())["step"] == 3


def test_a_batch_that_was_typed_is_refused(place: Path) -> None:
    done = train(*JOB, "batch=64", cwd=place)
    assert done.code == 2
    assert "batch is 64, but the training split has 54 examples; use batch=54 or less" in done.err


@pytest.mark.parametrize("words", [["batch=auto"], ["-m", "seed=1,2"]], ids=" ".join)
def test_other_lines_shrink_it_too(words: list[str], place: Path, tmp_path: Path) -> None:
    done = train(*JOB, *words, f"output_root={tmp_path}", cwd=place)
    assert done.code == 0, done.out + done.err
    configs = [yaml_io.load(path) for path in tmp_path.rglob("config.yaml") if path.parent.name != ".hydra"]
    assert [config["batch"] for config in configs] == [54] * (2 if "-m" in words else 1)


@pytest.mark.parametrize(
    "words", [["doctor", "--json"], ["lr-find", "--steps=20", "--out=found.svg"], ["show", "--out=shown.png"]]
)
def test_commands_that_make_no_run_shrink_it_too(words: list[str], place: Path) -> None:
    done = forked("lockstep", words[0], *JOB, *words[1:], cwd=place)
    assert done.code == 0, done.out + done.err
    assert said_once(done)
    if "--json" in words:
        assert {finding["level"] for finding in json.loads(done.out)["findings"]} <= {"ok", "warning"}


def test_the_parts_of_a_loop_have_the_smaller_batch(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert compose(JOB).plan.batch == 54
