"""What `lockstep evaluate` shows, writes and refuses, for the predictions of any models."""

import json
import math
import statistics
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import CrossEntropyLoss

from helpers import run_dir
from lockstep.core.errors import InputError
from lockstep.core.model import best_classes
from lockstep.core.run import State
from lockstep.core.run_dir import RunDir
from lockstep.core.tags import CALIBRATION_ERROR, Monitor
from lockstep.core.world import World
from lockstep.data.datasets.arrays import ArraySplit
from lockstep.inference import evaluate as command
from lockstep.inference import scoring
from lockstep.inference.evaluate import CrossValidation, check_data, cross_validations, report_folds, share_note
from lockstep.inference.scoring import (
    EvaluatedSplit,
    Evaluation,
    Part,
    _metrics,
    of_all,
    show_figures,
    text_with_unit,
)
from lockstep.records.ledger import Ledger
from lockstep.records.record import Record
from lockstep.records.runs import JobRun
from lockstep.scores import EvaluationBlock
from lockstep.tasks import Multiclass
from lockstep.training.predictions import MATRIX_CLASSES
from thread_ranks import ThreadRanks


def part(labels: torch.Tensor, *answers: torch.Tensor, **figures: float) -> Part:
    split = ArraySplit(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), labels)
    return Part(EvaluatedSplit(split, labels), 7, torch.ones(len(labels), dtype=torch.bool), answers, figures)


def card(targets: str, *names: str) -> Any:
    return SimpleNamespace(names=names, classes=len(names), targets=targets)


def test_a_score_has_its_unit_and_none_a_dash() -> None:
    values = (("top1", 0.0), ("top1", 98.765), ("loss", 0.0), ("loss", 0.042123), ("top1", None))
    assert [text_with_unit(name, value) for name, value in values] == ["0.00 %", "98.77 %", "0", "0.04212", "–"]
    figures = {"loss": math.nan, "top1": 0.0, "f1": math.inf, "f1/cat": 3.0, "auroc": -math.inf, "mae": -1.5}
    assert of_all(figures) == {"loss": None, "top1": 0.0, "f1": None, "auroc": None, "mae": -1.5}


