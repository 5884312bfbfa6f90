"""`lockstep evaluate` and `lockstep predict` on runs that were just made."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

import lockstep
from helpers import NARROW, Done, forked, records, train_here
from lockstep.checkpoint.weights import read_card
from lockstep.core.model_card import ModelCard
from lockstep.core.run_dir import RunDir, slug

SIZES = ((40, 30), (30, 44), (33, 33))


def photo(path: Path, number: int, level: int) -> None:
    """A noisy photograph of one brightness."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(number).integers(level - 50, level + 50, (*SIZES[number % 3], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos of cats and dogs, a run on them in `outputs/pets`, and one on digits beside it."""
    folder = tmp_path_factory.mktemp("use")
    for split, count in (("train", 8), ("val", 6)):
        for number in range(count):
            photo(folder / "photos" / split / "cat" / f"{number}.png", number, 60)
            photo(folder / "photos" / split / "dog" / f"{number}.jpg", 10 + number, 190)
    pets = train_here(
        folder / "outputs" / "pets",
        *("dataset=folder", f"dataset.path={folder / 'photos'}", "dataset.decode_size=24", "dataset.input_size=16"),
        *(NARROW, "steps=6", "batch=8", "augment=none"),
    )
    train_here(folder / "outputs" / "digits", NARROW, "steps=30", "batch=128", "train.ema=0.5")
    pets.mark_latest(folder / "outputs")
    return folder


def used(place: Path, *words: str) -> Done:
    return forked("lockstep", *words, cwd=place)


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.numerics
@pytest.mark.parametrize("name", ["pets", "digits"])
def test_an_evaluation_is_that_of_the_run_to_the_bit(place: Path, name: str) -> None:
    run = RunDir(place / "outputs" / name)
    done = used(place, "evaluate", f"outputs/{name}", "--device", "cpu")
    assert done.code == 0, done.err
    evaluation = json.loads((run.path / "evaluation.json").read_text())
    best = run.read_summary()["best_step"]
    logged = next(line for line in records(run) if line["step"] == best and "loss/val" in line)
    assert evaluation["top1"] == run.read_summary()["best"]
    assert f"top-1 {evaluation['top1']:.2f} %" in done.out
    assert "\neach class:\n" in done.out
    assert ("top-5" in done.out) == (name == "digits"), "two classes have no top-5"
    assert json.loads(used(place, "evaluate", f"outputs/{name}", "--device", "cpu", "--json").out) == evaluation
    if name == "pets":  # the others are averaged, and the log has the loss of the model itself
        assert (evaluation["loss"], evaluation["top5"]) == (logged["loss/val"], logged["acc/val_top5"])


def test_the_predictions_add_up_to_the_evaluation(place: Path) -> None:
    assert used(place, "evaluate", "latest").code == 0
    folder = place / "outputs" / "pets"
    evaluation = json.loads((folder / "evaluation.json").read_text())
    lines = rows((folder / "predictions.csv").read_text())
    assert [line["sample"] for line in lines] == sorted(map(str, (place / "photos" / "val").rglob("*.*")))
    assert all(f"/{line['label']}/" in line["sample"] for line in lines)
    pairs, names = Counter((line["label"], line["predicted"]) for line in lines), ("cat", "dog")
    assert evaluation["confusion"] == [[pairs[label, predicted] for predicted in names] for label in names]
    right = sum(line["label"] == line["predicted"] for line in lines)
    assert evaluation["top1"] == 100 * right / len(lines)
    assert [scores["name"] for scores in evaluation["classes"]] == ["cat", "dog"]
    assert sum(map(sum, evaluation["confusion"])) == evaluation["images"] == len(lines) == 12
    assert sum(scores["images"] * scores["top1"] for scores in evaluation["classes"]) == pytest.approx(100 * right)


def test_the_training_split_and_other_data_are_evaluated_too(place: Path, tmp_path: Path) -> None:
    for number in range(3):
        photo(tmp_path / "train" / "cat" / f"{number}.png", number, 60)
        photo(tmp_path / "train" / "dog" / f"{number}.png", number, 190)
        photo(tmp_path / "val" / "dog" / f"{number}.png", number, 190)
    words = ("evaluate", "outputs/pets", "--out", str(tmp_path))
    assert "16 images of the training split" in used(place, *words, "--split", "train").out
    done = used(place, *words, "--split", "val", f"dataset.path={tmp_path}")
    assert "3 images of the evaluation split" in done.out, done.err
    cat = json.loads((tmp_path / "evaluation.json").read_text())["classes"][0]
    assert cat == {"name": "cat", "images": 0, "top1": None}


