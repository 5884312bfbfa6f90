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
    job = components.read_config(place / "run" / "config.yaml")
    typed = train(*JOB, "batch=54", "hydra.run.dir=typed", cwd=place)
    assert "batch is" not in typed.err
    assert {**components.read_config(place / "typed" / "config.yaml"), "name": None} == {**job, "name": None}
    resumed = train("resume=run", "epochs=3", cwd=place)
    assert resumed.code == 0, resumed.err
    assert json.loads((place / "run" / "summary.json").read_text())["step"] == 3


@pytest.mark.parametrize("words", [["batch=auto"], ["-m", "seed=1,2"]], ids=" ".join)
def test_other_lines_shrink_it_too(words: list[str], place: Path, tmp_path: Path) -> None:
    done = train(*JOB, *words, f"output_root={tmp_path}", cwd=place)
    assert done.code == 0, done.out + done.err
    configs = [components.read_config(path) for path in tmp_path.rglob("config.yaml") if path.parent.name != ".hydra"]
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


@pytest.mark.parametrize("words", [(), ("batch=auto",), ("++batch=auto",), ("train.eval_batch=8",)], ids=str)
def test_the_parts_of_a_loop_have_the_smaller_batch(
    place: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(place)
    assert compose([*JOB, *words]).plan.batch == 54
    for typed in ("batch=64", "++batch=55"):
        with pytest.raises(InputError, match=r"54"):
            compose([*JOB, *words, typed])


def layout(root: Path, name: str, *places: str) -> Path:
    """A folder with three images of each class in these places below it."""
    for number, place in enumerate(places):
        for image in range(3):
            path = root / name / place / f"{number}{image}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (40 * number, 20 * image, 9)).save(path)
    return root / name


SPLITS = ("train/lamp", "train/mug", "val/lamp", "val/mug")
# What is in a folder, and the folders below it that are trained and evaluated: the same one if it is cut.
LAYOUTS = {
    "splits": (SPLITS, "train", "val"),
    "one level too high": (tuple(f"photos/{place}" for place in SPLITS), "photos/train", "photos/val"),
    "two levels too high": (tuple(f"a/b/{place}" for place in SPLITS), "a/b/train", "a/b/val"),
    "classes alone": (("lamp", "mug"), "", ""),
    "classes with folders": (("lamp/old", "lamp/new", "mug/steam_train"), "", ""),
    "a class that is called a train": (("lamp/old", "mug/old", "steam_train/old"), "", ""),
    "classes that are called train and test": (("lamp", "steam_train", "test_tube"), "", ""),
    "classes, one level too high": (("photos/lamp", "photos/mug"), "photos", "photos"),
    "val alone": (("val/lamp", "val/mug"), "val", "val"),
    "train alone": (("train/lamp", "train/mug"), "train", "train"),
    "train beside another folder": (("train/lamp", "train/mug", "notes/old"), "train", "train"),
    "train and test": (("train/lamp", "train/mug", "test/lamp", "test/mug"), "train", "test"),
    "validation and test": (
        tuple(f"{split}/{name}" for split in ("train", "test", "validation") for name in ("lamp", "mug")),
        "train",
        "validation",
    ),
    "valid": (("train/lamp", "train/mug", "valid/lamp", "valid/mug"), "train", "valid"),
    "capitals": (("Training/lamp", "Training/mug", "Validation/lamp", "Validation/mug"), "Training", "Validation"),
    "doubled names": (
        tuple(f"seg_{split}/seg_{split}/{name}" for split in ("pred", "test", "train") for name in ("lamp", "mug")),
        "seg_train/seg_train",
        "seg_test/seg_test",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_splits_of_a_folder_are_found(name: str, tmp_path: Path) -> None:
    places, trained, evaluated = LAYOUTS[name]
    folder = Folder(path=str(layout(tmp_path, "given", *places)))
    listings = folder.listings()
    train, val = ({*listings[split]} for split in ("train", "val"))
    images = [{*(Path(folder.path) / place).rglob("*.png")} for place in (trained, evaluated)]
    assert set(listings["val"].labels.tolist()) == {*range(len(listings["train"].classes))}
    assert not train & val
    if trained == evaluated:
        assert train | val == images[0]
        assert len(val) == len(listings["val"].classes)
    else:
        assert [train, val] == images


def test_links_to_the_folders_of_classes_are_the_folders(tmp_path: Path) -> None:
    elsewhere = layout(tmp_path, "elsewhere", *SPLITS)
    (tmp_path / "linked").mkdir()
    for split in elsewhere.iterdir():
        (tmp_path / "linked" / split.name).symlink_to(split)
    places, linked = (Folder(path=str(path)).listings() for path in (elsewhere, tmp_path / "linked"))
    for split, listing in places.items():
        names = [
            {path.relative_to(top) for path in of[split]}
            for top, of in ((elsewhere, places), (tmp_path / "linked", linked))
        ]
        assert names[0] == names[1] != set()
        assert linked[split].classes == listing.classes


def test_a_share_or_a_folder_that_is_typed_is_what_is_evaluated(tmp_path: Path) -> None:
    path = str(layout(tmp_path, "given", *SPLITS, "lamp", "mug"))
    cut = Folder(path=path, train_folder=".", val_share=0.34).located()
    assert (cut.train_folder, cut.val_share) == (".", 0.34)
    assert Folder(path=path, val_folder="train").located().val_folder == "train"
    assert Folder(path=path, test_folder="val").located().val_share == 0.1
    assert Folder(path=path, folds=3, fold=0, val_folder="none").located().val_share is None


@pytest.mark.parametrize(
    ("places", "below", "meant"),
    [
        (SPLITS, "train/mug", "train"),
        (tuple(f"photos/{place}" for place in SPLITS), "photso", "photos"),
        (SPLITS, "trian", "train"),
        (("lamp", "mug"), "mug", "."),
        (("photos/lamp", "photos/mug"), "photso", "photos"),
    ],
)
def test_a_path_beside_the_folder_that_is_meant_is_answered_with_that_folder(
    places: tuple[str, ...], below: str, meant: str, tmp_path: Path
) -> None:
    path = layout(tmp_path, "given", *places)
    with pytest.raises(InputError, match=r"did you mean dataset\.path=(.+)\?") as refused:
        Folder(path=str(path / below)).listings()
    assert str(path / meant) == re.findall(r"path=(.+)\?", str(refused.value))[0]
    assert Folder(path=str(path / meant)).listings()["train"].classes == ("lamp", "mug")


@pytest.mark.parametrize(
    ("places", "says"),
    [
        (("",), "move its images into folders of their classes, such as"),
        (("train", "val"), "move its images into folders of their classes, such as"),
        (
            ("train/Mug", "train/lamp", "val/mug", "val/lamp"),
            "val/mug is a class that .* does not have; rename it to Mug",
        ),
    ],
)
def test_what_no_line_fixes_is_said_with_what_to_do(places: tuple[str, ...], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        Folder(path=str(layout(tmp_path, "given", *places))).listings()


@pytest.mark.parametrize("name", ["train", "Train", "VAL", "mug"])
def test_a_split_without_classes_is_not_taken_for_a_class_beside_it(name: str, tmp_path: Path) -> None:
    root = layout(tmp_path, "given", name, "lamp")
    says = "did you mean dataset.path=.*given" if name == "mug" else "move its images into folders of their classes"
    with pytest.raises(InputError, match=f"{name} has no subfolders, expected one per class; {says}"):
        Folder(path=str(root / name)).listings()


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
    run = r"outputs/\d+-\d+-first-\w+: Linear, trained on photos \(Folder\), \d+\.\d\d % top-1 at step \d\n"
    assert re.match(run, done.err)


def test_clean_says_what_all_would_free(place: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").symlink_to(place / "photos")
    assert train(*JOB, cwd=tmp_path).code == 0
    done = forked("lockstep", "clean", "outputs", "--keep", "9", cwd=tmp_path)
    assert re.search(r"^there is nothing to remove\n--all frees \d+ kB more: the checkpoints of", done.out), done.out
    assert forked("lockstep", "clean", "outputs", "--all", "--yes", cwd=tmp_path).code == 0
    assert "--all" not in forked("lockstep", "clean", "outputs", cwd=tmp_path).out


@pytest.mark.slow
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
