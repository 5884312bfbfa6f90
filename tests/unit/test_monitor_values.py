"""A monitor that can have no value on the images to evaluate is refused; one that has none all the same is told."""

import csv
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn import metrics

from helpers import QUICK, created, refusal, train_here
from lockstep.inference.predictor import load_predictor
from lockstep.job import validate_with_data

NAMES = ("a", "b", "c")
# What is evaluated, (images, classes): images of each class, of one, without one; several labels or none; values.
CLASSES = {"all": np.eye(3), "one": np.eye(3)[[0, 0, 0]], "two": np.eye(3)[[0, 1, 0, 1]], "single": np.eye(3)[[1]]}
LABELS = {
    "all": np.eye(3),
    "none": np.zeros((4, 3)),
    "every": np.ones((4, 3)),
    "constant": np.array([[1, 1, 0]] * 4),
    "mixed": np.array([[1, 1, 0], [1, 0, 0]]),
    "single": np.array([[1, 0, 1]]),
}
VALUES = {"all": np.eye(3) + 1, "constant": np.ones((4, 3)), "single": np.ones((1, 3))}
OF_BOTH = ("precision", "recall", "f1", "auroc", "average_precision")
OF_CLASSES = ("accuracy", *OF_BOTH, "calibration", "kappa", "matthews")
OF_LABELS = (*OF_BOTH, "map", "subset_accuracy")
CASES = [
    *(("multiclass", metric, split) for metric in OF_CLASSES for split in CLASSES),
    *(("multilabel", metric, split) for metric in OF_LABELS for split in LABELS),
    *(("regression", metric, split) for metric in ("mae", "rmse", "r2") for split in VALUES),
]


def words(folder: Path, task: str, labels: NDArray[np.float64]) -> list[str]:
    """A data set of three classes, labels or values, of which these are evaluated."""
    train = np.eye(3)[[0, 1, 2] * 3]
    with (folder / "table.csv").open("w") as file:
        table = csv.writer(file)
        table.writerow(["path", "split", *NAMES, "label"])
        for number, row in enumerate((*train, *labels)):
            Image.new("RGB", (6, 6), (20 * number, 9, 9)).save(folder / f"{number}.png")
            split = "train" if number < len(train) else "val"
            table.writerow([f"{number}.png", split, *(f"{value:g}" for value in row), NAMES[int(row.argmax())]])
    columns = [f"dataset.label_columns=[{','.join(NAMES)}]"] * (task != "multiclass")
    data = ("dataset=csv", f"dataset.path={folder / 'table.csv'}", "dataset.decode_size=6", "model=linear", "batch=3")
    return [f"task={task}", *data, *columns, "augment=none", "steps=6"]