def test_a_table_of_figures_has_the_images_of_the_rows_that_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"fold": 0, "images": 1234, "top1": 50.0}, {"fold": "mean", "loss": 0.25}, {"fold": 2, "images": 0}]
    show_figures("part", "fold", rows, ["top1", "loss"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["part", "images", "top-1", "loss"]
    assert lines[-3:] == [["0", "1,234", "50.00", "%", "–"], ["mean", "–", "0.25"], ["2", "0", "–", "–"]]


def test_the_classes_with_the_lowest_scores_are_shown_first_without_those_that_have_no_image(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [f"n{at:02}" for at in range(13)]
    labels = torch.arange(12).repeat_interleave(12)
    predicted = torch.where(torch.arange(144) % 12 < labels, labels, 12)  # of class n, n of 12 are right
    Evaluation(card("classes", *names), [part(labels, predicted, torch.ones(144))], {}, {}).show()
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "the 10 classes with the lowest top-1:"
    assert head.split() == ["class", "images", "top-1"]
    assert [row.split()[:2] for row in rows if "%" in row] == [[name, "12"] for name in names[:10]]


def test_labels_are_counted_above_a_half_and_values_for_all_images() -> None:
    shares = torch.tensor([[0.5, 0.6], [0.4, 1.0], [1.0, 0.0]])
    by_output = {"f1/cat": 25.0, "f1/dog/big": math.nan, "recall/cat": 1.0, "recall/dog/big": 2.0}
    for targets, images in (("labels", [1, 2]), ("values", [3, 3])):
        result = Evaluation(card(targets, "cat", "dog/big"), [part(shares, shares)], {"loss": 0.5}, by_output)
        assert result.rows == [
            {"name": "cat", "images": images[0], "f1": 25.0, "recall": 1.0},
            {"name": "dog/big", "images": images[1], "f1": None, "recall": 2.0},
        ]
        facts = {"images": 3, "skipped": 0, "loss": 0.5, targets: result.rows}
        assert result.facts() == facts, "and no confusion"
        broken = replace(part(shares, shares), whole=torch.tensor([True, True, False]))
        fewer = Evaluation(card(targets, "cat", "dog/big"), [broken], {}, by_output).rows
        assert [row["images"] for row in fewer] == ([0, 2] if targets == "labels" else [2, 2])
        folds = Evaluation(card(targets, "cat", "dog/big"), [part(shares, shares), broken], {}, by_output).rows
        assert [row["images"] for row in folds] == ([1, 4] if targets == "labels" else [5, 5])


@pytest.mark.parametrize(
    ("targets", "figures", "tabled"),
    [
        ("classes", {CALIBRATION_ERROR}, set()),
        ("labels", {"map", "f1", "subset_accuracy"}, {"precision", "recall", "map", "f1"}),
        ("values", {"mae", "rmse", "r2"}, {"mae", "rmse", "r2"}),
    ],
)
def test_metrics_are_those_of_the_run_or_else_of_the_task_and_each_by_output(
    targets: str, figures: set[str], tabled: set[str]
) -> None:
    usual, by_output = _metrics(targets, None)
    assert (usual.keys(), by_output.keys()) == (figures, tabled)
    assert all(node["average"] == "none" for node in by_output.values())
    assert all(node.get("average") != "none" for node in usual.values())
    own = {"recall": {"_target_": "lockstep.metrics.Recall", "average": "micro"}, "x": {"_target_": "own.X"}}
    chosen, of_each = _metrics(targets, own)
    extra = {CALIBRATION_ERROR} if targets == "classes" else set()
    assert chosen.keys() == {"recall", "x"} | extra
    assert own.keys() == {"recall", "x"}, "the config of the run stays as it is"
    assert _metrics(targets, {})[0].keys() == figures, "a run without metrics of its own has those of its task"
    assert chosen["recall"] == own["recall"]
    assert [*of_each] == (["precision", "recall"] if targets == "labels" else ["recall"])
    assert of_each["recall"] == {**own["recall"], "average": "none"}


def folds(*done: int, of: int = 3, **values: str) -> CrossValidation:
    runs: Any = {fold: SimpleNamespace(folder=Path(f"job{fold}"), run_dir=fold) for fold in done}
    return CrossValidation(values, of, runs, {fold: "failed" for fold in range(of) if fold not in done})


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("form", ["table", "json"])
def test_folds_have_their_mean_and_their_spread(number: int, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    labels, scores = torch.tensor([0, 1]), [50.0, 100.0, 0.0][:number]
    parts = [part(labels, labels, torch.ones(2), top1=score, loss=score / 4) for score in scores]
    evaluation = Evaluation(card("classes", *"abcdef"), parts, {"top1": 51.0, "loss": 1.0}, {})
    done = {1: (2,), 2: (0, 2), 3: (0, 1, 2)}[number]
    setting = folds(*done, seed="3", lr="0.1")
    facts = report_folds(setting, evaluation, form)
    spread = statistics.stdev(scores) if number > 1 else None
    assert facts["mean"] == {
        "top1": pytest.approx(sum(scores) / number),
        "loss": pytest.approx(sum(scores) / number / 4),
    }
    assert facts["spread"] == (
        {} if spread is None else {"top1": pytest.approx(spread), "loss": pytest.approx(spread / 4)}
    )
    assert (facts["split"], facts["setting"], facts["folds"]) == ("val", {"seed": "3", "lr": "0.1"}, 3)
    assert facts["missing"] == {fold: "failed" for fold in range(3) if fold not in done}
    assert (facts["images"], facts["top1"]) == (2 * number, 51.0)
    assert facts["by_fold"] == [
        {"fold": at, "run": f"job{at}", "step": 7, "images": 2, "skipped": 0, "top1": score, "loss": score / 4}
        for at, score in zip(done, scores, strict=True)
    ]
    shown = capsys.readouterr().out
    if form == "json":
        assert shown == ""
        return
    head = f"seed=3 lr=0.1: {2 * number} images of {number} of 3 folds, each predicted by the model that was not"
    assert shown.startswith(head)
    missing = ", ".join(f"{fold} (failed)" for fold in facts["missing"])
    assert (f"no figure counts the folds that are missing: {missing}\n" in shown) == (number < 3)
    rows = [line.split() for line in shown.splitlines()]
    (deviation,) = (row for row in rows if row[0] == "±")
    assert deviation == (["±", "–", "–"] if spread is None else ["±", f"{spread:.2f}", "%", f"{spread / 4:.4g}"])
    mean = sum(scores) / number
    assert rows[rows.index(deviation) - number - 1 :][: number + 3] == [
        *([str(at), "2", f"{score:.2f}", "%", f"{score / 4:.4g}"] for at, score in zip(done, scores, strict=True)),
        ["mean", f"{mean:.2f}", "%", f"{mean / 4:.4g}"],
        deviation,
        ["together", str(2 * number), "51.00", "%", "1"],
    ]


@pytest.mark.parametrize("form", ["table", "json"])
def test_an_evaluation_is_written_with_its_format_and_shown_in_one_form(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = torch.tensor([0, 1])
    evaluations = [Evaluation(card("classes", "a", "b"), [part(labels, labels, torch.ones(2))], {}, {})]
    command.write_files(tmp_path, {"settings": [{"split": "val"}] * 2}, evaluations, form, "")
    assert {path.name for path in tmp_path.iterdir()} == {"evaluation.json", "predictions.csv"}
    capsys.readouterr()
    command.write_files(tmp_path, {"split": "test", "top1": 1.5}, evaluations, form, "-other")
    results, predictions = tmp_path / "evaluation-test-other.json", tmp_path / "predictions-test-other.csv"
    assert results.read_text().endswith("}\n")
    written = json.loads(results.read_text())
    assert (written.pop("format"), written.pop("lockstep") != "") == (1, True)
    assert written == {"split": "test", "top1": 1.5}
    shown = capsys.readouterr().out
    if form == "json":
        assert json.loads(shown) == json.loads(results.read_text())
    else:
        assert shown == f"wrote {results}\nwrote {predictions}\n"
    predictions.unlink()
    predictions.symlink_to(results)
    before = results.read_bytes()
    with pytest.raises(InputError, match=r"--out is .*predictions-test-other\.csv"):
        command.write_files(tmp_path, {"split": "test", "top1": 2}, evaluations, form, "-other")
    assert results.read_bytes() == before, "both names are looked at before one is written"


@pytest.mark.parametrize(("val_share", "part_name"), [(0.25, "folder"), (0.25, "split"), (None, "folder")])
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_share_of_other_data_is_said_of_the_splits_that_are_cut(
    split: str, val_share: float | None, part_name: str
) -> None:
    located = SimpleNamespace(val_share=val_share)
    source: Any = SimpleNamespace(val_share=None, located=lambda: located, part=part_name)
    expected = []
    if split != "test" and val_share is not None:
        every = "; dataset.train_folder=. dataset.val_folder=. takes all" * (part_name == "folder")
        expected = [f"the {split} split is a share of these images, by dataset.val_share=0.25{every}"]
    assert share_note(source, split) == expected


def predictor(*names: str, targets: str = "classes", **sizes: Any) -> Any:
    usual = {"image_shape": (3, 8, 8), "input_shape": (3, 6, 6), "eval_crop": 0.75, "fit": "crop"}
    facts = {"targets": targets, "classes": len(names), "names": names, **usual, **sizes}
    return SimpleNamespace(card=SimpleNamespace(**facts))


def source_of(*names: str, classes: int = 0, **changed: Any) -> Any:
    own = vars(predictor(*names).card) | {"class_names": names, "classes": classes or len(names)}
    return SimpleNamespace(**{**own, **changed})


def test_classes_of_other_data_are_found_by_their_names() -> None:
    model = predictor("cat", "dog", "owl")
    for names, labels in ((("cat", "dog", "owl"), [0, 1, 2]), (("owl", "cat"), [2, 0]), (("dog",), [1])):
        assert check_data(model, source_of(*names)).tolist() == labels
    assert check_data(predictor("0", "1", "2"), source_of(classes=3)).tolist() == [0, 1, 2]
    assert check_data(predictor("é"), source_of("e\N{COMBINING ACUTE ACCENT}")).tolist() == [0]
    for other, says in (
        (
            source_of("cat", "wolf", "fox"),
            r"has 3 classes, which are not the 3 of the model \('wolf' is none of them\);",
        ),
        (source_of(classes=3), r"has 3 classes, which are not the 3 of the model \('0' is none of them\);"),
    ):
        with pytest.raises(InputError, match=says):
            check_data(model, other)
    with pytest.raises(InputError, match=r"has 2 classes, which are not the 3 of the model; name data"):
        check_data(predictor("0", "1", "2"), source_of(classes=2))


@pytest.mark.parametrize("targets", ["labels", "values"])
def test_labels_and_values_of_other_data_are_the_same_in_the_same_order(targets: str) -> None:
    model = predictor("x", "y", targets=targets)
    assert check_data(model, source_of("x", "y", targets=targets)).tolist() == [0, 1]
    another = {"labels": "values", "values": "labels"}[targets]
    for names, kind in (
        (("y", "x"), targets),
        (("x",), targets),
        (("x", "y", "z"), targets),
        (("x", "y"), another),
    ):
        says = f"it has the {kind} {', '.join(names)}, expected the {targets} of the model, x, y; name such data"
        with pytest.raises(InputError, match=says):
            check_data(model, source_of(*names, targets=kind))


@pytest.mark.parametrize(
    ("name", "value"),
    [("image_shape", (3, 9, 8)), ("input_shape", (3, 6, 7)), ("eval_crop", 0.8), ("fit", "pad")],
)
def test_sizes_of_other_data_are_those_of_the_model(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"dataset: its {name} is .*, but the model expects ") as caught:
        check_data(predictor("cat"), source_of("cat", **{name: value}))
    assert f"its {name} is {value}, " in str(caught.value)


def sweep_of(monkeypatch: pytest.MonkeyPatch, *jobs: tuple[str, str]) -> Path:
    """A sweep of jobs, each of its words and its state."""
    runs = []
    for number, (words, state) in enumerate(jobs):
        facts = {"number": number, "overrides": tuple(words.split()), "folder": f"job{number}", "state": state}
        runs.append(JobRun(Ledger(Path("sweep")), Record(**facts), Monitor()))  # type: ignore[arg-type]
    monkeypatch.setattr(command, "read_jobs", lambda ledger: runs)
    return Path("sweep")


def test_the_runs_of_a_sweep_that_differ_in_the_fold_alone_are_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done, failed = State.done, State.failed
    sweep = sweep_of(
        monkeypatch,
        *((f"seed=1 dataset.folds=3 dataset.fold={fold}", state) for fold, state in ((2, done), (0, done))),
        *((f"seed=2 dataset.folds=3 dataset.fold={fold}", state) for fold, state in ((0, failed), (1, done))),
        ("seed=3 dataset.folds=3 dataset.fold=1", failed),
        ("seed=4", done),
    )
    one, two = cross_validations(sweep)
    assert (one.name, one.values, one.folds) == ("seed=1", {"seed": "1"}, 3)
    assert {fold: run.folder.name for fold, run in one.runs.items()} == {0: "job1", 2: "job0"}
    assert [*one.runs] == [0, 2]
    assert one.missing == {1: "no job"}
    assert ([*two.runs], two.missing) == ([1], {0: "failed", 2: "no job"})
    assert capsys.readouterr().out == "warning: seed=3 is skipped: none of its folds is done\n"
    for job in command.read_jobs(Ledger(sweep)):
        vars(job).update({"state": State.damaged, "error": "its record is damaged"} if job.record.number == 1 else {})
    assert cross_validations(sweep)[0].missing == {0: "damaged", 1: "no job"}
    assert capsys.readouterr().out.startswith("warning: its record is damaged\nwarning: seed=3 is skipped")
    (alone,) = cross_validations(sweep_of(monkeypatch, ("dataset.folds=12 dataset.fold=11", done)))
    assert (alone.name, alone.missing) == ("", dict.fromkeys(range(11), "no job"))
    for jobs, says in (
        ([("dataset.folds=2 dataset.fold=1", failed)], "sweep: no fold is done; `lockstep compare sweep` compares"),
        (
            [("seed=4", done), ("dataset.folds=2", done), ("dataset.fold=2", done)],
            "sweep: it has no folds, expected a",
        ),
    ):
        with pytest.raises(InputError, match=says):
            cross_validations(sweep_of(monkeypatch, *jobs))


def test_each_fold_is_evaluated_on_its_own_images_by_its_own_model(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, hashes = torch.tensor([0, 1]), {0: "a", 1: "b"}
    split = part(labels).split

    def load(folder: Path, device: str) -> Any:
        return SimpleNamespace(card=SimpleNamespace(trained_on=trained_on(int(str(folder)[-1]))), device=device)

    def split_for(model: Any, run_dir: int, overrides: Any, of: str, threads: Any) -> Any:
        assert (of, overrides, threads) == ("val", ["x=1"], 5)
        return split, run_dir

    def trained_on(fold: int) -> dict[str, str]:
        return {"sha256": hashes[fold]}

    monkeypatch.setattr(command, "load_predictor", load)
    monkeypatch.setattr(command, "split_for", split_for)
    monkeypatch.setattr(command, "fingerprint_of", {0: "a", 1: "b"}.__getitem__)
    setting, world = folds(0, 1, lr="0.1"), World.solo()
    own = [*command.trials(setting, ["x=1"], world, 5)]
    assert [dict(of.place) for _, of in own] == [{"fold": "0", "lr": "0.1"}, {"fold": "1", "lr": "0.1"}]
    hashes[1] = "a"
    with pytest.raises(InputError, match="its examples differ from those of job1, so the model may have seen some"):
        [*command.trials(setting, ["x=1"], world, 5)]
    monkeypatch.setattr(f"{__name__}.card", None)
    monkeypatch.setattr(
        command, "load_predictor", lambda *_, **__: SimpleNamespace(card=SimpleNamespace(trained_on={}))
    )
    with pytest.raises(InputError, match="its examples differ from those of job0"):
        [*command.trials(setting, ["x=1"], world, 5)]


@pytest.mark.parametrize("settings", [0, 1, 2])
def test_the_settings_of_a_sweep_are_written_together(monkeypatch: pytest.MonkeyPatch, settings: int) -> None:
    written, passed, world = list[Any](), list[Any](), World.solo()
    monkeypatch.setattr(command, "cross_validations", lambda sweep: [folds(0)] * settings + [folds(1)])
    monkeypatch.setattr(command, "trials", lambda setting, *words: passed.append(words) or [*setting.runs])
    monkeypatch.setattr(command, "evaluated", lambda trials, world: None if trials == [1] else "evaluation")
    monkeypatch.setattr(command, "report_folds", lambda setting, evaluation, form: {"of": form})
    monkeypatch.setattr(command, "write_files", lambda *facts, other: written.append((*facts, other)))
    for out in (None, "out"):
        command.evaluate_folds("sweep", ("x=1",), world, 3, split="val", out=out, form="json")
        assert passed == [(("x=1",), world, 3)] * (settings + 1)
        passed.clear()
        one: Any = {"of": "json"}
        results = one if settings == 1 else {"settings": [one] * settings}
        expected = (Path(out or "sweep"), results, ["evaluation"] * settings, "json", "")
        assert written == [expected] * bool(settings)
        written.clear()
    for other in ("train", "test"):
        with pytest.raises(InputError, match=f"--split {other}: a sweep is .*evaluate sweep/best --split {other}$"):
            command.evaluate_folds("sweep", (), World.solo(), None, split=other, out=None, form="json")


def test_a_folder_for_the_results_has_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "nowhere"):
        with pytest.raises(InputError, match=f"--out is {tmp_path}/{name}, expected a folder that exists"):
            command.evaluate("run", (), split="val", device=None, out=str(tmp_path / name))


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("form", ["table", "json"])
@pytest.mark.parametrize("overrides", [[], ["dataset.limit=2", "data_root=a"]], ids=str)
@pytest.mark.parametrize(("place", "out"), [("run", None), ("run", "out"), (None, None), (None, "out")])
def test_an_evaluation_says_its_data_and_is_written_beside_its_weights_or_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    split: str,
    form: str,
    overrides: list[str],
    place: str | None,
    out: str | None,
) -> None:
    run: Any = SimpleNamespace(path=Path(place)) if place else None
    model = SimpleNamespace(card=card("classes", *"abcdef"))
    vars(model.card).update(trained_on={"sha256": "own"}, step=7, score="91 % top-1")
    labels, written = torch.tensor([0, 1]), list[Any]()
    result = Evaluation(model.card, [part(labels, labels, torch.ones(2))], {"top1": 50.0, "loss": math.nan}, {})
    source = SimpleNamespace(path="photos", notes=lambda: ["few photos"], val_share=0.5, part="split")
    source.located = lambda: source
    steps = {
        "find_weights": lambda path: Path(path, "model.safetensors"),
        "run_of": lambda file: run,
        "load_predictor": lambda file, device: model,
        "say_which": lambda file, of: None,
        "split_for": lambda predictor, own, words, name, threads: (result.parts[0].split, source),
        "fingerprint_of": lambda data: sha256,
        "evaluated": lambda trials, world: result,
        "write_files": lambda *facts: written.append(facts),
    }
    for name, step in steps.items():
        monkeypatch.setattr(command, name, step)
    for sha256, trained_on, is_other in (
        ("own", {"sha256": "own"}, False),
        ("x", {}, False),
        ("x", {"sha256": "y"}, True),
    ):
        model.card.trained_on = trained_on
        command.evaluate_weights("weights", overrides, World.solo(), None, split=split, out=out, form=form)
        shown = capsys.readouterr()
        notes = ["few photos", f"the {split} split is a share of these images, by dataset.val_share=0.5"] * is_other
        assert shown.err.splitlines() == [f"warning: {note}" for note in notes]
        folder, facts, evaluations, kind, other = written.pop()
        assert folder == Path(out or place or "")
        assert other == ("-dataset.limit=2_data_root=a" if overrides and place and out is None else "")
        assert (evaluations, kind) == ([result], form)
        data = {"path": str(Path("photos").absolute()), "overrides": overrides, "sha256": sha256}
        assert facts["data"] == data
        assert {name: facts[name] for name in ("weights", "step", "dataset", "split", "images", "top1", "loss")} == {
            "weights": "model.safetensors",
            "step": 7,
            "dataset": "SimpleNamespace",
            "split": split,
            "images": 2,
            "top1": 50.0,
            "loss": None,
        }
        if form == "json":
            assert shown.out == ""
            continue
        words = {"train": "training", "val": "evaluation"}[split]
        first, scores, *lines = shown.out.splitlines()
        assert first == f"2 images of the {words} split of SimpleNamespace, weights of step 7"
        assert scores == "top-1 50.00 %  loss –"
        assert lines[: 1 + (split == "val")] == [*["in training it was 91 % top-1"] * (split == "val"), "each class:"]
    source.path, model.card.score = None, ""
    command.evaluate_weights("weights", overrides, World.solo(), None, split=split, out=out, form=form)
    assert written.pop()[1]["data"]["path"] is None
    assert "in training it was" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed_threads", "of_run", "expected"),
    [
        *((None, 2, [2]), (None, 8, [4]), (None, "auto", []), (None, None, [])),
        *((3, 2, [3]), (9, "auto", [9]), (3, None, [3])),
    ],
)
@pytest.mark.parametrize("targets", ["classes", "labels"])
def test_a_split_is_evaluated_with_the_threads_the_metrics_and_the_labels_of_the_run(
    monkeypatch: pytest.MonkeyPatch, typed_threads: int | None, of_run: Any, expected: list[int], targets: str
) -> None:
    labels = torch.tensor([0, 1, 1])
    examples = {name: part(labels + at).split.examples for at, name in enumerate(("train", "val"))}
    splits = {"train": lambda: examples["train"], "eval": lambda: examples["val"], "test": lambda: None}
    read_as = lambda chosen, of: chosen if of is model.card else None  # noqa: E731
    source = SimpleNamespace(part="folder", read_as=read_as, **splits)
    config, threads, typed = {"metric": {"f1": {}}, "launcher": "node"}, list[int](), list[str]()
    of_data: list[Any] = []
    monkeypatch.setattr(command, "data_of", lambda *words: of_data.append(words) or source)
    monkeypatch.setattr(command, "with_sizes", lambda data, of: data if of is model.card else None)
    monkeypatch.setattr(command, "with_targets", lambda data, of: typed.append(of) or data)
    monkeypatch.setattr(command, "check_data", lambda model, data: torch.tensor([5, 7, 9]))
    monkeypatch.setattr(command, "cores", lambda: 4)
    monkeypatch.setattr(command.components, "read_config", {"config": config}.__getitem__)
    of_launcher = {("launcher", "node"): SimpleNamespace(threads=of_run)}
    monkeypatch.setattr(command.components, "build_stored", lambda *words: of_launcher[words])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    model, run = predictor("a", "b", targets=targets), None if of_run is None else SimpleNamespace(config="config")
    for name, own in (("train", [5, 7, 7]), ("val", [7, 9, 9])):
        chosen, data = command.split_for(model, run, ["x=1"], name, typed_threads)  # type: ignore[arg-type]
        assert of_data.pop() == (run, ["x=1"])
        assert (chosen.examples, data) == (examples[name], source)
        assert chosen.labels.tolist() == (own if targets == "classes" else examples[name].labels.tolist())
        assert chosen.metrics == (None if run is None else {"f1": {}})
    assert (threads, typed) == (expected * 2, ["labels"] * (2 * (targets == "labels")))
    for of, remedy in (("folder", "name it with dataset.test_folder=NAME"), ("", "name data that has one")):
        source.part = of
        with pytest.raises(InputError, match=f"--split is test, but the data has no test split; {remedy}$"):
            command.split_for(model, run, (), "test", typed_threads)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_sweep", [True, False])
def test_the_words_of_the_ranks_go_to_them_and_all_others_to_the_evaluation(
    is_sweep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(command, "on_ranks", lambda call, words, device: calls.append((call, words, device)))
    monkeypatch.setattr(Ledger, "exists", is_sweep)
    words = ["dataset.limit=3", "launcher.ranks=2", "data_root=a", "device=cpu"]
    command.evaluate("run", words, split="test", device="cuda", out=str(tmp_path), form="json")
    ((call, of_ranks, device),) = calls
    assert call.func is (command.evaluate_folds if is_sweep else command.evaluate_weights)
    assert call.args == ("run", ["dataset.limit=3", "data_root=a"])
    assert call.keywords == {"split": "test", "out": str(tmp_path), "form": "json"}
    assert (of_ranks, device) == (["launcher.ranks=2", "device=cpu"], "cuda")
    command.evaluate("run", [], split="val", device=None, out=None)
    assert calls[-1][0].keywords == {"split": "val", "out": None, "form": "table"}


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders to which MNIST has been downloaded."""
    folders: list[str] = []
    monkeypatch.setattr("lockstep.data.datasets.builtin.MNIST.prepare", lambda self: folders.append(self.root))
    return folders


def test_the_data_of_a_run_are_those_of_its_job_and_nothing_is_fetched(
    tmp_path: Path, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_dir(tmp_path / "run", "dataset=mnist", "data_root=/theirs", "dataset.limit=7")
    source: Any = command.data_of(run, ())
    assert (type(source).__name__, source.root, source.limit, fetched) == ("MNIST", "/theirs", 7, [])
    monkeypatch.setattr(command.components, "build_stored", lambda group, node: f"{group} of {node['_target_']}")
    assert command.data_of(run, ()) == "dataset of lockstep.data.datasets.MNIST", "of the version of the run"  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("stored", "typed", "root", "limit", "is_fetched"),
    [
        (["dataset=mnist", "dataset.limit=7", "data_root=/theirs"], ["dataset.fold=null"], "/theirs", 7, False),
        (["dataset=mnist", "dataset.limit=7", "data_root=/theirs"], ["data_root=mine"], "mine", 7, True),
        (["dataset=mnist", "dataset.limit=7"], ["dataset.limit=5"], "data", 5, True),
        (["experiment=mnist_tutorial", "data_root=/theirs"], ["dataset.limit=5"], "/theirs", 5, False),
        (["experiment=digits_resnet50d", "data_root=/theirs"], ["dataset=mnist"], "/theirs", None, False),
        (["dataset=digits", "data_root=/theirs"], ["dataset=mnist"], "/theirs", None, False),
        (["dataset=fake", "dataset.classes=3"], ["dataset=mnist"], "data", None, True),
        (None, ["dataset=mnist", "dataset.limit=5"], "data", 5, True),
        (None, ["dataset=mnist", "data_root=mine"], "mine", None, True),
    ],
)
def test_data_are_those_of_the_run_with_the_words_of_the_command_and_fetched_where_that_says(
    stored: list[str] | None,
    typed: list[str],
    root: str,
    limit: int | None,
    is_fetched: bool,
    tmp_path: Path,
    fetched: list[str],
) -> None:
    run = None
    if stored is not None:
        run = RunDir.at(tmp_path / "run")
        run.overrides.write_text(json.dumps([*stored, "epochs=3", "optimizer.lr=0.1"]))
    source: Any = command.data_of(run, typed)
    assert (type(source).__name__, source.root) == ("MNIST", root)
    assert source.limit == (limit if limit is not None else type(source)().limit)
    assert fetched == [root] * is_fetched


def test_a_weights_file_is_told_to_name_data() -> None:
    for words in ((), ("data_root=a",), ("dataset.limit=3",)):
        with pytest.raises(InputError) as raised:
            command.data_of(None, words)
        assert str(raised.value) == (
            "a weights file does not say where data is; name it: dataset=folder dataset.path=FOLDER"
        )


@pytest.mark.parametrize(
    ("skipped", "own", "says", "allowed"),
    [(3, 1, "2 more images,", 5), (2, 1, "1 more image,", 5), (1, 1, "", 5), (0, 0, "", 0)],
)
def test_images_that_other_ranks_could_not_decode_are_counted(
    skipped: int,
    own: int,
    says: str,
    allowed: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaders: list[Any] = []

    def loader(**options: Any) -> Any:
        loaders.append(options)
        return SimpleNamespace(count_skipped=lambda: skipped, broken_seen=[*range(own)])

    def evaluate_model(model: Any, **options: Any) -> dict[str, float]:
        loaders.append((model, options))
        return {"loss": 2.0}

    def build_stored(group: str, node: Any) -> Any:
        loaders.append((group, node))
        return SimpleNamespace(build=lambda *words: loaders.append(words) or CrossEntropyLoss(reduction="none"))

    labels, loss = torch.tensor([0, 1, 1]), {"_target_": "lockstep.losses.CrossEntropy"}
    split = part(labels).split
    monkeypatch.setattr(scoring.components, "build_stored", build_stored)
    model: Any = SimpleNamespace(
        card=SimpleNamespace(loss=loss, classes=2, targets="classes", eval_batch=4, eval_views=6),
        device=torch.device("cpu"),
        **{name: name for name in ("model", "transforms", "precision")},
    )
    monkeypatch.setattr(scoring, "EvalLoader", loader)
    monkeypatch.setattr(scoring, "evaluate_model", evaluate_model)
    monkeypatch.setattr(type(split.examples), "skip", allowed)
    assert scoring.evaluate_blocks(model, split, World.solo("meta"), ["observer"]) == {"loss": 2.0}  # type: ignore[list-item]
    shown = capsys.readouterr()
    text = f"{says} which other ranks have read, cannot be decoded: skipped"
    assert (text in shown.out + shown.err) is bool(says)
    assert "which other ranks" in shown.out + shown.err or not says
    (of_card, words, options, (called, evaluated_with)) = loaders
    assert of_card == ("loss", loss)
    assert words == (2, labels), "a loss may weigh classes by their numbers"
    assert evaluated_with["loader"].broken_seen == [*range(own)]
    assert evaluated_with["world"] == options["world"]
    assert (options["eval_batch"], options["skip"], options["world"].device) == (4, allowed, torch.device("cpu"))
    options["eval_labels"][0] = -1
    assert labels.tolist() == [0, 1, 1], "broken images are marked in a copy"
    assert (called, evaluated_with["views"], evaluated_with["observers"]) == ("model", 6, ["observer"])
    assert (evaluated_with["transforms"], evaluated_with["precision"]) == ("transforms", "precision")
    assert isinstance(evaluated_with["task"], Multiclass)
    assert evaluated_with["loss"].tolerates_broken is (allowed > 0)


def observed(targets: str, probabilities: str, logits: torch.Tensor, labels: torch.Tensor) -> scoring.Predicted:
    advanced: list[int] = []
    of: Any = SimpleNamespace(targets=targets, probabilities=probabilities, classes=logits.shape[1])
    observer = scoring.Predicted(of, World.solo(), advanced.append)
    for at, block in enumerate((slice(2), slice(2, None))):
        losses = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)[block]
        own = logits[block]
        observer.update(EvaluationBlock(own, own, best_classes(own), labels[block], losses, 2 * at))
    assert advanced == [2, 1]
    return observer


def test_predictions_are_kept_with_their_share_their_odds_and_their_loss() -> None:
    logits = torch.tensor([[1.0, 3.0], [0.5, -2.0], [0.0, 0.25]])
    observer = observed("classes", "softmax", logits, torch.tensor([0, -1, 1]))
    split = part(torch.tensor([0, 1, 1])).split
    own_part = observer.part(split, 12, {"loss": 99.0, "top1": 50.0})
    assert (own_part.split, own_part.step, own_part.images) == (split, 12, 2)
    assert own_part.whole.tolist() == [True, False, True]
    assert own_part.figures == {"loss": 3.5, "top1": 50.0}, "of the two images that are whole"
    predicted, shares, odds = own_part.answers
    assert predicted.tolist() == [1, 0, 1]
    assert torch.equal(shares, logits.softmax(1).amax(1))
    torch.testing.assert_close(odds, logits.double().softmax(1).logit(), rtol=1e-6, atol=1e-6)
    by_label = observed("labels", "sigmoid", logits, torch.zeros(3, 2)).part(split, 1, {})
    assert [len(by_label.answers), by_label.images] == [2, 3]
    assert torch.equal(by_label.answers[0], logits.sigmoid())
    assert torch.equal(by_label.answers[1], logits.double())
    (values,) = observed("values", "values", logits, torch.zeros(3, 2)).part(split, 1, {}).answers
    assert torch.equal(values, logits)


def test_the_share_of_a_prediction_is_that_of_the_class_that_the_task_predicts() -> None:
    of: Any = SimpleNamespace(targets="classes", probabilities="softmax", classes=3)
    observer = scoring.Predicted(of, World.solo(), lambda images: None)
    logits, labels = torch.tensor([[3.0, 2.0, 0.0], [0.0, 1.0, 5.0]]), torch.tensor([0, 1])
    observer.update(EvaluationBlock(logits, logits, torch.tensor([[1, 0, 2], [2, 1, 0]]), labels, torch.zeros(2), 0))
    predicted, shares, _ = observer.part(part(labels).split, 1, {}).answers
    assert predicted.tolist() == [1, 2]
    assert torch.equal(shares, logits.softmax(1)[[0, 1], [1, 2]])


def test_main_alone_keeps_the_predictions_of_all_ranks_in_the_order_of_the_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of: Any = SimpleNamespace(targets="classes", probabilities="softmax", classes=2)

    def blocks_on(world: World) -> tuple[list[float], list[int]]:
        advanced: list[int] = []
        observer = scoring.Predicted(of, world, advanced.append)
        for done, number in enumerate((2, (2, 1, 0)[world.rank])):  # in the last round the last rank has no block
            losses = torch.full((number,), 10.0 * done + world.rank, dtype=torch.float64)
            logits = torch.eye(2)[:number]
            if number:
                observer.update(EvaluationBlock(logits, logits, best_classes(logits), torch.zeros(number), losses, 0))
            else:
                observer.update_without()
        return [float(block[1]) for block in observer.blocks], advanced

    main, second, third = ThreadRanks(3, monkeypatch).run(blocks_on)
    assert main == ([0.0, 2.0, 4.0, 20.0, 11.0], [2, 2, 2, 2, 1])
    assert second == third == ([], [])


def test_the_figures_of_all_parts_weigh_each_image_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scored:
        def __init__(self, of: Any, nodes: Any, world: Any) -> None:
            self.nodes = nodes

        def compute(self) -> dict[str, float]:
            return dict.fromkeys(self.nodes, 0.25)

    words: list[Any] = []

    @contextmanager
    def progress(*facts: Any) -> Any:
        words.append(facts)
        yield lambda number: None

    def evaluate_blocks(model: Any, split: EvaluatedSplit, world: World, observers: Any) -> dict[str, float]:
        own, *both, predicted = observers
        nodes.append([[*scores.nodes] for scores in (own, *both)])
        number = len(split.labels)
        losses = torch.full((number,), float(number), dtype=torch.float64)
        logits = torch.eye(2)[split.labels]
        predicted.update(EvaluationBlock(logits, logits, best_classes(logits), split.labels, losses, 0))
        return {"loss": 0.0, "top1": 10.0 * number, "top5": 100.0}

    nodes: list[Any] = []
    monkeypatch.setattr(scoring, "_scores", Scored)
    monkeypatch.setattr(scoring, "progress", progress)
    monkeypatch.setattr(scoring, "evaluate_blocks", evaluate_blocks)
    metric = {"f1": {"_target_": "lockstep.metrics.F1", "average": "macro"}}
    trials = []
    for number, step in ((1, 3), (3, 8)):
        split = part(torch.zeros(number, dtype=torch.int64)).split
        own = SimpleNamespace(targets="classes", probabilities="softmax", classes=2, step=step)
        place = {"fold": str(number), "seed": "2"} if number == 3 else {}
        trials.append((SimpleNamespace(card=own), EvaluatedSplit(split.examples, split.labels, metric, place)))
    result = scoring.evaluated(trials, World.solo())  # type: ignore[arg-type]
    assert result is not None
    assert result.card is trials[0][0].card
    assert [(own.step, own.images) for own in result.parts] == [(3, 1), (8, 3)]
    together = {"loss": 0.25 * 1 + 0.75 * 3, "top1": 25.0, "top5": 100.0, "f1": 0.25, CALIBRATION_ERROR: 25.0}
    assert result.figures == pytest.approx(together)
    assert result.by_output == {"f1": 0.25}
    assert nodes == [[[], ["f1", CALIBRATION_ERROR], ["f1"]], [["f1", CALIBRATION_ERROR]] * 2 + [["f1"]]]
    assert [*result.parts[1].figures] == ["loss", "top1", "top5", "f1", CALIBRATION_ERROR]
    assert result.parts[1].figures[CALIBRATION_ERROR] == 25.0
    assert words == [("evaluating", 1), ("evaluating fold=3 seed=2", 3)]
    assert scoring.evaluated([], World.solo()) is None


@pytest.mark.parametrize(("probabilities", "confidence"), [("softmax", 1 / (1 + math.exp(-2))), ("sigmoid", 0.5)])
def test_the_scores_are_of_the_probabilities_of_the_model(
    probabilities: str, confidence: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate_blocks(model: Any, split: EvaluatedSplit, world: World, observers: Any) -> dict[str, float]:
        logits = torch.tensor([[0.0, -2.0]])
        for observer in observers:
            observer.update(EvaluationBlock(logits, logits, best_classes(logits), split.labels, torch.zeros(1), 0))
        return {"loss": 0.0, "top1": 100.0, "top5": 100.0}

    monkeypatch.setattr(scoring, "evaluate_blocks", evaluate_blocks)
    own = SimpleNamespace(**vars(card("classes", "b", "a")), probabilities=probabilities, step=1)
    split = replace(
        part(torch.tensor([0])).split, metrics={"f1": {"_target_": "lockstep.metrics.F1", "average": "macro"}}
    )
    result = scoring.evaluated([(SimpleNamespace(card=own), split)], World.solo())  # type: ignore[list-item]
    assert result is not None
    assert result.figures[CALIBRATION_ERROR] == pytest.approx(100 * (1 - confidence))
    assert result.by_output == {"f1/b": 1.0, "f1/a": pytest.approx(math.nan, nan_ok=True)}


def test_an_evaluation_is_on_the_device_and_with_the_threads_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    model = SimpleNamespace(card=SimpleNamespace(trained_on={"sha256": "own"}))
    source = SimpleNamespace(notes=lambda: ["a note"], val_share=None)
    split = part(torch.tensor([0, 1])).split
    monkeypatch.setattr(command, "find_weights", lambda path: Path(path, "w.safetensors"))
    monkeypatch.setattr(command, "run_of", lambda file: ("run of", file))
    monkeypatch.setattr(command, "load_predictor", lambda file, device: calls.append((file, device)) or model)
    monkeypatch.setattr(command, "say_which", lambda file, own: calls.append((file, own)))
    monkeypatch.setattr(command, "split_for", lambda *words: calls.append(words) or (split, source))
    monkeypatch.setattr(command, "fingerprint_of", lambda data: "own")
    monkeypatch.setattr(command, "evaluated", lambda trials, world: calls.append((trials, world)))
    world, file = World.solo("meta"), Path("of/w.safetensors")
    command.evaluate_weights("of", ["x=1"], world, 5, split="train", out=None, form="table")
    run = ("run of", file)
    wanted_split = (model, run, ["x=1"], "train", 5)
    assert calls == [(file, "meta"), (file, model.card), wanted_split, ([(model, split)], world)], (
        "and nothing is shown"
    )
    calls.clear()
    runs: Any = {2: SimpleNamespace(folder=Path("job2"), run_dir="its folder")}
    (trial,) = command.trials(CrossValidation({}, 3, runs, {}), ["x=1"], world, 5)
    assert calls == [(Path("job2"), "meta"), (model, "its folder", ["x=1"], "val", 5)]
    assert (trial[0], trial[1].place) == (model, {"fold": "2"})


@pytest.mark.parametrize(("targets", "title"), [("labels", "each label:"), ("values", "each value:")])
def test_all_labels_and_values_are_shown_in_their_order(
    targets: str, title: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = tuple(f"n{at:02}" for at in range(12, 0, -1))
    shares = torch.eye(12)
    by_output = {f"{metric}/{name}": at / 4 for metric in ("f1", "mae") for at, name in enumerate(names)}
    Evaluation(card(targets, *names), [part(shares, shares)], {}, by_output).show()
    head, columns, *lines = capsys.readouterr().out.splitlines()
    assert head == title
    assert columns.split() == [title.split()[1].rstrip(":"), "images", "f1", "mae"]
    rows = [line.split() for line in lines if line.startswith("n") or " n" in line]
    assert [row[0] for row in rows] == [*names]
    assert rows[5][1:] == ["1" if targets == "labels" else "12", "1.25", "1.25"]


def test_the_labels_of_an_example_their_shares_and_their_odds_have_a_column_each() -> None:
    true = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    shares, odds = torch.tensor([[0.75, 0.5], [0.25, 0.125]]), torch.tensor([[1.0, 0.0], [-1.0, -2.0]])
    whole = torch.tensor([True, False])
    split = EvaluatedSplit(part(true).split.examples, true, place={"fold": "3"})
    own_part = Part(split, 7, whole, (shares, odds), {})
    rows = [*Evaluation(card("labels", "dog", "cat"), [own_part], {}, {}).lines()]
    columns = ("predicted dog", "predicted cat", "log-odds dog", "log-odds cat")
    assert rows == [
        {
            "sample": "0",
            "true dog": "1",
            "true cat": "0",
            **dict(zip(columns, ("0.75", "0.5", "1", "0"), strict=True)),
            "fold": "3",
        },
        {"sample": "1", "true dog": "0", "true cat": "1", **dict.fromkeys(columns, ""), "fold": "3"},
    ]


def test_the_class_of_an_example_has_its_probability_and_the_odds_of_every_class() -> None:
    labels, predicted, shares = torch.tensor([1, 0]), torch.tensor([0, 1]), torch.tensor([0.75, 0.5])
    own_part = part(labels, predicted, shares, torch.tensor([[1.0, -1.0], [-0.25, 0.25]]))
    columns = ("sample", "label", "predicted", "probability", "log-odds dog", "log-odds cat")
    rows = [("0", "cat", "dog", "0.75", "1", "-1"), ("1", "dog", "cat", "0.5", "-0.25", "0.25")]
    lines = [*Evaluation(card("classes", "dog", "cat"), [own_part], {}, {}).lines()]
    assert lines == [dict(zip(columns, row, strict=True)) for row in rows]


def test_the_images_of_a_class_are_counted_over_all_parts() -> None:
    one, two = torch.tensor([0, 1, 1]), torch.tensor([1, 2])
    answers = ((torch.tensor([0, 1, 0]), torch.ones(3)), (torch.tensor([1, 0]), torch.ones(2)))
    parts = [part(labels, *own) for labels, own in zip((one, two), answers, strict=True)]
    by_output = {"recall/a": 0.5, "recall/b": math.nan, "recall/c": 1.0}
    result = Evaluation(card("classes", "a", "b", "c"), parts, {}, by_output)
    assert result.rows == [
        {"name": "a", "images": 1, "top1": 100.0, "recall": 0.5},
        {"name": "b", "images": 3, "top1": pytest.approx(200 / 3), "recall": None},
        {"name": "c", "images": 1, "top1": 0.0, "recall": 1.0},
    ]
    assert result.facts()["confusion"] == [[1, 0, 0], [1, 2, 0], [1, 0, 0]]
    many = [f"n{at}" for at in range(MATRIX_CLASSES + 1)]
    for names in (many, many[1:]):
        confusion = Evaluation(card("classes", *names), parts, {}, {}).facts()["confusion"]
        assert (confusion is None) == (len(names) > MATRIX_CLASSES)
    assert [line["sample"] for line in result.lines()] == ["0", "1", "2", "0", "1"]


def test_a_group_of_the_user_belongs_to_the_data_of_its_run_and_not_to_other_data(
    tmp_path: Path, fetched: list[str]
) -> None:
    run = RunDir.at(tmp_path / "run")
    run.overrides.write_text(json.dumps(["mine=small", "experiment=photos", "dataset=mnist", "epochs=3"]))
    source: Any = command.data_of(run, ["dataset=mnist"])
    assert (type(source).__name__, source.root) == ("MNIST", "data")
    with pytest.raises(Exception, match="mine"):  # a group of the user that is not here
        command.data_of(run, ["dataset.limit=5"])
