"""`report.html` of a run: what its folder says of it, in one file. Needs no data and no model.

Every file of the folder may be missing, of another version, or damaged. Then the page says so, and has the rest.
"""

import base64
import functools
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.options import annotations_of, differences, value_text
from lockstep.core import safe_read, tags
from lockstep.core.errors import masked
from lockstep.core.fields import leaves
from lockstep.core.figures import Predictions
from lockstep.core.model_card import CLASSES
from lockstep.core.run import Run
from lockstep.core.safe_read import is_number
from lockstep.core.safe_write import write_atomic
from lockstep.report.charts import MOST_CURVES, USAGE, charts, charts_of_predictions, learning_titles
from lockstep.telemetry import pictures
from lockstep.telemetry.progress import format_duration, format_timestamp

CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}  # as a page shows them
CHECKED = ("item", "state", "reason", "override")  # of an entry of the checklist
TABLE_CLASSES = 50  # of more classes the table has those with the lowest recall
CONFUSED = 10  # confusions in the list


def write_report(run: Run) -> Path:
    write_atomic(run.run_dir.report, run_page(run))
    return run.run_dir.report


def run_page(run: Run, *, refresh: int | None = None) -> str:
    """The page of a run. A browser loads it again every `refresh` seconds."""
    return rendered("run.html", refresh=refresh, **facts_of(run))


def rendered(page: str, **facts: Any) -> str:
    """A page with these facts. Every text in them is escaped."""
    return str(_pages().get_template(page).render(facts, script=_script()))


@functools.cache
def _script() -> dict[str, str]:
    """The one script that a page may run, which sorts tables, with the hash by which the page's policy names it."""
    text = str(_pages().get_template("sort.js").render())
    return {"text": text, "hash": base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}


