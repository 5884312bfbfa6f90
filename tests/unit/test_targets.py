"""Targets besides one class: labels and values from a CSV file and from `datasets`, mixed and with corrupt images."""

import itertools
import json
import re
import tarfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sklearn.preprocessing import MultiLabelBinarizer
from torch import Tensor
from torchvision.models._meta import _COCO_CATEGORIES, _IMAGENET_CATEGORIES

from helpers import records, resolved, train_here
from lockstep.core.errors import InputError
from lockstep.core.model import is_broken
from lockstep.core.rng import MIX, sample_keys
from lockstep.data.datasets import packed
from lockstep.data.datasets.arrays import check_labels
from lockstep.data.datasets.files import LISTINGS
from lockstep.data.datasets.folder import Folder
from lockstep.data.datasets.tables import CSV, HF
from lockstep.data.datasets.targets import (
    SEPARATOR,
    as_numbers,
    as_targets,
    class_notes,
    lists_note,
    names_of,
    split_text,
    target_of,
)
from lockstep.data.datasets.webdataset import WebDataset
from lockstep.data.transforms.mixing import Mix
from lockstep.diagnostics import prove
from lockstep.diagnostics.inspection import inspect
from lockstep.job.validate import check_job
from lockstep.job.validate_with_data import check_plan
from lockstep.training.resolved_job import ResolvedJob

LABELS = [["cat", "dog"], ["dog"], [], ["bird"], ["cat"], ["bird", "cat"], ["dog"], ["cat"]]
VALUES = [[1.5, -2.0], [0.0, 3.25], [1e-3, 7.0], [2.0, 0.0], [-1.0, 1.0], [4.0, 4.0], [0.5, 0.5], [9.0, -9.0]]


def images(folder: Path, number: int = 8) -> list[str]:
    names = [f"{n}.png" for n in range(number)]
    for n, name in enumerate(names):
        Image.new("RGB", (8, 8), (20 * n, 10, 200)).save(folder / name)
    return names


def table(folder: Path, columns: str, cells: list[str], name: str = "all.csv") -> str:
    names = images(folder, len(cells))
    splits = ["train"] * (len(cells) - 3) + ["val"] * 3
    lines = [f"{name},{cell},{split}" for name, cell, split in zip(names, cells, splits, strict=True)]
    path = folder / name
    path.write_text("\n".join([f"path,{columns},split", *lines]))
    return str(path)


def test_labels_of_a_cell_and_of_columns_are_those_of_scikit_learn(tmp_path: Path) -> None:
    expected = MultiLabelBinarizer(classes=["bird", "cat", "dog"]).fit_transform(LABELS)
    joined = CSV(path=table(tmp_path, "label", [" ; ".join(own) for own in LABELS]), targets="labels")
    cells = [",".join("true" if cell else "0" for cell in row) for row in expected]
    columns = ["bird", "cat", "dog"]
    wide = CSV(path=table(tmp_path, "bird,cat,dog", cells, "wide.csv"), label_columns=columns, targets="labels")
    for source in (joined, wide):
        assert source.class_names == ("bird", "cat", "dog")
        both = torch.cat([source.train().labels, source.eval().labels])
        assert both.dtype == torch.float32
        np.testing.assert_array_equal(both.numpy(), expected)
        assert [source.train().name(n)[-5:] for n in range(5)] == [f"{n}.png" for n in range(5)]
    assert any("1 of 5 images of the training split have no label" in note for note in joined.notes())
    other = CSV(path=table(tmp_path, "label", ["cat"] * 8, "other.csv"), targets="labels")
    assert other.fingerprint() != joined.fingerprint()


FORMS: dict[str, Any] = {
    "spaces": " ".join,
    "semicolons": ";".join,
    "bars": "|".join,
    "commas": ",".join,
    "commas and spaces": ", ".join,
    "slashes": "/".join,
    "pluses": " + ".join,
    "a list of Python": str,
    "a tuple of Python": lambda own: str(tuple(own)),
    "a set of Python": lambda own: str(set(own)),
    "a list of JSON": json.dumps,
    "an array of NumPy": lambda own: str(np.array(own)),
}
SETS = [["cat", "dog"], ["dog"], ["bird"], ["bird", "cat", "dog"], ["bird", "cat"], ["cat", "dog"], ["dog"], ["bird"]]


def from_texts(folder: Path, kind: str, cells: list[str], **keys: Any) -> Any:
    """The data set of a kind whose labels are these texts."""
    LISTINGS.clear()
    if kind == "csv":
        path = table(folder, "label", ['"' + cell.replace('"', '""') + '"' for cell in cells])
        return CSV(path=path, decode_size=8, **keys)
    if kind == "hf":
        return HF(path=saved(folder, label=(cells, None)), decode_size=8, **keys)
    names = images(folder, len(cells))
    for split, of in (("train", slice(5)), ("val", slice(5, 8))):
        with tarfile.open(folder / f"{split}.tar", "w") as shard:
            for name, cell in zip(names[of], cells[of], strict=True):
                shard.add(folder / name, name)
                (folder / "cell").write_text(cell)
                shard.add(folder / "cell", name.replace(".png", ".cls"))
    return WebDataset(path=str(folder), decode_size=8, **keys)


