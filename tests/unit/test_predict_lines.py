"""What `lockstep predict` prints and writes, for the answers of any model."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.core import log
from lockstep.core.errors import InputError, StorageError
from lockstep.inference import predict as command
from lockstep.inference.predict import form_of, predict
from lockstep.inference.predictor import Prediction

CAT, DOG, OWL = (0, "cat", 0.91, 2.3), (1, "dog", 0.085, -2.4), (2, "owl", 0.005, -5.3)


def results(*answers: tuple[str, list[Any]]) -> Iterator[tuple[Path, list[Any]]]:
    return ((Path(name), list(own)) for name, own in answers)


def table(targets: str, *answers: tuple[str, list[Any]], names: tuple[str, ...] = ("cat", "dog", "owl")) -> list[str]:
    paths = [Path(name) for name, _ in answers]
    return [*command._table(paths, results(*answers), targets, names)]


def test_a_table_has_columns_and_the_number_of_images_of_each_class() -> None:
    lines = table("classes", ("a.png", [CAT, DOG]), ("日本.png", [DOG, CAT]), ("\n\x1b.p", [DOG, OWL]))
    assert lines == [
        "a.png     cat  91.0 %  dog   8.5 %",
        "日本.png  dog   8.5 %  cat  91.0 %",
        r"\n\x1b.p  dog   8.5 %  owl   0.5 %",
        "3 images: 2 dog, 1 cat",
    ]
    assert table("classes", ("a.png", [OWL]))[-1] == "1 image: 1 owl"
    assert table("classes") == []
    thousand = [("a", [CAT])] * 1000
    assert table("classes", *thousand)[-1] == "1,000 images: 1,000 cat"


def test_every_label_of_an_image_is_counted_and_none_too() -> None:
    lines = table("labels", ("a", [CAT, DOG]), ("b", []), ("c", [CAT, OWL]), ("d", []), ("e", []))
    assert lines[1:2] == ["b  "]
    assert lines[-1] == "5 images: 3 no label, 2 cat, 1 dog, 1 owl"


def test_a_long_name_of_a_class_is_cut_and_the_longest_name_is_the_width_of_all() -> None:
    long = "x" * 30
    for names, width in ((("cat", long), 24), (("cat", "x" * 24), 24), (("cat", "鳥鳥鳥"), 6), (("ca", "b"), 2)):
        (line, _) = table("classes", ("a", [(0, names[0], 0.5, 0.0)]), names=names)
        assert line == f"a  {names[0]:<{width}}  50.0 %"
    (line, counted) = table("classes", ("a", [(1, long, 0.5, 0.0)]), names=("cat", long))
    assert (line, counted) == (f"a  {'x' * 24}  50.0 %", f"1 image: 1 {long}")
    assert table("classes", ("a", [(0, "c\x1bt", 0.5, 0.0)]))[-1] == r"1 image: 1 c\x1bt"


@pytest.mark.parametrize(("width", "lines"), [(25, 1), (24, 2), (10, 2)])
def test_a_line_that_is_wider_than_the_terminal_is_two(
    width: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command.console, "terminal", SimpleNamespace(width=width))
    monkeypatch.setattr(log, "has_terminal", lambda: True)
    whole = "photos/a.png  cat  91.0 %"
    assert len(whole) == 25
    expected = [whole] if lines == 1 else ["photos/a.png", "  cat  91.0 %"]
    assert table("classes", ("photos/a.png", [CAT]))[:-1] == expected
    monkeypatch.setattr(log, "has_terminal", lambda: False)
    assert table("classes", ("photos/a.png", [CAT]))[:-1] == [whole]


VALUES = [(0, "x", np.float32(0.1)), (1, "y", np.float32(-2))]


def test_values_have_their_own_digits_in_every_form() -> None:
    assert table("values", ("a.png", VALUES), ("long.png", VALUES), names=("x", "y")) == [
        "a.png  x 0.1  y -2",
        "long.png  x 0.1  y -2",
    ]
    assert command._lines(results(("a.png", VALUES)), "values", "csv") == ["file,x,y", "a.png,0.1,-2"]
    for form in ("json", "jsonl"):
        (row,) = rows(form, command._lines(results(("a.png", VALUES)), "values", form))
        assert row == {"file": "a.png", "values": {"x": float(np.float32(0.1)), "y": -2.0}}
    assert command._lines(results(), "values", "csv") == []


def rows(form: str, lines: list[str]) -> list[Any]:
    if form == "csv":
        return [*csv.DictReader(lines)]
    return [*map(json.loads, lines)] if form == "jsonl" else json.loads("\n".join(lines))


def test_classes_have_their_rank_their_number_and_all_digits_in_every_form() -> None:
    answers = [("a.png", [CAT, DOG]), ("b.png", []), ("c.png", [OWL])]
    lines = command._lines(results(*answers), "labels", "csv")
    assert lines == [
        "file,rank,label,class,probability,log_odds",
        "a.png,1,0,cat,0.91,2.3",
        "a.png,2,1,dog,0.085,-2.4",
        "c.png,1,2,owl,0.005,-5.3",
    ]
    for form in ("json", "jsonl"):
        read = rows(form, command._lines(results(*answers), "labels", form))
        assert [row["file"] for row in read] == ["a.png", "b.png", "c.png"]
        assert [[tuple(name.values()) for name in row["classes"]] for row in read] == [[CAT, DOG], [], [OWL]]
        assert [*read[0]["classes"][0]] == ["label", "name", "probability", "log_odds"]
    for targets in ("classes", "labels"):
        assert command._lines(results(), targets, "csv") == lines[:1], "a table of no image has its columns"


@pytest.mark.parametrize(
    ("name", "form", "expected"),
    [
        ("a.csv", "table", "csv"),
        ("a.JSON", "table", "json"),
        ("a.b.jsonl", "table", "jsonl"),
        ("a.json", "json", "json"),
        ("a.CSV", "csv", "csv"),
        ("a.csv", "json", "expected a file .json for --json: --out {}.json"),
        ("a.json", "csv", "expected a file .csv for --csv: --out {}.csv"),
        ("a.txt", "table", "expected a file .csv or .json or .jsonl: --out {}.csv"),
        ("a", "json", "expected a file .json for --json: --out {}.json"),
        ("no/a.csv", "table", "expected a file in a folder that exists"),
    ],
)
def test_the_form_of_a_file_is_its_ending_and_the_flag(tmp_path: Path, name: str, form: str, expected: str) -> None:
    out = tmp_path / name
    if " " not in expected:
        assert form_of(out, form) == expected
        return
    with pytest.raises(InputError) as caught:
        form_of(out, form)
    assert str(caught.value) == f"--out is {out}, {expected.format(tmp_path / 'a')}"


class Model:
    """A model of three classes, labels or values that answers with the first pixel of an image."""

    def __init__(self, targets: str = "classes", channels: int = 1) -> None:
        self.card = SimpleNamespace(targets=targets, classes=4, image_shape=(channels, 1, 1))
        self.names = ("cat", "dog", "owl", "ant")
        self.batches = list[list[int]]()

    def stored(self, path: Path) -> Tensor:
        if path.name.startswith("torn"):
            raise InputError(f"{path.name} is torn")
        if path.name.startswith("lost"):
            raise StorageError(f"{path.name} is lost")
        return torch.full((1, 1, 1, 1), int(path.stem))

    def predict(self, images: Tensor) -> list[Prediction]:
        self.batches.append(images.flatten().tolist())
        odds = torch.tensor([1.0, 0.0, -1.0, -2.0], dtype=torch.float64)
        return [
            Prediction(label=0, names=self.names, probabilities=(odds - of).sigmoid(), log_odds=odds - of)
            for of in self.batches[-1]
        ]

    def values(self, images: Tensor) -> Tensor:
        return torch.tensor([[0.5, 1.5, 2.5, 3.5]]).repeat(len(images), 1)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 0.png to 4.png; commands run in it, and have the model that `serve` sets."""
    for number in range(5):
        (tmp_path / f"{number}.png").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "find_weights", Path)
    monkeypatch.setattr(command, "say_which", lambda file, card: log.note(f"{file} of {card.targets}"))
    serve(Model(), monkeypatch)
    return tmp_path


