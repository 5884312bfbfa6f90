"""The advice of a run, of its report, of `doctor` and of `lr-find`: pasted onto the line it is given for, it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import FAKE, forked, photos_of_two_classes, resolved, train

SMALL = ("model=linear", "device=cpu", "logger=jsonl", "epochs=2")
JOBS = {
    "photos with a batch": ("dataset=folder", "dataset.path=photos", "dataset.input_size=8", "batch=32", *SMALL),
    "photos from files": (
        *("dataset=folder", "dataset.path=photos", "dataset.input_size=32", "batch=8"),
        *("loader=streaming", "loader.workers=0", "model=basicnet", *SMALL[1:]),
    ),
    "in memory": (*FAKE, "dataset.examples=1000", "batch=16", "model=basicnet", *SMALL[1:]),
}
# What a machine of tests cannot have: downloads, and minutes of compiling.
COMPOSED_ONLY = ("pretrained", "compile")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photos_of_two_classes(tmp_path_factory.mktemp("advice"), 40, "jpg")


def advice_of(job: tuple[str, ...], folder: str, place: Path) -> Iterator[str]:
    """Every override that a run, its checklist, `doctor` and `lr-find` offer for a job."""
    done = train(*job, f"hydra.run.dir=run-{folder}", cwd=place)
    assert done.code == 0, done.err
    summary = json.loads((place / f"run-{folder}" / "summary.json").read_text())
    findings = [summary["learning"], summary["verdict"], *summary["checklist"]]
    yield from (finding["override"] for finding in findings if finding["override"])
    longer = re.search(r"train longer .* ((?:epochs|steps)=\d+)", done.out)
    assert longer is not None
    yield longer[1]
    doctor = forked("lockstep", "doctor", *job, "--json", cwd=place)
    assert doctor.code == 0, doctor.err
    texts = [finding["text"] for finding in json.loads(doctor.out)["findings"]]
    rates = forked("lockstep", "lr-find", *job, "--steps=12", "--out=found.svg", cwd=place)
    assert rates.code == 0, rates.err
    for text in [*texts, rates.out]:
        yield from re.findall(r"\b[a-z_]+(?:\.[a-z_]+)*=[\w.]*\w", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_advice_runs_on_the_line_that_it_is_given_for(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    job = JOBS[name]
    collected = dict.fromkeys(advice_of(job, name, place))
    assert len(collected) >= 3
    for number, override in enumerate(collected):
        words = override.split()
        if any(name in override for name in COMPOSED_ONLY):
            resolved(*job, *words)
            continue
        length = () if override.startswith(("epochs=", "steps=")) else ("steps=2",)
        done = train(*job, *words, *length, f"hydra.run.dir={name}-{number}", cwd=place)
        assert done.code == 0, (override, done.err)