def listed(source: Any) -> list[str]:
    return [note for note in source.notes() if "look like lists of" in note]


def test_folders_whose_names_look_like_lists_are_classes(tmp_path: Path) -> None:
    for split, name in itertools.product(("train", "val"), ("a;b", "b;c")):
        (folder := tmp_path / split / name).mkdir(parents=True)
        images(folder, 2)
    source = Folder(path=str(tmp_path), decode_size=8)
    assert (source.class_names, listed(source)) == (("a;b", "b;c"), [])


@pytest.mark.parametrize("kind", ["csv", "webdataset", "hf"])
@pytest.mark.parametrize("form", FORMS)
def test_labels_that_look_like_lists_are_read_with_the_key_that_a_note_names(
    form: str, kind: str, tmp_path: Path
) -> None:
    cells = [FORMS[form](own) for own in SETS]
    one_class = from_texts(tmp_path, kind, cells, targets="classes")
    (note,) = listed(one_class)
    assert f"the {len(one_class.class_names)} classes, such as " in note
    assert (
        "look like lists of 3 names, and each list is one class; for several labels of an image, use task=multil"
        in note
    )
    if kind == "hf":
        assert note.endswith("use task=multilabel and lists of names in the column")
        return
    key = re.search(r"dataset\.label_separator='(.+?)'", note)
    assert bool(key) == (not form.startswith(("semicolons", "a"))), "semicolons and lists need none"
    if key:
        (note,) = listed(from_texts(tmp_path, kind, cells, targets="labels"))
        assert note.endswith(f'each list is one label; for several labels of an image, use "{key[0]}"')
    labels = from_texts(tmp_path, kind, cells, targets="labels", **({"label_separator": key[1]} if key else {}))
    expected = MultiLabelBinarizer(classes=["bird", "cat", "dog"]).fit_transform(SETS)
    assert labels.class_names == ("bird", "cat", "dog")
    assert listed(labels) == []
    np.testing.assert_array_equal(torch.cat([labels.train().labels, labels.eval().labels]).numpy(), expected)


NAMES = ['röt "x"', "синий", "it's, ok", "a\\b"]


def test_names_in_lists_are_those_that_python_and_json_wrote() -> None:
    assert split_text(json.dumps(NAMES), ";") == split_text(json.dumps(NAMES, ensure_ascii=False), ";") == NAMES
    assert split_text(str(NAMES[:3]), ";") == NAMES[:3]
    assert split_text(str(["it's \0"]), ";") == [r"it's \x00"], "an escape that JSON has not"
    for separator in ";, ":
        assert split_text(f"['a{separator}b', 'c']", separator) == [f"a{separator}b", "c"]
    assert [split_text(empty, ";") for empty in ("[]", "()", "{}", "set()", "")] == [[]] * 5
    assert [split_text(name, "/") for name in ("(cat)", "{'a': 1}")] == [["(cat)"], ["{'a': 1}"]]


@pytest.mark.parametrize("kind", ["csv", "webdataset"])
def test_a_list_that_no_training_example_has_is_no_class_to_remove(kind: str, tmp_path: Path) -> None:
    cells = [" ".join(own) for own in [*SETS[:-1], ["bird", "dog"]]]
    with pytest.raises(
        InputError, match=r"'bird dog', which no training example has; the names of the 6 classes, such"
    ):
        from_texts(tmp_path, kind, cells, targets="classes").prepare()


@pytest.mark.parametrize("kind", ["csv", "webdataset"])
def test_a_list_with_another_separator_than_the_typed_one_is_answered_with_its_own(kind: str, tmp_path: Path) -> None:
    cells = [",".join(own) for own in SETS[:-1]] + ["bird;dog"]
    with pytest.raises(InputError, match=r"'bird;dog', which .* use \"dataset\.label_separator=';'\"$"):
        from_texts(tmp_path, kind, cells, targets="labels", label_separator=",").prepare()


@pytest.mark.parametrize(
    "names",
    [
        _IMAGENET_CATEGORIES,
        _COCO_CATEGORIES,
        ["traffic light", "red light", "traffic sign"],
        ["Audi A4 Sedan 2012", "Audi A5 Coupe 2012", "BMW X3 SUV 2012", "BMW X5 SUV 2007"],
        ["1", "2", "3"],
        ["2020-01", "2020-02"],
        ["a"],
        ["tench, Tinca tinca", "goldfish, Carassius auratus", "hen"],
    ],
)
@pytest.mark.parametrize("targets", ["classes", "labels"])
def test_names_of_several_words_are_no_lists(names: list[str], targets: str) -> None:
    assert lists_note(names, targets, ";") == []


