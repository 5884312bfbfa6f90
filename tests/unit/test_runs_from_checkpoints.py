"""A new run that starts from another run's checkpoint: its score, its best checkpoint and its weights are its own."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import records, train_here
from lockstep.checkpoint.weights import read_card
from lockstep.core.run_dir import RunDir

EMA = "train.ema=0.5"
STILL = "optimizer.lr=1e-12"  # with this rate no later step is better than the ones before
JOB = ("model=linear", "batch=64", "augment=none", "train.eval_every=5", "checkpoint.every=5", "checkpoint.keep=9")
LONG, MORE = "steps=30", "steps=50"


@pytest.fixture(scope="module", params=["", EMA])
def first(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, str]:
    """A run with its best score before its last step, and the override of its average."""
    folder = tmp_path_factory.mktemp("first") / "run"
    average = (request.param,) if request.param else ()
    train_here(folder, *JOB, *average, "optimizer.lr=0.02", "steps=20")
    return train_here(folder, *JOB, *average, STILL, LONG), request.param


def check_own_best(run: RunDir, *, after: int) -> None:
    """Check all that a folder says of the best weights against its own figures and files."""
    summary, average = json.loads(run.summary.read_text()), "acc/val_ema_top1"
    lines = [line for line in records(run) if "acc/val_top1" in line]
    scores = {line["step"]: line.get(average, line["acc/val_top1"]) for line in lines}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert min(scores) > after
    assert (summary["best"], summary["best_step"]) == (scores[best], best)
    folder = run.checkpoints / run.best.read_text().strip()
    assert folder.name == f"step-{best:08d}"
    scored = load_file(folder / ("ema.safetensors" if average in lines[0] else "model.safetensors"))
    exported = load_file(run.weights)
    assert all(torch.equal(exported[name], tensor) for name, tensor in scored.items())
    assert (read_card(run.weights).step, read_card(run.weights).scores["top1"]) == (best, scores[best])
    assert json.loads(run.validation.read_text())["step"] == best
    assert {int(row["step"]) for row in csv.DictReader(run.table.read_text().splitlines())} == {*scores}


@pytest.mark.parametrize("start", ["best", "last"])
@pytest.mark.parametrize("word", [STILL, "optimizer.lr=0.02"])
def test_a_new_run_has_the_best_weights_of_its_own_evaluations(
    first: tuple[RunDir, str], tmp_path: Path, start: str, word: str
) -> None:
    earlier, average = first
    checkpoint = earlier.checkpoints / getattr(earlier, start).read_text().strip()
    words = (*JOB, *([average] if average else []), MORE, word)
    run = train_here(tmp_path / "run", *words, f"resume={checkpoint}")
    check_own_best(run, after=int(checkpoint.name[5:]))
    second = run.checkpoints / run.best.read_text().strip()
    forked = train_here(tmp_path / "second", *words, STILL, "steps=60", f"resume={second}")
    check_own_best(forked, after=int(second.name[5:]))


@pytest.mark.parametrize("stop_at", [1, 7])
def test_a_new_run_that_was_stopped_goes_on_to_the_same_best(
    first: tuple[RunDir, str], tmp_path: Path, stop_at: int
) -> None:
    earlier, average = first
    checkpoint = earlier.checkpoints / earlier.best.read_text().strip()
    words = (*JOB, *([average] if average else []), STILL, MORE, f"resume={checkpoint}")
    whole = train_here(tmp_path / "whole", *words)
    cut = train_here(tmp_path / "cut", *words, stop_at=stop_at)
    if stop_at == 1:  # killed before its first checkpoint was whole
        shutil.rmtree(cut.checkpoints)
        cut.checkpoints.mkdir()
        cut.none_yet.touch()
    train_here(cut.path, *words)
    check_own_best(cut, after=int(checkpoint.name[5:]))
    assert cut.weights.read_bytes() == whole.weights.read_bytes()


def test_a_run_that_goes_on_in_its_folder_keeps_its_best(first: tuple[RunDir, str]) -> None:
    check_own_best(first[0], after=0)
    assert json.loads(first[0].summary.read_text())["best_step"] <= 20
