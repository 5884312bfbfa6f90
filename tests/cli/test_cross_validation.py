"""`lockstep evaluate SWEEP`: the predictions for all folds together, each by a model that was not trained on it."""

from __future__ import annotations

import csv
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as reference
from PIL import Image

from helpers import Done, forked, tree
from lockstep.core.run import State
from lockstep.core.run_dir import RunDir
from lockstep.records.ledger import Ledger

IMAGES = 24
TARGETS = {"multiclass": "label_column=one", "multilabel": "label_columns=[x,y]", "regression": "label_columns=[u,v]"}
# With these rates, most probabilities round to 0 or 1.
METRICS = {
    "multiclass": ("metric=[f1,auroc]", "optimizer=sgd", "optimizer.lr=2"),
    "multilabel": ("metric=[auroc]", "optimizer=sgd", "optimizer.lr=20"),
    "regression": ("metric=[mae]",),
}
LINE = ("model=linear", "batch=8", "epochs=2", "augment=none", "device=cpu", "launcher.threads=1", "logger=jsonl")


def photos(folder: Path) -> Path:
    """Noisy images, and a table with a class, two labels and two values for each."""
    draws = np.random.default_rng(0)
    folder.mkdir()
    with (folder / "table.csv").open("w") as file:
        file.write("path,one,x,y,u,v\n")
        for number in range(IMAGES):
            pixels = draws.integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
            x, y = int(pixels[:3].mean() > pixels[3:].mean()), int(draws.integers(2))
            file.write(f"{number}.png,{'ab'[number % 2]},{x},{y},{pixels[:3].mean() / 100},{draws.normal()}\n")
    return folder


def sweep(folder: Path, *words: str) -> Path:
    data = ("dataset=csv", f"dataset.path={folder / 'data' / 'table.csv'}", "dataset.decode_size=6")
    places = (f"hydra.sweep.dir={folder}/sweep", f"output_root={folder}/outputs")
    done = forked("lockstep", "train", "-m", *data, *LINE, *places, *words)
    assert done.code == 0, done.err
    return folder / "sweep"


def over_folds(folder: Path, task: str) -> Path:
    """A sweep over three folds for a kind of targets."""
    photos(folder / "data")
    targets = f"dataset.{TARGETS[task]}"
    return sweep(folder, f"task={task}", targets, *METRICS[task], "dataset.folds=3", "dataset.fold=0,1,2")


