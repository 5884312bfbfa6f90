"""Sweeps by any score: its direction decides the best job, who goes on in a halving, and what a search looks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers import Done, forked
from lockstep.core.run import Run
from lockstep.sweep.ledger import Ledger

pytestmark = pytest.mark.slow

JOB = ("train", "-m", "model=linear", "optimizer=sgd", "batch=128", "device=cpu", "launcher.threads=1")
RATES = "optimizer.lr=0.001,0.1,30"


def sweep(folder: Path, *words: str, code: int = 0) -> Done:
    done = forked("lockstep", *JOB, f"hydra.sweep.dir={folder}/sweep", f"output_root={folder}/outputs", *words)
    assert done.code == code, done.err
    return done


def figures(folder: Path, tag: str) -> dict[str, list[float]]:
    ledger = Ledger(folder / "sweep")
    return {
        record.folder: [line[1][tag] for line in Run(ledger.folder / record.folder).figures if tag in line[1]]
        for record in ledger.records()
    }


def test_the_best_job_has_the_lowest_loss(tmp_path: Path) -> None:
    done = sweep(tmp_path, "monitor=loss", "epochs=2", RATES)
    losses = {folder: min(values) for folder, values in figures(tmp_path, "loss/val").items()}
    best = min(losses, key=lambda folder: losses[folder])
    ledger = Ledger(tmp_path / "sweep")
    assert ledger.best == best
    assert {record.folder: record.objective for record in ledger.records()} == losses
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["direction"] == "minimize"
    assert f"best: job {int(best[:3])} with " in done.out + done.err


def test_the_best_job_has_the_lowest_error_of_a_metric_that_the_task_adds(tmp_path: Path) -> None:
    words = ("dataset=fake", "dataset.classes=2", "dataset.channels=1", "dataset.size=8", "dataset.examples=256")
    sweep(tmp_path, "task=regression", *words, "monitor=rmse", "epochs=2", RATES)
    errors = {folder: min(values) for folder, values in figures(tmp_path, "metric/rmse").items()}
    assert Ledger(tmp_path / "sweep").best == min(errors, key=lambda folder: errors[folder])
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["direction"] == "minimize"


def test_the_jobs_with_the_lowest_losses_go_on_in_a_halving(tmp_path: Path) -> None:
    sweep(tmp_path, "monitor=loss", "epochs=4", "optimizer.lr=0.001,0.01,0.1,30", "sweep.halving=2")
    states = {record.folder: str(record.state) for record in Ledger(tmp_path / "sweep").records()}
    first = {folder: values[0] for folder, values in figures(tmp_path, "loss/val").items()}
    ranked = sorted(first, key=lambda folder: first[folder])
    assert [states[folder] for folder in ranked[2:]] == ["pruned", "pruned"]
    assert sorted(states[folder] for folder in ranked[:2]) == ["done", "pruned"]


def test_a_search_minimises_a_loss(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    sweep(tmp_path, "hydra/sweeper=optuna", "monitor=loss", "epochs=1", RATES, "hydra.sweeper.n_trials=3")
    journal = optuna.storages.journal.JournalFileBackend(str(tmp_path / "sweep" / "optuna.log"))
    storage = optuna.storages.JournalStorage(journal)
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    assert study.direction.name == "MINIMIZE"
    assert study.best_value == min(record.objective for record in Ledger(tmp_path / "sweep").records())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("monitor=loss,top1",), "compared by one score, and monitor differs between them; give it one value"),
        (
            ("monitor=loss", "seed=1,2", "hydra.launcher.direction=maximize"),
            "whose direction is minimize",
        ),
        (
            ("task=multiclass,multilabel",),
            "give all of them one monitor: monitor=loss",
        ),
    ],
)
def test_jobs_that_cannot_be_compared_are_refused(words: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    assert sentence in sweep(tmp_path, "steps=1", *words, code=2).err
    assert not (tmp_path / "sweep").exists()