@pytest.mark.parametrize("between", ";|")
def test_few_cells_with_a_semicolon_or_a_bar_are_lists_also_without_repeated_names(between: str) -> None:
    names = [f"cat{between}pet", f"dog{between}pet", "cow"]
    (note,) = lists_note(names, "classes", ";")
    assert "names of the 3 classes, such as " in note
    assert note.endswith("use task=multilabel" + " \"dataset.label_separator='|'\"" * (between == "|"))


def test_lists_that_python_wrote_need_no_separator() -> None:
    for separator in ";|,":
        (note,) = lists_note(["['cat', 'pet']", "['dog', 'pet']", "['cow']"], "classes", separator)
        assert note.endswith("use task=multilabel")


def test_values_of_columns_are_their_numbers(tmp_path: Path) -> None:
    path = table(tmp_path, "x,y", [f"{x},{y}" for x, y in VALUES])
    source = CSV(path=path, label_columns=["x", "y"], targets="values")
    assert (source.class_names, source.classes) == (("x", "y"), 2)
    torch.testing.assert_close(torch.cat([source.train().labels, source.eval().labels]), torch.tensor(VALUES))
    one = CSV(path=path, label_column="y", targets="values", val_share=None)
    assert (one.class_names, one.eval().labels.tolist()) == (("y",), [[4.0], [0.5], [-9.0]])


@pytest.mark.parametrize("targets", ["labels", "values"])
def test_a_share_is_held_out_of_any_targets(targets: str, tmp_path: Path) -> None:
    names = images(tmp_path, 40)
    cells = [";".join(LABELS[n % 2]) if targets == "labels" else str(n) for n in range(40)]
    rows = [f"{name},{cell}" for name, cell in zip(names, cells, strict=True)]
    (tmp_path / "all.csv").write_text("\n".join(["path,label", *rows]))
    source = CSV(path=str(tmp_path / "all.csv"), targets=targets, val_share=0.2)
    train, val = source.train(), source.eval()
    assert (len(train), len(val)) == (32, 8)
    if targets == "labels":
        assert val.labels.sum(0).tolist() == [4, 8], "four of each kind of image"


def test_a_number_beyond_float32_and_a_label_to_evaluate_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has .1e99. for .label., expected a finite number; correct it"):
        CSV(path=table(tmp_path, "label", [*"12", "1e99", *"45678"]), targets="values").prepare()
    source = CSV(path=table(tmp_path, "label", ["cat"] * 7 + ["cat;dog"]), targets="labels")
    with pytest.raises(InputError, match=r"line 9 of .* has the label 'dog', which no training example has"):
        source.prepare()


def test_the_targets_of_a_data_set_are_those_of_the_task(tmp_path: Path) -> None:
    words = ("dataset=csv", f"dataset.path={table(tmp_path, 'label', ['1'] * 8)}")
    for task, targets in {"multiclass": "classes", "multilabel": "labels", "regression": "values"}.items():
        assert resolved(*words, f"task={task}").dataset.targets == targets
    with pytest.raises(InputError, match=r"the targets of dataset=digits are classes, .* of csv, fake, hf"):
        resolved("task=regression")


NO_NUMBERS = "expected a finite number; correct it"
ONE_CLASS = "has one class; use task=multilabel or task=regression, or dataset.label_column=NAME"
NO_CLASS = "numbered classes are whole numbers from 0"
OTHERS = ", or dataset=NAME with one of csv, fake, hf, torchvision, webdataset"
# For each column or data set: what each task says of it; None: it fits.
FITTING: dict[str, tuple[str | None, str | None, str | None]] = {
    "label_column=name": (None, None, NO_NUMBERS),
    "label_column=names": (
        "has nothing in the column 'names'; correct it",
        None,
        "has nothing in the column 'names'",
    ),
    "label_column=number": (NO_CLASS, NO_CLASS, None),
    "label_column=nan": (NO_CLASS, NO_CLASS, NO_NUMBERS),
    "label_column=hole": ("has nothing in the column 'hole'", None, "has nothing in the column 'hole'; correct it"),
    "label_columns=[x,y]": (ONE_CLASS, None, None),
    "label_columns=[x,hole]": (*("has nothing in the column 'hole'; correct it",) * 3,),
    "label_columns=[x,number]": (ONE_CLASS, "expected 0 or 1 (also true or false) for each label; correct it", None),
    "label_columns=[x,nan]": (ONE_CLASS, "expected 0 or 1 (also true", NO_NUMBERS),
    "label_columns=[zero]": (ONE_CLASS, "no image to train on has a label, so there is nothing to learn", None),
    "label_columns=[x,y,x]": (*("dataset.label_columns has 'x' twice; remove one",) * 3,),
    "label_columns=[x] dataset.label_column=name": (*("both name labels; remove one",) * 3,),
    "label_columns=[x,y] dataset.label_column=name": (*("both name labels; remove one",) * 3,),
    "label_column=other": (*("name one with dataset.label_column=NAME",) * 3,),
    "label_columns=[x,other]": (*("name one with dataset.label_columns=[NAME]",) * 3,),
    "dataset=digits": (None, f"use task=multiclass{OTHERS}", f"use task=multiclass{OTHERS}"),
    "dataset=packed": (f"use task=multilabel{OTHERS}", None, f"use task=multilabel{OTHERS}"),
    "dataset=fake dataset.targets=values": (f"use task=regression{OTHERS}", f"use task=regression{OTHERS}", None),
}


