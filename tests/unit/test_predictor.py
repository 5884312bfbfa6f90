"""A trained model in use: its weights describe themselves, and it predicts what the evaluation computed."""

import itertools
import json
import math
import re
import shutil
import urllib.request
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm  # noqa: F401, the time limit of a model must not include this import
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

import lockstep
from helpers import NARROW, records, train_here
from lockstep.checkpoint.weights import load_start, read_card
from lockstep.core.errors import BrokenImage, InputError, LockstepError, StorageError
from lockstep.core.fields import rule_of
from lockstep.core.formats import NewerFormat
from lockstep.core.model import best_classes
from lockstep.core.model_card import (
    FITS,
    LONGEST_SIDE,
    METADATA_KEY,
    MOST_CHANNELS,
    MOST_CHARACTERS,
    MOST_CLASSES,
    VIEWS,
    ModelCard,
    TrainedInput,
)
from lockstep.core.protocols import Precision
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile, UnreadableStorage
from lockstep.core.world import World
from lockstep.data.datasets.arrays import ArraySplit
from lockstep.data.datasets.builtin import Digits
from lockstep.data.datasets.files import FileSplit
from lockstep.inference import images as images_module
from lockstep.inference import predictor as predictor_module
from lockstep.inference.evaluate import split_for
from lockstep.inference.images import files_in, stored_image, stored_images
from lockstep.inference.predictor import Prediction, Predictor, load_predictor, run_of, say_which
from lockstep.inference.scoring import EvaluatedSplit, Evaluation, evaluated
from lockstep.precision import BF16, FP32, FP64, BF16Pure
from lockstep.training import trained
from lockstep.training.resolved_job import load_job
from lockstep.training.trained import load_trained