@functools.cache
def _pages() -> Any:
    """The templates of all pages, compiled when they are first used: that takes half of the time of a page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: (
            "" if value is None else masked(value).translate(CONTROLS) if type(value) is str else value
        ),
    )


def facts_of(run: Run) -> dict[str, Any]:
    facts, environment, figures, predictions = run.summary, run.environment, run.figures, run.predictions
    command = run.read(run.run_dir.command, safe_read.read_text, "")
    times: Mapping[str, float | None] = facts.get("time") or {}
    sections: dict[str, Callable[[], Any]] = {
        "summary": lambda: [*_summary(run)],
        "findings": lambda: [*_findings(facts)],
        "time": lambda: [(tags.part_words(name), share) for name, share in times.items() if share],
        "checklist": lambda: [[item[key] for key in CHECKED] for item in facts.get("checklist", ())],
        "hardware": lambda: [row for row in _hardware(facts, environment) if row[1]],
        "scores": lambda: _scores(run),
        "headline": lambda: _headline(run),
        "curves": lambda: [*charts(figures, learning_titles(run))],
        "usage": lambda: [*charts(figures, USAGE), *charts(run.gpu, USAGE)],
        "predictions": lambda: _predictions(run, predictions) if predictions else {},
        "channels": lambda: pictures.channels_shown((run.composed.get("dataset") or {}).get("channels", 3)),
        "differences": lambda: [
            (key, value_text(value), value_text(usual))
            for key, value, usual in differences(run.composed, run.choices)
        ],
        "environment": lambda: [
            (key, str(value)) for key, value in leaves(environment) if value not in (None, [], {})
        ],
    }
    shown: dict[str, Any] = {}
    for name, section in sections.items():
        try:
            shown[name] = section()
        except (TypeError, ValueError, LookupError, AttributeError, OSError, OverflowError) as error:
            shown[name] = ()
            run.damage.append(f"{name} in {run.folder} is damaged, or of another version ({type(error).__name__})")
    return {
        "title": run.folder.name,
        "folder": str(run.folder.absolute()),
        **shown,
        "command": "\n".join(line for line in command.splitlines() if not line.startswith("# sha256")),
        "config": run.read(run.run_dir.config, safe_read.read_text, ""),
        "notes": [*run.damage, *filter(None, [facts.get("error")])],
    }


def summary_of(run: Run) -> dict[str, Any]:
    """The part of the page that a notebook shows."""
    return {"headline": _headline(run), "curves": [*charts(run.figures, learning_titles(run))][:2]}


def number(value: object, form: str, unit: str = "", before: str = "") -> str:
    """A number of a file as text; empty if it is none."""
    return f"{before}{value:{form}}{unit}" if is_number(value) else ""


def figure(name: str, value: Any) -> str:
    """A figure of an evaluation as text, with its unit; empty if it is not a number."""
    return "".join(tags.figure_parts(name, value)) if is_number(value) else ""


def _scores(run: Run) -> dict[str, Any]:
    scores, test = (tags.telling(run.summary.get(key) or {}, run.classes) for key in ("scores", "test"))
    rows = [
        (tags.figure_word(name), figure(name, scores.get(name)), figure(name, test.get(name)))
        for name in {**scores, **test}
    ]
    evaluations = sum(run.monitor.value_in(scalars) is not None for _, scalars in run.figures)
    note = "" if test or evaluations < 2 else tags.chosen_on_itself(run.composed.get("dataset") or {})
    return {"rows": rows[:MOST_CURVES], "test": bool(test), "note": note} if rows else {}


def _headline(run: Run) -> str:
    """What the run was, in one line: `94.08 % top-1 on 355 images, digitnet, digits, epoch 2 of 2, 0:01`."""
    facts, predictions = run.summary, run.predictions
    best = tags.figure_text(run.monitor.name, facts["best"]) if is_number(facts.get("best")) else ""
    images = sum(predictions.examples) if predictions and predictions.targets == CLASSES else 0
    epochs = run.composed.get("epochs") if run.composed.get("steps") is None else None
    done, steps = facts.get("step"), facts.get("steps")
    epoch = f"epoch {done * epochs / steps:.3g} of {epochs}" if done and steps and is_number(epochs) else ""
    seconds = facts.get("seconds")
    parts = [best + f" on {images:,} images" * bool(best and images), *_subject(run), epoch]
    return ", ".join(filter(None, [*parts, format_duration(seconds) if seconds else ""]))


def _subject(run: Run) -> list[str]:
    """The model and the data set, by their options, and the folder of the images if there is one."""
    dataset = run.composed.get("dataset") or {}
    folder = Path(str(dataset.get("path") or "")).name
    return [run.choices.get("model", ""), " ".join(filter(None, (run.choices.get("dataset", ""), folder)))]


def _summary(run: Run) -> Iterator[tuple[str, str]]:
    facts, figures = run.summary, run.figures
    model, data = _subject(run)
    config: dict[str, Any] = run.read(run.run_dir.config, safe_read.read_yaml, {})
    last = {tag: value for _, scalars in figures for tag, value in scalars.items()}
    monitor = run.monitor
    metrics = [tag for tag in last if re.fullmatch(tags.METRIC + "[^/]*", tag) and tag not in monitor.tags]
    words = {name: tags.figure_word(name) for name in (monitor.name, tags.TOP1)}
    words[tags.LOSS] = "validation loss"
    final = {name: [last[tag] for tag in tags.Monitor(name).tags if tag in last] for name in words}
    step = max((value for value in (facts.get("step"), figures[-1][0] if figures else 0) if value), default=0)
    started, seconds, spent = facts.get("started"), facts.get("seconds"), facts.get("spent", {})
    rows = {
        "state": str(run.state),
        "model": model,
        "data": data,
        **annotations_of(run.composed),
        "batch": number(config.get("batch"), ","),
        "learning rate": number((config.get("optimizer") or {}).get("lr"), ".4g"),
        "ended early": facts.get("stopped_early"),
        f"best {words[monitor.name]}": figure(monitor.name, facts.get("best"))
        + number(facts.get("best_step"), ",", before=" at step "),
        **{f"last {words[name]}": figure(name, values[0]) for name, values in final.items() if values},
        "last training loss": number(last.get(tags.EPOCH_LOSS, last.get(tags.TRAIN_LOSS)), ".4f"),
        **{f"last {tags.name_of_tag(tag)}": number(last[tag], ".4g") or "–" for tag in metrics[:MOST_CURVES]},
        "steps": number(step, ",") + number(facts.get("steps"), ",", before=" of "),
        "started": format_timestamp(started or 0),
        "duration": format_duration(seconds) if seconds else "",
        "speed": number(facts.get("img_per_s"), ",.0f", " images/s")
        + number(facts.get("data_wait_pct"), ".2g", " % of the time waiting for data", before=", "),
        "corrupt images skipped": number(facts.get("skipped") or None, ","),
        "energy": number(spent.get("kwh"), ".3g", " kWh"),
        "GPU hours": number(spent.get("gpu_hours") or None, ".3g"),
        "cost": number(spent.get("usd") or None, ",.2f", " USD"),
    }
    yield from ((key, value) for key, value in rows.items() if value)


def _hardware(facts: Mapping[str, Any], environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "processes", str(environment.get("world_size", "not known"))
    yield "threads of each", str(environment.get("threads", "not known"))
    yield from (("GPU", str(gpu)) for gpu in environment.get("gpus", ()))
    for figure in tags.FIGURES:
        if figure.tag.startswith((tags.CPU, tags.GPU)):
            yield figure.title, number(facts.get("_".join(figure.tag.split("/")[:2])), ",.4g")


def _predictions(run: Run, predictions: Predictions) -> dict[str, Any]:
    """What the page shows of predictions, with the names of the classes in the place of their labels."""
    names, rows = predictions.names, []
    precisions: Sequence[float | None] = predictions.average_precision
    for label, examples in enumerate(predictions.examples):
        predicted, hits = predictions.predicted[label], predictions.hits[label]
        scores = [100 * hits / total if total else math.nan for total in (predicted, examples)]
        scores.append(200 * hits / (predicted + examples) if predicted + examples else math.nan)
        cells = ["–" if math.isnan(score) else f"{score:.1f}" for score in scores]
        average = [number(precisions[label], ".4g") or "–"] if precisions else []
        rows.append((names[label], f"{examples:,}", *cells, *average))
    if len(rows) > TABLE_CLASSES:
        rows = sorted(rows, key=lambda row: 101.0 if row[3] == "–" else float(row[3]))[:TABLE_CLASSES]
    matrix = np.array(predictions.confusion)
    few = len(names) <= pictures.MOST_WITH_COUNTS and len(matrix) > 0
    shares = (matrix / np.maximum(matrix.sum(1, keepdims=True), 1)).clip(0, 1) ** 0.5 if few else []
    classes = predictions.targets == CLASSES
    return {
        "step": f"{predictions.step:,}",
        "columns": ["images", "precision", "recall", "F1", *["average precision"] * bool(precisions)],
        "kind": "class" if classes else "label",
        "classes": rows,
        "number": len(names),
        "matrix": [
            (name, [*zip(*row, strict=True)])
            for name, *row in zip(names, predictions.confusion, shares, strict=False)
        ],
        "picture": base64.b64encode(pictures.heat(predictions)).decode() if len(matrix) and not few else "",
        "confused": [*_confused(names, matrix)] if len(matrix) else [],
        "charts": [*charts_of_predictions(predictions)],
        "names": names,
        "worst": [
            {**example, "is": predictions.in_words(example["label"])}
            | {"said": predictions.in_words(example["predicted"])}
            | {"share": number(example["probability"], ".0%", ")", " (").replace("%", " %")}
            | {"file": _address(run, str(example["sample"]))}
            for example in predictions.worst
            if not classes or example["label"] != example["predicted"]
        ],
    }


def _confused(names: Sequence[str], matrix: np.ndarray) -> Iterator[str]:
    """The largest confusions in words, such as `9 as 8: 5 of 36`."""
    wrong = matrix * (1 - np.eye(len(matrix), dtype=matrix.dtype))
    for place in np.argsort(-wrong, axis=None, kind="stable")[:CONFUSED]:
        true, said = divmod(int(place), len(matrix))
        if wrong[true, said] > 0:
            yield f"{names[true]} as {names[said]}: {wrong[true, said]:,} of {matrix[true].sum():,}"


def _address(run: Run, sample: str) -> str:
    """The address of the file of an example; empty for one that is not a file here."""
    folder = (run.composed.get("dataset") or {}).get("path")
    path = Path(str(folder), sample).absolute() if folder else None
    return path.as_uri() if path is not None and path.is_file() else ""


def _findings(facts: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for name, finding in (("learning", facts.get("learning")), ("speed", facts.get("verdict"))):
        if finding:
            yield {"name": name, **{key: str(finding.get(key) or "") for key in ("sentence", "evidence", "override")}}