def check_whole(job: ResolvedJob) -> None:
    check_job(job)
    check_plan(job)


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with a column of each kind, and a packed set of labels."""
    folder = tmp_path_factory.mktemp("columns")
    cells = [
        f"{'ab'[n % 2]},{('a', '', 'b;c', 'a;c')[n % 4]},{n / 7:.3f},{'nan' if n == 4 else n / 2},"
        f"{'' if n == 3 else n % 2},{n % 2},{n % 3 == 0:d},0"
        for n in range(8)
    ]
    path = table(folder, "name,names,number,nan,hole,x,y,zero", cells)
    source = CSV(path=path, label_columns=["x", "y"], targets="labels", decode_size=8)
    packed.pack_source(source, folder / "packed", threads=1, advanced=lambda number: None)
    return folder


@pytest.mark.parametrize("task", ["multiclass", "multilabel", "regression"])
@pytest.mark.parametrize("words", FITTING)
def test_targets_that_do_not_fit_the_task_are_one_sentence(words: str, task: str, columns: Path) -> None:
    sentence = dict(zip(("multiclass", "multilabel", "regression"), FITTING[words], strict=True))[task]
    chosen = words.split() if words.startswith("dataset=") else ["dataset=csv", *f"dataset.{words}".split()]
    path = {"dataset=csv": columns / "all.csv", "dataset=packed": columns / "packed"}.get(chosen[0])
    job = (*chosen, f"task={task}", "batch=2", "epochs=3", *([f"dataset.path={path}"] if path else []))
    with pytest.raises(InputError) if sentence else nullcontext() as caught:
        check_whole(resolved(*job))
    assert caught is None or str(sentence) in str(caught.value)


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_a_proof_reads_columns_as_the_task_says(task: str, columns: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "_compare_all", lambda *_: None)
    table = ("dataset=csv", f"dataset.path={columns / 'all.csv'}", "dataset.label_columns=[x,y]")
    prove.prove([*table, f"task={task}"], steps=2, ranks="2")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train.patience=2", None),
        ("train.patience=3", "train.patience is 3, but the run has 3 evaluations (one every 5 of 15 steps)"),
        ("train.patience=3ep", "train.patience is 3ep, but the run has 3 evaluations"),
        ("monitor=f1/3 metric=f1", "does not log, expected one of loss, top1, top5, f1; set metric.f1.average=none"),
        ("monitor=f1 metric=f1 metric.f1.average=none", "f1/0, f1/1, f1/2 and so on for each class"),
        ("monitor=-", "monitor is -, which an evaluation of this job does not log"),
        ("monitor=recall", "which an evaluation of this job does not log, expected one of loss, top1, top5; add a"),
        ("train.min_delta=0.1", "train.patience is null, so no run ends early"),
    ],
)
def test_a_patience_that_none_loses_and_an_unknown_monitor_are_one_sentence(words: str, sentence: str | None) -> None:
    job = resolved("dataset=fake", "dataset.examples=40", "dataset.size=8", "batch=8", "epochs=3", *words.split())
    with pytest.raises(InputError) if sentence else nullcontext() as caught:
        check_whole(job)
    assert caught is None or str(sentence) in str(caught.value)


def saved(folder: Path, **columns: Any) -> str:
    """A table of eight images with these columns, written by `save_to_disk`."""
    datasets = pytest.importorskip("datasets")
    images(folder)
    pixels = [{"bytes": (folder / f"{n}.png").read_bytes(), "path": None} for n in range(8)]
    features = {name: feature for name, (_, feature) in columns.items() if feature is not None}
    rows = datasets.Dataset.from_dict({"image": pixels, **{name: cells for name, (cells, _) in columns.items()}})
    for name, feature in {"image": datasets.Image(), **features}.items():
        rows = rows.cast_column(name, feature)
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


def test_the_columns_of_datasets_are_lists_of_labels_and_numbers(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    names = ["bird", "cat", "dog"]
    expected = MultiLabelBinarizer(classes=names).fit_transform(LABELS)
    numbers, classes = [[*map(names.index, own)] for own in LABELS], datasets.ClassLabel(names=names)
    columns = {"names": LABELS, "floats": expected.astype(float).tolist(), "bools": expected.astype(bool).tolist()}
    columns |= {"pair": VALUES, "one": [row[0] for row in VALUES]}
    typed = {"numbers": (numbers, datasets.Sequence(classes))}
    typed["fixed"] = (expected.tolist(), datasets.Sequence(datasets.Value("int64"), length=3))
    typed["single"] = (expected[:, :1].tolist(), datasets.Sequence(datasets.Value("int64"), length=1))
    twos = [[n % 3, (n + 1) % 3] for n in range(len(LABELS))]
    typed["two"] = (twos, datasets.Sequence(classes, length=2))
    path = saved(tmp_path, **typed, **{name: (cells, None) for name, cells in columns.items()})
    for column in ("names", "numbers", "floats", "bools", "fixed"):
        source = HF(path=path, label_column=column, targets="labels")
        numbered = tuple(f"{column}_{number}" for number in range(3))
        assert source.class_names == (tuple(names) if column in ("names", "numbers") else numbered)
        np.testing.assert_array_equal(source.train().labels.numpy(), expected)
    single = HF(path=path, label_column="single", targets="labels")
    np.testing.assert_array_equal(single.train().labels, expected[:, :1])
    two = HF(path=path, label_column="two", targets="labels")
    assert two.class_names == tuple(names)
    np.testing.assert_array_equal(two.train().labels, MultiLabelBinarizer(classes=range(3)).fit_transform(twos))
    pair = HF(path=path, label_column="pair", targets="values")
    assert pair.class_names == ("pair_0", "pair_1")
    torch.testing.assert_close(pair.eval().labels, torch.tensor(VALUES))
    assert HF(path=path, label_column="one", targets="values").class_names == ("one",)


def test_a_column_of_datasets_that_is_no_target_is_one_sentence(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"one": [float(n) for n in range(8)], "gap": [1.0, None, *[1.0] * 6]}
    columns |= {"ragged": [[1.0, 0.0], [1.0], *[[0.0, 1.0]] * 6], "vector": [[0, 1, 0]] * 8}
    columns |= {"none": [[]] * 8, "texts": ["high"] * 8, "two": [[n % 2, 1 - n % 2] for n in range(8)]}
    fixed = pytest.importorskip("datasets").Sequence(pytest.importorskip("datasets").Value("int64"), length=2)
    typed = {"hole": ([[0, 1], None, *[[1, 0]] * 6], fixed)}
    path = saved(tmp_path, **typed, **{name: (cells, None) for name, cells in columns.items()})
    for column, targets, sentence in (
        *(("hole", targets, "row 1 of .* has 0 numbers, expected 2") for targets in ("labels", "values")),
        ("one", "labels", r"row 0 of .* has the labels 0\.0, expected a list of classes"),
        ("one", "classes", r"row 0 of .* has the label 0\.0, expected a class; .* task=regression"),
        ("gap", "values", "row 1 of train in .* has null for 'gap', expected a finite number"),
        ("ragged", "labels", "row 1 of .* has 1 number, expected 2"),
        ("vector", "labels", r"row 0 of .* has the labels 0, 1, 0, expected each class once; .* store floats"),
        ("two", "labels", r"row 0 of .* has the labels 0, 1, expected each class once; .* store floats"),
        ("none", "labels", "none of the 8 training examples has a label, the first is row 0"),
        ("texts", "values", "row 0 of .* has 'high' for 'texts', expected a finite number"),
    ):
        with pytest.raises(InputError, match=sentence):
            HF(path=path, label_column=column, targets=targets).prepare()


@pytest.mark.parametrize(
    ("labels", "targets", "sentence"),
    [
        (torch.tensor([[0.5, 1.5]]), "labels", r"example 0 of .* \[0\.5, 1\.5\], expected shares from 0 to 1"),
        (torch.tensor([[0.0, torch.nan]]), "values", r"example 0 of .* label \[0\.0, nan\], expected finite numbers"),
        (torch.tensor([[0.0, 0.0], [0.0, -torch.inf]]), "values", r"example 1 of .* \[0\.0, -inf\], expected finite"),
        (torch.tensor([[1.0, -0.5]]), "labels", r"example 0 of .* \[1\.0, -0\.5\], expected shares from 0 to 1"),
        (torch.tensor([[1.0, 1.0], [1.0, 1.0001]]), "labels", r"example 1 of .*, expected shares from 0 to 1"),
        (torch.ones(4, 3), "values", r"the values of .* are float32 \(4, 3\), expected floats \(N, 2\)"),
        (torch.ones(4, dtype=torch.int64), "labels", r"the labels of .* are int64 \(4,\), expected floats"),
        (torch.ones(4, 2), "classes", r"the classes of .* are float32 \(4, 2\), expected int64 \(N,\)"),
    ],
)
def test_labels_that_are_not_those_of_their_kind_are_refused(labels: Tensor, targets: str, sentence: str) -> None:
    check_labels(torch.tensor([[0.0, 1.0]]), 2, "the training split", "labels")
    with pytest.raises(InputError, match=sentence):
        check_labels(labels, 2, "the training split", targets)


def test_what_is_known_of_labels_and_values_before_a_run() -> None:
    labels, values = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.tensor([[0.0, 1.0], [0.0, 2.0]])
    assert class_notes(["x", "y"], {"train": values, "val": values}, "values") == [
        "x is the same for all images to train on, so there is nothing to learn"
    ]
    notes = class_notes(["cat", "dog"], {"train": labels, "val": labels[:1]}, "labels")
    assert notes[:2] == [
        "1 of 2 labels have no image in the training split, so the model never sees one: cat",
        "1 of 2 images of the training split have no label",
    ]
    job = resolved("dataset=fake", "dataset.size=8", "dataset.classes=2", "dataset.examples=16", "task=regression")
    columns = enumerate(job.dataset.train().labels.T.numpy())
    ranges = [f"{name} {own.min():.4g} to {own.max():.4g} (mean {own.mean():.4g})" for name, own in columns]
    texts = [finding.text for finding in inspect(job.dataset, 1)]
    assert f"{', '.join(ranges)}: 16 to train on" in texts[0]
    counts = resolved("dataset=fake", "dataset.size=8", "dataset.classes=9", "dataset.examples=16", "task=multilabel")
    rows = counts.dataset.train().labels.sum(0).int().tolist()
    text = ", ".join(f"{label} {count}" for label, count in enumerate(rows[:8]))
    findings = [*inspect(counts.dataset, 1)]
    assert any(f"{text}, and 1 more: 16 to train on" in finding.text for finding in findings)
    assert "classes" not in {finding.check for finding in findings}, "warnings are of labels too"


CELL = st.sampled_from([0.0, 1.0, -3.5, float("nan")])


@given(st.lists(st.lists(CELL, min_size=2, max_size=2), min_size=2, max_size=8), st.sampled_from(["mixup", "cutmix"]))
def test_mixed_targets_are_shares_of_both_and_no_broken_partner_leaks(labels: list[list[float]], kind: str) -> None:
    stored = torch.tensor(labels, dtype=torch.float64)
    size = len(labels)
    pictures = torch.arange(size, dtype=torch.float64).view(-1, 1, 1, 1).expand(-1, 1, 8, 8).contiguous()
    keys = sample_keys(0, 0, torch.arange(size), MIX)
    mix = Mix(classes=2, mixup=1.0 if kind == "mixup" else 0.0, cutmix=1.0 if kind == "cutmix" else 0.0)
    mixed, targets = mix.apply(pictures, stored, keys)
    broken = is_broken(stored)
    for n in range(size - 1):
        if broken[n]:
            continue
        share = 1 - (mixed[n].mean() - n).item()  # the pixels of example n are all n
        partner = torch.zeros(2, dtype=torch.float64) if broken[n + 1] else stored[n + 1]
        assert not targets[n].isnan().any()
        assert share == pytest.approx(1.0) if broken[n + 1] else 0 <= share <= 1
        torch.testing.assert_close(targets[n], stored[n] * share + partner * (1 - share), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_broken_images_count_nothing_in_any_task(task: str, tmp_path: Path) -> None:
    cells = [";".join(own) for own in LABELS] if task == "multilabel" else [str(row[0]) for row in VALUES]
    words = ("dataset=csv", "dataset.decode_size=8", "model=linear", "batch=4", "steps=4", "precision=fp64")
    whole = table(tmp_path, "label", cells)
    lines = (tmp_path / "all.csv").read_text().splitlines()
    (tmp_path / "fewer.csv").write_text("\n".join(line for line in lines if not line.startswith("6.png")))
    job = (*words, f"task={task}", "augment=none", "train.eval_every=2", "optimizer.lr=1e-300")
    fewer = train_here(tmp_path / "fewer", *job, f"dataset.path={tmp_path / 'fewer.csv'}")
    (tmp_path / "6.png").write_bytes(b"broken")
    skipped = train_here(tmp_path / "skipped", *job, f"dataset.path={whole}", "dataset.skip=2")
    tags = [tag for line in records(fewer) for tag in line if tag.startswith(("loss/val", "metric/"))]
    assert len({*tags}) == 4
    for lines in zip(records(fewer), records(skipped), strict=True):
        one, other = ({tag: line[tag] for tag in line if tag in tags} for line in lines)
        assert one == pytest.approx(other, rel=1e-12)


def test_five_classes_without_images_are_named_and_eight_images_are_no_few() -> None:
    names = [*"abcdefg"]
    for missing, shown in ((5, "c, d, e, f, g"), (6, "b, c, d, e, f, ...")):
        labels = torch.arange(8) % (len(names) - missing)
        notes = class_notes(names, {"train": torch.arange(7), "val": labels})
        few = f"{missing} of 7 classes have no image in the evaluation split, so no score tells anything about them"
        assert notes == [f"{few}: {shown}"]
    (note,) = class_notes(["a", "b"], {"val": torch.arange(7) % 2})
    assert note == "the evaluation split has 7 images, so a score says little; more to evaluate say more"


@pytest.mark.parametrize(
    ("value", "targets", "expected"),
    [
        *((value, "values", value) for value in ([1.0, 2.0], [])),
        *((value, "values", [value]) for value in (1.5, "1.5", None)),
        (["a", 1], "labels", ["<a>", "<1>"]),
        ([1.0, 0], "labels", [1.0, 0]),
        ([0, True], "labels", [0, True]),
        *((value, "labels", "an error") for value in ([-1], [0, -1], "a", None, [None], [[1.0]], 0)),
        *((value, "classes", f"<{value}>") for value in ("a", 0, 7, True, "")),
        *((value, "classes", "an error") for value in (None, 0.0, [1], {}, {"a": 1}, -1)),
    ],
    ids=repr,
)
def test_a_stored_value_is_a_name_a_list_or_a_number_as_the_targets_are(
    value: Any, targets: str, expected: Any
) -> None:
    if expected != "an error":
        assert target_of(value, targets, "row 3", "<{}>".format) == expected
        return
    with pytest.raises(InputError, match="dataset: row 3 has the label") as caught:
        target_of(value, targets, "row 3", "<{}>".format)
    if targets == "classes":
        hint = ", or use task=multilabel or task=regression"
        assert str(caught.value).endswith(hint) == isinstance(value, float | list)
        assert target_of("x", targets, "row 3") == "x"


@pytest.mark.parametrize(
    ("cell", "binary", "number"),
    [
        *((cell, True, 1.0) for cell in (1, "1", " TRUE ", "true", True, 1.0)),
        *((cell, True, 0.0) for cell in (0, "False", "0.0", False)),
        *((cell, True, None) for cell in ("0.5", 2, "yes", "", None, -1)),
        *((cell, False, float(cell)) for cell in (" 2.5 ", "-3e38", "3e38", 0.5, "1")),
        *((cell, False, None) for cell in ("true", "3.1e38", "-3.1e38", "nan", "inf", None, "")),
    ],
    ids=repr,
)
def test_a_number_is_finite_and_of_a_label_0_or_1(cell: Any, binary: bool, number: float | None) -> None:
    names = ("x", "y")
    if number is not None:
        table = as_numbers([[0, cell], [cell, 1]], names, "row {}".format, binary=binary)
        assert table.dtype == torch.float32
        torch.testing.assert_close(table, torch.tensor([[0, number], [number, 1]]))
        return
    expected = "0 or 1 (also true or false) for each label" if binary else "a finite number"
    with pytest.raises(
        InputError, match=rf"dataset: row 1 has .* for 'y', expected {re.escape(expected)}; correct it"
    ):
        as_numbers([[0, 1], [0, cell]], names, "row {}".format, binary=binary)
    for row, has in (([1], "1 number"), ([1, 0, 1], "3 numbers"), ([], "0 numbers")):
        with pytest.raises(
            InputError, match=f"dataset: row 1 has {has}, expected 2, as the first example to train on"
        ):
            as_numbers([[0, 1], row], names, "row {}".format, binary=binary)


def test_values_and_labels_without_names_are_called_as_their_column() -> None:
    place = "row {}".format
    for targets, examples in (("values", [[1.0]] * 2), ("labels", [[1.0]] * 2), ("values", []), ("values", [[]])):
        assert names_of(examples, targets, place, "size") == ("size",)
    for targets in ("values", "labels"):
        assert names_of([[1.0, 0.0, 1.0]], targets, place, "size") == ("size_0", "size_1", "size_2")
    assert names_of([["b", "a"], [], ["c"]], "labels", place, "size") == ("a", "b", "c")
    assert names_of([["1"], ["0", "1"], []], "labels", place, "x") == ("0", "1"), "labels by their numbers"
    assert names_of([["0"], ["1"]], "labels", place, "x") == ("0", "1"), "one label each"
    assert names_of([["0"], ["5"]], "labels", place, "x", gaps=False) == ("0", "5")
    assert names_of(["0", "5"], "classes", place, "x") == ("0", "5")
    with pytest.raises(InputError, match="row 1 has the label '5', but numbered classes are whole numbers from 0"):
        names_of(["0", "5"], "classes", place, "x", gaps=False)
    with pytest.raises(InputError, match="row 1 has the label '-1', but numbered classes"):
        names_of([["0", "0"], ["-1"], ["2"]], "labels", place, "x")
    with pytest.raises(
        InputError, match="row 0 has the labels 1, 0, expected each class once; for a 0 or 1 for each"
    ):
        names_of([["1", "0"], ["0", "1"]], "labels", place, "x")


@pytest.mark.parametrize(("images", "says"), [(1, "1 image,"), (7, "7 images,"), (8, None)])
def test_few_images_to_evaluate_are_said_of_the_evaluation_split_alone(images: int, says: str | None) -> None:
    labels = torch.arange(images) % 2
    for split in ("train", "val", "test"):
        notes = [note for note in class_notes(["a", "b"], {split: labels}) if "so a score says little" in note]
        assert bool(notes) == (split == "val" and says is not None)
        assert all(note.startswith(f"the evaluation split has {says} so a score") for note in notes)
    (missing,) = class_notes(["a", "b", "c"], {"test": torch.tensor([0, 1])})
    assert missing == "1 of 3 classes have no image in the test split, so no score tells anything about them: c"
    assert class_notes(["a"], {"val": torch.zeros(9, dtype=torch.int64)}) == [
        "all images are of one class, a, so there is nothing to learn"
    ]
    assert class_notes(["a"], {"val": torch.ones(9, 1)}, "labels") == []
    same = {"train": torch.tensor([[1.0, 2.0], [1.0, 3.0]]), "val": torch.tensor([[1.0, 2.0]] * 9)}
    assert class_notes(["x", "y"], same, "values") == [
        "x is the same for all images to train on, so there is nothing to learn"
    ]


def test_a_separator_is_one_to_ten_characters_in_one_line() -> None:
    for fits, texts in ((True, (";", " ", "x" * 10)), (False, ("", "x" * 11, "\n", "a\nb", None, 1))):
        assert [SEPARATOR.fits(text) for text in texts] == [fits] * len(texts)


def test_all_rows_of_wrong_numbers_are_told_at_once() -> None:
    rows = [[0], [0, 1], ["x", "y"], [0, 1, 2], [1, None]]
    with pytest.raises(InputError) as caught:
        as_numbers(rows, ("a", "b"), "row {}".format, binary=False)
    rows_named = [re.findall(r"dataset: (row \d has \S+)", sentence)[0] for sentence in caught.value.args]
    assert rows_named == ["row 0 has 1", "row 2 has 'x'", "row 2 has 'y'", "row 3 has 3", "row 4 has null"]


def test_a_label_that_no_training_example_has_is_named_where_it_first_comes() -> None:
    with pytest.raises(InputError) as caught:
        as_targets(["a", "c", "d", "c", "d"], "classes", ("a", "b"), "row {}".format, ";")
    assert [*caught.value.args] == [
        f"dataset: row {row} has the label {label!r}, which no training example has; remove it"
        for row, label in ((1, "c"), (2, "d"))
    ]
    with pytest.raises(InputError, match=r"^dataset: row 2 has the label 'c', which no training example has"):
        as_targets([["a"], ["b", "a"], ["b", "c"], ["c"]], "labels", ("a", "b"), "row {}".format, ";")


@pytest.mark.parametrize(
    ("examples", "expected"),
    [
        ([["a", "b"], ["b", "a"]], [[1, 1], [1, 1]]),
        ([["a"], ["b", "a"]], [[1, 0], [1, 1]]),
        ([["a", "a"], ["b"]], [[1, 0], [0, 1]]),
        ([["a", "b"], ["a", "a"]], None),
    ],
)
def test_labels_that_come_twice_are_refused_where_they_may_be_numbers_for_each_label(
    examples: list[list[str]], expected: list[list[int]] | None
) -> None:
    if expected is not None:
        assert as_targets(examples, "labels", ("a", "b"), "row {}".format, ";").tolist() == expected
        return
    with pytest.raises(
        InputError, match=r"^dataset: row 1 has the labels a, a, expected each label once; for a 0 or 1"
    ):
        as_targets(examples, "labels", ("a", "b"), "row {}".format, ";")


@pytest.mark.parametrize(
    ("names", "are_lists"),
    [
        (["cat/dog", "dog/cat"], True),
        (["cat dog", "dog cat"], False),
        (["cat/dog", "dog/cow"], False),
        (["cat/dog", "dog/cow", "cow/cat"], True),
        (["cat dog", "dog cow", "cow cat"], False),
        (["cat dog", "dog", "cat"], True),
        (["cat", "dog", "cow"], False),
    ],
)
def test_names_with_at_most_as_many_parts_are_lists_and_with_fewer_words(names: list[str], are_lists: bool) -> None:
    notes = lists_note(names, "labels", ";")
    assert len(notes) == are_lists
    parts = len({part for name in names for part in re.split("[/ ]", name)})
    for note in notes:
        assert note.startswith(
            f"the names of the {len(names)} labels, such as '{names[0]}', look like lists of {parts} "
        )


def test_three_labels_that_come_twice_are_names_and_no_numbers_for_each_label() -> None:
    labels = as_targets([["a", "b", "c"], ["c", "c", "a"]], "labels", ("a", "b", "c"), "row {}".format, ";")
    assert labels.tolist() == [[1, 1, 1], [1, 0, 1]]
    with pytest.raises(
        InputError, match=r"^dataset: row 0 has the labels a, b, a, expected each label once; for a 0 "
    ):
        as_targets([["a", "b", "a"]] * 2, "labels", ("a", "b", "c"), "row {}".format, ";")