def photos(root: Path, count: int = 6) -> str:
    """Small photographs of two classes, of several formats and shapes; returns the overrides for them."""
    sizes = itertools.cycle([(40, 30), (30, 44), (33, 33)])
    for split, label, number in itertools.product(("train", "val"), ("cat", "dog"), range(count)):
        path = root / split / label / f"{number}.{'jpg' if number % 2 else 'png'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        level = 60 if label == "cat" else 190
        pixels = np.random.default_rng(number).integers(level - 50, level + 50, (*next(sizes), 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return f"dataset=folder dataset.path={root} dataset.decode_size=24 dataset.input_size=16"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run on the digits."""
    return train_here(tmp_path_factory.mktemp("digits") / "run", NARROW, "steps=20", "batch=128")


@pytest.fixture(scope="module")
def of_photos(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run on photographs, with a crop."""
    folder = tmp_path_factory.mktemp("photos")
    words = photos(folder / "photos").split()
    return train_here(folder / "run", *words, "dataset.crop=0.9", NARROW, "steps=4", "batch=8", "augment=none")


def evaluate_split(predictor: Predictor, split: ArraySplit) -> Evaluation:
    evaluation = evaluated([(predictor, EvaluatedSplit(split, split.labels))], World.solo())
    assert evaluation is not None
    return evaluation


def own_scores(predictor: Predictor, run: RunDir) -> tuple[float, float]:
    """The loss and top-1 of the run's evaluation split, from the predictor's logits alone."""
    split, block = load_job(run.config).dataset.eval(), predictor.card.eval_batch
    loss, hits = 0.0, 0
    for start in range(0, len(split), block):
        labels = split.labels[start : start + block]
        logits = predictor.logits(split.fetch(list(range(start, start + len(labels)))))
        loss += F.cross_entropy(logits, labels, reduction="none").sum().double().item()
        hits += int((best_classes(logits)[:, 0] == labels).sum())
    return loss / len(split), 100 * hits / len(split)


CONFIGS = {
    "default": "",
    "six views of a larger input": "train.eval_views=6 dataset.input_size=12",
    "batch norm and whitening, averaged": "model=whitenet model.widths=[8,8,8] dataset.input_size=12 train.ema=0.5",
    "bf16 throughout": "precision=bf16_pure",
    "a model of timm with dropout": "model=timm model.name=test_resnet dataset.input_size=32 model.drop_rate=0.5",
}


@pytest.mark.numerics
@pytest.mark.parametrize("overrides", CONFIGS.values(), ids=CONFIGS)
def test_a_loaded_model_computes_the_evaluation_of_its_run_to_the_bit(tmp_path: Path, overrides: str) -> None:
    words = [*([] if "model=" in overrides else [NARROW]), *overrides.split()]
    run = train_here(tmp_path / "run", *words, "steps=2", "batch=64", "train.eval_every=1", "seed=3")
    shutil.move(run.weights, tmp_path / "alone.safetensors")
    predictor = lockstep.load(tmp_path / "alone.safetensors", device="cpu")
    loss, top1 = own_scores(predictor, run)
    best = next(line for line in records(run) if line["step"] == predictor.card.step and "loss/val" in line)
    assert top1 == run.read_summary()["best"] == predictor.card.scores["top1"]
    assert predictor.card.averaged == ("ema" in overrides)
    if not predictor.card.averaged:  # the logged loss is that of the model, not of its average
        assert loss == best["loss/val"]


@pytest.mark.parametrize(("fit", "views"), [*itertools.product(FITS, VIEWS)])
def test_a_photo_of_every_fit_is_averaged_over_every_number_of_views(of_photos: RunDir, fit: str, views: int) -> None:
    loaded = lockstep.load(of_photos.path, device="cpu")
    card = replace(loaded.card, fit=fit, eval_views=views, image_shape=(3, 24, 18), input_shape=(3, 16, 12))
    predictor = replace(loaded, card=card, transforms=replace(loaded.transforms, preprocessing=card))
    pixels = predictor.preprocess(next(of_photos.path.parent.rglob("*.png")))
    moved = [F.pad(pixels, [1] * 4, "reflect")[..., at : at + 16, at : at + 12] for at in (0, 2)]
    halves = {1: [(1.0, pixels)], 2: [(1.0, pixels)], 6: [(0.5, pixels), *((0.25, view) for view in moved)]}[views]
    both = [(weight / 2, view) for weight, own in halves for view in (own, own.flip(-1))] if views > 1 else halves
    with torch.no_grad():
        expected = sum(weight * predictor.model(view) for weight, view in both)
    torch.testing.assert_close(predictor.values(next(of_photos.path.parent.rglob("*.png"))), expected)


@pytest.mark.parametrize("views", VIEWS)
def test_an_evaluation_of_a_file_averages_as_many_views_as_its_run(digits: RunDir, views: int) -> None:
    loaded = lockstep.load(digits.path, device="cpu")
    predictor = replace(loaded, card=replace(loaded.card, eval_views=views))
    figures = evaluate_split(predictor, Digits().eval()).figures
    assert (figures["loss"], figures["top1"]) == pytest.approx(own_scores(predictor, digits))
    assert (figures["loss"] == evaluate_split(loaded, Digits().eval()).figures["loss"]) == (views == 1)


def test_pixels_that_overshoot_are_black_or_white(of_photos: RunDir) -> None:
    loaded = lockstep.load(of_photos.path, device="cpu")
    card = replace(loaded.card, image_shape=(3, 24, 24), input_shape=(3, 40, 40), interpolation="bicubic")
    predictor = replace(loaded, card=card, transforms=replace(loaded.transforms, preprocessing=card))
    halves = torch.zeros(1, 3, 24, 24, dtype=torch.uint8)
    halves[..., 12:] = 255
    seen = predictor.cropped(halves)[0]
    assert torch.equal(seen.flip(-1), 255 - seen)
    assert (seen[..., 20:] > 128).all(), "the bright half has nothing dark"


@pytest.mark.parametrize("precision", [FP32(), FP64(), BF16(), BF16Pure()], ids=repr)
def test_the_input_of_a_model_has_the_format_of_its_precision(digits: RunDir, precision: Precision) -> None:
    predictor = load_predictor(digits.path, device="cpu", precision=precision)
    pixels = predictor.preprocess(Digits().eval().images[:2])
    assert pixels.dtype == precision.storage, "the model has weights in it, and is called without autocast"
    assert predictor.model(pixels).shape == (2, 10)


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_split_is_evaluated_on_what_predict_sees_of_large_jpegs(
    of_photos: RunDir, tmp_path: Path, split: str
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (200, 260, 3), dtype=np.uint8)
    for of, label in itertools.product(("train", "val"), ("cat", "dog")):
        (tmp_path / of / label).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / of / label / "0.jpg")
    predictor = lockstep.load(of_photos.path, device="cpu")
    evaluated_split, _ = split_for(predictor, of_photos, [f"dataset.path={tmp_path}"], split)
    examples = evaluated_split.examples
    assert torch.equal(examples.fetch([0, 1]), predictor.stored([examples.name(0), examples.name(1)]))


@pytest.mark.parametrize("reader", ["load", "init_from"])
def test_a_flipped_bit_of_a_weights_file_is_noticed(digits: RunDir, tmp_path: Path, reader: str) -> None:
    """In the length, the header or the tensors. One in the name of the hash changes nothing else."""
    file = tmp_path / "alone.safetensors"
    data = digits.weights.read_bytes()
    own, card = load_file(digits.weights), read_card(digits.weights)
    model = lockstep.load(digits.weights, device="cpu").model
    header, name = 8 + int.from_bytes(data[:8], "little"), data.index(b'"own_sha256":')
    for place in {*range(0, header, 23), *range(name, name + 80, 3), *range(header, len(data), len(data) // 50)}:
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        in_name = name < place <= name + 10
        # The file is named once: what is damaged is not also said to be a model that cannot be built.
        named_once = rf"^((?!{file}).)*{re.escape(str(file))}((?!{file}).)*$"
        with nullcontext() if in_name else pytest.raises(InputError, match=named_once):
            lockstep.load(file, device="cpu") if reader == "load" else load_start(model, file)
        if in_name:
            assert read_card(file) == card
            assert all(torch.equal(tensor, own[key]) for key, tensor in load_file(file).items())


def test_weights_of_an_older_version_have_no_hash_and_can_be_used(digits: RunDir, tmp_path: Path) -> None:
    with safe_open(digits.weights, "pt") as opened:
        older = {key: text for key, text in opened.metadata().items() if key != "own_sha256"}
    save_file(load_file(digits.weights), tmp_path / "older.safetensors", older)
    assert len(older) == 1
    lockstep.load(tmp_path / "older.safetensors", device="cpu")


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ("dataset.decode_size=24 dataset.input_size=16 dataset.crop=0.9", (16, 16)),
        ("dataset.input_size=[20,12]", (20, 12)),
        ("dataset.input_size=[12,20] dataset.fit=pad", (12, 20)),
        ("dataset.decode_size=[16,24] dataset.fit=squash", (16, 24)),
    ],
)
def test_files_are_preprocessed_as_the_evaluation_does(tmp_path: Path, sizes: str, shape: tuple[int, int]) -> None:
    data = photos(tmp_path / "photos").split()[:2]
    run = train_here(tmp_path / "run", *data, *sizes.split(), NARROW, "steps=2", "batch=8", "augment=none")
    predictor = lockstep.load(run.path, device="cpu")
    split = load_job(run.config).dataset.eval()
    assert isinstance(split, FileSplit)
    stored = split.fetch(list(range(len(split))))
    assert torch.equal(predictor.stored(list(split.paths)), stored)
    assert predictor.preprocess(split.paths[0]).shape == (1, 3, *shape)
    assert own_scores(predictor, run)[1] == run.read_summary()["best"]
    assert predictor.names == ("cat", "dog")
    named, _ = split_for(predictor, None, data, "val")
    assert torch.equal(named.examples.fetch(list(range(len(split)))), stored)


def test_a_path_its_bytes_a_pillow_image_and_an_array_are_the_same_image(of_photos: RunDir) -> None:
    predictor = lockstep.load(of_photos.path, device="cpu")
    path = Path(load_job(of_photos.config).dataset.path, "val", "dog", "0.png")
    array = np.asarray(Image.open(path))
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    forms: list[Any] = [path, str(path), path.read_bytes(), Image.open(path), array, tensor, tensor[None]]
    expected = predictor.predict(path)[0].probabilities
    for form in forms:
        (prediction,) = predictor.predict(form)
        assert torch.equal(prediction.probabilities, expected)
    assert len(predictor.predict([path, array, tensor])) == 3
    assert predictor.predict([]) == []


def test_the_images_of_a_folder_are_those_that_training_would_read(tmp_path: Path) -> None:
    for name in ("photos/b.png", "photos/a/c.JPG", "photos/._b.png", "photos/.cache/d.png", "more/e.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    photos = tmp_path / "photos"
    (photos / "link").symlink_to(tmp_path / "more")
    (photos / "above").symlink_to(tmp_path)
    assert files_in(photos) == [photos / name for name in ("a/c.JPG", "b.png", "link/e.png")]


def test_a_prediction_has_the_class_its_name_and_all_probabilities(of_photos: RunDir) -> None:
    predictor, image = lockstep.load(of_photos.path, device="cpu"), np.full((30, 30, 3), 190, np.uint8)
    (prediction,) = predictor.predict(image)
    assert prediction.probabilities.sum().item() == pytest.approx(1)
    assert prediction.name == ("cat", "dog")[prediction.label]
    assert prediction.probability == max(prediction.probabilities.tolist())
    order = prediction.probabilities.argsort(descending=True).tolist()
    assert [name for _, name, _ in prediction.top(9)] == [("cat", "dog")[label] for label in order]
    renamed = replace(predictor, card=replace(predictor.card, class_names=("yak", "ant")))
    assert renamed.names == ("yak", "ant"), "by label"
    assert renamed.predict(image)[0].name == ("yak", "ant")[prediction.label]


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        ("nowhere.png", r"nowhere.png: there is no such file or folder"),
        (b"no image", r"the image cannot be read as an image \(cannot identify image file, expected one of JPEG"),
        (np.zeros((4, 4, 3), np.float32), r"an image is float32 of shape \(4, 4, 3\), expected uint8"),
        (torch.zeros(4, 4, dtype=torch.uint8), r"an image is uint8 of shape \(4, 4\), expected uint8: an array"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), "an image has 2 channels, expected 1 or 3"),
        *(
            (
                torch.zeros(shape, dtype=torch.uint8),
                rf"an image is uint8 of shape \({', '.join(map(str, shape))}\), exp",
            )
            for shape in ((0, 4, 4), (3, 0, 4), (3, 4, 0))
        ),
    ],
    ids=["missing", "no image", "floats", "two dimensions", "two channels", "no channel", "no row", "no column"],
)
def test_an_invalid_image_is_one_sentence(digits: RunDir, image: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        lockstep.load(digits.path, device="cpu").predict(image)


def test_the_weights_say_what_they_are_and_where_they_come_from_but_no_path(of_photos: RunDir) -> None:
    card = read_card(of_photos.weights)
    assert card.model["_target_"] == "lockstep.models.DigitNet"
    assert (card.classes, card.class_names) == (2, ("cat", "dog"))
    assert (card.image_shape, card.input_shape, card.eval_crop) == ((3, 24, 24), (3, 16, 16), 0.9)
    assert card.trained_on["_target_"] == "lockstep.data.datasets.Folder"
    summary = of_photos.read_summary()
    assert (card.step, card.scores["top1"]) == (summary["best_step"], summary["best"])
    assert card.lockstep == lockstep.__version__
    assert str(of_photos.path.parent).encode() not in of_photos.weights.read_bytes()


def test_a_model_with_published_weights_is_not_downloaded_again(
    digits: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr(urllib.request, "urlopen", refused)
    timm_model = ("model=timm", "model.name=test_resnet", "dataset.input_size=32")
    run = train_here(tmp_path / "run", *timm_model, "steps=1", "device=cpu")
    monkeypatch.setattr("timm.models._builder.load_pretrained", refused)
    card = {**vars(read_card(run.weights)), "model": {**read_card(run.weights).model}}
    card["model"]["pretrained"] = True
    save_file(load_file(run.weights), run.weights, ModelCard(**card).metadata())
    assert lockstep.load(run.path).predict(np.zeros((8, 8), np.uint8))


def changed(run: RunDir, **values: Any) -> dict[str, str]:
    """The metadata of the weights of a run with other values in its card."""
    with run.weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    card = json.loads(header["__metadata__"][METADATA_KEY])
    return {METADATA_KEY: json.dumps({**card, **values})}


NAN, TIMM = float("nan"), "lockstep.models.Timm"
HOSTILE: dict[str, tuple[dict[str, Any] | str | None, str]] = {
    "no card": (None, "it does not say what its model is; init_from= can train from weights of other programs"),
    "no JSON": ("{", "its description is not JSON"),
    "deep": ("[" * 50 + "]" * 50, "its description is not JSON"),
    "a list": ("[]", r"its description is \[\], expected keys"),
    "no number": ({"format": "2"}, "has format '2' of Lockstep"),
    "a command": ({"format": 2, "lockstep": "1' ; rm '"}, "has format 2 of Lockstep"),
    "foreign code": ({"model": {"_target_": "os.system"}}, "model._target_ is 'os.system', expected a class of"),
    "another group": (
        {"model": {"_target_": "lockstep.precision.FP32"}},
        "model._target_ is 'lockstep.precision.FP32",
    ),
    "unknown field": ({"model": {"_target_": "lockstep.models.DigitNet", "depth": 1}}, "model.depth is not a key of"),
    "a file of timm": (
        {"model": {"_target_": "lockstep.models.Timm", "options": {"checkpoint_path": "/etc/passwd"}}},
        "model.options.checkpoint_path does not shape the network",
    ),
    "foreign precision": ({"precision": {"_target_": "builtins.exec"}}, "precision._target_ is 'builtins.exec'"),
    "NaN sizes": ({"input_shape": [1, NAN, 8]}, r"its input_shape is \[1, nan, 8\], expected \[channels, height"),
    "huge sizes": ({"image_shape": [1, 10**9, 8]}, "its image_shape is .*, expected"),
    "a huge model": (
        {"model": {"_target_": "lockstep.models.DigitNet", "width": 16384, "dropout": 0.1}},
        "is of another model: 8 tensors differ|is of another model",
    ),
    "a wide model": (
        {"model": {"_target_": TIMM, "name": "swin_tiny_patch4_window7_224", "options": {"embed_dim": 16384 - 64}}},
        "cannot be built|is of another model",
    ),
    "huge classes": ({"classes": 10**12}, "its classes is 1000000000000, expected a whole number from 1"),
    **{
        f"{number} names": (
            {"class_names": ["a"] * number},
            f"it has {number} class_names, expected one for each of 10",
        )
        for number in (1, 9, 11)
    },
    "zero std": ({"std": [0]}, r"its std is \[0\], expected a list of numbers from"),
    "too many means": ({"mean": [0.5] * 3}, "its image_shape, mean and std have 1, 3 and 1 channels, expected the 1"),
    "three views": ({"eval_views": 3}, "its eval_views is 3, expected one of 1, 2, 6"),
    "NaN crop": ({"eval_crop": NAN}, "its eval_crop is nan, expected a number above 0"),
    "nearest": ({"interpolation": "nearest"}, "its interpolation is 'nearest', expected one of bilinear, bicubic"),
    "argmax": ({"probabilities": "argmax"}, "its probabilities is 'argmax', expected one of softmax, sigmoid"),
}


@pytest.mark.parametrize(("values", "sentence"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_description_is_one_sentence(
    digits: RunDir, tmp_path: Path, values: dict[str, Any] | str | None, sentence: str
) -> None:
    file = tmp_path / "weights.safetensors"
    metadata = {METADATA_KEY: values} if isinstance(values, str) else values and changed(digits, **values)
    save_file(load_file(digits.weights), file, metadata)
    with pytest.raises(InputError, match=sentence) as caught:
        lockstep.load(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


MOST = (MOST_CHANNELS, LONGEST_SIDE, LONGEST_SIDE)
SHAPES = (
    [[1, 1, 1], [*MOST]],
    [[0, 1, 1], [1, 0, 1], [1, 1, 0], [3, 8], [3, 8, 8, 8], [3, 8.0, 8], [3, True, 8], (3, 8, 8), "388"]
    + [[size + (at == place) for at, size in enumerate(MOST)] for place in range(3)],
)
COUNTS = ([1, MOST_CLASSES], [0, -1, 2.0, True, "2", MOST_CLASSES + 1, NAN])
NODES = ([{"_target_": "a.B"}, {"_target_": "a.B", "width": 1}], [{}, {"_target_": 1}, {"width": 1}, "a.B", ["a.B"]])
# By key of a description: values that fit, at the ends of the range, and others beside them.
VALUES_OF_A_CARD: dict[str, tuple[list[Any], list[Any]]] = {
    **dict.fromkeys(("image_shape", "input_shape"), SHAPES),
    **dict.fromkeys(("classes", "eval_batch"), COUNTS),
    **dict.fromkeys(("model", "precision", "loss"), NODES),
    "trained_on": ([{}, {"a": 1}], [[], "a", 1]),
    "eval_crop": ([1e-9, 1, 1.0], [0, -0.1, 1.000001, NAN, True, "1"]),
    "mean": ([[], [-1e6, 0, 1e6]], [[1.1e6], [-1.1e6], [NAN], ["0"], [True], 0.5, "0"]),
    "std": ([[1e-6, 1e6]], [[0], [0.9e-6], [1.1e6], [NAN], 1]),
    "class_names": ([[], ["a", ""]], [[1], ["a", None], "ab", {"a": "b"}]),
    "eval_views": ([1, 2, 6], [0, 3, True, 2.0, "2"]),
    "lockstep": (["", "1.0", "a" * 100], ["a" * 101, 1.0, None]),
    "step": ([0, 2**62], [-1, 2**62 + 1, 1.0, True, "1"]),
    "scores": (
        [{}, {"loss": -1e300, "top1": 1e300}],
        [{"top1": NAN}, {"top1": 1e301}, {"top1": "1"}, {"a": True}, [1]],
    ),
    "averaged": ([True, False], [0, 1, None, "true"]),
    "interpolation": (["bilinear", "bicubic"], ["nearest", "", None]),
    "fit": ([*FITS], ["", None]),
    "probabilities": (["softmax", "sigmoid"], ["argmax", "", None]),
    "targets": (["classes", "labels", "values"], ["class", "", None]),
    "monitor": (["top1", "-loss"], ["a\nb", "a\0b", 1]),
    "packages": ([{}, {"a": "b"}], [{"a": 1}, {"a\nb": "c"}, {"a": "b\nc"}, ["a"]]),
}


def test_each_key_of_a_description_has_its_own_range() -> None:
    rules = {field.name: rule_of(ModelCard, field.name) for field in fields(ModelCard)}
    assert rules.keys() == VALUES_OF_A_CARD.keys()
    for key, (fitting, wrong) in VALUES_OF_A_CARD.items():
        assert [value for value in fitting if not rules[key].fits(value)] == [], key
        assert [value for value in wrong if rules[key].fits(value)] == [], key


def test_a_key_of_a_later_version_is_ignored(digits: RunDir) -> None:
    assert ModelCard.parse(changed(digits, another=1)) == ModelCard.parse(changed(digits))


def test_a_description_of_a_later_format_is_no_damage(digits: RunDir) -> None:
    newer = changed(digits, format=99, lockstep="9.0", classes=-1)
    for file, named in ((("a/file",), "a/file"), ((), "its description")):
        with pytest.raises(NewerFormat, match=rf"^{named} has format 99 of .*, and Lockstep"):
            ModelCard.parse(newer, *file)


def test_a_file_from_before_the_key_fit_has_centres(digits: RunDir) -> None:
    card = json.loads(changed(digits)[METADATA_KEY])
    assert card.pop("fit") == "crop"
    assert ModelCard.parse({METADATA_KEY: json.dumps(card)}) == ModelCard.parse(changed(digits))


REQUIRED = ("image_shape", "input_shape", "eval_crop", "mean", "std", "model", "precision", "loss", "classes")
REQUIRED += ("class_names", "eval_views", "eval_batch", "trained_on", "lockstep")


def test_a_description_is_refused_by_the_first_key_that_it_lacks(digits: RunDir) -> None:
    card = json.loads(changed(digits)[METADATA_KEY])
    for gone in sorted(card.keys() - {"format"}):
        text = json.dumps({key: value for key, value in card.items() if key != gone})
        if gone in REQUIRED:
            with pytest.raises(ValueError, match=f"^its description lacks '{gone}'$"):
                ModelCard.parse({METADATA_KEY: text})
        else:
            ModelCard.parse({METADATA_KEY: text})
    with pytest.raises(ValueError, match=r"^its description lacks 'class_names'$"):
        ModelCard.parse({METADATA_KEY: "{}"})
    foreign: list[Any] = [None, "text", [METADATA_KEY], {}, {METADATA_KEY: 1}, {METADATA_KEY: None}]
    for other in foreign:
        with pytest.raises(ValueError, match=r"^it does not say what its model is"):
            ModelCard.parse(other)


def test_a_description_has_as_many_characters_as_may_be_and_no_more(digits: RunDir) -> None:
    text = changed(digits)[METADATA_KEY].ljust(MOST_CHARACTERS)
    assert ModelCard.parse({METADATA_KEY: text}).classes == 10
    with pytest.raises(ValueError, match=f"has {MOST_CHARACTERS + 1:,} characters, expected at most 16,777,216"):
        ModelCard.parse({METADATA_KEY: text + " "})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"input_shape": [3, 8, 8]}, "have 1, 1 and 1 channels, expected the 3 of its input_shape"),
        ({"image_shape": [3, 8, 8]}, "have 3, 1 and 1 channels, expected the 1"),
        ({"mean": [0.5, 0.5]}, "have 1, 2 and 1 channels, expected the 1"),
        ({"std": [0.5, 0.5]}, "have 1, 1 and 2 channels, expected the 1"),
    ],
)
def test_all_that_a_description_says_of_channels_has_the_same_number(
    digits: RunDir, values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=f"^its image_shape, mean and std {sentence}"):
        ModelCard.parse(changed(digits, **values))


def test_a_description_that_is_nested_too_deeply_or_has_too_few_or_too_many_names_is_told(digits: RunDir) -> None:
    for text in ("[" * 100_000, "{", "[" * 40 + "]" * 40):
        with pytest.raises(ValueError, match=r"^its description is not JSON \(.+\)$"):
            ModelCard.parse({METADATA_KEY: text})
    for number in (1, 9, 11):
        with pytest.raises(ValueError, match=f"^it has {number} class_names, expected one for each of 10$"):
            ModelCard.parse(changed(digits, class_names=["a"] * number))


def test_a_card_says_its_names_and_the_score_that_has_chosen_the_weights(digits: RunDir) -> None:
    card = replace(ModelCard.parse(changed(digits)), trained_on={"_target_": "a.b.Data", "name": "x"})
    assert card.data_name == "Data"
    models: dict[str, dict[str, Any]] = {
        "Net": {"_target_": "a.b.Net"},
        "resnet18": {"_target_": "a.Timm", "name": "resnet18"},
    }
    models["Other"] = {"_target_": "Other", "name": None}
    assert {name: replace(card, model=model).model_name for name, model in models.items()} == {
        name: name for name in models
    }
    scores = {"loss": 0.25, "top1": 50.0}
    monitors = {"-loss": "loss 0.25", "top1": "50.00 % top-1", "f1": ""}
    assert {name: replace(card, monitor=name, scores=scores).score for name in monitors} == monitors
    assert replace(card, scores={}).score == ""
    assert replace(card, classes=3, class_names=()).names == ("0", "1", "2")
    assert replace(card, classes=2, class_names=("cafe\u0301", "b\udcff")).names == ("caf\u00e9", "b\\udcff")
    assert replace(card, classes=2, class_names=("\ufb01n", "H\u2082O")).names == ("\ufb01n", "H\u2082O"), (
        "they look so"
    )
    assert replace(card, monitor="f1", scores={"f1": 0.0}).score == "f1 0"
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(card, scores={"f1": NAN}).metadata()
    earlier = replace(card, lockstep="0.9")
    assert ModelCard.parse(earlier.metadata()) == earlier, "written again, it is still of the version that trained it"
    assert json.loads(earlier.metadata()[METADATA_KEY])["format"] == 1
    usual = {field.name: field.default for field in fields(ModelCard)}
    assert (usual["averaged"], usual["probabilities"], usual["targets"], usual["monitor"]) == (
        *(False, "softmax", "classes", "top1"),
    )


def test_a_hostile_file_is_one_sentence(digits: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"

    def refused(sentence: str) -> None:
        with pytest.raises(InputError, match=sentence):
            lockstep.load(file)

    refused("weights: there are no weights at .*, expected a .safetensors file or a run folder")
    file.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    refused("cannot be read as safetensors")
    with file.open("wb") as sparse:
        sparse.write((100 * 2**20).to_bytes(8, "little"))
        sparse.truncate(2**40)
    refused("cannot be read as safetensors .*header too large")
    save_file({}, file, {METADATA_KEY: " " * (MOST_CHARACTERS + 1)})
    refused(f"its description has {MOST_CHARACTERS + 1:,} characters, expected at most {MOST_CHARACTERS:,}")
    tensors = {**load_file(digits.weights)}
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] * NAN}, file, changed(digits))
    refused(f"has numbers that are not finite in 1 tensors, e.g. {name}")
    tensors.pop(name)
    save_file(tensors, file, changed(digits))
    refused(f"is of another model: 1 tensors differ, e.g. {name}")


