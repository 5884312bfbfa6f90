"""Small folders of photos, as they are: their batch, their form, their model in use."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

import lockstep
from helpers import Done, forked, photos_of_two_classes, train
from lockstep import compose
from lockstep.config import components
from lockstep.core.errors import InputError
from lockstep.data.datasets import Folder

JOB = ("dataset=folder", "dataset.path=photos", "dataset.input_size=8", "model=linear", "epochs=2", "device=cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `photos`: 54 images to train on, and 10 to evaluate."""
    return photos_of_two_classes(tmp_path_factory.mktemp("small"), 8, "png")


def said_once(done: Done) -> bool:
    return done.err.count("batch is 54, all images of the training split; it would be 64 with more images") == 1


def test_a_batch_that_nobody_typed_is_at_most_the_split(place: Path) -> None:
    done = train(*JOB, "hydra.run.dir=run", cwd=place)
    assert done.code == 0, done.err
    assert said_once(done)
    job = components.load(place / "run" / "config.yaml")
    typed = train(*JOB, "batch=54", "hydra.run.dir=typed", cwd=place)
    assert "batch is" not in typed.err
    assert {**components.load(place / "typed" / "config.yaml"), "name": None} == {**job, "name": None}
    resumed = train("resume=run", "epochs=3", cwd=place)
    assert resumed.code == 0, resumed.err
    assert json.loads((place / "run" / "summary.json").read_text())["step"] == 3


@pytest.mark.parametrize("words", [["batch=auto"], ["-m", "seed=1,2"]], ids=" ".join)
def test_other_lines_shrink_it_too(words: list[str], place: Path, tmp_path: Path) -> None:
    done = train(*JOB, *words, f"output_root={tmp_path}", cwd=place)
    assert done.code == 0, done.out + done.err
    configs = [components.load(path) for path in tmp_path.rglob("config.yaml") if path.parent.name != ".hydra"]
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


def layout(root: Path, name: str, *places: str) -> Path:
    """A folder with three images of each class in these places below it."""
    for number, place in enumerate(places):
        for image in range(3):
            path = root / name / place / f"{number}{image}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (40 * number, 20 * image, 9)).save(path)
    return root / name