def test_an_evaluation_of_a_share_of_other_data_says_so_and_its_words_take_all(place: Path, tmp_path: Path) -> None:
    for number, name in itertools.product(range(4), ("cat", "dog")):
        photo(tmp_path / name / f"{number}.png", number, 60)
    words = ("evaluate", "outputs/pets", f"dataset.path={tmp_path}", "--out", str(tmp_path))
    part = used(place, *words)
    assert "2 images of the evaluation split" in part.out
    assert "the val split is a share of these images, by dataset.val_share=0.1; " in part.err
    proposed = re.findall(r"dataset\.\w+_folder=\.", part.err)
    every = used(place, *words, *proposed)
    assert "8 images of the evaluation split" in every.out
    assert "val_share" not in every.err + used(place, "evaluate", "outputs/pets", "--out", str(tmp_path)).err


def test_a_run_keeps_the_evaluation_of_its_own_data_and_every_evaluation_says_its_data(
    place: Path, tmp_path: Path
) -> None:
    shutil.copytree(place / "photos", tmp_path / "photos")
    run, words = tmp_path / "pets", f"dataset.path={tmp_path / 'photos'}"
    shutil.copytree(place / "outputs" / "pets", run, ignore=shutil.ignore_patterns("evaluation*", "predictions*"))
    (tmp_path / "photos" / "val" / "cat" / "3.png").unlink()
    assert used(place, "evaluate", str(run)).code == 0
    own = (run / "evaluation.json").read_bytes()
    for split in ("val", "train"):
        assert used(place, "evaluate", str(run), words, "--split", split).code == 0
    tails = ("", f"-{slug(words)}", f"-train-{slug(words)}")
    expected = {name for tail in tails for name in (f"evaluation{tail}.json", f"predictions{tail}.csv")}
    assert {path.name for path in run.iterdir() if path.name.startswith(("evaluation", "predictions"))} == expected
    assert (run / "evaluation.json").read_bytes() == own
    facts, of_other = json.loads(own), json.loads((run / f"evaluation{tails[1]}.json").read_text())
    assert (facts["images"], of_other["images"]) == (12, 11)
    assert (facts["data"]["path"], facts["data"]["overrides"]) == (str(place / "photos"), [])
    assert (of_other["data"]["path"], of_other["data"]["overrides"]) == (str(tmp_path / "photos"), [words])
    trained_on = read_card(run / "model.safetensors").trained_on["sha256"]
    assert [trained_on == read["data"]["sha256"] for read in (facts, of_other)] == [True, False]


@pytest.mark.parametrize("ending", ["csv", "json", "jsonl", "CSV"])
def test_the_ending_of_a_file_of_predictions_decides_its_form(place: Path, tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"predicted.{ending}"
    words = ("predict", "outputs/pets", "photos/val/cat", "--out", str(out), "--top", "1")
    assert used(place, *words).code == 0
    text, predictor = out.read_text(), lockstep.load(place / "outputs" / "pets")
    if ending.lower() == "csv":
        odds = [float(row["log_odds"]) for row in rows(text)]
    else:
        read = json.loads(text) if ending == "json" else [*map(json.loads, text.splitlines())]
        odds = [row["classes"][0]["log_odds"] for row in read]
    files = sorted((place / "photos" / "val" / "cat").iterdir())
    assert odds == [float(prediction.log_odds.max()) for prediction in predictor.predict(files)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--out", "p.txt"), "--out is p.txt, expected a file .csv or .json or .jsonl: --out p.csv"),
        (("--out", "p"), "--out is p, expected a file .csv or .json or .jsonl: --out p.csv"),
        (
            ("--out", "p.json", "--csv"),
            "--out is p.json, expected a file .csv for --csv: --out p.csv",
        ),
    ],
)
def test_another_ending_of_a_file_of_predictions_is_refused(
    place: Path, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    done = used(tmp_path, "predict", str(place / "outputs" / "pets"), str(place / "photos"), *words)
    assert (done.code, sentence in done.err, [*tmp_path.iterdir()]) == (2, True, [])


def test_a_file_of_weights_alone_is_evaluated_on_data_that_is_named(place: Path, tmp_path: Path) -> None:
    shutil.copy(place / "outputs" / "pets" / "model.safetensors", tmp_path / "pets.safetensors")
    done = used(tmp_path, "evaluate", "pets.safetensors")
    assert (done.code, done.out) == (2, "")
    assert "a weights file does not say where data is; name it: dataset=folder dataset.path=FOLDER" in done.err
    data = ("dataset=folder", f"dataset.path={place / 'photos'}")
    done = used(tmp_path, "evaluate", "pets.safetensors", *data, "dataset.decode_size=256")
    assert "dataset: its image_shape is (3, 256, 256), but the model expects (3, 24, 24)" in done.err
    done = used(tmp_path, "evaluate", "pets.safetensors", *data)
    assert done.code == 0, done.err
    assert {path.name for path in tmp_path.iterdir()} == {"pets.safetensors", "evaluation.json", "predictions.csv"}


def test_a_file_of_weights_alone_is_evaluated_on_some_of_its_classes(place: Path, tmp_path: Path) -> None:
    shutil.copy(place / "outputs" / "pets" / "model.safetensors", tmp_path / "pets.safetensors")
    shutil.copytree(place / "photos" / "val" / "dog", tmp_path / "test" / "dog")
    table = [f"{file.relative_to(tmp_path)},{file.parent.name},test" for file in (tmp_path / "test").rglob("*.*")]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *table]))
    predicted = {
        line["file"]: line["class"]
        for line in rows(used(tmp_path, "predict", "pets.safetensors", "test", "--csv", "--top", "1").out)
    }
    right = 100 * sum(Path(file).parent.name == name for file, name in predicted.items()) / len(predicted)
    folder = ("dataset=folder", "dataset.path=.", "dataset.train_folder=test", "dataset.val_folder=test")
    for data in (
        folder,
        ("dataset=csv", "dataset.path=list.csv", "dataset.train_split=test", "dataset.val_split=test"),
    ):
        done = used(tmp_path, "evaluate", "pets.safetensors", *data)
        assert done.code == 0, done.err
        evaluation = json.loads((tmp_path / "evaluation.json").read_text())
        lines = rows((tmp_path / "predictions.csv").read_text())
        assert evaluation["top1"] == pytest.approx(right)
        assert {str(Path(line["sample"])): line["predicted"] for line in lines} == predicted
        assert all(Path(line["sample"]).parent.name == line["label"] for line in lines)
        assert [(score["name"], score["images"]) for score in evaluation["classes"]] == [("cat", 0), ("dog", 6)]
    (tmp_path / "test" / "dog").rename(tmp_path / "test" / "wolf")
    done = used(tmp_path, "evaluate", "pets.safetensors", *folder)
    assert "which are not the 2 of the model ('wolf' is none of them)" in done.err