def serve(model: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    models = {(Path("run"), "cpu"): model}
    monkeypatch.setattr(command, "load_predictor", lambda file, device: models[file, device])
    return model


def predicted(files: list[str], *, form: str = "json", **options: Any) -> None:
    predict("run", files, **{"form": form, "top": None, "device": "cpu", "out": None, **options})


@pytest.mark.parametrize(
    ("targets", "options", "sentence"),
    [
        *(("classes", {"top": top}, f"--top is {top}, expected 1 or more: --top 5") for top in (0, -1)),
        *(
            (kind, {"top": 1}, f"--top is 1, but this model predicts {kind}; remove it")
            for kind in ("labels", "values")
        ),
        *(
            (kind, {"threshold": 0.0}, f"--threshold is 0, but this model predicts {kind}; remove it")
            for kind in ("classes", "values")
        ),
        *(
            ("labels", {"threshold": share}, f"--threshold is {share:g}, expected a probability: --threshold 0.5")
            for share in (-0.01, 1.01)
        ),
    ],
)
def test_a_number_that_the_model_does_not_take_is_refused(
    photos: Path, monkeypatch: pytest.MonkeyPatch, targets: str, options: dict[str, Any], sentence: str
) -> None:
    serve(Model(targets), monkeypatch)
    with pytest.raises(InputError) as caught:
        predicted(["0.png"], **options)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("targets", "options", "names"),
    [
        ("classes", {}, ["cat", "dog", "owl"]),
        ("classes", {"top": 1}, ["cat"]),
        ("classes", {"top": 9}, ["cat", "dog", "owl", "ant"]),
        ("labels", {}, ["cat"]),
        ("labels", {"threshold": 0.0}, ["cat", "dog", "owl", "ant"]),
        ("labels", {"threshold": 0.2}, ["cat", "dog", "owl"]),
        ("labels", {"threshold": 1.0}, []),
    ],
)
def test_the_likeliest_classes_or_the_labels_above_the_threshold_are_told(
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    targets: str,
    options: dict[str, Any],
    names: list[str],
) -> None:
    serve(Model(targets), monkeypatch)
    predicted(["0.png"], **options)
    shown = capsys.readouterr()
    assert shown.err == f"run of {targets}\n"
    (row,) = json.loads(shown.out)
    assert [name["name"] for name in row["classes"]] == names
    for name in row["classes"]:
        assert (name["label"], name["log_odds"]) == (name["label"], 1.0 - name["label"])