SPLITS = ("train/lamp", "train/mug", "val/lamp", "val/mug")
# What is in a folder, and the path that is typed below it.
LAYOUTS = {
    "one level too high": (tuple(f"photos/{place}" for place in SPLITS), ""),
    "two levels too high": (tuple(f"a/b/{place}" for place in SPLITS), ""),
    "one level too low": (SPLITS, "train"),
    "a class": (SPLITS, "train/mug"),
    "a misspelt path": (tuple(f"photos/{place}" for place in SPLITS), "photso"),
    "a misspelt split": (SPLITS, "trian"),
    "classes alone": (("lamp", "mug"), ""),
    "classes, one level too high": (("photos/lamp", "photos/mug"), ""),
    "a class of classes": (("lamp", "mug"), "mug"),
    "a misspelt folder of classes": (("photos/lamp", "photos/mug"), "photso"),
    "val alone": (("val/lamp", "val/mug"), ""),
    "train alone": (("train/lamp", "train/mug"), ""),
    "train and test": (("train/lamp", "train/mug", "test/lamp", "test/mug"), ""),
    "other names": (("Training/lamp", "Training/mug", "Validation/lamp", "Validation/mug"), ""),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_in_another_form_is_answered_with_a_line_that_works(name: str, tmp_path: Path) -> None:
    places, below = LAYOUTS[name]
    path = layout(tmp_path, "given", *places) / below
    with pytest.raises(InputError) as refused:
        Folder(path=str(path)).listings()
    words = dict(re.findall(r"dataset\.(\w+)=([^\s,;?]+)", str(refused.value).replace("dataset.path=FOLDER", "")))
    if words.get("val_folder") == "NAME":
        del words["val_folder"]  # the other half of an "or"
    if {"val_folder", "val_share"} <= words.keys():
        del words["val_share"]
    changed = {key: float(text) if key == "val_share" else text for key, text in words.items()}
    listings = Folder(**{"path": str(path), **changed}).listings()
    train, val = listings["train"], listings["val"]
    assert train.classes == val.classes == ("lamp", "mug")
    assert set(train.labels.tolist()) == set(val.labels.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (("",), "move the images into folders of their classes, such as"),
        (("train", "val"), "move its images into folders of their classes, such as"),
        (
            ("train/Mug", "train/lamp", "val/mug", "val/lamp"),
            "val/mug is a class that .* does not have; rename it to Mug",
        ),
    ],
)
def test_what_no_line_fixes_is_said_with_what_to_do(places: tuple[str, ...], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        Folder(path=str(layout(tmp_path, "given", *places))).list_files()


def test_one_class_alone_is_refused(tmp_path: Path) -> None:
    layout(tmp_path, "photos", "train/mug", "val/mug")
    done = train(*JOB, cwd=tmp_path)
    assert done.code == 2
    assert "dataset: it has one class, mug, so there is nothing to tell apart, expected two or more" in done.err
    assert not (tmp_path / "outputs").exists()


def test_the_banner_names_a_few_classes_with_their_images(place: Path) -> None:
    done = train(*JOB, "hydra.run.dir=named", cwd=place)
    assert "54 to train on, 10 to evaluate, lamp 27+5, mug 27+5, 3x8x8" in done.out


def test_latest_is_the_newest_run_that_has_weights(place: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").symlink_to(place / "photos")
    assert train(*JOB, "name=first", cwd=tmp_path).code == 0
    failed = train(*JOB, "name=second", "optimizer.lr=1e6", "epochs=50", "train.eval_every=100%", cwd=tmp_path)
    assert failed.code == 76, failed.err
    assert "second" in (tmp_path / "outputs" / "latest").read_text()
    done = forked("lockstep", "predict", "latest", "photos/val/mug", cwd=tmp_path)
    assert done.code == 0, done.err
    assert re.match(r"outputs/\d+-\d+-first-\w+: Linear, trained on Folder, \d+\.\d\d % top-1 at step \d\n", done.err)


def test_clean_says_what_all_would_free(place: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").symlink_to(place / "photos")
    assert train(*JOB, cwd=tmp_path).code == 0
    done = forked("lockstep", "clean", "outputs", "--keep", "9", cwd=tmp_path)
    assert re.search(r"^there is nothing to remove\n--all frees \d+ kB more: the checkpoints of", done.out), done.out
    assert forked("lockstep", "clean", "outputs", "--all", "--yes", cwd=tmp_path).code == 0
    assert "--all" not in forked("lockstep", "clean", "outputs", cwd=tmp_path).out


def test_an_exported_model_takes_the_size_that_the_model_sees(place: Path, tmp_path: Path) -> None:
    """The same photo, cropped and resized by Pillow as docs/use.md says, gets the same class."""
    onnxruntime = pytest.importorskip("onnxruntime")
    words = ("dataset.decode_size=64", "dataset.input_size=32", "dataset.crop=0.875", "hydra.run.dir=large")
    assert train(*JOB[:2], "model=linear", "epochs=2", "device=cpu", *words, cwd=place).code == 0
    done = forked("lockstep", "export", "large", "--out", str(tmp_path / "model.onnx"), cwd=place)
    assert done.code == 0, done.err
    assert "uint8 pixels of shape batch x 3x32x32 to logits of 2 classes" in done.out
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    card = json.loads(session.get_modelmeta().custom_metadata_map["lockstep"])
    assert (session.get_inputs()[0].shape, card["eval_crop"]) == (["batch", 3, 32, 32], 0.875)
    predictor = lockstep.load(place / "large", device="cpu")
    file = place / "photos" / "val" / "mug" / "55.png"
    photo = ImageOps.fit(Image.open(file), (32, 32), Image.Resampling[card["interpolation"].upper()], bleed=0.0625)
    (logits,) = session.run(["logits"], {"images": np.asarray(photo).transpose(2, 0, 1)[None]})
    assert logits == pytest.approx(predictor.logits(predictor.stored(file)).numpy(), abs=0.02)