@pytest.fixture(scope="module")
def multiclass(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return over_folds(tmp_path_factory.mktemp("multiclass"), "multiclass")


def evaluated(folder: Path, out: Path, *words: str) -> tuple[Done, Any, list[dict[str, str]]]:
    done = forked("lockstep", "evaluate", str(folder), "--device", "cpu", "--out", str(out), *words)
    assert done.code == 0, done.err
    with (out / "predictions.csv").open(newline="") as file:
        return done, json.loads((out / "evaluation.json").read_text()), list(csv.DictReader(file))


def right_scores(task: str, rows: list[dict[str, str]]) -> dict[str, float]:
    """The scores of the lines of a table of predictions."""
    if task == "multiclass":
        true = np.array([row["label"] == "b" for row in rows])
        predicted = np.array([row["predicted"] == "b" for row in rows])
        odds = np.array([float(row["log-odds b"]) for row in rows])
        return {
            "top1": 100 * reference.accuracy_score(true, predicted),
            "top5": 100.0,
            "loss": np.logaddexp(0, np.where(true, -odds, odds)).mean(),
            "f1": reference.f1_score(true, predicted, average="macro"),
            "auroc": reference.roc_auc_score(true, odds),
        }
    names = ("x", "y") if task == "multilabel" else ("u", "v")
    true, values = (
        np.array([[float(row[f"{kind} {name}"]) for name in names] for row in rows]) for kind in ("true", "predicted")
    )
    if task == "multilabel":
        odds = np.array([[float(row[f"log-odds {name}"]) for name in names] for row in rows])
        return {
            "loss": np.logaddexp(0, np.where(true == 1, -odds, odds)).mean(),
            "map": reference.average_precision_score(true, odds),
            "f1": reference.f1_score(true, values > 0.5, average="macro", zero_division=0),
            "subset_accuracy": reference.accuracy_score(true, values > 0.5),
            "auroc": reference.roc_auc_score(true, odds),
        }
    return {
        "loss": reference.mean_squared_error(true, values),
        "mae": reference.mean_absolute_error(true, values),
        "rmse": reference.root_mean_squared_error(true, values),
        "r2": reference.r2_score(true, values),
    }


@pytest.mark.numerics
@pytest.mark.parametrize(
    "task", ["multiclass", *(pytest.param(task, marks=pytest.mark.slow) for task in ("multilabel", "regression"))]
)
def test_the_scores_of_all_folds_together_are_those_of_scikit_learn(
    task: str, multiclass: Path, tmp_path: Path
) -> None:
    folder = multiclass if task == "multiclass" else over_folds(tmp_path, task)
    done, facts, rows = evaluated(folder, tmp_path)
    images = [str(folder.parent / "data" / f"{number}.png") for number in range(IMAGES)]
    assert sorted(row["sample"] for row in rows) == sorted(images), "each image once"
    assert (facts["images"], facts["folds"], facts["missing"]) == (IMAGES, 3, {})
    right = right_scores(task, rows)
    assert {name: facts[name] for name in right} == pytest.approx(right, rel=1e-4, abs=1e-5)
    for fold, part in enumerate(facts["by_fold"]):
        own = [row for row in rows if row["fold"] == str(fold)]
        scores = RunDir(folder / part["run"]).read_summary()["scores"]
        assert {name: part[name] for name in scores} == scores, "to the bit"
        assert (part["fold"], part["images"]) == (fold, len(own))
        assert {name: part[name] for name in right} == pytest.approx(right_scores(task, own), rel=1e-4, abs=1e-5)
    for name in right:
        values = [part[name] for part in facts["by_fold"]]
        assert facts["mean"][name] == pytest.approx(statistics.mean(values))
        assert facts["spread"][name] == pytest.approx(statistics.stdev(values))
    assert "24 images of 3 of 3 folds, each predicted by the model that was not trained on it" in done.out
    assert "warning" not in done.out


def test_the_fold_of_an_image_is_the_one_whose_run_evaluated_it(multiclass: Path, tmp_path: Path) -> None:
    _, facts, rows = evaluated(multiclass, tmp_path)
    for part in facts["by_fold"]:
        run = multiclass / part["run"]
        _, _, own = evaluated(run, tmp_path)
        assert own == [
            {k: v for k, v in row.items() if k != "fold"} for row in rows if row["fold"] == str(part["fold"])
        ]


@pytest.mark.slow
def test_each_setting_and_seed_has_its_scores(tmp_path: Path) -> None:
    photos(tmp_path / "data")
    words = ("dataset.label_column=one", "dataset.folds=2", "dataset.fold=0,1", "seed=1,2", "optimizer.lr=0.1,0.01")
    folder = sweep(tmp_path, *words)
    ledger = Ledger(folder)
    first, *_ = ledger.records()
    ledger.end(first, State.failed, error="no memory")
    done, facts, rows = evaluated(folder, folder)
    by_setting = {(one["setting"]["seed"], one["setting"]["optimizer.lr"]): one for one in facts["settings"]}
    assert by_setting.keys() == {(seed, lr) for seed in ("1", "2") for lr in ("0.1", "0.01")}
    for (seed, lr), one in by_setting.items():
        own = [row for row in rows if (row["seed"], row["optimizer.lr"]) == (seed, lr)]
        assert one["images"] == len(own) == len({row["sample"] for row in own})
        assert one["top1"] == pytest.approx(100 * np.mean([row["label"] == row["predicted"] for row in own]))
    (incomplete,) = (one for one in facts["settings"] if one["missing"])
    assert (incomplete["missing"], incomplete["images"], incomplete["spread"]) == ({"0": "failed"}, IMAGES // 2, {})
    assert "12 images of 1 of 2 folds" in done.out
    assert "warning: no figure counts the folds that are missing: 0 (failed)" in done.out
    ledger.end(ledger.record(first.number + 4), State.failed)  # the other fold of this setting
    first_setting = " ".join(word for word in first.overrides if word.startswith(("seed=", "optimizer.lr=")))
    assert f"warning: {first_setting} is skipped: none of its folds is done" in evaluated(folder, tmp_path)[0].out
    for record in ledger.records():
        ledger.end(record, State.failed)
    assert "no fold is done; `lockstep compare " in forked("lockstep", "evaluate", str(folder)).err


@pytest.mark.numerics
def test_folds_have_the_same_bits_on_any_number_of_ranks(multiclass: Path, tmp_path: Path) -> None:
    for number in (1, 3):
        (tmp_path / str(number)).mkdir()
        done, _, _ = evaluated(multiclass, tmp_path / str(number), f"launcher.ranks={number}")
        assert done.out.count("images of 3 of 3 folds") == 1
    assert tree(tmp_path / "1") == tree(tmp_path / "3")


def test_only_the_data_of_the_training_is_evaluated_wherever_it_is(multiclass: Path, tmp_path: Path) -> None:
    shutil.copytree(multiclass.parent / "data", tmp_path / "moved")
    data = f"dataset.path={tmp_path / 'moved' / 'table.csv'}"
    _, there, _ = evaluated(multiclass, tmp_path)
    _, here, _ = evaluated(multiclass, tmp_path, data)
    assert here == there
    (tmp_path / "evaluation.json").unlink()
    with (tmp_path / "moved" / "table.csv").open("a") as file:
        file.write("0.png,a,0,0,0,0\n")
    for words in ([data], ["dataset.fold=1"]):
        done = forked("lockstep", "evaluate", str(multiclass), "--out", str(tmp_path), *words)
        assert done.code == 2
        assert "so the model may have seen some of the fold; name the files of the training" in done.err
    assert not (tmp_path / "evaluation.json").exists()


def test_a_sweep_without_folds_and_other_splits_are_one_sentence(multiclass: Path, tmp_path: Path) -> None:
    photos(tmp_path / "data")
    folder = sweep(tmp_path, "dataset.label_column=one", "dataset.val_share=0.5", "seed=1,2")
    done = forked("lockstep", "evaluate", str(folder))
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "it has no folds, expected a sweep such as dataset.folds=5 dataset.fold=0,1,2,3,4 -m; " in done.err
    assert f"`lockstep compare {folder}` compares its jobs" in done.err
    done = forked("lockstep", "evaluate", str(multiclass), "--split", "train")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "--split train: a sweep is evaluated on its folds; name one of its runs: lockstep evaluate " in done.err