def is_defined(task: str, metric: str, labels: NDArray[np.float64]) -> bool:
    """Whether scikit-learn has a score for random predictions; a class or label without examples has none."""
    scores = np.random.default_rng(1).random(labels.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if metric == "r2":
            return bool(np.isfinite(metrics.r2_score(labels, scores)))
        if metric in ("precision", "recall", "f1", "average_precision", "map"):
            return bool(labels.any())
        if metric == "auroc":
            pairs = [(true, own) for true, own in zip(labels.T, scores.T, strict=True) if true.any()]
            return any(np.isfinite(metrics.roc_auc_score(*pair)) for pair in pairs if len({*pair[0]}) > 1)
    return True


@pytest.mark.parametrize(("task", "metric", "split"), CASES)
def test_a_monitor_is_refused_where_scikit_learn_has_no_score(
    tmp_path: Path, task: str, metric: str, split: str
) -> None:
    labels = {"multiclass": CLASSES, "multilabel": LABELS, "regression": VALUES}[task][split]
    job = [*words(tmp_path, task, labels), f"metric=[{metric}]", f"monitor={metric}"]
    out = f"output_root={tmp_path / 'out'}"
    if is_defined(task, metric, labels):
        created(*QUICK, *job, out)
        return
    sentence = refusal(tmp_path / "out", *QUICK, *job)
    present = len({*labels.argmax(1)}) if task == "multiclass" else labels.any(0).sum()
    kind = {"multiclass": f" ({present} of 3 classes)", "multilabel": f" ({present} of 3 labels)", "regression": ""}
    assert (
        f"monitor is {metric}, which has no value on the {len(labels)} images to evaluate{kind[task]}, " in sentence
    )
    created(*QUICK, *job[:-1], "monitor=loss", out)  # as the sentence says


def test_the_score_of_a_class_without_images_is_refused_and_those_of_the_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = [*words(tmp_path, "multiclass", CLASSES["two"]), "metric=recall", "metric.recall.average=none"]
    assert "(2 of 3 classes), whatever is predicted" in refusal(tmp_path / "out", *QUICK, *job, "monitor=recall/c")
    created(*QUICK, *job, "monitor=recall/a", f"output_root={tmp_path / 'out'}")
    monkeypatch.setattr(validate_with_data, "TRIED_LABELS", 1)  # the first has class a
    created(*QUICK, *job, "monitor=recall/b", f"output_root={tmp_path / 'out'}")


VALUELESS = ("metric=kappa", "monitor=kappa", "optimizer.lr=0.1", "train.eval_every=1", "schedule=constant")


@pytest.mark.parametrize("ends", ["steps=6", "steps=60 train.patience=2"])
def test_a_run_whose_monitor_never_has_a_value_keeps_its_last_weights_and_says_so(
    tmp_path: Path, ends: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "cohen_kappa_score", lambda *_, **__: float("nan"))
    job = [word for word in words(tmp_path, "multiclass", CLASSES["all"]) if not word.startswith("steps")]
    run = train_here(tmp_path / "run", *job, *VALUELESS, *ends.split())
    summary, shown = run.read_summary(), capsys.readouterr().out
    assert "best none, kappa never had a value; the weights are those of step" in shown
    assert (summary["status"], summary["best"], summary["best_step"]) == ("completed", None, summary["step"])
    assert load_predictor(run.path, device="cpu").card.step == summary["step"]
    for command in ("evaluate", "predict", "export", "demo"):
        assert f"lockstep {command} {run.path}" in " ".join(shown.split())
    again = train_here(run.path, *job, *VALUELESS, "steps=70")
    assert load_predictor(again.path, device="cpu").card.step == 70 == again.read_summary()["best_step"]


SAMPLINGS = ("train.repeats=3", "train.sampling=balanced", "dataset.limit=0.7", "dataset.folds=3 dataset.fold=1")


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_record_of_examples_has_the_index_of_each_example(tmp_path: Path, sampling: str) -> None:
    job = [word for word in words(tmp_path, "multiclass", CLASSES["all"]) if not word.startswith("steps")]
    own = [
        *sampling.split(),
        *["dataset.val_split=none"] * ("folds" in sampling),
        "telemetry.samples=true",
        "epochs=4",
    ]
    for name, more in (("plain", own[1:] if "train." in sampling else own), ("run", own)):
        train_here(tmp_path / name, *job, *more)
    lines = {
        name: [json.loads(line) for line in (tmp_path / name / "logs/rank0.samples.jsonl").read_text().splitlines()]
        for name in ("plain", "run")
    }
    pixels = {line["index"]: line["hash"] for line in lines["plain"]}
    assert {*pixels} == {*range(len(pixels))}
    assert {line["index"] for line in lines["run"]} <= {*pixels}
    assert all(line["hash"] == pixels[line["index"]] for line in lines["run"])


def test_each_repetition_of_an_example_in_an_epoch_is_augmented_in_its_own_way(tmp_path: Path) -> None:
    job = ("model=linear", "train.repeats=4", "epochs=1", "batch=64", "telemetry.samples=true")
    run = train_here(tmp_path / "run", *job)
    hashes: dict[int, list[int]] = {}
    for line in map(json.loads, (run.logs / "rank0.samples.jsonl").read_text().splitlines()):
        hashes.setdefault(line["index"], []).append(line["hash"])
    repeated = [own for own in hashes.values() if len(own) == 4]
    assert len(repeated) > 100
    # Nine shifts by up to a pixel: 4 equal ones come once in 700.
    assert sum(len({*own}) > 1 for own in repeated) > 0.95 * len(repeated)
