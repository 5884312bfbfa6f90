"""The charts of a run's page: its figures by step as lines, and its predictions."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lockstep.core.figures import Figures, Predictions, finite, is_of_option
from lockstep.core.model_card import LABELS
from lockstep.core.run import Run
from lockstep.core.tags import BLUE, FIGURES, METRIC, Figure, name_of_tag, telling
from lockstep.telemetry import pictures
from lockstep.telemetry.pictures import COLOURS

MOST_CURVES = 20  # curves of a chart, and charts of single figures
CURVE_POINTS = 400  # of a curve: more are averaged
LEFT, RIGHT, TOP, BOTTOM = 54, 432, 8, 226  # edges of a chart's plot, in units of its 440x250 view box
Curve = tuple[str, str, Sequence[float], Sequence[float]]  # its label and colour, x and y
Charts = dict[str, list[Figure]]  # the figures of each chart, by its title


def charts_of(*pages: str) -> Charts:
    """The charts of our figures in these categories."""
    titles: Charts = {}
    for figure in FIGURES:
        if figure.colour is not None and figure.page in pages:
            titles.setdefault(figure.title, []).append(figure)
    return titles


USAGE: Charts = charts_of("Throughput", "GPU")


def learning_titles(run: Run) -> Charts:
    """The charts of a run: the monitored metric comes first, and the learning rate last.

    Each metric has its own chart, and so has each figure of an option.
    """
    tags = dict.fromkeys(tag for _, scalars in run.figures for tag in finite(scalars))
    monitored = [tag for tag in run.monitor.tags if tag in tags and tag.startswith(METRIC)]
    metrics = [tag for tag in tags if re.fullmatch(METRIC + "[^/]*", tag) and tag not in monitored]
    others = [*metrics, *filter(is_of_option, tags)]

    def single(tags: Sequence[str]) -> Charts:
        titles = {tag: f"{name_of_tag(tag)}, validation" if tag.startswith(METRIC) else tag for tag in tags}
        return {titles[tag]: [Figure(tag, "", colour=BLUE)] for tag in tags}

    curves = {
        title: [*telling({row.tag: row for row in rows}, run.classes).values()]
        for title, rows in charts_of("Learning").items()
    }
    return single(monitored) | curves | single(others[:MOST_CURVES]) | charts_of("Optimisation")


def charts(figures: Figures, titles: Charts) -> Iterator[tuple[str, dict[str, Any]]]:
    """The titles and charts that have a figure at two steps or more."""
    figures = [(step, finite(scalars)) for step, scalars in figures]
    tags = dict.fromkeys(tag for _, scalars in figures for tag in scalars)
    for title, rows in titles.items():
        matches = [(tag, row) for tag, row in itertools.product(tags, rows) if row.covers(tag)]
        lines: list[Curve] = []
        for tag, row in matches[:MOST_CURVES]:
            points = [(float(step), scalars[tag]) for step, scalars in figures if tag in scalars]
            colour = row.colour or COLOURS[len(lines) % len(COLOURS)]
            lines.append((row.curve or tag.partition("/")[2], colour, *zip(*points, strict=True)))
        if drawn := line_chart(lines):
            more = f" (the first {MOST_CURVES} of {len(matches):,})" if len(matches) > MOST_CURVES else ""
            yield title + more, drawn


def line_chart(lines: Sequence[Curve]) -> dict[str, Any]:
    """What the macro `lines` of pages/parts.html draws: curves over steps; empty without two steps.

    Each point has a text, which the browser shows under the pointer.
    """
    averaged = [(label, colour, _averaged(x), _averaged(y)) for label, colour, x, y in lines]
    steps = [step for *_, x, _ in averaged for step in x]
    values = [value for *_, y in averaged for value in y]
    if len(set(steps)) < 2:
        return {}
    low, high = min(values), max(values)
    margin = 0.04 * (high - low) or abs(high) / 10 or 1.0
    x_place, x_ticks = _axis(min(steps), max(steps), LEFT, RIGHT, whole=True)
    y_place, y_ticks = _axis(low - margin, high + margin, BOTTOM, TOP, whole=False)
    curves = [
        {
            "label": label,
            "colour": colour,
            "points": [
                (x_place(step), y_place(value), f"step {step:,.0f}: {value:.4g}")
                for step, value in zip(x, y, strict=True)
            ],
        }
        for label, colour, x, y in averaged
    ]
    return {"curves": curves, "x_ticks": x_ticks, "y_ticks": y_ticks, "left": LEFT, "right": RIGHT}


def _axis(low: float, high: float, start: int, end: int, *, whole: bool) -> tuple[Any, list[tuple[float, str]]]:
    """The place of a value on an axis from `start` to `end`, and its ticks: multiples of 1, 2 or 5 times 10^n."""

    def place(value: float) -> float:
        return round(start + (value - low) / (high - low) * (end - start), 1)

    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(power * by for by in (1, 2, 5, 10) if power * by * 5 >= high - low)
    step = max(1.0, step) if whole else step
    ticks = [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return place, [(place(tick), f"{tick:,.0f}" if whole else f"{tick:.4g}") for tick in ticks]


def _averaged(values: Sequence[float]) -> list[float]:
    """The means of at most `CURVE_POINTS` parts of the values."""
    return [float(part.mean()) for part in np.array_split(np.asarray(values, float), min(CURVE_POINTS, len(values)))]


def charts_of_predictions(predictions: Predictions) -> Iterator[tuple[str, str]]:
    if predictions.targets == LABELS and predictions.curves:
        yield "Precision over recall", pictures.precision_over_recall(predictions)
    for value, name in enumerate(predictions.names[: min(MOST_CURVES, len(predictions.points))]):
        title = "Predicted against true" + f": {name}" * (len(predictions.names) > 1)
        yield title, pictures.against_true(predictions, value)