def test_classes_in_another_order_are_evaluated_by_name(place: Path, tmp_path: Path) -> None:
    weights = place / "outputs" / "pets" / "model.safetensors"
    tensors = {name: value.flip(0) if len(value) == 2 else value for name, value in load_file(weights).items()}
    card = dataclasses.replace(read_card(weights), class_names=("dog", "cat"))
    save_file(tensors, tmp_path / "turned.safetensors", card.metadata())
    data = ("dataset=folder", f"dataset.path={place / 'photos'}", "--device", "cpu")
    tables = []
    for file in (weights, tmp_path / "turned.safetensors"):
        done = used(tmp_path, "evaluate", str(file), *data, "--out", str(tmp_path))
        assert done.code == 0, done.err
        tables.append(rows((tmp_path / "predictions.csv").read_text()))
    assert tables[0] == tables[1]


def test_a_broken_image_is_left_out_where_that_is_allowed(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "photos", tmp_path / "photos")
    (tmp_path / "photos" / "val" / "cat" / "3.png").write_bytes(b"torn")
    words = ("evaluate", "outputs/pets", "--out", str(tmp_path), f"dataset.path={tmp_path / 'photos'}")
    done = used(place, *words)
    assert done.code == 2
    assert "cat/3.png, cannot be decoded" in done.err
    assert not (tmp_path / "evaluation.json").exists()
    assert used(place, *words, "dataset.skip=1").code == 0
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert (evaluation["images"], evaluation["skipped"]) == (11, 1)
    torn = next(line for line in rows((tmp_path / "predictions.csv").read_text()) if "3.png" in line["sample"])
    assert (torn["label"], torn["predicted"], torn["probability"]) == ("cat", "", "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("outputs/pets", "epohcs=3"), "epohcs: there is no such key in the config. Did you mean epochs=3"),
        (("outputs/pets", "dataset=digits"), "dataset: it has 10 classes, which are not the 2 of the model"),
        (("outputs/digits", "--out", "nowhere"), "--out is nowhere, expected a folder that exists"),
        (("nowhere/latest",), "weights: no run has been started in nowhere"),
        (("outputs/pets", "dataset.pth=x"), "dataset.pth: there is no such key"),
    ],
)
def test_what_cannot_be_evaluated_is_one_sentence(place: Path, words: tuple[str, ...], sentence: str) -> None:
    done = used(place, "evaluate", *words)
    assert done.code == 2
    assert sentence in done.err
    assert "Traceback" not in done.err


