"""`report.html`: what a page has in it, from a whole folder, a damaged one, and one of hostile names."""

import base64
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from PIL import Image, ImageDraw

from browser import CHROMIUM, DRIVER, browser
from helpers import train_here
from lockstep.api import Result
from lockstep.config import components
from lockstep.core.errors import InputError
from lockstep.core.figures import Predictions
from lockstep.core.run import Run, State
from lockstep.core.run_dir import RunDir, relative
from lockstep.core.tags import TAGS, Direction, Figure, Monitor, chosen_on_itself
from lockstep.records.ledger import Identity, Ledger
from lockstep.records.record import Record
from lockstep.report.charts import (
    BOTTOM,
    CURVE_POINTS,
    LEFT,
    MOST_CURVES,
    RIGHT,
    TOP,
    _axis,
    charts,
    charts_of_predictions,
    line_chart,
)
from lockstep.report.listener import LONG_S, Listener, is_due
from lockstep.report.report import report
from lockstep.report.run_page import _predictions, facts_of, number, rendered, write_report
from lockstep.report.sweep_page import _curves, _facts, _importance, write_sweep_report
from lockstep.telemetry import pictures
from lockstep.telemetry.progress import format_timestamp

HOSTILE = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7919 * 7907 }}$\\frac{&amp;\u202e日本語"
FACTS: dict[str, Any] = {
    "time": {"data": 0.43, "to_device": 0.02, "forward": 0.2, "backward": 0.35},
    "verdict": {
        "sentence": "the GPU waits for data",
        "evidence": "43 %",
        "gain": 1.5,
        "override": "loader.workers=8",
    },
    "checklist": [
        {"item": "workers", "state": "worth trying", "reason": "it waits", "override": "loader.workers=8"},
        {"item": "torch.compile", "state": "done", "reason": "the steps are compiled", "override": None},
    ],
    "spent": {"kwh": 0.012, "gpu_hours": 0.1, "usd": 0.25},
}


class Page(HTMLParser):
    """What a browser makes of a page: its texts, and its tags with their attributes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(path.read_text())
        self.text = " ".join(self.texts)
        self.is_loaded_again = any((of.get("http-equiv") or "").lower() == "refresh" for _, of in self.tags)

    def handle_data(self, data: str) -> None:
        self.texts.append(" ".join(data.split()))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def addresses(self) -> Iterator[str]:
        yield from (of[key] or "" for _, of in self.tags for key in ("src", "href", "srcset", "action") if key in of)

    def titles(self) -> list[str]:
        """The titles of its charts, in order."""
        names = ((of.get("aria-label") or of.get("alt") or "") for tag, of in self.tags if tag in ("img", "svg"))
        return [name for name in names if name]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    words = ("epochs=2", "model.width=8", "metric=[f1]", "telemetry.report=never")
    run = train_here(tmp_path_factory.mktemp("trained") / "run", *words)
    run.write_summary(**FACTS, gpu_util=97.5)
    choices = {"model": "digitnet", "dataset": "digits", "optimizer": "adamw", "experiment": None}
    (run.hydra / "hydra.yaml").write_text(json.dumps({"hydra": {"runtime": {"choices": choices}}}))
    run.command.write_text("python train.py model.width=8\n")
    return run


@pytest.fixture
def run(trained: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(Path(shutil.copytree(trained.path, tmp_path / "run")))


def page_of(run: RunDir) -> Page:
    return Page(write_report(Run(run.path)))


def test_a_page_has_the_run_in_it(run: RunDir) -> None:
    line = {"time": 1.0, "uuid": "GPU-aa", "util": 50.0, "power_w": 300.0}
    samples = [{**line, "step": step, "local_rank": rank} for step in (3, 4) for rank in (0, 1)]
    lines = ["", "{}", "[" * 5000, *map(json.dumps, samples)]
    run.gpu.write_text("".join(f"{text}\n" for text in lines))
    page = page_of(run)
    assert {"Loss", "Accuracy, %", "f1, validation", "Learning rate"} <= {*page.titles()}
    assert {"GPU utilisation, %", "GPU power, W"} <= {*page.titles()}
    text, best = " ".join(page.text.split()), f"{run.read_summary()['best']:.2f} %"
    for part in ("done", best, "python train.py model.width=8", "the GPU waits for data", "loader.workers=8"):
        assert part in text
    for part in ("43.0 %", "to device", "0.012 kWh", "0.25 USD", "it waits", "torch", "recall", "Confusion matrix"):
        assert part in text
    assert "torch.compile done the steps are compiled Changes" in text, "no `None`"
    assert "GPU utilisation, % 97.5" in text
    assert "model.width 8 32" in text, "what differs from the defaults, with the default"
    wrong = [of for of in json.loads(run.validation.read_text())["worst"] if of["label"] != of["predicted"]]
    assert len([of for tag, of in page.tags if tag == "img" and "title" in of]) == len(wrong) > 0
    assert "on 355 images, digitnet, digits, epoch 2 of 2, " in text, "the headline"
    assert "model digitnet data digits batch 64 learning rate 0.001 " in text
    assert "waiting for data" in text


def test_a_page_runs_its_own_script_alone_and_loads_nothing(run: RunDir) -> None:
    page = page_of(run)
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert {tag for tag, _ in page.tags}.isdisjoint({"link", "iframe", "object", "form"})
    (script,) = re.findall(r"<script>(.*?)</script>", run.report.read_text(), re.DOTALL)
    hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert any(f"script-src 'sha256-{hashed}'" in (of.get("content") or "") for _, of in page.tags)
    assert all(address.startswith("data:image/") for address in page.addresses())
    assert "http" not in run.report.read_text().replace("http-equiv", "")
    assert any("default-src 'none'" in (of.get("content") or "") for _, of in page.tags)
    assert not page.is_loaded_again, "nothing changes a report"


def test_every_text_of_a_run_is_escaped(run: RunDir) -> None:
    def hostile(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hostile(of) for key, of in value.items()}
        if isinstance(value, list):
            return [hostile(of) for of in value]
        return HOSTILE if isinstance(value, str) else value

    for path in (run.summary, run.environment):
        path.write_text(json.dumps(hostile(json.loads(path.read_text()))))
    predictions = vars(Predictions.read(run.validation)) | {"names": [HOSTILE] * 10}
    predictions["worst"] = [{**example, "sample": HOSTILE, "png": HOSTILE} for example in predictions["worst"][:2]]
    run.composed.write_text(components.dump({"model": {"width": HOSTILE}, HOSTILE: HOSTILE, "seed": HOSTILE}))
    run.command.write_text(f"python train.py {HOSTILE}")
    lines = [{"step": 1, f"metric/{HOSTILE.replace('/', '')}": 1.0, "loss/train": 2.0}] * 2
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    plain = {tag for tag, _ in page_of(run).tags}
    run.validation.write_text(json.dumps(predictions))
    page = page_of(run)
    assert {tag for tag, _ in page.tags} <= plain | {"figure", "img", "figcaption"}
    assert [tag for tag, _ in page.tags].count("script") == 1, "its own"
    assert not [key for _, of in page.tags for key in of if key.startswith("on")]
    assert page.text.count(HOSTILE) > 20
    assert str(7919 * 7907) not in page.text


def readable(run: RunDir) -> list[Path]:
    """The files of a run that a report reads."""
    hydra = (run.composed, run.hydra / "hydra.yaml")
    return [run.summary, run.environment, run.metrics, run.validation, run.command, run.config, *hydra]


DAMAGES: dict[str, Callable[[str], str]] = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "a list": lambda text: "[1, 2]",
    "a number": lambda text: "3",
    "other keys": lambda text: '{"a": {"b": [null, NaN]}}',
    "not text": lambda text: text[:20] + "\udcff" + text[20:],
    "deep": lambda text: "[" * 5000,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damaged_file_still_gives_a_page(run: RunDir, damage: str) -> None:
    for path in readable(run):
        content = path.read_bytes()
        path.write_bytes(DAMAGES[damage](content.decode()).encode(errors="surrogateescape"))
        assert "Environment" in page_of(run).text, path
        path.write_bytes(content)


def test_any_missing_file_still_gives_a_page_that_complains_of_nothing(run: RunDir) -> None:
    for path in readable(run):
        content = path.read_bytes()
        path.unlink()
        page = page_of(run)
        assert "Environment" in page.text
        assert not [of for tag, of in page.tags if of.get("class") == "sentence bad"], path
        path.write_bytes(content)
    shutil.rmtree(run.path)
    run.path.mkdir()
    assert "A curve needs figures of two steps." in page_of(run).text


def values(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in a JSON document, inner ones too."""
    items = node.items() if isinstance(node, dict) else enumerate(node[:2]) if isinstance(node, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from values(value, (*at, key))


WRONG: list[Any] = [None, "text", -1, [[1]], {"a": 1}]


def check_wrong_values(run: RunDir, path: Path, depth: int) -> None:
    """Write a page for each value down to a depth of a document, with a wrong one in its place."""
    whole, wrongs = path.read_text(), itertools.cycle(WRONG)
    for at, wrong in zip([at for at in values(json.loads(whole)) if len(at) <= depth], wrongs, strict=False):
        node = document = json.loads(whole)
        for key in at[:-1]:
            node = node[key]
        node[at[-1]] = wrong
        path.write_text(json.dumps(document))
        assert "Environment" in page_of(run).text, (at, wrong)
    path.write_text(whole)


def test_the_monitored_class_of_a_metric_comes_first_and_each_figure_of_an_option_has_a_chart(run: RunDir) -> None:
    line = {"loss/val": 1.0, "metric/recall/a*": 0.5, "metric/recall/a*b": 0.5, "metric/f1": 0.5, "my/gap": 2.0}
    run.metrics.write_text("".join(f"{json.dumps({'step': step, **line})}\n" for step in (1, 2)))
    run.write_summary(monitor="recall/a*")
    titles = page_of(run).titles()
    assert titles[:4] == ["recall/a*, validation", "Loss", "f1, validation", "my/gap"]


@pytest.mark.slow
def test_any_value_of_another_type_still_gives_a_page(run: RunDir) -> None:
    for path, depth in ((run.summary, 3), (run.environment, 1), (run.validation, 3)):
        check_wrong_values(run, path, depth)


def test_a_run_that_was_cut_has_a_page(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    run.summary.write_text(json.dumps({"status": "running", "started": 1.0, "step": 0, "steps": 40}))
    lines = [f"{json.dumps({'step': step, 'time': 1, 'loss/train': 2.5})}\n" for step in (2, 3)]
    run.metrics.write_text("".join(lines) + '{"step": 4, "lo')
    run.validation.unlink()
    report(str(run.path))
    assert capsys.readouterr().out == f"wrote {run.report}\n"
    page = Page(run.report)
    assert "killed" in page.text
    assert "3 of 40" in page.text
    assert "Loss" in page.titles()
    assert "Predictions" not in page.text


def test_scores_that_are_no_numbers_leave_gaps(run: RunDir) -> None:
    lines = [{"step": step, "loss/train": None if step % 2 else 1.0, "loss/val": None} for step in range(1, 9)]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "Loss" in page_of(run).titles()
    run.metrics.write_text(f"{json.dumps(lines[1])}\n")
    assert page_of(run).titles() == [], "a chart of one point shows nothing"


@pytest.mark.parametrize(
    ("names", "counts", "shown"),
    [
        (["a"], [3, 3, 3, [[3]]], "a 3 100.0 100.0 100.0"),
        (["a"], [0, 0, 0, [[0]]], "a 0 – – –"),
        ([f"class-{n}" for n in range(120)], [100, 100, 50, []], "class-0 100 50.0 50.0 50.0"),
    ],
)
def test_the_table_of_classes_has_those_with_the_lowest_recall(
    run: RunDir, names: list[str], counts: list[Any], shown: str
) -> None:
    examples, predicted, hits, confusion = counts
    several = [examples] * (len(names) - 1)
    kinds = {"examples": [examples, *several], "predicted": [predicted, *several], "hits": [hits, *several]}
    example = {"sample": "a", "label": 0, "predicted": 0, "probability": None, "loss": None, "png": ""}
    Predictions(step=1, names=names, **kinds, confusion=confusion, curves=[], worst=[example]).write(run.validation)
    page = page_of(run)
    assert shown in " ".join(page.text.split())
    assert ("The 50 of 120 classes" in page.text) == (len(names) > 1)


def test_a_notebook_shows_a_result_as_three_lines_and_a_table_with_curves(run: RunDir) -> None:
    summary = Run(run.path).summary
    result = Result(folder=run.path, objective=summary["best"], summary=summary, metrics=[], weights=run.weights)
    assert repr(result).splitlines() == [
        f"Result: top1 {summary['best']:.4g} at step {summary['best_step']}",
        f"  folder   {run.path}",
        f"  weights  {run.weights}",
    ]
    html = result._repr_html_()
    cells = re.sub(r"(<[^>]*>|\s)+", " ", html.partition("<style>")[0])
    assert cells.endswith(f" folder {run.path} weights {run.weights} ")
    assert re.findall(r'<svg [^>]*aria-label="(.*?)"', html) == ["Loss", "Accuracy, %"]
    assert len(page_of(run).titles()) > 2
    assert "on 355 images, digitnet" in html
    assert "<script" not in html


def test_a_page_lists_the_largest_confusions_first(run: RunDir) -> None:
    confusion = [[5, 1, 0], [3, 4, 0], [0, 0, 2]]
    kinds: dict[str, Any] = {"examples": [6, 7, 2], "predicted": [8, 5, 2], "hits": [5, 4, 2]}
    Predictions(step=1, names=[*"abc"], **kinds, confusion=confusion, curves=[], worst=[]).write(run.validation)
    text = " ".join(page_of(run).text.split())
    assert "true class as predicted class b as a: 3 of 7 a as b: 1 of 6 class images" in text


def test_a_wrong_image_leads_to_its_file(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "a b.png").touch()
    run.composed.write_text(components.dump({"dataset": {"path": str(tmp_path)}}))
    examples = [{**EXAMPLE, "sample": name, "label": 0, "predicted": 1} for name in ("a b.png", "gone.png")]
    Predictions(**{**vars(Predictions.read(run.validation)), "worst": examples}).write(run.validation)
    assert [*filter(None, (of.get("href") for _, of in page_of(run).tags))] == [(tmp_path / "a b.png").as_uri()]


def test_the_importance_of_a_key_is_its_share_of_the_variance(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "sweep")
    ledger.create(Identity(base={}, swept=("a", "b"), words=()))
    jobs = [((f"a={a}", f"b={b}"), f"{a}{b}") for a in (1, 2) for b in (1, 2)]
    for record, score in zip(ledger.enter(jobs), (10.0, 11.0, 13.0, 14.0), strict=True):
        (ledger.folder / record.folder).mkdir()
        ledger.end(ledger.start(record), State.done, objective=score)
    report(str(ledger.folder))
    # Between the values of `a` it is 4 * 1.5^2 of 10, of `b` 4 * 0.5^2.
    assert "(not fANOVA). a 90.0 % b 10.0 %" in " ".join(Page(ledger.folder / "report.html").text.split())


BLACK = pictures.in_base64(np.zeros((1, 4, 4), np.uint8))
EXAMPLE = {"sample": "a", "probability": None, "loss": 1.5, "png": BLACK}
NONE: dict[str, list[Any]] = {name: [] for name in ("examples", "predicted", "hits", "confusion", "curves")}
COUNTS: dict[str, list[Any]] = {"examples": [4, 0], "predicted": [3, 1], "hits": [3, 0]}
CURVES = [[[0] * 126 + [4], [6] + [0] * 126], [[0] * 127, [9] + [0] * 125 + [1]]]
LABELLED: dict[str, Any] = {"targets": "labels", "curves": CURVES, "average_precision": [0.8125, None]}
LABELLED["worst"] = [{**EXAMPLE, "label": [0, 1], "predicted": []}]
OF_LABELS = Predictions(step=1, names=["cat", "dog"], **{**NONE, **COUNTS, **LABELLED})
VALUED: dict[str, Any] = {"targets": "values", "points": [[[1.0, 2.0], [1.5, None]], [[0.0, 3.0], [1.0, 1.0]]]}
VALUED["worst"] = [{**EXAMPLE, "label": [30.5, 2.0], "predicted": [None, 2.5]}]
OF_VALUES = Predictions(step=1, names=["angle", "size"], **{**NONE, **VALUED})


def test_a_page_shows_labels_with_their_average_precision(run: RunDir) -> None:
    OF_LABELS.write(run.validation)
    page = page_of(run)
    text = " ".join(page.text.split())
    assert "label images precision recall F1 average precision cat 4 100.0 75.0 85.7 0.8125 dog 0 0.0 – 0.0 –" in text
    assert "is cat, dog said none" in text
    assert "Precision over recall" in page.titles()
    assert "Confusion matrix" not in text


def test_a_page_shows_predicted_values_against_true_ones(run: RunDir) -> None:
    OF_VALUES.write(run.validation)
    page = page_of(run)
    assert "is angle 30.5, size 2 said angle not a number, size 2.5" in " ".join(page.text.split())
    assert {"Predicted against true: angle", "Predicted against true: size"} <= {*page.titles()}
    assert "recall" not in page.text


ONE_VALUE = replace(
    OF_VALUES, names=["angle"], points=OF_VALUES.points[:1], worst=[{**VALUED["worst"][0], "label": [1]}]
)


@pytest.mark.parametrize("predictions", [OF_LABELS, ONE_VALUE], ids=["labels", "values"])
def test_any_wrong_value_of_labels_and_values_still_gives_a_page(run: RunDir, predictions: Predictions) -> None:
    predictions.write(run.validation)
    check_wrong_values(run, run.validation, 3)


def test_a_page_follows_the_monitor(run: RunDir) -> None:
    early = "val mae has not been better than 2.5 (step 4) for 3 evaluations; train.patience=3 ends the run"
    run.write_summary(monitor="-mae", best=2.5, best_step=4, stopped_early=early, scores={"loss": 0.25, "mae": 2.5})
    figures = {"loss/val": 0.5, "loss/val_ema": 0.25, "metric/mae": 2.75, "metric/r2": 0.5, "metric/f1": 0.75}
    lines = [{"step": step, **figures, "metric/rmse": 3.0, "my/scalar": 7.0} for step in (2, 4)]
    lines[0] |= {"metric/mae": 9.5, "loss/val": 0.75}
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page = page_of(run)
    text = " ".join(page.text.split())
    assert f"ended early {early} best mae 2.5 at step 4 last mae 2.75" in text
    assert "top-1" not in text.partition("Curves")[0].partition("Summary")[2]
    titles = ["mae, validation", "Loss", "r2, validation", "f1, validation", "rmse, validation", "my/scalar"]
    assert page.titles() == titles
    note = chosen_on_itself(["val_share"])
    assert "(dataset.val_share=0.1)" in note
    assert f"score validation loss 0.25 mae 2.5 {note[0].upper()}{note[1:]}." in text
    run.write_summary(test={"loss": 0.3, "mae": 3.125})
    text = " ".join(page_of(run).text.split())
    assert "score validation test loss 0.25 0.3 mae 2.5 3.125 Curves" in text


def test_a_score_that_was_not_chosen_among_others_is_not_called_so(run: RunDir) -> None:
    run.write_summary(scores={"loss": 0.25, "top1": 90.0})
    for evaluations, is_said in ((1, False), (2, True)):
        lines = [{"step": step, "loss/val": 0.5, TAGS["top1"]: 90.0} for step in range(1, evaluations + 1)]
        run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        assert ("the score was chosen" in page_of(run).text.lower()) == is_said


def test_each_line_of_a_legend_is_drawn(run: RunDir) -> None:
    lines = [{"step": step, "loss/val": 0.5, "loss/train": 0.4} for step in (1, 2)]
    lines[0] |= {"loss/val_ema": 0.3}  # a line of one point
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    marks: dict[str, list[dict[str, str | None]]] = {}
    for tag, attributes in page_of(run).tags:
        marks.setdefault(tag, []).append(attributes)
    colours = {(mark["style"] or "").rpartition(" ")[2] for mark in marks["i"]}
    drawn = {line["stroke"] for line in marks["polyline"] if len((line["points"] or "").split()) > 1}
    drawn |= {point["fill"] for point in marks["circle"] if "fill" in point}
    assert len(colours) == 3
    assert colours <= drawn


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is neither a run nor a sweep"):
        report(str(tmp_path))
    assert not [*tmp_path.iterdir()]


def test_a_run_ends_with_a_report_if_it_was_long_or_is_asked_for_one(trained: RunDir, tmp_path: Path) -> None:
    assert not trained.report.exists()
    always = train_here(tmp_path / "always", "steps=2", "telemetry.report=always")
    assert "state done" in " ".join(Page(always.report).text.split())
    assert [is_due(when, LONG_S) for when in ("auto", "always", "never")] == [True, True, False]
    assert [is_due(when, LONG_S - 1) for when in ("auto", "always", "never")] == [False, True, False]


@pytest.fixture
def sweep(trained: RunDir, tmp_path: Path) -> Ledger:
    """A sweep of four jobs: two are done, one failed, one waits."""
    ledger = Ledger(tmp_path / "sweep")
    words = ("optimizer.lr=0.1,0.2", f"name={HOSTILE}")
    ledger.create(Identity(base={}, swept=("name", "optimizer.lr"), words=words))
    jobs = [((f"optimizer.lr={rate}", f"name={HOSTILE}{rate}"), f"lr={rate}#?%") for rate in (0.1, 0.2, 0.3, 0.4)]
    first, second, failed, _ = ledger.enter(jobs)
    for record, score in ((first, 91.0), (second, 92.0)):
        shutil.copytree(trained.path, ledger.folder / record.folder)
        ledger.end(ledger.start(record), State.done, objective=score)
    ledger.end(ledger.start(failed), State.failed, exit_code=70, error=HOSTILE)
    return ledger


def test_the_page_of_a_sweep_compares_its_jobs_and_leads_to_them(sweep: Ledger) -> None:
    report(str(sweep.folder))
    page = Page(sweep.folder / "report.html")
    assert {"Score against seconds, by job", "Score against kWh, by job"} <= {*page.titles()}
    assert any((name or "").startswith("What was varied") for name in page.titles())
    assert "2 done, 1 failed, 1 waiting" in page.text
    assert page.text.count(HOSTILE) >= 4
    assert "score of each job" in page.titles()
    links = [address for address in page.addresses() if not address.startswith("data:")]
    assert len(links) == 4
    written = [RunDir(sweep.folder / record.folder).report.is_file() for record in sweep.records()]
    assert written == [True, True, False, False], "a job without a folder has no page"
    assert not page.is_loaded_again
    pages = [link for link in links if link.endswith("report.html")]
    assert len(pages) == 2
    assert all(set(link) <= {*"abcdefghijklmnopqrstuvwxyz0123456789-.%/_ABCDEF"} for link in links)
    assert page.text.index("92.00") < page.text.rindex("91.00")


@pytest.mark.parametrize("rates", [(1e-6, 1e-3, 10.0), (0.002, 0.003, 0.005), (0.001, 0.01)])
def test_the_numbers_of_a_logarithmic_scale_are_plain(rates: tuple[float, ...]) -> None:
    picture = pictures.svg(lambda axes: axes.loglog(rates, rates), 6.4, 4.0).decode()
    numbers = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    assert len(numbers) > 3
    assert all(float(number.replace("\u2212", "-")) > 0 for number in numbers)


def test_no_label_of_a_chart_is_over_another() -> None:
    rows = [[rate, score] for rate, score in ((0.1, 97.75), (0.2, 97.46), (0.3, 79.72))]
    address = pictures.parallel(["rate", "score"], rows, [97.75, 97.46, 79.72])
    picture = base64.b64decode(address.partition(",")[2]).decode()
    shown = [text for text in ("0.1", "0.2", "0.3", "97.75", "97.46", "79.72") if f">{text}<" in picture]
    assert shown == ["0.1", "0.2", "0.3", "97.75", "79.72"]


@pytest.mark.parametrize(
    ("values", "middle"),
    [([1.0, 2.0, 4.0], 1 / 2), ([1.0, 2.0, 3.9], 1 / 2.9), ([0.0, 2.0, 4.0], 1 / 2), (["a", "b", "c"], 1 / 2)],
)
def test_a_column_is_logarithmic_where_its_numbers_span_four_times(
    values: list[Any], middle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = MagicMock()
    monkeypatch.setattr(pictures, "drawn", lambda draw, *size: draw(axes))
    pictures.parallel(
        ["key", "score"], [[value, score] for value, score in zip(values, (1, 2, 4), strict=True)], [1, 2, 4]
    )
    heights = [call.args[0] for call in axes.plot.call_args_list]
    assert [own for own, _ in heights] == pytest.approx([0, middle, 1])
    assert [score for _, score in heights] == pytest.approx([0, 1 / 3, 1]), "the score is not"


SEEDS = (("seed=1,2",), "lockstep train -m seed=1,2 hydra.sweep.dir={}")


@pytest.mark.parametrize(
    ("states", "words", "line"),
    [
        ((), ("ladder", "seed=1"), "lockstep ladder seed=1"),
        ((State.failed,), *SEEDS),
        ((State.done,), *SEEDS),
        ((State.stopped, State.waiting), *SEEDS),
    ],
)
def test_a_sweep_without_scores_has_a_page_with_the_line_that_makes_it_again(
    tmp_path: Path, states: tuple[State, ...], words: tuple[str, ...], line: str
) -> None:
    ledger = Ledger(tmp_path / "sweep")
    ledger.create(Identity(base={}, swept=("seed",), words=words))
    records = ledger.enter([((f"seed={n}",), "s") for n, _ in enumerate(states)])
    for record, state in zip(records, states, strict=True):
        if state is not State.waiting:
            ledger.end(ledger.start(record), state)
    report(str(ledger.folder))
    page = Page(ledger.folder / "report.html")
    assert "Jobs" in page.text or not states
    assert line.format(relative(ledger.folder)) in page.texts


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs Debian's chromium and chromedriver")
def test_a_browser_shows_pages_without_errors_on_phones_and_desks(run: RunDir, sweep: Ledger, tmp_path: Path) -> None:
    predictions = vars(Predictions.read(run.validation)) | {"names": [HOSTILE] * 10}
    Predictions(**predictions).write(run.validation)
    report(str(sweep.folder))
    pages = [write_report(Run(run.path)), sweep.folder / "report.html"]
    for of in (OF_LABELS, OF_VALUES):
        copy = RunDir(Path(shutil.copytree(run.path, tmp_path / of.targets)))
        replace(of, names=[HOSTILE, "b"]).write(copy.validation)
        pages.append(write_report(Run(copy.path)))
    with browser(tmp_path / "profile") as window:
        for path in pages:
            for width in (390, 1200):
                window.call("/window/rect", width=width, height=900)
                window.open(path.as_uri())
                assert window.run("return document.documentElement.scrollWidth <= window.innerWidth"), (path, width)
                broken = "return [...document.images].filter(i => !i.naturalWidth).map(i => i.alt)"
                assert window.run(broken) == [], "every chart is drawn"
        assert window.messages() == []


@pytest.mark.parametrize("classes", [50, 51])
def test_fifty_classes_keep_their_order_and_of_more_the_one_without_images_is_left_out(
    run: RunDir, classes: int
) -> None:
    names = [f"class{number:02}" for number in range(classes)]
    hits = [50 - number for number in range(classes)]
    examples = [50] * 50 + [0] * (classes - 50)
    predicted = [51 + 500 * (number % 2) for number in range(classes)]  # the precision has another order
    kinds: dict[str, Any] = {"examples": examples, "predicted": predicted, "hits": hits}
    Predictions(step=1, names=names, **kinds, confusion=[], curves=[], worst=[]).write(run.validation)
    shown = re.findall(r"class\d\d", page_of(run).text)
    assert shown == (names if classes == 50 else [*reversed(names[:50])])


def test_a_run_that_was_stopped_has_a_part_of_its_epochs(run: RunDir) -> None:
    run.write_summary(step=9, steps=24)
    assert "digits, epoch 0.75 of 2, " in page_of(run).text


def test_an_axis_has_a_tick_at_each_end_that_is_one() -> None:
    place, ticks = _axis(0.0, 10.0, 50, 430, whole=True)
    assert [text for _, text in ticks] == ["0", "2", "4", "6", "8", "10"]
    assert [at for at, _ in ticks] == [50, 126, 202, 278, 354, 430]
    assert place(5.0) == 240


def test_the_steps_of_a_long_curve_are_averaged_as_its_values_are() -> None:
    numbers = [float(number) for number in range(2 * CURVE_POINTS)]
    (curve,) = line_chart([("loss", "red", numbers, numbers)])["curves"]
    assert len(curve["points"]) == CURVE_POINTS
    assert [text for *_, text in curve["points"]][-1] == "step 798: 798.5"


@pytest.mark.parametrize("value", [0.0, -0.0, 5.0, -5.0, 1e-12, 1e12])
def test_a_curve_that_never_changes_is_drawn_in_the_middle(value: float) -> None:
    chart = line_chart([("loss", "red", [1.0, 2.0], [value, value])])
    assert {place for _, place, _ in chart["curves"][0]["points"]} == {(BOTTOM + TOP) / 2}


@pytest.mark.parametrize(("number", "title"), [(20, "GPU"), (21, "GPU (the first 20 of 21)")])
def test_a_chart_says_when_it_leaves_curves_out(number: int, title: str) -> None:
    figures = [(step, {f"gpu/util/{gpu}": float(step) for gpu in range(number)}) for step in (1, 2)]
    ((shown, chart),) = charts(figures, {"GPU": [Figure("gpu/util/", "GPU", colour="")]})
    assert (shown, len(chart["curves"])) == (title, 20)


@pytest.mark.parametrize("number", [MOST_CURVES - 1, MOST_CURVES, MOST_CURVES + 1])
def test_a_sweep_says_when_the_curves_of_some_jobs_are_left_out(number: int) -> None:
    records = [Record(number=n, overrides=(), folder="", objective=1.0) for n in range(number)]
    points = [(1, 0.5), (2, 1.0)]
    jobs: Any = dict.fromkeys(range(number), SimpleNamespace(monitor=Monitor(), series=lambda *tags: points))
    ((title, chart),) = _curves(records, jobs, Monitor())
    few = f" (the best {MOST_CURVES})" * (number > MOST_CURVES)
    assert title == f"val top-1 of each job{few}"
    labels = [curve["label"] for curve in chart["curves"]]
    assert labels == ["best", *(f"job {n}" for n in range(1, min(number, MOST_CURVES)))]


def test_a_key_counts_by_the_jobs_of_its_values_and_one_of_as_many_values_as_jobs_says_nothing() -> None:
    settings = [("1", 10.0), ("1", 12.0), ("1", 11.0), ("2", 15.0)]
    records = [
        Record(number=n, overrides=(f"a={a}", f"b={n}"), folder="", objective=score)
        for n, (a, score) in enumerate(settings)
    ]
    ((key, share),) = _importance(records, ["a", "b"])
    assert (key, share) == ("a", pytest.approx(12 / 14))


@pytest.mark.parametrize(
    ("direction", "order"), [(Direction.maximize, "2031"), (Direction.minimize, "3021")], ids=str
)
def test_the_jobs_of_a_page_come_best_first_and_those_without_a_score_last(
    direction: Direction, order: str, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path)
    ledger.create(Identity(swept=("a",), words=("a=1,2,3,4",), direction=direction))
    records = ledger.enter([((f"a={number}",), "a") for number in range(4)])
    for record, score in zip(records, (0.5, None, 0.75, -0.25), strict=True):
        (tmp_path / record.folder).mkdir()
        ledger.end(ledger.start(record), State.failed if score is None else State.done, objective=score)
    assert "".join(cells[0] for _, cells in _facts(ledger)["jobs"]) == order


def test_a_sweep_costs_what_all_of_its_jobs_cost(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.create(Identity(swept=("a",), words=("a=1,2",)))
    for record, seconds in zip(ledger.enter([(("a=1",), "1"), (("a=2",), "2")]), (10.0, 30.0), strict=True):
        folder = RunDir.at(ledger.folder / record.folder)
        folder.write_summary(status="completed", seconds=seconds)
        ledger.end(ledger.start(record), State.done, objective=1.0)
    assert "seconds of all 40 " in " ".join(Page(write_sweep_report(ledger)).text.split())


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """What the charts of `pictures` draw on."""
    axes = MagicMock()
    axes.lines = []
    axes.plot.side_effect = lambda *values, **options: axes.lines.append(values)
    monkeypatch.setattr(pictures, "drawn", lambda draw, *size: draw(axes))
    return axes


def test_the_first_point_is_marked_and_ten_have_labels(axes: MagicMock) -> None:
    names = [f"{'a' * number}b" for number in range(12)]
    places, scores = [(7 * number) % 12 for number in range(12)], [*range(1, 13)]
    pictures.scatter(places, scores, names, "seconds", "score")
    ((x, y),) = (call.args for call in axes.scatter.call_args_list)
    assert ([*x], [*y]) == (places, scores)
    colours = axes.scatter.call_args.kwargs["color"]
    assert (len(colours), colours[0], {*colours[1:]}) == (12, pictures.ORANGE, {pictures.BLUE})
    labels = [call.args for call in axes.annotate.call_args_list]
    assert labels == [(names[number], [places[number], scores[number]]) for number in range(10)]
    assert axes.set.call_args.kwargs == {"xlabel": "seconds", "ylabel": "score"}
    pictures.scatter([1], [1], ["x" * 19], "", "")
    assert axes.annotate.call_args.args[0] == "x" * 17 + "…"


def test_axes_of_one_unit_make_a_square_and_a_chart_grows_with_its_columns() -> None:
    import matplotlib as mpl

    def sides(address: str) -> tuple[float, float]:
        size = re.search(r'<svg [^>]*?width="(\S+)pt" height="(\S+)pt"', base64.b64decode(address[26:]).decode())
        assert size is not None
        return float(size[1]) / 72, float(size[2]) / 72

    own = dict(mpl.rcParams)
    square = sides(pictures.against_true(OF_VALUES, 0))
    assert square[0] == square[1]
    assert sides(pictures.precision_over_recall(OF_LABELS)) == square
    width, height = sides(pictures.scatter([1, 2], [1, 2], ["a", "b"], "seconds", "score"))
    assert (width, width > 1.5 * height) == (square[0], True)
    few, more, many = (sides(pictures.parallel(["a"] * n, [[1.0] * n, [2.0] * n], [1.0, 2.0])) for n in (2, 5, 10))
    assert few[0] == width
    assert many[0] == pytest.approx(2 * more[0])
    assert many[0] > few[0]
    assert few[1] == more[1] == many[1]
    assert dict(mpl.rcParams) == own, "other pictures of a program keep their style"


def test_predicted_values_are_drawn_over_the_true_ones_with_their_diagonal(axes: MagicMock) -> None:
    for points, ends in (([[-3.0, 2.0, 1.0], [-1.0, None, -5.0]], [-5.0, 2.0]), ([[-2.0], [-1.0]], [-2.0, -1.0])):
        axes.reset_mock()
        pictures.against_true(replace(OF_VALUES, points=[OF_VALUES.points[0], points]), 1)
        ((x, y),) = (call.args for call in axes.plot.call_args_list)
        assert x == y == ends
        true, predicted = axes.scatter.call_args.args
        assert true.tolist() == points[0]
        assert [None if np.isnan(value) else value for value in predicted] == points[1]
        assert axes.set.call_args.kwargs == {"xlabel": "true", "ylabel": "predicted"}


def test_the_curves_of_labels_are_drawn_where_they_are_predicted_and_those_after_ten_dashed(axes: MagicMock) -> None:
    hit, never, wrong = [[0, 0, 2], [1, 0, 1]], [[3, 0, 0], [3, 0, 0]], [[0, 0, 0], [0, 0, 4]]
    no_threshold = [[0, 0, 0], [0, 0, 0]]
    curves = [hit, wrong, no_threshold, *[never] * 9]
    names = ["x" * 30, *(f"label{number}" for number in range(11))]
    pictures.precision_over_recall(replace(OF_LABELS, names=names, curves=curves))
    drawn = [(recall.tolist(), precision.tolist(), dash) for recall, precision, dash in axes.lines]
    assert drawn[0] == ([1.0, 1.0, 1.0], [0.5, 2 / 3, 2 / 3], "-")
    assert drawn[1] == ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], "-")
    assert drawn[2] == ([1.0], [0.5], "-"), "up to the threshold above which it is never predicted"
    assert [dash for *_, dash in drawn] == ["-"] * 10 + ["--"]
    shown = [call.kwargs["label"] for call in axes.plot.call_args_list]
    assert shown == ["x" * 17 + "…", "label0", *names[3:]]
    assert {"xlabel": "recall", "ylabel": "precision"}.items() <= axes.set.call_args.kwargs.items()


def test_the_lines_of_a_sweep_are_drawn_up_to_the_best_which_is_marked(axes: MagicMock) -> None:
    rows = [["a", 3.0], ["c", 1.0], ["b", 2.0], ["b", 2.0]]
    pictures.parallel(["x" * 19, "score"], rows, [3.0, 1.0, 2.0, 2.0])
    heights = [call.args[0] for call in axes.plot.call_args_list]
    assert heights == [[1.0, 0.0], [0.5, 0.5], [0.5, 0.5], [0.0, 1.0]], "texts are at equal distances"
    worst, middle, _, best = (call.kwargs["color"] for call in axes.plot.call_args_list)
    assert best == pictures.ORANGE
    assert worst == pytest.approx((0.75, 0.8, 0.9))
    assert all(dark < pale for dark, pale in zip(middle, worst, strict=True)), "the darker the better"
    assert axes.set_xticks.call_args.args[1] == ["x" * 17 + "…", "score"]
    axes.reset_mock()
    pictures.parallel(["a", "score"], [[1.0, 2.0]], [5.0])
    assert [call.args[0] for call in axes.plot.call_args_list] == [[0.0, 0.0]], "one job has no span"
    assert axes.plot.call_args.kwargs["color"] == pictures.ORANGE
    axes.reset_mock()
    pictures.parallel(["a", "score"], [[1.0, 2.0], [2.0, 2.0], [3.0, 1.0], [4.0, 2.0]], [2.0, 2.0, 1.0, 2.0])
    marked = [call.args[0][0] for call in axes.plot.call_args_list if call.kwargs["color"] == pictures.ORANGE]
    assert marked == [0.0] == axes.plot.call_args.args[0][:1], "the first of equal ones, over the lines of the rest"
    axes.reset_mock()
    pictures.parallel(["a", "b"], [[number, f"{number}"] for number in range(5)], [0.0] * 5)
    labels = [(call.args[0], call.args[1][0]) for call in axes.annotate.call_args_list]
    assert labels == [("4", 0), ("0", 0), *((f"{number}", 1) for number in (4, 3, 2, 1, 0))], (
        "the ends of a long scale"
    )
    axes.reset_mock()
    pictures.parallel(["a", "b"], [[value, "b"] for value in (1, 2, 3, 4, "auto")], [0.0] * 5)
    labels = [call.args[0] for call in axes.annotate.call_args_list]
    assert labels == ["auto", "4", "3", "2", "1", "b"], "each of a column with a text"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x" * 18, "x" * 18),
        ("x" * 19, "x" * 17 + "…"),
        (0.123456, "0.1235"),
        (12345.6, "1.235e+04"),
        ("a\tb", "a\\tb"),
    ],
)
def test_a_label_has_eighteen_letters_at_most(value: str | float, text: str) -> None:
    assert pictures.shorten(value) == text


def test_a_picture_is_the_same_each_time_and_has_its_texts_as_they_are() -> None:
    def draw(axes: Any) -> None:
        axes.plot([1, 2], [3, 4], label="$x$")
        axes.legend()

    one, two = (pictures.svg(draw, 4.0, 3.0).decode() for _ in range(2))
    assert one == two
    assert ">$x$<" in one
    assert "dc:date" not in one


def test_a_page_has_each_fact_of_a_run_in_words(tmp_path: Path) -> None:
    run, photos = RunDir.at(tmp_path / "run"), tmp_path / "photos"
    composed = {"epochs": 4, "steps": None, "tags": ["a", "b"], "dataset": {"path": str(photos), "channels": 4}}
    run.composed.write_text(components.dump(composed))
    choices = {"model": "digitnet", "dataset": "folder"}
    (run.hydra / "hydra.yaml").write_text(json.dumps({"hydra": {"runtime": {"choices": choices}}}))
    run.config.write_text(components.dump({"batch": 1024, "optimizer": {"lr": 0.001234567}}))
    run.command.write_text("python train.py\n# sha256 abc\n")
    environment = {"world_size": 2, "threads": 4, "gpus": ["H200", "H100"], "git": None, "list": [], "table": {}}
    run.environment.write_text(json.dumps({**environment, "packages": {"torch": "2"}}))
    facts: dict[str, Any] = {"status": "completed", "monitor": "top1", "started": 90000.0, "seconds": 75.4}
    facts |= {"step": 1200, "steps": 1600, "best": 93.456, "best_step": 1000, "skipped": 1200, "error": "it broke"}
    facts |= {"scores": {"loss": 0.5, "top1": 93.456, "mcc": None}, "test": {"loss": 0.25, "f1": 0.5}}
    facts |= {"img_per_s": 12345.6, "data_wait_pct": 1.234, "gpu_util": 97.51234, "cpu_cores": 3.0}
    facts |= {"spent": {"kwh": 0.0123456, "gpu_hours": 2.34567, "usd": 1234.5}}
    facts |= {"time": {"data": 0.25, "forward": 0.75, "step": 0.0}, "checklist": FACTS["checklist"]}
    facts |= {"verdict": {"sentence": "it is fast", "evidence": "1 %", "override": None}}
    run.summary.write_text(json.dumps(facts))
    lines: list[dict[str, Any]] = [{"step": 600, "loss/train": 0.9, "acc/train_top1": 50.0, "perf/mfu_pct": 2.0}]
    lines += [{"step": 600, "loss/val": 0.8, "acc/val_top1": 80.0, "metric/f1": 0.1, "loss/train_epoch": 0.7}]
    lines += [{"step": 1200, "loss/train": 0.6, "metric/f1/a": 0.2}]
    lines += [
        {"step": 1200, "loss/val": 0.51234, "acc/val_top1": 92.5, "acc/val_ema_top1": 93.4, "perf/mfu_pct": 3.0}
    ]
    lines[-1] |= {"metric/f1": None, "metric/kappa": 0.123456, "loss/train_epoch": 0.55555}
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run.gpu.write_text(
        "".join(f'{{"time": {t}, "step": {t}, "local_rank": 0, "uuid": "a", "util": 5}}\n' for t in (1, 2))
    )
    shown = facts_of(Run(run.path))
    titles = {name: [title for title, _ in shown.pop(name)] for name in ("curves", "usage")}
    assert titles == {
        "curves": ["Loss", "Accuracy, %"],
        "usage": ["Model FLOPs utilisation, %", "GPU utilisation, %"],
    }
    different = shown.pop("differences")
    assert {("epochs", "4", "20"), ("dataset.channels", "4", "3"), ("tags", "a, b", "none")} <= {*different}
    assert shown == {
        "title": "run",
        "folder": str(tmp_path / "run"),
        "summary": [
            ("state", "done"),
            ("model", "digitnet"),
            ("data", "folder photos"),
            ("tags", "a, b"),
            ("batch", "1,024"),
            ("learning rate", "0.001235"),
            ("best top-1", "93.46 % at step 1,000"),
            ("last top-1", "93.40 %"),
            ("last validation loss", "0.5123"),
            ("last training loss", "0.5555"),
            ("last f1", "–"),
            ("last kappa", "0.1235"),
            ("steps", "1,200 of 1,600"),
            ("started", format_timestamp(90000.0)),
            ("duration", "1:15"),
            ("speed", "12,346 images/s, 1.2 % of the time waiting for data"),
            ("corrupt images skipped", "1,200"),
            ("energy", "0.0123 kWh"),
            ("GPU hours", "2.35"),
            ("cost", "1,234.50 USD"),
        ],
        "findings": [{"name": "speed", "sentence": "it is fast", "evidence": "1 %", "override": ""}],
        "time": [("waiting for data", 0.25), ("forward", 0.75)],
        "checklist": [[item[key] for key in ("item", "state", "reason", "override")] for item in FACTS["checklist"]],
        "hardware": [
            ("processes", "2"),
            ("threads of each", "4"),
            ("GPU", "H200"),
            ("GPU", "H100"),
            ("CPU cores in use", "3"),
            ("GPU utilisation, %", "97.51"),
        ],
        "scores": {
            "rows": [("loss", "0.5", "0.25"), ("top-1", "93.46 %", ""), ("mcc", "", ""), ("f1", "", "0.5")],
            "test": True,
            "note": "",
        },
        "headline": "93.46 % top-1, digitnet, folder photos, epoch 3 of 4, 1:15",
        "predictions": {},
        "channels": " (the first three of 4 channels)",
        "environment": [
            ("world_size", "2"),
            ("threads", "4"),
            ("gpus", "['H200', 'H100']"),
            ("packages.torch", "2"),
        ],
        "command": "python train.py",
        "config": run.config.read_text(),
        "notes": ["it broke"],
    }
    run.write_summary(
        skipped=0,
        seconds=None,
        learning={"sentence": "it learns"},
        verdict=None,
        spent={"gpu_hours": 0, "usd": 0.0, "kwh": 0.0},
    )
    run.environment.write_text('{"git_changes": false, "gpu_count": 0}')
    run.composed.write_text(components.dump({**composed, "epochs": 4, "steps": 1600}))
    shown = facts_of(Run(run.path))
    run.write_summary(verdict={"sentence": "it waits"})
    assert [row["name"] for row in facts_of(Run(run.path))["findings"]] == ["learning", "speed"]
    assert not {"corrupt images skipped", "duration", "GPU hours", "cost"} & {name for name, _ in shown["summary"]}
    assert ("energy", "0 kWh") in shown["summary"]
    assert shown["environment"] == [("git_changes", "False"), ("gpu_count", "0")]
    assert shown["findings"] == [{"name": "learning", "sentence": "it learns", "evidence": "", "override": ""}]
    assert shown["headline"] == "93.46 % top-1, digitnet, folder photos"
    assert shown["hardware"][:2] == [("processes", "not known"), ("threads of each", "not known")]
    run.composed.write_text(components.dump({**composed, "steps": 1600, "dataset": {"path": None}}))
    assert facts_of(Run(run.path))["headline"] == "93.46 % top-1, digitnet, folder", "a data set may have no path"


def test_the_page_of_a_sweep_has_each_fact_of_its_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("parallel", "scatter"):
        monkeypatch.setattr(pictures, name, lambda *values: values)
    ledger = Ledger(tmp_path / "sweep")
    words = ("a=1,2", "seed=1,2")
    ledger.create(Identity(swept=("a", "seed"), words=words, of_hydra=("hydra/sweeper=basic",), figure="top1"))
    records = ledger.enter([((f"a={a}", f"seed={seed}"), f"a={a} s={seed}") for a in (1, 2) for seed in (1, 2)])
    scores = (0.0, 80.0, 90.0, None)
    costs: list[dict[str, Any]] = [{"seconds": 10.0, "spent": {"kwh": 0.5}}]
    costs += [{"seconds": 20.25, "spent": {"usd": 1.0, "kwh": 0.0}}, {}, {"seconds": 100.0}]
    for record, score, cost in zip(records, scores, costs, strict=True):
        job = RunDir.at(ledger.folder / record.folder)
        job.summary.write_text(json.dumps({"status": "completed", **cost}))
        points = [{"step": step, "acc/val_top1": float(record.number + step)} for step in (1, 2)]
        job.metrics.write_text("".join(f"{json.dumps(point)}\n" for point in points))
        state, error = (State.failed, "odd\nmore") if score is None else (State.done, "")
        ledger.end(ledger.start(record), state, objective=score, error=error)
    RunDir(ledger.folder / records[0].folder).report.touch()
    shown = _facts(ledger)
    *charts, (title, lines) = shown.pop("charts")
    colours = [pictures.ORANGE, pictures.BLUE, pictures.GREEN]
    assert title == "val top-1 of each job"
    assert [(line["label"], line["colour"]) for line in lines["curves"]] == [
        (label, colour) for label, colour in zip(("best", "job 1", "job 0"), colours, strict=True)
    ]
    rows = [[2.0, 1.0, 90.0], [1.0, 2.0, 80.0], [1.0, 1.0, 0.0]]
    assert charts == [
        (
            "What was varied, and the score: the darker the better, orange is the best",
            (["a", "seed", "val top-1"], rows, [90.0, 80.0, 0.0]),
        ),
        ("Score against seconds, by job", ((20.25, 10.0), (80.0, 0.0), ("1", "0"), "seconds", "val top-1")),
        ("Score against kWh, by job", ((0.0, 0.5), (80.0, 0.0), ("1", "0"), "kWh", "val top-1")),
        ("Score against USD, by job", ((1.0,), (80.0,), ("1",), "USD", "val top-1")),
    ]
    assert dict(shown.pop("importance")) == pytest.approx({"a": 1666.667 / 4866.667, "seed": 816.667 / 4866.667})
    assert shown == {
        "title": "Sweep sweep",
        "folder": str(tmp_path / "sweep"),
        "headline": "",
        "notes": ["job 3: odd\njob 3: more"],
        "summary": [
            ("jobs", "3 done, 1 failed"),
            ("best", "job 2 with 90.00 % top-1: a=2 seed=1"),
            ("seconds of all", "130"),
            ("kWh of all", "0.5"),
            ("USD of all", "1"),
        ],
        "columns": ["job", "state", "a", "seed", "val top-1", "seconds", "kWh", "USD"],
        "numbers": 4,
        "jobs": [
            ("002-a%3D2%20s%3D1/", ["2", "done", "2", "1", "90.00", "", "", ""]),
            ("001-a%3D1%20s%3D2/", ["1", "done", "1", "2", "80.00", "20.2", "0", "1"]),
            ("000-a%3D1%20s%3D1/report.html", ["0", "done", "1", "1", "0.00", "10", "0.5", ""]),
            ("003-a%3D2%20s%3D2/", ["3", "failed", "2", "2", "", "100", "", ""]),
        ],
        "command": "lockstep train -m hydra/sweeper=basic a=1,2 seed=1,2 hydra.sweep.dir=sweep",
    }
    (ledger.folder / records[1].folder / "summary.json").write_text("{")
    damaged = _facts(ledger)
    assert "summary.json" in damaged["notes"][0]
    shutil.rmtree(ledger.folder / "jobs")
    (ledger.folder / "jobs").mkdir()
    empty = _facts(ledger)
    assert (empty["columns"], empty["summary"]) == (["job", "state", "a", "seed", "val top-1"], [])


@pytest.mark.parametrize("direction", Direction)
def test_the_best_of_a_sweep_is_the_brightest_in_its_charts(
    direction: Direction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gains: list[list[float]] = []
    monkeypatch.setattr(pictures, "parallel", lambda columns, rows, colours: gains.append([*colours]))
    ledger = Ledger(tmp_path)
    ledger.create(Identity(swept=("a",), words=("a=1,2",), direction=direction))
    for record in ledger.enter([((f"a={a}",), "a") for a in (1, 2)]):
        (tmp_path / record.folder).mkdir()
        ledger.end(ledger.start(record), State.done, objective=float(record.number + 1))
    _facts(ledger)
    assert gains == [[2.0, 1.0] if direction is Direction.maximize else [-1.0, -2.0]]


@pytest.mark.parametrize("file", ["overrides", "summary"])
def test_a_run_of_which_one_file_is_left_has_a_page(file: str, tmp_path: Path) -> None:
    run = RunDir.at(tmp_path / "run")
    getattr(run, file).write_text("[]" if file == "overrides" else "{}")
    report(str(run.path))
    assert run.report.is_file()


def test_the_end_of_a_run_names_its_page_or_the_command_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir.at(tmp_path / "run")
    run.summary.write_text("{}")

    def ended(when: str) -> str:
        info: Any = SimpleNamespace(folder=run.path, config={"telemetry": {"report": when}})
        Listener(info).completed({"seconds": 1.0})
        return capsys.readouterr().out

    assert ended("never") == "   report       lockstep report run\n"
    assert ended("always") == "   report       run/report.html\n"
    monkeypatch.setattr("lockstep.report.run_page.write_report", lambda run: {}["none"])
    shown = ended("always")
    assert "warning: report.html could not be written (KeyError: 'none')" in shown
    assert shown.endswith("   report       lockstep report run\n")


def test_steps_that_are_one_make_no_chart_and_a_thousand_has_a_comma() -> None:
    assert line_chart([("loss", "red", [1.0, 1.0], [2.0, 3.0])]) == {}
    (curve,) = line_chart([("loss", "red", [1.0, 1000.0], [0.0, 100.0])])["curves"]
    places = [round(BOTTOM + (value + 4) / 108 * (TOP - BOTTOM), 1) for value in (0, 100)]
    assert [(place, text) for _, place, text in curve["points"]] == [
        (places[0], "step 1: 0"),
        (places[1], "step 1,000: 100"),
    ]


def test_curves_of_different_steps_share_their_axes() -> None:
    lines = [("a", "red", [20.0, 30.0], [0.0, 1.0]), ("b", "blue", [10.0, 20.0], [2.0, -1.0])]
    first, second = line_chart(lines)["curves"]
    assert [x for x, *_ in first["points"]] == [(LEFT + RIGHT) / 2, RIGHT]
    assert [x for x, *_ in second["points"]] == [LEFT, (LEFT + RIGHT) / 2]
    heights = [point[1] for point in (second["points"][1], first["points"][0], second["points"][0])]
    assert heights == sorted(heights, reverse=True), "greater values are higher"


def test_the_curves_of_a_chart_come_in_the_order_of_their_figures() -> None:
    figures = [(step, {"b/x": 1.0, "a/x": 2.0}) for step in (1, 2)]
    rows = [Figure(f"{name}/x", "X", colour="red", curve=name) for name in "ab"]
    ((_, chart),) = charts(figures, {"X": rows})
    assert [curve["label"] for curve in chart["curves"]] == ["b", "a"]


def test_what_was_varied_is_drawn_for_two_jobs_with_scores_of_a_sweep_that_varies_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "parallel", lambda *values: values)
    shown = {}
    for scored, swept in ((1, ("a",)), (2, ("a",)), (2, ())):
        ledger = Ledger(tmp_path / f"{scored}{swept}")
        ledger.create(Identity(swept=swept, words=()))
        jobs = [((f"a={number}" if swept else "b=1",), f"{number}") for number in range(3)]
        for record in ledger.enter(jobs, identify=lambda words: object()):
            (ledger.folder / record.folder).mkdir()
            score = float(record.number) if record.number < scored else None
            ledger.end(ledger.start(record), State.failed if score is None else State.done, objective=score)
        titles = [title for title, _ in _facts(ledger)["charts"]]
        shown[scored, swept] = any(title.startswith("What was varied") for title in titles)
    assert shown == {(1, ("a",)): False, (2, ("a",)): True, (2, ()): False}


@pytest.mark.parametrize(
    ("low", "high", "whole", "ticks"),
    [
        (0.0, 1.0, False, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (1.0, 2.0, True, ["1", "2"]),
        (0.0, 5000.0, True, ["0", "1,000", "2,000", "3,000", "4,000", "5,000"]),
        (-0.35, 0.35, False, ["-0.2", "0", "0.2"]),
        (3.1, 27.9, False, ["5", "10", "15", "20", "25"]),
    ],
)
def test_the_ticks_of_an_axis_are_few_round_numbers(low: float, high: float, whole: bool, ticks: list[str]) -> None:
    assert [text for _, text in _axis(low, high, 0, 100, whole=whole)[1]] == ticks


def test_curves_without_a_colour_of_their_own_have_different_ones_and_their_own_names() -> None:
    figures = [(step, {f"gpu/util/{gpu}": float(step) for gpu in range(9)}) for step in (1, 2)]
    ((_, chart),) = charts(figures, {"GPU": [Figure("gpu/util/", "GPU", colour="")]})
    assert [curve["label"] for curve in chart["curves"]] == [f"util/{gpu}" for gpu in range(9)]
    assert [curve["colour"] for curve in chart["curves"]] == [*pictures.COLOURS, pictures.COLOURS[0]]
    ((_, chart),) = charts(figures, {"GPU": [Figure("gpu/util/0", "GPU", colour="red", curve="first")]})
    assert [(curve["label"], curve["colour"]) for curve in chart["curves"]] == [("first", "red")]


def test_twenty_metrics_and_twenty_values_have_charts(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"loss/val": 1.0, **{f"metric/m{number:02}": 0.5 for number in range(21)}}
    run.metrics.write_text("".join(f"{json.dumps({'step': step, **line})}\n" for step in (1, 2)))
    titles = [title for title, _ in facts_of(Run(run.path))["curves"]]
    assert titles == ["Loss", *(f"m{number:02}, validation" for number in range(20))]
    assert len([name for name, _ in facts_of(Run(run.path))["summary"] if name.startswith("last m")]) == 20
    monkeypatch.setattr(pictures, "against_true", lambda predictions, value: str(value))
    many = replace(OF_VALUES, names=[f"v{number}" for number in range(21)], points=OF_VALUES.points[:1] * 21)
    shown = [*charts_of_predictions(many)]
    assert shown == [(f"Predicted against true: v{number}", str(number)) for number in range(20)]
    assert [*charts_of_predictions(ONE_VALUE)] == [("Predicted against true", "0")]
    assert [*charts_of_predictions(replace(OF_LABELS, targets="classes"))] == []


def test_wrong_predictions_of_classes_are_shown_and_all_of_labels(run: RunDir) -> None:
    counts: dict[str, Any] = {"examples": [4, 2], "predicted": [2, 4], "hits": [1, 1], "confusion": [[1, 3], [1, 1]]}
    examples = [{**EXAMPLE, "label": label, "predicted": 1, "probability": 0.934} for label in (0, 1)]
    of_classes = Predictions(step=1234, names=["a", "b"], **counts, curves=[], worst=examples)
    shown = _predictions(Run(run.path), of_classes)
    assert [(of["is"], of["said"], of["share"]) for of in shown["worst"]] == [("a", "b", " (93 %)")]
    assert (shown["step"], shown["kind"], shown["number"]) == ("1,234", "class", 2)
    assert shown["classes"] == [("a", "4", "50.0", "25.0", "33.3"), ("b", "2", "25.0", "50.0", "33.3")]
    assert shown["confused"] == ["a as b: 3 of 4", "b as a: 1 of 2"]
    shares = [(name, [(count, round(float(share), 4)) for count, share in row]) for name, row in shown["matrix"]]
    assert shares == [("a", [(1, 0.5), (3, 0.866)]), ("b", [(1, 0.7071), (1, 0.7071)])]
    same = replace(OF_LABELS, worst=[{**EXAMPLE, "label": [0], "predicted": [0]}])
    shown = _predictions(Run(run.path), same)
    assert (len(shown["worst"]), shown["kind"]) == (1, "label"), "its probabilities may be wrong"
    for classes in (20, 21):
        names = [f"c{label}" for label in range(classes)]
        kinds: dict[str, Any] = {name: [1] * classes for name in ("examples", "predicted", "hits")}
        confusion = np.ones((classes, classes), int).tolist()
        shown = _predictions(
            Run(run.path), Predictions(step=1, names=names, **kinds, confusion=confusion, curves=[], worst=[])
        )
        assert (bool(shown["picture"]), len(shown["matrix"])) == ((False, 20) if classes == 20 else (True, 0))
        assert shown["confused"] == [f"c0 as c{label}: 1 of {classes}" for label in range(1, 11)]


def test_control_characters_are_shown_and_secrets_of_addresses_are_not() -> None:
    shown = rendered("run.html", refresh=7, **{**facts_of(Run(Path("nowhere"))), "title": "a\x00\x0b\x7f\x9fb\tc"})
    assert "a\\x00\\x0b\\x7f\\x9fb\tc" in shown
    assert re.search(r'http-equiv="refresh" content="7"', shown)
    shown = rendered(
        "run.html", refresh=None, **{**facts_of(Run(Path("nowhere"))), "title": "https://me:pw12345@host"}
    )
    assert "pw12345" not in shown
    assert 'http-equiv="refresh"' not in shown
    pairs = [("a", 0), ("b", 0.0), ("c", None), ("d", ""), ("e", 7), ("f", False)]
    shown = rendered("run.html", refresh=None, **{**facts_of(Run(Path("nowhere"))), "summary": pairs})
    cells = dict(re.findall(r"<td>([a-f])</td><td>(.*?)</td>", shown))
    assert cells == {"a": "0", "b": "0.0", "c": "", "d": "", "e": "7", "f": "False"}, "only what is unknown is empty"
    assert [number(value, ".3g", " kWh", "<") for value in (1.0, 0, None, "1", True)] == [
        "<1 kWh",
        "<0 kWh",
        "",
        "",
        "",
    ]


@pytest.mark.parametrize("text", ["predicted", "x", "1,234", "W" * 20])
def test_a_text_in_a_picture_has_all_its_letters(text: str) -> None:
    page = Image.new("RGB", (400, 40), "white")
    ImageDraw.Draw(page).text((0, 0), text, fill="black")
    drawn, whole = np.array(pictures._text(text)), np.array(page)
    height, width = drawn.shape[:2]
    assert (drawn == whole[:height, :width]).all()
    assert (whole[:, width:] == 255).all(), "nothing is beside it"
    assert (whole[height:] == 255).all(), "nothing is below it"


def test_the_headline_counts_the_images_of_classes_alone(run: RunDir) -> None:
    run.write_summary(best=94.0, monitor="top1")
    for targets, words in (
        ("classes", "94.00 % top-1 on 1,004 images, digitnet, "),
        ("labels", "94.00 % top-1, digitnet, "),
    ):
        replace(OF_LABELS, targets=targets, examples=[1000, 4]).write(run.validation)
        assert facts_of(Run(run.path))["headline"].startswith(words)
    run.write_summary(best=0.0)
    assert facts_of(Run(run.path))["headline"].startswith("0.00 % top-1, digitnet, "), "a score like any other"
    run.write_summary(best=None)
    replace(OF_LABELS, targets="classes").write(run.validation)
    assert facts_of(Run(run.path))["headline"].startswith("digitnet, digits, epoch 2 of 2, ")


@pytest.mark.parametrize(("step", "steps"), [(None, "7 of 9"), (3, "7 of 9"), (8, "8 of 9"), (0, "7 of 9")])
def test_a_run_has_come_as_far_as_its_summary_or_its_figures_say(
    step: int | None, steps: str, tmp_path: Path
) -> None:
    run = RunDir.at(tmp_path / "run")
    run.write_summary(steps=9, step=step)
    lines = [{"step": 4, "loss/train": 0.75}, {"step": 7, "loss/train": 0.25, "acc/val_ema_top1": 50.0}]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    summary = dict(facts_of(Run(run.path))["summary"])
    assert summary["steps"] == steps
    assert summary["last training loss"] == "0.2500", "there is none of an epoch"
    assert summary["last top-1"] == "50.00 %"
    assert {"last validation loss", "best top-1", "started", "ended early"}.isdisjoint(summary)


def test_the_last_figure_is_that_of_the_weights_that_decide(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path / "run")
    run.write_summary(monitor="-loss", best=0.5)
    line = {"step": 4, "loss/val": 0.75, "loss/val_ema": 0.5, "acc/val_top1": 80.0, "acc/val_ema_top1": 90.0}
    run.metrics.write_text(json.dumps(line) + "\n")
    summary = dict(facts_of(Run(run.path))["summary"])
    expected = {"best validation loss": "0.5", "last validation loss": "0.5", "last top-1": "90.00 %"}
    assert expected.items() <= summary.items()


@pytest.mark.parametrize(("classes", "is_shown"), [(5, False), (6, True)])
def test_the_top_5_of_a_few_classes_has_no_curve_and_no_row(run: RunDir, classes: int, is_shown: bool) -> None:
    names = [f"c{number}" for number in range(classes)]
    counts: dict[str, Any] = {name: [1] * classes for name in ("examples", "predicted", "hits")}
    Predictions(step=1, names=names, **counts, confusion=[], curves=[], worst=[]).write(run.validation)
    lines = [{"step": step, "acc/val_top1": 50.0, "acc/val_top5": 100.0, "optim/lr": 0.1} for step in (1, 2)]
    run.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run.write_summary(scores={"top1": 50.0, "top5": 100.0}, test={"top5": 100.0})
    facts = facts_of(Run(run.path))
    (_, accuracy), (title, _) = facts["curves"]
    labels = [curve["label"] for curve in accuracy["curves"]]
    assert labels == ["validation", *["validation, top-5"] * is_shown]
    assert title == "Learning rate", "it is the last one"
    assert [row[0] for row in facts["scores"]["rows"]] == ["top-1", *["top-5"] * is_shown]
    assert facts["scores"]["test"] == is_shown


@pytest.mark.parametrize(
    ("samples", "jobs", "headline"),
    [
        (("seed",), [("a=1", "seed=1", 80.0), ("a=1", "seed=2", 84.0)], "82.00 ± 2.83 % top-1, 2 seeds, a=1"),
        (
            ("seed", "dataset.fold"),
            [("a=2", f"seed={seed}", f"dataset.fold={fold}", 80.0) for seed in (1, 2) for fold in (0, 1)],
            "80.00 ± 0.00 % top-1, 4 seeds and folds, a=2",
        ),
        (
            ("seed",),
            [("a=1", "seed=1", 80.0), ("a=1", "seed=2", None), ("a=1", "seed=3", 84.0)],
            "82.00 ± 2.83 % top-1, 2 seeds, a=1",
        ),
        ((), [("a=1", 80.0), ("a=2", 90.0)], ""),
    ],
)
def test_the_page_of_a_sweep_begins_with_its_best_setting_over_its_samples(
    samples: tuple[str, ...], jobs: list[tuple[Any, ...]], headline: str, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path)
    ledger.create(Identity(swept=("a", *samples), words=("a=1,2",), figure="top1"))
    lines = [*((words, score) for *words, score in jobs), (["a=9", *(f"{key}=0" for key in samples)], 1.0)]
    for record, (_, score) in zip(ledger.enter([(words, "x") for words, _ in lines]), lines, strict=True):
        (tmp_path / record.folder).mkdir()
        ledger.end(ledger.start(record), State.failed if score is None else State.done, objective=score)
    assert _facts(ledger)["headline"] == headline


def test_the_reports_of_a_sweep_are_of_the_jobs_that_have_a_folder_and_are_all_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = Ledger(tmp_path / "sweep")
    ledger.create(Identity(swept=("a",), words=("a=1,2,3",)))
    records = ledger.enter([((f"a={number}",), "a") for number in range(3)])
    for record in (records[0], records[2]):
        RunDir.at(ledger.folder / record.folder).write_summary(status="completed")
    ledger.path_of(0).write_text("{")
    ledger.end(records[2], State.failed, exit_code=2, error="it is wrong")
    with pytest.raises(InputError, match=r"000\.json is .*; rerun the sweep's command") as raised:
        report("sweep")
    assert "it is wrong" not in str(raised.value), "a job that failed is not damaged"
    assert sorted(path.parent.name for path in tmp_path.rglob("report.html")) == ["000-a", "002-a", "sweep"]
    assert "wrote sweep/report.html\n" in capsys.readouterr().out


@pytest.mark.parametrize("error", [TypeError, ValueError, KeyError, AttributeError, OSError, OverflowError])
def test_a_part_of_a_page_that_fails_leaves_the_others(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: Run) -> None:
        raise error

    monkeypatch.setattr("lockstep.report.run_page._headline", fail)
    run = RunDir.at(tmp_path / "run")
    facts = facts_of(Run(run.path))
    says = f"headline in {run.path} is damaged, or of another version ({error.__name__})"
    assert (facts["headline"], facts["notes"]) == ((), [says])


def test_a_page_says_what_of_a_run_is_damaged_and_what_was_its_error(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path / "run")
    run.summary.write_text(json.dumps({"checklist": [{"item": "workers"}], "error": "it broke"}))
    run.config.write_bytes(b"\xff")
    shown = facts_of(Run(run.path))
    sentence = f"checklist in {run.path} is damaged, or of another version (KeyError)"
    assert (shown["checklist"], shown["config"]) == ((), "")
    assert sentence in shown["notes"]
    assert any(note.startswith(str(run.config)) for note in shown["notes"])
    assert shown["notes"][-1] == "it broke"


def test_a_page_begins_with_what_was_learnt_and_then_the_speed(run: RunDir) -> None:
    learning, verdict = ({"sentence": text, "evidence": text * 2, "override": None} for text in "ab")
    run.write_summary(learning=learning, verdict=verdict)
    findings = facts_of(Run(run.path))["findings"]
    assert [tuple(finding.values()) for finding in findings] == [
        ("learning", "a", "aa", ""),
        ("speed", "b", "bb", ""),
    ]


def test_one_job_and_jobs_of_one_score_show_nothing_that_mattered(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.create(Identity(swept=("a",), words=("a=1,2",)))
    records = ledger.enter([((f"a={number // 2}", f"b={number % 2}"), "job") for number in range(4)])
    for record in records:
        RunDir.at(tmp_path / record.folder).write_summary(seconds=7.0)
    ledger.end(ledger.start(records[0]), State.done, objective=5.0)
    facts = _facts(ledger)
    assert [title for title, _ in facts["charts"]] == ["Score against seconds, by job"]
    assert ("best", "job 0 with score 5: a=0 b=0") in facts["summary"]
    scores = [replace(record, state=State.done, objective=5.0) for record in records]
    assert [*_importance(scores, ["a"])] == []
    assert [*_importance([], ["a"])] == []
    ((key, share),) = _importance([replace(one, objective=one.number // 2) for one in scores], ["a"])
    assert (key, share) == ("a", 1.0)


def test_all_curves_of_a_chart_are_between_its_edges() -> None:
    curves = [
        ("a", "red", [3.0, 5.0], [2.0, 1.0]),
        ("b", "blue", [1.0, 9.0], [-3.0, 6.0]),
        ("c", "grey", [4.0], [0.0]),
    ]
    chart = line_chart(curves)
    assert (chart["left"], chart["right"]) == (54, 432)
    assert [(curve["label"], curve["colour"]) for curve in chart["curves"]] == [
        ("a", "red"),
        ("b", "blue"),
        ("c", "grey"),
    ]
    (_, (first, last), _) = [[(x, y) for x, y, _ in curve["points"]] for curve in chart["curves"]]
    assert (first[0], last[0]) == (54, 432)
    margin = round(0.04 * 9 / (1.08 * 9) * (BOTTOM - TOP), 1)
    assert (first[1], last[1]) == (BOTTOM - margin, TOP + margin), "larger is higher"
    assert {text: place for place, text in chart["x_ticks"]} == {
        text: round(54 + (int(text) - 1) / 8 * 378, 1) for text in ("2", "4", "6", "8")
    }