def test_files_are_answered_in_their_order_in_blocks_without_those_that_are_torn(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.AT_ONCE == 32
    monkeypatch.setattr(command, "AT_ONCE", 2)
    model, advanced = serve(Model(), monkeypatch), list[Any]()

    class Progress:
        def __init__(self, *facts: Any) -> None:
            advanced.append(facts)

        def __enter__(self) -> Any:
            return advanced.append

        def __exit__(self, *_: Any) -> None: ...

    monkeypatch.setattr(command, "progress", Progress)
    files = ["3.png", "torn1.png", "1.png", "0.png", "torn2.png", "torn3.png", "4.png"]
    with pytest.raises(InputError) as caught:
        predicted([*files, "torn4", "2.png", "2.png", "no*"])
    torn = ("torn1.png", "torn2.png", "torn3.png", "torn4")
    assert caught.value.args == ("no file has a name like no*", *(f"{name} is torn" for name in torn))
    rows = json.loads(capsys.readouterr().out)
    assert [row["file"] for row in rows] == [f"{number}.png" for number in (3, 1, 0, 4, 2, 2)]
    assert model.batches == [[3], [1, 0], [4], [2, 2]]
    assert advanced == [("predicting", 10), 2, 2, 2, 2, 2]
    with pytest.raises(StorageError, match=r"lost\.png is lost"):
        predicted(["0.png", "lost.png"])


def test_a_folder_is_read_for_the_channels_of_the_model_and_a_file_is_written_whole(
    photos: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "9.npy").touch()
    for channels, names in (
        (1, [f"{at}.png" for at in range(5)]),
        (3, [f"{at}.png" for at in range(5)]),
        (5, ["9.npy"]),
    ):
        serve(Model(channels=channels), monkeypatch)
        predicted(["."], form="table", out="out.JSONL", top=1)
        assert capsys.readouterr().out == "wrote out.JSONL\n"
        text = Path("out.JSONL").read_text()
        assert text.endswith("}\n")
        assert [json.loads(line)["file"] for line in text.splitlines()] == names
    with pytest.raises(InputError, match=r"torn1\.png is torn"):
        predicted(["torn1.png", "0.png"], out="some.json")
    assert capsys.readouterr().out == "wrote some.json\n"
    assert len(json.loads(Path("some.json").read_text())) == 1
    serve(Model("values"), monkeypatch)
    predicted(["0.png"], form="csv")
    assert capsys.readouterr().out == "file,cat,dog,owl,ant\n0.png,0.5,1.5,2.5,3.5\n"