def test_predictions_are_those_of_the_evaluation_in_every_format(place: Path) -> None:
    assert used(place, "evaluate", "outputs/pets", "--device", "cpu").code == 0
    evaluated = {
        line["sample"]: line["predicted"]
        for line in rows((place / "outputs" / "pets" / "predictions.csv").read_text())
    }
    files = str(place / "photos" / "val")
    table = used(place, "predict", "latest", files)
    assert table.code == 0, table.err
    *predicted, last = table.out.splitlines()
    assert {line.split("  ")[0]: line.split("  ")[1].split()[0] for line in predicted} == evaluated
    assert len({len(line) for line in predicted}) == 1, "in columns"
    counts = [f"{list(evaluated.values()).count(name)} {name}" for name in dict.fromkeys(evaluated.values())]
    assert last.startswith(f"{len(evaluated)} images: ")
    assert sorted(last.partition(": ")[2].split(", ")) == sorted(counts)
    assert table.err.startswith("outputs/pets: "), "`latest` moves, so its run is named"
    pattern = used(place, "predict", "latest", f"{files}/*/*", "--out", "predicted.csv")
    assert (pattern.code, pattern.out) == (0, "wrote predicted.csv\n")
    assert (place / "predicted.csv").read_text() == used(place, "predict", "latest", files, "--csv").out
    lines = rows(used(place, "predict", "latest", files, "--csv", "--top", "1").out)
    assert {line["file"]: line["class"] for line in lines} == evaluated
    predictions: list[dict[str, Any]] = json.loads(used(place, "predict", "--json", "latest", files).out)
    assert {photo["file"]: photo["classes"][0]["name"] for photo in predictions} == evaluated
    assert all(sum(name["probability"] for name in photo["classes"]) == pytest.approx(1) for photo in predictions)


def test_names_of_somebody_elses_weights_and_files_forge_no_row(place: Path, tmp_path: Path) -> None:
    run = place / "outputs" / "pets" / "model.safetensors"
    names = ("=1+1\nforged,1,0,dog,1", "dog\x1b[2K\rforged\u2028")
    card = dataclasses.replace(read_card(run), class_names=names)
    save_file(load_file(run), tmp_path / "sent.safetensors", card.metadata())
    files = [tmp_path / "photos" / f"{name}.png" for name in ("=2\nforged", "@x\u2029y", "+\x1b[2J")]
    for number, file in enumerate(files):
        photo(file, number, 60)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "no\nimage.png").write_bytes(b"no")
    words = ("predict", "sent.safetensors", "photos", "more", "--device", "cpu")
    table, lines, records = (used(tmp_path, *words, *form) for form in ([], ["--csv"], ["--json"]))
    assert len(table.out.splitlines()) == 3 + 1, "and the line with their number"
    cells = [list(line.values()) for line in rows(lines.out)]
    assert len(cells) == len(lines.out.splitlines()) - 1 == 6
    assert {cell[0] for cell in cells} == {f"photos/{file.name.encode('unicode_escape').decode()}" for file in files}
    assert {cell[3] for cell in cells} == {r"'=1+1\nforged,1,0,dog,1", r"dog\x1b[2K\rforged\u2028"}
    assert {name["name"] for record in json.loads(records.out) for name in record["classes"]} == set(names)
    for done in (table, lines, records):
        assert (done.code, len(done.err.splitlines())) == (2, 2), done.err  # the run, and the file that is no image
        assert all(line.isprintable() for line in (done.out + done.err).split("\n"))


def test_a_file_that_is_no_image_is_said_and_the_others_are_printed(place: Path, tmp_path: Path) -> None:
    (tmp_path / "torn.jpg").write_bytes(b"\xff\xd8\xff torn")
    (tmp_path / "empty").mkdir()
    photo(tmp_path / "good\x1b[31m.png", 1, 60)
    done = used(place, "predict", "latest", str(tmp_path), str(tmp_path / "empty"), "nowhere.png")
    assert done.code == 2
    assert done.out.endswith("\n1 image: 1 cat\n")
    assert "good\\x1b[31m.png  " in done.out
    _, *sentences = done.err.splitlines()
    assert len(sentences) == 3
    assert all(sentence.startswith("lockstep: ") for sentence in sentences)
    assert "nowhere.png: there is no such file or folder" in done.err


@pytest.mark.parametrize("words", [("evaluate",), ("predict", "photos"), ("export", "photos"), ("demo",)], ids=str)
def test_weights_that_name_foreign_code_are_refused_by_every_command(
    place: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    weights, hostile = place / "outputs" / "digits" / "model.safetensors", tmp_path / "weights.safetensors"
    card = vars(read_card(weights)) | {"model": {"_target_": "os.system", "command": f"touch {tmp_path / 'ran'}"}}
    save_file(load_file(weights), hostile, ModelCard(**card).metadata())
    done = used(place, words[0], str(hostile), *words[1:])
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "model._target_ is 'os.system', expected a class of lockstep.models" in done.err
    assert {path.name for path in tmp_path.iterdir()} == {"weights.safetensors"}
