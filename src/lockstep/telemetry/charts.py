"""Charts for reports, ladders and `lr-find` as SVG, drawn by matplotlib, which takes 0.4 s to import."""

import base64
import io
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lockstep.core.errors import escaped

POINTS = 400  # of a curve: more are averaged
LINE_HEIGHT = 0.05  # of a label, as a share of an axis
COLOURS = ("#1f5fb4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#666666")
STYLE: Any = {
    # A class may be called `$x$`. The browser draws the letters, so it needs no outlines of them.
    "text.parse_math": False,
    "axes.formatter.use_mathtext": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "lockstep",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
Curve = tuple[str, str, Sequence[float], Sequence[float]]  # its label and colour, x and y


def drawn(draw: Callable[[Any], None], width: float = 4.4, height: float = 2.6) -> str:
    """The address of the picture `svg`: a page that shows it runs nothing that is in it."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg(draw, width, height)).decode()}"


def svg(draw: Callable[[Any], None], width: float, height: float) -> bytes:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of a home that cannot be written
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that its font does not have; those of the browser have them
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(axes := figure.subplots())
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":  # the formatter of matplotlib writes TeX, which is not parsed here
                axis.set_major_formatter(LogFormatter())
                axis.set_minor_formatter(LogFormatter())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().encode(errors="backslashreplace")


def curves(lines: Sequence[Curve]) -> str:
    def draw(axes: Any) -> None:
        for label, colour, x, y in lines:
            axes.plot(_averaged(x), _averaged(y), color=colour, marker="." * (len(y) < 30), label=cut(label, 40))
        axes.set_xlabel("step")
        if len(lines) > 1:
            axes.legend(frameon=False)

    return drawn(draw)


def _averaged(values: Sequence[float]) -> list[float]:
    """The means of at most `POINTS` parts of the values."""
    parts = np.array_split(np.asarray(values, float), min(POINTS, len(values)))
    return [float(part.mean()) for part in parts]


def scatter(x: Sequence[float], y: Sequence[float], labels: Sequence[str], x_label: str, y_label: str) -> str:
    """Points with their labels. A label that would be over an earlier one is left out."""

    def draw(axes: Any) -> None:
        axes.scatter(x, y, color=COLOURS[0])
        spans = [(max(values) - min(values)) * LINE_HEIGHT or 1.0 for values in (x, y)]
        labelled: set[tuple[int, ...]] = set()  # the fields of a grid that have a label
        for *point, label in zip(x, y, labels, strict=True):
            field = tuple(math.floor(value / span) for value, span in zip(point, spans, strict=True))
            if labelled.isdisjoint((field[0] + right, field[1] + up) for right in (-1, 0, 1) for up in (-1, 0, 1)):
                labelled.add(field)
                axes.annotate(cut(label), point, size=7, xytext=(3, 3), textcoords="offset points")
        axes.set(xlabel=x_label, ylabel=y_label)

    return drawn(draw)


def parallel(columns: Sequence[str], rows: Sequence[Sequence[str | float]], colours: Sequence[float]) -> str:
    """Parallel coordinates: a line for each row over the columns, the darker the greater its figure of `colours`.

    A column of numbers is a scale, logarithmic if they span more than 50 times; of texts, each has its own height.
    A label that would be over a higher one is left out.
    """
    values = [
        sorted({*column}, key=lambda value: (isinstance(value, str), value)) for column in zip(*rows, strict=True)
    ]

    def height(column: int, value: Any) -> float:
        of = values[column]
        if any(isinstance(other, str) for other in of):
            return of.index(value) / max(1, len(of) - 1)
        low, at, high = (math.log(x) if of[0] > 0 and of[-1] > 50 * of[0] else x for x in (of[0], value, of[-1]))
        return (at - low) / ((high - low) or 1)

    def draw(axes: Any) -> None:
        least, span = min(colours), (max(colours) - min(colours)) or 1.0
        for row, colour in sorted(zip(rows, colours, strict=True), key=lambda pair: pair[1]):
            share = (colour - least) / span
            heights = [height(column, value) for column, value in enumerate(row)]
            axes.plot(heights, color=(0.75 - 0.65 * share, 0.8 - 0.5 * share, 0.9 - 0.3 * share))
        for column, of in enumerate(values):
            axes.axvline(column, color="black", linewidth=0.8)
            lowest = math.inf
            for value in reversed(of if len(of) <= 4 or isinstance(of[-1], str) else (of[0], of[-1])):
                if lowest - (at := height(column, value)) > LINE_HEIGHT:
                    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
                    style: Any = {"size": 7, "textcoords": "offset points", "bbox": ground}
                    axes.annotate(cut(value), (column, at), xytext=(3, 2), **style)
                    lowest = at
        axes.set_xticks(range(len(columns)), [cut(name) for name in columns])
        axes.set(yticks=[], xlim=(-0.1, len(columns) - 0.6))
        axes.grid(visible=False)

    return drawn(draw, max(4.4, 1.4 * len(columns)), 3.2)


def cut(value: str | float, most: int = 18) -> str:
    text = escaped(value, keep="") if isinstance(value, str) else f"{value:.4g}"
    return text if len(text) <= most else f"{text[: most - 1]}…"
