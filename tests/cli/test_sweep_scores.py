"""Sweeps by any score: its direction decides the best job, who goes on in a halving, and what a search looks for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helpers import Done, forked, train
from lockstep.core.run import Run
from lockstep.records.ledger import Ledger

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


def test_a_halving_over_seeds_ends_with_the_setting_of_the_better_mean_and_all_its_seeds(tmp_path: Path) -> None:
    words = ("monitor=loss", "epochs=4", "optimizer.lr=0.001,0.01,0.1,30", "seed=1,2", "sweep.halving=4")
    done = sweep(tmp_path, *words)
    assert "1 of 4 settings continue after 25 % of their steps" in done.out
    states = [str(record.state) for record in Ledger(tmp_path / "sweep").records()]
    first = [values[0] for values in figures(tmp_path, "loss/val").values()]
    means = [first[number] + first[number + 1] for number in range(0, 8, 2)]
    best = means.index(min(means))
    assert states == ["done" if number // 2 == best else "pruned" for number in range(8)]
    assert sweep(tmp_path, *words).out.count("started") == 0
    (line,) = re.findall(r"^ *\d, \d .*± .*2 done.*$", done.out, re.MULTILINE)
    assert line.split()[0] == f"{2 * best},"
    whole = sweep(tmp_path, *words[:-1])  # those that were left behind go on too
    assert whole.out.count(" ± ") >= 4


def test_a_search_minimises_a_loss(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    sweep(tmp_path, "hydra/sweeper=optuna", "monitor=loss", "epochs=1", RATES, "hydra.sweeper.n_trials=3")
    journal = optuna.storages.journal.JournalFileBackend(str(tmp_path / "sweep" / "optuna.log"))
    storage = optuna.storages.JournalStorage(journal)
    (summary,) = optuna.get_all_study_summaries(storage)
    study = optuna.load_study(study_name=summary.study_name, storage=storage)
    assert study.direction.name == "MINIMIZE"
    assert study.best_value == min(record.objective for record in Ledger(tmp_path / "sweep").records())


FAKE = ("dataset=fake", "dataset.classes=4", "dataset.channels=1", "dataset.size=8", "dataset.examples=256")
TASKS = ("task=multiclass", "task=multilabel", "task=regression")


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """A folder with the recipes `a` and `b` of a regression, and `c` of several labels."""
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    for name, task, rate in (("a", "regression", 0.1), ("b", "regression", 0.01), ("c", "multilabel", 0.1)):
        text = f"# @package _global_\ndefaults:\n  - override /task: {task}\noptimizer:\n  lr: {rate}\n"
        (folder / f"{name}.yaml").write_text(text)
    return folder.parent


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("monitor=loss,top1",),
            "the monitors of these are -loss and top1; give all of them one that each has: monitor=loss",
        ),
        (("task=multiclass,multilabel",), "the monitors of these are map and top1; give all of them one"),
        (("experiment=a,c",), "the monitors of these are -mae and map; give all of them one"),
        (("monitor=loss", "seed=1,2", "hydra.launcher.direction=maximize"), "whose direction is minimize"),
        (("metric=f1,kappa", "monitor=f1"), "job 1 (metric=kappa): monitor has f1, which an evaluation"),
        (("seed=1,2", "sweep.objectives=[score,f1]"), "job 0 (seed=1): sweep.objectives has f1, which an evaluation"),
        (("sweep.objectives=[score,f1]",), "job 0: sweep.objectives has f1, which an evaluation"),
        (("seed=1,2", "sweep.objectives=[top1,score]"), "each once; the score is top1: sweep.objectives=[score]"),
        (("hydra/sweeper=optuna", "batch=8,9", "sweep.objectives=[speed]"), "sweep.objectives has speed, which"),
        (("hydra/sweeper=optuna", "batch=8,9", "seed=1,2"), "compares job by job, so the luckiest seed would win"),
        (("hydra/sweeper=optuna", "batch=8,9", "dataset.fold=0,1"), "so the luckiest dataset.fold would win"),
        (
            ("batch=8,9", "seed=1,2,3", "sweep.halving=3"),
            "all seeds and folds of a setting being one, and this line has 2",
        ),
    ],
    ids=str,
)
def test_jobs_that_cannot_be_compared_are_refused(
    words: tuple[str, ...], sentence: str, tmp_path: Path, recipes: Path
) -> None:
    assert sentence in sweep(tmp_path, f"--config-dir={recipes}", *FAKE, "steps=1", *words, code=2).err
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("words", "head", "direction"),
    [
        (("task=multiclass,multilabel,regression", "monitor=loss"), "val loss", "minimize"),
        (("task=multiclass,multilabel,regression", "monitor=auto,loss"), None, None),
        (("monitor=loss,-loss",), "val loss", "minimize"),
        (("experiment=a,b",), "val mae", "minimize"),
        (("metric=[f1],[f1,kappa]",), "val top-1 +val f1 +val kappa", "maximize"),
        (
            ("metric=f1", "monitor=f1", "seed=1,2", "sweep.objectives=[f1,loss,top1]"),
            "val f1 +val loss +val top-1",
            "maximize",
        ),
    ],
    ids=str,
)
def test_jobs_agree_on_a_score_after_auto_is_resolved(
    words: tuple[str, ...], head: str | None, direction: str, tmp_path: Path, recipes: Path
) -> None:
    line = (f"--config-dir={recipes}", *FAKE, "steps=1", *words)
    done = sweep(tmp_path, *line, code=0 if head else 2)
    if head is not None:
        assert re.search(f"^job +.*{head} +state", done.out, re.MULTILINE)
        assert Ledger(tmp_path / "sweep").identity().direction == direction
        assert "jobs are done" in sweep(tmp_path, *line).out  # the line goes on with its own sweep


def test_runs_of_all_tasks_are_a_table_each_of_every_command(tmp_path: Path) -> None:
    for task, metric in zip(TASKS, ("f1", "map", "r2"), strict=True):
        for seed in (1, 2):
            train(
                *FAKE, "model=linear", "steps=1", "device=cpu", task, f"metric={metric}", f"seed={seed}", cwd=tmp_path
            )
    heads = ["val top-1 +val f1", "val map", "val mae +val r2"]
    compared, listed = (forked("lockstep", *words, cwd=tmp_path).out for words in (("compare", "outputs"), ("runs",)))
    assert all(re.search(f"{head} +state", compared, re.MULTILINE) for head in heads)
    assert all(re.search(f"^.*when +.*{head} +size", listed, re.MULTILINE) for head in heads)
    rows = json.loads(forked("lockstep", "runs", "--sort", "score", "--json", cwd=tmp_path).out)
    for monitor, falls in (("top1", False), ("map", False), ("mae", True)):
        scores = [row["score"] for row in rows if row["monitor"] == monitor]
        assert scores == sorted(scores, reverse=not falls)
        assert len(scores) == 2