@pytest.mark.parametrize("kind", [UnreadableFile, UnreadableStorage])
def test_a_file_that_cannot_be_read_is_no_mistake_of_its_model(
    digits: RunDir, monkeypatch: pytest.MonkeyPatch, kind: type[UnreadableFile]
) -> None:
    def fail(file: Path) -> None:
        raise kind(file, "cannot be read (Input/output error)")

    monkeypatch.setattr(trained, "load_weights", fail)
    with pytest.raises(kind) as refused:
        load_trained(digits.path, device="cpu")
    assert str(refused.value) == f"{digits.weights} cannot be read (Input/output error)"


def test_latest_is_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train_here(tmp_path / "outputs" / "one", NARROW, "steps=1")
    run.mark_latest(tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    for text in ("latest", "outputs/latest", "outputs/one", "outputs/one/model.safetensors", str(run.path)):
        assert lockstep.load(text).card.step == 1
    (tmp_path / "outputs" / "latest").unlink()
    with pytest.raises(InputError, match="no run has been started in outputs"):
        lockstep.load("latest")


def test_an_evaluation_reports_the_loss_of_the_training(tmp_path: Path) -> None:
    loss = ("loss=bce", "loss.label_smoothing=0.2")
    run = train_here(tmp_path / "run", NARROW, "steps=4", *loss, "metric=calibration")
    predictor, split = lockstep.load(run.path, device="cpu"), Digits().eval()
    evaluation = evaluate_split(predictor, split)
    shares = evaluation.parts[0].answers[1]
    logged = next(line for line in records(run) if "loss/val" in line)
    assert evaluation.figures["loss"] == logged["loss/val"]
    # This loss treats each class separately (sigmoid), so all probabilities must do so too.
    assert predictor.card.probabilities == "sigmoid"
    assert torch.equal(predictor.logits(split.images).sigmoid().amax(1), shares)
    # A batch of another size may round differently.
    (prediction,) = predictor.predict(split.images[:1])
    torch.testing.assert_close(prediction.probabilities.max(), shares[0], rtol=1e-5, atol=0)
    assert evaluation.figures["calibration_error"] == 100 * logged["metric/calibration"]


class FirstBroken(ArraySplit):
    """A split of which the first image is broken."""

    def fetch(self, indices: list[int], epoch: int = 0) -> torch.Tensor:
        if 0 in indices:
            raise BrokenImage(0, "a.png", "cut short")
        return super().fetch(indices, epoch)


def test_broken_images_count_in_no_figure_and_are_no_more_than_the_split_allows(
    digits: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = lockstep.load(digits.path)
    some = Digits().eval()
    split = FirstBroken(some.images[:20], some.labels[:20])
    whole = evaluate_split(predictor, ArraySplit(some.images[1:20], some.labels[1:20]))
    with pytest.raises(BrokenImage, match=r"image 0, a\.png, cannot be decoded"):
        evaluate_split(predictor, split)
    monkeypatch.setattr(ArraySplit, "skip", 1)
    result = evaluate_split(predictor, split)
    assert (result.parts[0].images, result.figures["top1"]) == (19, whole.figures["top1"])
    assert result.figures["loss"] == pytest.approx(whole.figures["loss"], rel=1e-5)


def test_a_loaded_model_leaves_random_numbers_alone_and_knows_its_run(digits: RunDir, tmp_path: Path) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for load in (lockstep.load, lambda path: load_trained(path, device="cpu")):  # the second is of a teacher
        load(digits.path)
        assert torch.equal(torch.get_rng_state(), before)
    checkpoint_folder = max(digits.checkpoints.glob("step-*"))
    for file in (digits.weights, checkpoint_folder / "model.safetensors"):
        assert run_of(file) == digits
    assert run_of(tmp_path / "a" / "b" / "model.safetensors") is None
    for folder in (checkpoint_folder / "deeper", digits.path / "own", digits.checkpoints):
        assert run_of(folder / "model.safetensors") is None


def test_images_are_resized_as_in_the_training_of_the_weights(digits: RunDir, tmp_path: Path) -> None:
    tensors = load_file(digits.weights)
    for interpolation in ("bilinear", "bicubic"):
        path = tmp_path / f"{interpolation}.safetensors"
        save_file(tensors, path, changed(digits, interpolation=interpolation))
        assert lockstep.load(path).transforms.preprocessing.interpolation == interpolation


def test_a_grey_image_gets_the_mean_of_all_colours() -> None:
    trained = TrainedInput(input_shape=(3, 8, 8), eval_crop=1.0, mean=(0.2, 0.4, 0.6), std=(1.0, 2.0, 3.0))
    assert trained.normalisation(3) == ((0.2, 0.4, 0.6), (1.0, 2.0, 3.0))
    for channels in (1, 4):
        expected = np.array([[0.4] * channels, [2] * channels])
        assert np.array(trained.normalisation(channels)) == pytest.approx(expected)


def test_of_equal_classes_the_predicted_one_is_first_and_no_probability_is_above_itself() -> None:
    odds = torch.tensor([0.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    for label in (1, 2):
        prediction = Prediction(label=label, names=tuple("abcd"), probabilities=odds.sigmoid(), log_odds=odds)
        assert [row[0] for row in prediction.top(2)] == [label, 3 - label]
        assert {name for _, name, _ in prediction.above(0.5)} == {"b", "c"}


def test_parts_of_any_sizes_together_have_the_figures_of_the_whole(digits: RunDir) -> None:
    predictor, whole = lockstep.load(digits.path, device="cpu"), Digits().eval()
    parts = [ArraySplit(whole.images[of], whole.labels[of]) for of in (slice(30), slice(30, None))]
    trials = [(predictor, EvaluatedSplit(part, part.labels, place={"fold": str(n)})) for n, part in enumerate(parts)]
    evaluation = evaluated(trials, World.solo())
    assert evaluation is not None
    assert evaluation.figures == pytest.approx(evaluate_split(predictor, whole).figures, rel=1e-5)


def test_a_pattern_that_no_shell_expanded_names_files_and_folders_in_order(tmp_path: Path) -> None:
    names = ("b/2.png", "b/1.npy", "a1.png", "a0.txt", "[x].png", "c/sub/9.JPG", "d/x.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for pattern, channels, expected in (
        ("[x].png", 3, ["[x].png"]),
        ("a*", 3, ["a0.txt", "a1.png"]),
        ("[bc]", 3, ["b/2.png", "c/sub/9.JPG"]),
        ("[ab]*", 1, ["a0.txt", "a1.png", "b/2.png"]),
        ("b", 4, ["b/1.npy"]),
        ("b*", 4, ["b/1.npy"]),
        ("nowhere.png", 3, ["nowhere.png"]),
    ):
        assert files_in(tmp_path / pattern, channels) == [tmp_path / name for name in expected], pattern
    with pytest.raises(InputError, match=r"no file has a name like .*/z\*$"):
        files_in(tmp_path / "z*")
    for channels, kinds in ((3, ".apng, .avif, .bmp"), (2, ".npy, .tif, .tiff)")):
        with pytest.raises(InputError, match=rf"/d has no images in it \({re.escape(kinds)}"):
            files_in(tmp_path / "d", channels)


@pytest.mark.parametrize(
    ("node", "data"),
    [
        ({"path": "/data/photos", "name": "x"}, "photos (Digits)"),
        ({"path": "data/list.csv"}, "list.csv (Digits)"),
        ({"name": "Flowers102", "path": None}, "Flowers102 (Digits)"),
        ({}, "Digits"),
        (None, "Digits"),
        ("photos", "Digits"),
    ],
    ids=str,
)
def test_a_model_is_named_with_its_run_its_data_and_its_score(
    digits: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    node: Any,
    data: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    card = replace(read_card(digits.weights), scores={"top1": 91.5}, monitor="top1", step=7)
    run = RunDir.at(tmp_path / "outputs" / "one")
    run.config.write_text("{}")
    run.composed.write_text(json.dumps({"dataset": node}))
    say_which(run.weights, card)
    say_which(run.weights, replace(card, scores={"loss": 1.0}))
    say_which(tmp_path / "alone.safetensors", card)
    one, without, alone = capsys.readouterr().err.splitlines()
    assert one == f"outputs/one: DigitNet, trained on {data}, 91.50 % top-1 at step 7"
    assert without == f"outputs/one: DigitNet, trained on {data}"
    assert alone == "alone.safetensors: DigitNet, trained on Digits, 91.50 % top-1 at step 7"


def test_no_image_has_no_values_and_blocks_are_those_of_the_evaluation(digits: RunDir) -> None:
    predictor = lockstep.load(digits.path, device="cpu")
    assert predictor.values([]).shape == predictor.values(torch.zeros(0, 1, 8, 8, dtype=torch.uint8)).shape == (0, 10)
    sizes: list[int] = []
    images = Digits().eval().images[:7]
    expected = predictor.logits(images)
    small = replace(predictor, card=replace(predictor.card, eval_batch=3))
    hook = predictor.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    torch.testing.assert_close(small.values(images), expected)
    hook.remove()
    assert sizes == [3, 3, 1]
    assert not small.values(images).requires_grad


def test_a_gpu_that_is_not_here_is_refused_and_a_model_knows_its_device(
    digits: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(InputError) as refused:
            lockstep.load(digits.path, device=device)
        assert (
            str(refused.value) == f"weights: device is {device}, but PyTorch finds no GPU here; remove it, or use cpu"
        )
    loaded = load_trained(digits.path, device=None)
    assert loaded.device == torch.device("cpu")
    assert (loaded.model.training, loaded.card) == (False, read_card(digits.weights))


@pytest.mark.parametrize(("storage", "usable"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_precision_that_the_device_lacks_is_float32_where_the_weights_are(
    storage: torch.dtype, usable: bool, digits: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(self: Precision, device: str) -> None:
        raise InputError(f"no such products on {device}")

    own = BF16() if usable else BF16Pure()
    assert own.storage is storage
    monkeypatch.setattr(trained.components, "build_stored", lambda group, node: own)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # which the model is not on
    card: Any = read_card(digits.weights)
    assert trained._precision(card, torch.device("cpu")) is own
    monkeypatch.setattr(type(own), "check", refuse)
    if usable:
        assert trained._precision(card, torch.device("cpu")) == FP32()
        printed = capsys.readouterr()
        sentence = "warning: no such products on cpu; the model is used in float32 here"
        assert sentence in " ".join((printed.out + printed.err).split())
    else:
        with pytest.raises(InputError, match=r"^no such products on cpu$"):
            trained._precision(card, torch.device("cpu"))


@pytest.mark.parametrize(
    ("target", "packages", "extensions", "sentence"),
    [
        (
            "mine.Net",
            {"mine": "0" * 64},
            (),
            "needs the package mine, which is not an extension here; install it with pip, or name",
        ),
        ("mine.Net", {"mine": "0" * 64}, ("mine",), "cannot be built: "),
        ("mine.Net", {}, (), "cannot be built: "),
        ("__main__.Net", {"__main__": "0" * 64}, (), "cannot be built: "),  # a script's, which is no package
    ],
)
def test_a_model_of_a_package_that_is_not_here_is_refused_with_its_name(
    target: str,
    packages: dict[str, str],
    extensions: tuple[str, ...],
    sentence: str,
    digits: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "model.safetensors"
    save_file(load_file(digits.weights), file, changed(digits, model={"_target_": target}, packages=packages))
    active = [SimpleNamespace(package=name) for name in extensions]

    def refuse(group: str, node: Any) -> None:
        raise InputError("there is no class mine.Net")

    monkeypatch.setattr(trained.components, "build_stored", refuse)
    monkeypatch.setattr(trained.extensions, "active", lambda: active)
    with pytest.raises(InputError) as refused:
        load_trained(file, device="cpu")
    assert str(refused.value).startswith(
        f"weights: {'the model of ' * sentence.startswith('cannot')}{file} {sentence}"
    )
    if sentence.startswith("needs"):
        assert str(refused.value).endswith(" it with lockstep.load(PATH, extensions=['mine'])")
    else:
        assert str(refused.value).endswith("cannot be built: there is no class mine.Net")


def test_each_tensor_that_is_not_finite_is_counted_but_those_that_are_infinite_by_design(
    digits: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, file = load_file(digits.weights), tmp_path / "model.safetensors"
    first, second, third = [*tensors][:3]
    broken = {first: tensors[first] * NAN, third: tensors[third] + math.inf}
    save_file({**tensors, **broken}, file, changed(digits))
    names = [name for name in lockstep.load(digits.path).model.state_dict() if name in broken]
    with pytest.raises(InputError, match=f"has numbers that are not finite in 2 tensors, e.g. {names[0]}$"):
        lockstep.load(file)
    monkeypatch.setattr(trained, "infinite_buffers", lambda model: frozenset({first, second, third}))
    with pytest.raises(InputError, match=f"not finite in 1 tensors, e.g. {first}$"):
        lockstep.load(file)


def test_a_model_that_reads_numbers_as_it_is_built_is_built_all_the_same(
    digits: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*parts: Any) -> None:
        raise NotImplementedError("a tensor on the meta device has no numbers")

    expected = lockstep.load(digits.path, device="cpu").model.state_dict()
    monkeypatch.setattr(trained, "sketch", fail)
    loaded = lockstep.load(digits.path, device="cpu").model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


def test_only_what_a_new_model_has_may_be_infinite_in_its_file(digits: RunDir, tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10))
    module.register_buffer("bound", torch.tensor(math.inf))
    file, tensors = tmp_path / "model.safetensors", module.state_dict()
    node = {"_target_": "lockstep.training.objects.ModelObject", "type": "Sequential", "module": "torch"}
    card = changed(digits, model=node)
    save_file(tensors, file, card)
    assert load_trained(file, device="cpu", module=module).model.bound == math.inf
    save_file({**tensors, "1.running_mean": torch.full((64,), math.inf)}, file, card)
    with pytest.raises(InputError, match=r"not finite in 1 tensors, e\.g\. 1\.running_mean$"):
        load_trained(file, device="cpu", module=module)


def test_a_module_of_a_program_takes_the_weights_in_a_copy(digits: RunDir, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    file = tmp_path / "model.safetensors"
    node = {"_target_": "lockstep.training.objects.ModelObject", "type": "Sequential", "module": "torch"}
    tensors = {"1.weight": torch.ones(10, 64), "1.bias": torch.zeros(10)}
    save_file(tensors, file, changed(digits, model=node))
    before = module[1].weight.clone()
    loaded = load_trained(file, device="cpu", module=module)
    assert torch.equal(loaded.model(torch.ones(1, 1, 8, 8)), torch.full((1, 10), 64.0))
    assert torch.equal(module[1].weight, before)
    with pytest.raises(InputError, match=r"^weights: .*Sequential of torch, an object that a program gave"):
        load_trained(file, device="cpu")


@pytest.mark.parametrize("channels_last", [True, False])
def test_a_model_lies_in_memory_as_its_card_says(channels_last: bool, digits: RunDir, tmp_path: Path) -> None:
    file, node = tmp_path / "model.safetensors", dict(read_card(digits.weights).model)
    card = changed(digits, model={**node, "channels_last": channels_last})
    save_file(load_file(digits.weights), file, card)
    loaded = load_trained(file, device="cpu")
    kernels = [own for own in loaded.model.parameters() if own.ndim == 4 and min(own.shape) > 1]
    assert kernels
    assert {own.is_contiguous(memory_format=torch.channels_last) for own in kernels} == {channels_last}
    assert (loaded.memory_format is torch.channels_last) == channels_last


@pytest.mark.parametrize(
    ("packages", "present", "notes"),
    [
        ({}, {"mine": "new"}, []),
        ({"mine": "old"}, {"mine": "old"}, []),
        ({"mine": "old"}, {"mine": "new"}, ["mine"]),
        ({"mine": "old"}, {"mine": "old", "more": "new"}, ["more"]),
        ({"mine": "old", "__main__": "old"}, {"mine": "new", "__main__": "new"}, ["mine"]),
        ({"mine": "old", "more": "old"}, {"mine": "new", "more": "new"}, ["mine", "more"]),
    ],
)
def test_a_model_that_other_code_of_an_extension_has_trained_is_said_to_be(
    digits: RunDir,
    packages: dict[str, str],
    present: dict[str, str],
    notes: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained = predictor_module.load_trained(digits.path, device="cpu")
    trained = replace(trained, card=replace(trained.card, packages=packages))
    code = {name: SimpleNamespace(facts={"sha256": sha256}) for name, sha256 in present.items()}
    monkeypatch.setattr(predictor_module, "load_trained", lambda path, **_: trained)
    monkeypatch.setattr("lockstep.runtime.user_code.code_of", lambda config: code)
    load_predictor("some/run", device="cpu")
    shown = capsys.readouterr().err.splitlines()
    assert shown == [f"some/run was trained with other code of {name}" for name in notes]


def test_a_predictor_transforms_as_its_weights_say_on_their_device(
    digits: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    options_of: list[Any] = []
    trained = predictor_module.load_trained(digits.path, device="cpu")
    trained = replace(trained, memory_format=torch.channels_last, precision=FP64())
    monkeypatch.setattr(
        predictor_module, "load_trained", lambda path, **options: options_of.append((path, options)) or trained
    )
    predictor = load_predictor("run", device="cuda:1", precision=FP32(), module=None)
    assert options_of == [("run", {"device": "cuda:1", "precision": FP32(), "module": None})]
    assert (predictor.card, predictor.model, predictor.device) == (trained.card, trained.model, trained.device)
    assert predictor.transforms.preprocessing == trained.card
    images = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    pixels = predictor.preprocess(images)
    assert pixels.dtype is torch.float64
    wide = replace(predictor.card, image_shape=(3, 8, 8), input_shape=(3, 6, 6), mean=(0.5,) * 3, std=(0.5,) * 3)
    of_colours = replace(predictor, card=wide, transforms=replace(predictor.transforms, preprocessing=wide))
    pixels = of_colours.preprocess(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    assert pixels.is_contiguous(memory_format=torch.channels_last)


def frames(folder: Path) -> Path:
    """A file of three frames, with the levels 10, 100 and 200."""
    first, *more = (Image.new("L", (8, 8), level) for level in (10, 100, 200))
    first.save(path := folder / "frames.tif", save_all=True, append_images=more)
    return path


def test_an_image_of_pillow_is_the_frame_and_the_pixels_that_it_has_now(tmp_path: Path) -> None:
    how = Digits().preprocessing
    path = frames(tmp_path)
    with Image.open(path) as opened:
        assert stored_image(opened, how).unique().tolist() == [10]
    for frame, level in ((1, 100), (2, 200), (0, 10)):
        with Image.open(path) as opened:
            opened.seek(frame)
            assert stored_image(opened, how).unique().tolist() == [level], frame
    with Image.open(path) as drawn:
        drawn.paste(77, (0, 0, 8, 8))
        assert stored_image(drawn, how).unique().tolist() == [77]
    half = Image.new("L", (8, 4), 0)
    half.paste(200, (0, 0, 4, 4))
    half.getexif()[0x0112] = 6
    wide = replace(how, image_shape=(1, 8, 4), input_shape=(1, 8, 4), fit="squash")
    upright = stored_image(half, wide)[0]
    assert (upright[0].tolist(), upright[-1].tolist()) == ([200] * 4, [0] * 4), "turned as its orientation says"


def test_an_image_of_pillow_may_be_of_a_format_that_no_data_set_has(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), (9, 99, 199)).save(path := tmp_path / "a.tga")
    how = replace(Digits().preprocessing, image_shape=(3, 8, 8), input_shape=(3, 8, 8))
    with Image.open(path) as opened:
        assert stored_image(opened, how)[:, 0, 0].tolist() == [9, 99, 199]
    with pytest.raises(InputError, match=r"a\.tga cannot be read as an image \("):
        stored_image(path, how)


def test_an_image_of_pillow_can_be_used_again(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), (9, 99, 199)).save(path := tmp_path / "a.png")
    how = replace(Digits().preprocessing, image_shape=(3, 8, 8), input_shape=(3, 8, 8))
    opened = Image.open(path)
    first, second = (stored_image(opened, how) for _ in range(2))
    assert torch.equal(first, second)
    assert first[:, 0, 0].tolist() == [9, 99, 199]
    assert opened.getpixel((0, 0)) == (9, 99, 199)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_arrays_and_tensors_of_the_right_shape_are_not_changed_and_have_their_channels_last_or_first(
    channels: int,
) -> None:
    shape = (channels, 6, 7)
    how = replace(Digits().preprocessing, image_shape=shape, input_shape=shape)
    tensor = torch.arange(channels * 42).remainder(251).to(torch.uint8).view(shape)
    array = np.ascontiguousarray(tensor.permute(1, 2, 0).numpy())
    for image in (tensor, array, *([array[..., 0]] * (channels == 1))):
        assert torch.equal(stored_image(image, how), tensor)
    both = stored_images(torch.stack([tensor, tensor.flip(1)]), how)
    assert torch.equal(both, torch.stack([tensor, tensor.flip(1)]))
    assert torch.equal(stored_images(tensor[None], how), tensor[None])
    assert stored_images(iter([array, tensor]), how).shape == (2, *shape)
    assert (stored_images([], how).shape, stored_images([], how).dtype) == ((0, *shape), torch.uint8)
    larger = replace(how, image_shape=(channels, 12, 14), input_shape=(channels, 12, 14), fit="squash")
    assert stored_image(tensor, larger).shape == (channels, 12, 14)
    assert torch.equal(stored_image(array, larger), stored_image(tensor, larger))
    levels = torch.arange(10, 10 + 20 * channels, 20, dtype=torch.uint8).view(-1, 1, 1)
    striped = levels.repeat(1, 6, 7)
    striped[:, :3] = 0
    rows = stored_image(striped, larger)[:, [0, -1]]
    assert torch.equal(rows, torch.cat([torch.zeros_like(levels), levels], 1).expand(rows.shape)), "the top is black"
    array[:] = 0
    copied = stored_image(array, how)
    array[:] = 1
    assert not copied.any(), "it has a copy of the array"


@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_and_tensors_of_the_right_sides_get_the_channels_of_the_model(channels: int) -> None:
    how = replace(Digits().preprocessing, image_shape=(channels, 6, 7), input_shape=(channels, 6, 7))
    colours = np.random.default_rng(0).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    grey = np.array(Image.fromarray(colours).convert("L"))[..., None]
    for array, expected in ((colours, colours if channels == 3 else grey), (grey, grey.repeat(channels, 2))):
        tensor = torch.from_numpy(expected).permute(2, 0, 1)
        for image in (array, torch.from_numpy(array).permute(2, 0, 1)):
            assert torch.equal(stored_image(image, how), tensor)
    for number in (2, 4, 5):
        other = colours[..., :1].repeat(number, 2)
        with pytest.raises(InputError, match=f"^an image has {number} channels, expected 1 or 3"):
            stored_image(other, how)


@pytest.mark.parametrize("error", [StorageError("the disk is gone"), MemoryError("much"), OSError(5, "Input/output")])
@pytest.mark.parametrize("image", ["a.png", b"bytes"], ids=str)
def test_why_an_image_cannot_be_read_is_said_with_its_name(
    image: Any, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.chdir(tmp_path)
    Path("a.png").touch()
    monkeypatch.setattr(images_module.ImageFile, "of", fail)
    name = "a.png" if image == "a.png" else "the image"
    expected: dict[type, tuple[type[Exception], str]] = {
        StorageError: (StorageError, "the disk is gone"),
        MemoryError: (LockstepError, f"out of memory for {name}"),
        OSError: (InputError, f"{name} cannot be read as an image (Input/output)"),
    }
    kind, text = expected[type(error)]
    with pytest.raises(kind) as raised:
        stored_image(image, Digits().preprocessing)
    assert text.split()[-1] in str(raised.value)
    assert (str(raised.value) == text) or isinstance(error, MemoryError)


class Constant(torch.nn.Module):
    """The same logits for every image."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(images), -1)


def test_of_classes_whose_probabilities_round_to_1_the_likeliest_is_predicted(digits: RunDir) -> None:
    predictor = lockstep.load(digits.path, device="cpu")
    card = replace(predictor.card, probabilities="sigmoid")
    sure = replace(predictor, model=Constant(-9.0, 40.0, 60.0, 50.0, *[0.0] * 6), card=card)
    for prediction in sure.predict(Digits().eval().images[:2]):
        assert prediction.probabilities[1:4].tolist() == [1.0] * 3
        assert (prediction.label, prediction.name, prediction.probability) == (2, sure.names[2], 1.0)
        assert [label for label, *_ in prediction.top(3)] == [2, 3, 1]


def test_labels_above_a_threshold_are_the_likeliest_first_and_none_is_at_it() -> None:
    shares = torch.tensor([0.5, 0.9, 0.1, 0.75], dtype=torch.float64)
    prediction = Prediction(label=1, names=tuple("abcd"), probabilities=shares, log_odds=shares.logit())
    above = {0.0: "bdac", 0.1: "bda", 0.5: "bd", 0.75: "b", 0.9: "", 1.0: "", -1.0: "bdac", 2.0: ""}
    assert {share: "".join(row[1] for row in prediction.above(share)) for share in above} == above
    assert prediction.above(0.7) == [(1, "b", 0.9), (3, "d", 0.75)]
    assert prediction.top(0) == []
    assert (prediction.name, prediction.probability) == ("b", 0.9)
