"""Trained models of several labels and of values in use: evaluation, prediction and pictures."""

import asyncio
import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as reference
import torch
from PIL import Image

import lockstep
from helpers import FAKE, train_here
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.data.datasets import CSV
from lockstep.diagnostics.show import caption
from lockstep.inference import demo
from lockstep.inference.demo import DemoServer
from lockstep.inference.evaluate import check_data, evaluate
from lockstep.inference.predict import predict
from lockstep.runtime.local_server import Refused

JOB = (*FAKE, "augment=none", "dataset.classes=3", "dataset.examples=120", "model=linear", "batch=8", "epochs=3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    folder = tmp_path_factory.mktemp("runs")
    return {task: train_here(folder / task, *JOB, f"task={task}") for task in ("multilabel", "regression")}


def columns(run: RunDir) -> tuple[Any, Any]:
    with (run.path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    tables = [[[float(row[f"{kind} {n}"]) for n in range(3)] for row in rows] for kind in ("true", "predicted")]
    return tuple(map(np.array, tables))


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_an_evaluation_has_the_scores_of_the_training_and_of_scikit_learn(
    task: str, runs: dict[str, RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs[task]
    evaluate(str(run.path), (), split="val", device="cpu", out=None)
    facts, of_training = json.loads((run.path / "evaluation.json").read_text()), run.read_summary()["scores"]
    assert {name: facts[name] for name in of_training} == of_training, "to the bit"
    true, predicted = columns(run)
    by_output: dict[str, Any] = {
        "map": lambda y, p: reference.average_precision_score(y, p),
        "f1": lambda y, p: reference.f1_score(y, p > 0.5, zero_division=0),
        "precision": lambda y, p: reference.precision_score(y, p > 0.5, zero_division=0),
        "recall": lambda y, p: reference.recall_score(y, p > 0.5),
        "mae": reference.mean_absolute_error,
        "rmse": reference.root_mean_squared_error,
        "r2": reference.r2_score,
    }
    rows = facts["labels" if task == "multilabel" else "values"]
    assert [row["name"] for row in rows] == ["0", "1", "2"]
    tabled = {"map", "f1", "precision", "recall"} if task == "multilabel" else {"mae", "rmse", "r2"}
    assert all(row.keys() == {"name", "images", *tabled} for row in rows)
    for number, row in enumerate(rows):
        assert row["images"] == (true[:, number].sum() if task == "multilabel" else 30)
        for metric in row.keys() - {"name", "images"}:
            right = by_output[metric](true[:, number], predicted[:, number])
            assert row[metric] == pytest.approx(right, rel=1e-4, abs=1e-5), metric
    shown = capsys.readouterr().out
    assert "30 images of the evaluation split of Fake" in shown
    assert "warning" not in shown


def test_a_prediction_of_labels_has_those_above_the_threshold(
    runs: dict[str, RunDir], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (prediction,) = lockstep.load(runs["multilabel"].path, device="cpu").predict(tmp_path / "a.png")
    shares = sorted(prediction.probabilities.tolist(), reverse=True)
    between = (shares[0] + shares[1]) / 2
    assert [share for *_, share in prediction.above(between)] == shares[:1]
    options: dict[str, Any] = {"top": None, "device": "cpu", "out": None}
    predict(str(runs["multilabel"].path), [str(tmp_path)], form="json", threshold=between, **options)
    (record,) = json.loads(capsys.readouterr().out)
    assert [row["probability"] for row in record["classes"]] == shares[:1]
    predict(str(runs["multilabel"].path), [str(tmp_path)], form="json", threshold=0.0, **options)
    assert [row["probability"] for row in json.loads(capsys.readouterr().out)[0]["classes"]] == shares
    predict(str(runs["multilabel"].path), [str(tmp_path)], form="table", threshold=1.0, **options)
    assert "1 image: 1 no label" in capsys.readouterr().out
    predict(str(runs["multilabel"].path), [str(tmp_path)], form="csv", threshold=1.0, **options)
    assert capsys.readouterr().out == "file,rank,label,class,probability,log_odds\n"
    with pytest.raises(InputError, match="--threshold is 2, expected a probability"):
        predict(str(runs["multilabel"].path), [str(tmp_path)], form="table", threshold=2.0, **options)
    with pytest.raises(InputError, match=r"--threshold is 0\.5, but this model predicts values"):
        predict(str(runs["regression"].path), [str(tmp_path)], form="table", threshold=0.5, **options)
    predictor = lockstep.load(runs["regression"].path, device="cpu")
    values = predictor.values(tmp_path / "a.png")[0].tolist()
    for form in ("table", "csv"):
        predict(str(runs["regression"].path), [str(tmp_path)], form=form, **options)
        assert all(str(np.float32(value)) in capsys.readouterr().out for value in values[:1])
    predict(str(runs["regression"].path), [str(tmp_path)], form="json", **options)
    assert [*json.loads(capsys.readouterr().out)[0]["values"].values()] == values
    with pytest.raises(InputError, match=r"predicts values \(0, 1, 2\) and no classes; use Predictor.values"):
        predictor.predict(tmp_path / "a.png")


CERTAIN: dict[str, tuple[str, ...]] = {
    "softmax": ("task=multiclass", "optimizer.lr=10", "metric=[auroc,average_precision]"),
    "sigmoid": ("task=multiclass", "loss=bce", "optimizer.lr=20", "metric=[auroc,average_precision]"),
    "labels": ("task=multilabel", "optimizer.lr=20", "metric=[auroc]"),
}


@pytest.mark.parametrize("kind", CERTAIN)
def test_what_is_written_keeps_the_order_of_probabilities_that_round_to_1(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ("optimizer=sgd", "train.clip_norm=null", "dataset.classes=2", "epochs=2", *CERTAIN[kind])
    run = train_here(tmp_path / "run", *JOB, *job)
    evaluate(str(run.path), (), split="val", device="cpu", out=None)
    facts, of_training = json.loads((run.path / "evaluation.json").read_text()), run.read_summary()["scores"]
    assert {name: facts[name] for name in of_training} == of_training, "to the bit"
    with (run.path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    odds = np.array([[float(row[f"log-odds {n}"]) for n in range(2)] for row in rows])
    shares = [float(row[key]) for row in rows for key in row if key in ("probability", "predicted 0", "predicted 1")]
    cells = [[(row.get(f"true {n}"), row.get("label")) for n in range(2)] for row in rows]
    true = np.array([[own == "1" or label == str(n) for n, (own, label) in enumerate(row)] for row in cells])
    assert np.isin(shares, [0, 1]).mean() > 0.3, "saturated"
    assert len({*map(tuple, odds)}) == len(rows)
    assert facts["auroc"] == pytest.approx(reference.roc_auc_score(true, odds, average="macro"), rel=1e-12)
    name = "map" if kind == "labels" else "average_precision"
    assert facts[name] == pytest.approx(reference.average_precision_score(true, odds, average="macro"), rel=1e-12)
    for number in range(9):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    files = [str(tmp_path / f"{number}.png") for number in range(9)]
    predictor = lockstep.load(run.path, device="cpu")
    logits = predictor.values(files).double().numpy()
    right = logits - logits[:, ::-1] if kind == "softmax" else logits
    options: dict[str, Any] = {"device": "cpu", "out": None, "top": None}
    capsys.readouterr()
    predict(str(run.path), files, form="csv", threshold=0.0 if kind == "labels" else None, **options)
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    predict(str(run.path), files, form="json", threshold=0.0 if kind == "labels" else None, **options)
    classes = [row for record in json.loads(capsys.readouterr().out) for row in record["classes"]]
    for row, answer in zip(lines, classes, strict=True):
        expected = right[files.index(row["file"]), int(row["label"])]
        assert float(row["log_odds"]) == answer["log_odds"] == expected
        assert float(row["probability"]) == answer["probability"]
        assert (expected == right[files.index(row["file"])].max()) == (row["rank"] == "1")


def test_written_values_are_read_back_to_the_same_float32(
    runs: dict[str, RunDir], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, options = runs["regression"], {"device": "cpu", "out": None}
    evaluate(str(run.path), (), split="val", **options)
    true, predicted = (table.astype(np.float32).astype(float) for table in columns(run))
    facts = json.loads((run.path / "evaluation.json").read_text())
    assert facts["mae"] == pytest.approx(reference.mean_absolute_error(true, predicted), rel=1e-12)
    for number in range(2):  # they differ by one level of one pixel
        pixels = np.random.default_rng(0).integers(1, 255, (8, 8), dtype=np.uint8)
        pixels[3, 3] += number
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    files = [str(tmp_path / f"{number}.png") for number in range(2)]
    values = lockstep.load(run.path, device="cpu").values(files).numpy()
    capsys.readouterr()
    for form in ("table", "csv", "json"):
        predict(str(run.path), files, form=form, top=None, **options)
        text = capsys.readouterr().out
        if form == "csv":
            cells = [[row[str(n)] for n in range(3)] for row in csv.DictReader(text.splitlines())]
        elif form == "table":
            cells = [line.split()[2::2] for line in text.splitlines()]
        else:
            cells = [[*record["values"].values()] for record in json.loads(text)]
        assert np.array_equal(np.array(cells, dtype=np.float32), values), form


def test_a_file_that_is_no_image_is_not_counted(
    runs: dict[str, RunDir], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (8, 8), 9).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"b\.png"):
        predict(str(runs["multilabel"].path), [str(tmp_path)], form="table", top=None, device="cpu", out=None)
    assert "\n1 image: " in capsys.readouterr().out
    with pytest.raises(InputError, match="--top is 3, but this model predicts labels; remove it"):
        predict(str(runs["multilabel"].path), [str(tmp_path)], form="table", top=3, device="cpu", out=None)


def test_an_evaluation_has_the_metrics_of_its_run(tmp_path: Path) -> None:
    chosen = ("metric=[f1,auroc]", "metric.f1.average=micro", "monitor=auroc")
    run = train_here(tmp_path, *JOB, "task=multilabel", *chosen)
    evaluate(str(run.path), (), split="val", device="cpu", out=None)
    facts, of_training = json.loads((run.path / "evaluation.json").read_text()), run.read_summary()["scores"]
    assert of_training.keys() == {"loss", "map", "f1", "subset_accuracy", "auroc"}
    assert {name: facts[name] for name in of_training} == of_training


def test_other_data_is_refused(runs: dict[str, RunDir]) -> None:
    words = ("dataset=fake", "dataset.classes=4", "dataset.channels=1", "dataset.size=8")
    for task, targets in (("multilabel", "labels"), ("regression", "values")):
        sentence = f"it has the {targets} 0, 1, 2, 3, expected the {targets} of the model, 0, 1, 2"
        with pytest.raises(InputError, match=sentence):
            evaluate(str(runs[task].path), words, split="val", device="cpu", out=None)


def test_a_caption_has_labels_or_values() -> None:
    names = ("cat", "dog", "bird")
    assert caption(torch.tensor([1.0, 0.3, 0.0]), names, "labels") == ["cat", "30 % dog"]
    assert caption(torch.zeros(3), names, "labels") == ["no label"]
    assert caption(torch.tensor([1.5, -2.0, 0.0]), names, "values") == ["cat 1.5", "dog -2", "bird 0"]


def test_labels_and_values_in_another_order_are_not_those_of_the_model(
    runs: dict[str, RunDir], tmp_path: Path
) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).touch()
    (tmp_path / "list.csv").write_text("path,0,1,2,split\na.png,0,1,1,train\nb.png,0,1,1,val\n")
    for task, targets in (("multilabel", "labels"), ("regression", "values")):
        predictor = lockstep.load(runs[task].path, device="cpu")
        source = CSV(path=str(tmp_path / "list.csv"), label_columns=["1", "0", "2"], targets=targets)
        with pytest.raises(
            InputError, match=f"it has the {targets} 1, 0, 2, expected the {targets} of the model, 0, 1"
        ):
            check_data(predictor, source)


def test_the_page_of_a_model_gets_all_labels_that_are_predicted(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", *JOB, "task=multilabel", "dataset.classes=8", "epochs=1")
    server, photo = DemoServer(lockstep.load(run.path, device="cpu"), 0), io.BytesIO()
    Image.new("L", (8, 8)).save(photo, "PNG")
    weight, bias = server.predictor.model.parameters()
    for number in (0, 5, 6, 8):
        weight.data.zero_()
        bias.data.copy_(torch.arange(8).lt(number).float() - 0.5)
        answer = server.predicted(photo.getvalue())
        assert (answer["predicted"], len(answer["classes"])) == (number, max(5, number))
    server.socket.close()


def test_a_photo_comes_in_pieces_and_is_too_long_by_its_header_or_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "LARGEST", 10)

    def sent(length: int | None, *pieces: bytes) -> bytes:
        messages = iter([{"body": piece, "more_body": piece is not pieces[-1]} for piece in pieces])

        async def receive() -> dict[str, Any]:
            return next(messages)

        headers = {"origin": "http://here"} | ({} if length is None else {"content-length": str(length)})
        page: Any = SimpleNamespace(hosts={"here"})
        return asyncio.run(DemoServer._photo(page, headers, receive))

    for length in (None, 10):
        assert sent(length, b"abcde", b"fghij") == b"abcdefghij"
    for length, pieces in {11: [b"abc"], None: [b"abcdef", b"ghijk"], 3: [b"abcdef", b"ghijk"]}.items():
        with pytest.raises(Refused, match="the photo has"):
            sent(length, *pieces)
