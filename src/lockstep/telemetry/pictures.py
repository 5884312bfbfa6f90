"""Pictures of figures, images and predictions.

Charts of predictions, sweeps, ladders and `lr-find` are SVG, drawn by matplotlib, which takes 0.4 s to import. Images
in a grid and a confusion matrix are PNG, drawn in milliseconds.
"""

import base64
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from io import BytesIO, StringIO
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from lockstep.core.errors import escaped, percent
from lockstep.core.figures import Predictions
from lockstep.core.model_card import VALUES
from lockstep.core.tags import BLUE, DARK_GREY, GREEN, ORANGE

LINE_HEIGHT = 0.05  # of a label, as a share of an axis
LABELLED = 10  # points
COLOURS = (BLUE, ORANGE, GREEN, "#7570b3", "#e7298a", "#66a61e", "#e6ab02", DARK_GREY)
BEST_COLOUR = ORANGE  # marks the best job of a sweep
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
LINE = 13  # pixels of a line of text
GRID_PIXELS = 480  # pixels across a grid of small images; TensorBoard shows 300 without clicking
MOST_WITH_COUNTS = 20  # the most classes in a confusion matrix with names and counts
CELL, LONGEST_TITLE = 24, 80  # pixels of a cell with a count, and the most of a name
_MEASURE = ImageDraw.Draw(Image.new("1", (1, 1)))  # measures texts


def drawn(draw: Callable[[Any], None], width: float = 4.4, height: float = 2.6) -> str:
    """The address of the picture `svg`: a page that shows it runs nothing that is in it."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg(draw, width, height)).decode()}"


def svg(draw: Callable[[Any], None], width: float, height: float) -> bytes:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of a home that cannot be written
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about letters that its font lacks; the browser's fonts have them
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(axes := figure.subplots())
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":  # the formatter of matplotlib writes TeX, which is not parsed here
                axis.set_major_formatter(LogFormatter())
                axis.set_minor_formatter(LogFormatter())
        figure.savefig(text := StringIO(), format="svg", metadata={"Date": None})
    return text.getvalue().encode(errors="backslashreplace")


def scatter(x: Sequence[float], y: Sequence[float], labels: Sequence[str], x_label: str, y_label: str) -> str:
    """Points, the first one marked, and the labels of the first `LABELLED`."""

    def draw(axes: Any) -> None:
        axes.scatter(x, y, color=[BEST_COLOUR] + [COLOURS[0]] * (len(x) - 1))
        for *point, label in [*zip(x, y, labels, strict=True)][:LABELLED]:
            axes.annotate(shorten(label), point, size=7, xytext=(3, 3), textcoords="offset points")
        axes.set(xlabel=x_label, ylabel=y_label)

    return drawn(draw)


def against_true(predictions: Predictions, value: int) -> str:
    """The predictions of one of the values over the true ones, with the line on which they are equal."""

    def draw(axes: Any) -> None:
        true, predicted = (np.array(values, float) for values in predictions.points[value])  # None becomes NaN
        ends = [np.nanmin([true, predicted], initial=math.inf), np.nanmax([true, predicted], initial=-math.inf)]
        axes.plot(ends, ends, color=COLOURS[-1], linewidth=0.8)
        axes.scatter(true, predicted, color=COLOURS[0], s=9, alpha=0.6, linewidths=0)
        axes.set(xlabel="true", ylabel="predicted")

    return drawn(draw, 4.4, 4.4)


def precision_recall(counts: Sequence[Sequence[int]]) -> tuple[np.ndarray, ...]:
    """By threshold: the hits, the others that are predicted too, precision and recall, from `Predictions.curves`."""
    hits, false = np.array(counts)[:, ::-1].cumsum(1)[:, ::-1].astype(float)
    return hits, false, hits / np.maximum(hits + false, 1), hits / max(hits[0], 1)


def precision_over_recall(predictions: Predictions) -> str:
    """The curve of each label, up to the threshold above which it is never predicted."""

    def draw(axes: Any) -> None:
        for name, counts in zip(predictions.names, predictions.curves, strict=True):
            hits, false, precision, recall = precision_recall(counts)
            some = hits + false > 0
            if some.any():
                axes.plot(recall[some], precision[some], "-" if len(axes.lines) < 10 else "--", label=shorten(name))
        axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1.02), ylim=(0, 1.02))
        axes.legend(loc="lower left", ncols=2, fontsize=8.5, frameon=False)

    return drawn(draw, 4.4, 4.4)


def parallel(columns: Sequence[str], rows: Sequence[Sequence[str | float]], colours: Sequence[float]) -> str:
    """Parallel coordinates: a line for each row over the columns, the darker the greater its figure of `colours`.

    The greatest is marked, of equal ones the first. A column of numbers is a scale, logarithmic if they span four
    times or more and are not in the last column, the score; each text has its own height. A label that would overlap
    a higher one is omitted.
    """
    values = [
        sorted({*column}, key=lambda value: (isinstance(value, str), value)) for column in zip(*rows, strict=True)
    ]

    def height(column: int, value: Any) -> float:
        of = values[column]
        if any(isinstance(other, str) for other in of):
            return of.index(value) / max(1, len(of) - 1)
        logarithmic = column < len(columns) - 1 and of[0] > 0 and of[-1] >= 4 * of[0]
        low, at, high = (math.log(x) if logarithmic else x for x in (of[0], value, of[-1]))
        return (at - low) / ((high - low) or 1)

    def draw(axes: Any) -> None:
        least, span = min(colours), (max(colours) - min(colours)) or 1.0
        ascending = sorted(range(len(rows)), key=lambda row: (colours[row], -row))
        for row in ascending:
            share = (colours[row] - least) / span
            heights = [height(column, value) for column, value in enumerate(rows[row])]
            shade = (0.75 - 0.65 * share, 0.8 - 0.5 * share, 0.9 - 0.3 * share)
            axes.plot(heights, color=BEST_COLOUR if row == ascending[-1] else shade)
        for column, of in enumerate(values):
            axes.axvline(column, color="black", linewidth=0.8)
            lowest = math.inf
            for value in reversed(of if len(of) <= 4 or isinstance(of[-1], str) else (of[0], of[-1])):
                if lowest - (at := height(column, value)) > LINE_HEIGHT:
                    ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
                    style: Any = {"size": 7, "textcoords": "offset points", "bbox": ground}
                    axes.annotate(shorten(value), (column, at), xytext=(3, 2), **style)
                    lowest = at
        axes.set_xticks(range(len(columns)), [shorten(name) for name in columns])
        axes.set(yticks=[], xlim=(-0.1, len(columns) - 0.6))
        axes.grid(visible=False)

    return drawn(draw, max(4.4, 1.4 * len(columns)), 3.2)


def shorten(value: str | float, most: int = 18) -> str:
    text = escaped(value, keep="") if isinstance(value, str) else f"{value:.4g}"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def sheet(
    images: Sequence[np.ndarray | None] | np.ndarray,
    captions: Sequence[str] = (),
    columns: int = 4,
    *,
    heads: Sequence[str] = (),
    least: int = 0,
) -> bytes:
    """Images uint8 (C, H, W) in rows as PNG, with the lines of its caption below each; None leaves a field empty.

    Small images are enlarged to fill the page, or to `least` pixels. `heads` are texts above the columns.
    """
    tiles = [None if image is None else as_image(image) for image in images]
    size = next(tile.size for tile in tiles if tile is not None)
    factor = -(-(least or GRID_PIXELS // columns) // max(size))
    width, height = (side * factor for side in size)
    lines = max((text.count("\n") + 1 for text in captions), default=0)
    top, step = (LINE + 4) * bool(heads), height + 4 + LINE * lines
    rows = math.ceil(len(tiles) / columns)
    page = Image.new("RGB", ((width + 4) * min(columns, len(tiles)), top + step * rows), "white")
    draw = ImageDraw.Draw(page)
    for column, head in enumerate(heads):
        draw.text((column * (width + 4), 0), head, fill="black")
    for number, tile in enumerate(tiles):
        if tile is None:
            continue
        x, y = number % columns * (width + 4), top + number // columns * step
        page.paste(tile.resize((width, height), Image.Resampling.NEAREST), (x, y))
        for line, text in enumerate(captions[number].split("\n") if captions else ()):
            draw.text((x, y + height + LINE * line), _fitting(text, width), fill="black")
    return _png(page)


def worst(predictions: Predictions) -> bytes:
    """The examples with the highest losses: what each is, and what the model says."""
    images, captions = [], []
    for example in predictions.worst:
        with Image.open(BytesIO(base64.b64decode(example["png"]))) as image:
            images.append(np.asarray(image.convert("RGB")).transpose(2, 0, 1))
        share = "" if example["probability"] is None else f" ({percent(example['probability'])})"
        labels = range(len(predictions.names))
        names = [_name(predictions.names, label) if predictions.targets != VALUES else "" for label in labels]
        true, said = (predictions.in_words(example[key], names) for key in ("label", "predicted"))
        captions.append(f"is {true}\nsaid {said}{share}")
    return sheet(images, captions, columns=3)


def heat(predictions: Predictions) -> bytes:
    """The confusion matrix as PNG: a row for each true class, a column for each predicted one."""
    counts, names = np.array(predictions.confusion), predictions.names
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    named = len(names) <= MOST_WITH_COUNTS
    titles = [_fitting(_name(names, label), LONGEST_TITLE) for label in range(len(names) if named else 0)]
    # The side of the margin: a line with what the axis is, and the longest name.
    margin = LINE + 8 + max((_width(title) for title in titles), default=0)
    cell = CELL if named else max(3, 300 // len(names))
    colours = (255 - np.sqrt(shares)[..., None] * [247, 207, 148]).astype(np.uint8)
    page = Image.new("RGB", (margin + cell * len(names),) * 2, "white")
    page.paste(Image.fromarray(colours).resize((cell * len(names),) * 2, Image.Resampling.NEAREST), (margin, margin))
    draw = ImageDraw.Draw(page)
    page.paste(_text("predicted"), (margin, 2))
    page.paste(_text("true").rotate(90, expand=True), (2, margin))
    for label, title in enumerate(titles):
        at = margin + cell * label + cell // 2
        name = _text(title)
        page.paste(name, (margin - 4 - name.width, at - LINE // 2))
        page.paste(name.rotate(90, expand=True), (at - LINE // 2, margin - 4 - name.width))
        for other in np.flatnonzero(counts[label]):
            colour = "white" if shares[label, other] > 0.25 else "black"
            draw.text((margin + cell * (other + 0.5), at), str(counts[label, other]), fill=colour, anchor="mm")
    return _png(page)


def in_base64(image: np.ndarray) -> str:
    """An image uint8 (C, H, W) as PNG in base64."""
    return base64.b64encode(_png(as_image(image))).decode()


def as_image(image: np.ndarray) -> Image.Image:
    """The picture of an image uint8 (C, H, W): its first three channels, or the first one in grey."""
    return Image.fromarray(image[:3].transpose(1, 2, 0).copy() if len(image) >= 3 else image[0])


def channels_shown(channels: int) -> str:
    """Words after "images" that say which of so many channels their pictures show; empty for all."""
    return "" if channels in (1, 3) else f" (the first {'three ' * (channels > 3)}of {channels} channels)"


def _name(names: Sequence[str], label: int) -> str:
    """The name of a class; its label if the font of the pictures does not have the letters."""
    return names[label] if max(names[label], default=" ") < "\u0180" else f"class {label}"


def _fitting(text: str, width: int) -> str:
    """A text in one line, cut where the picture has no space for more."""
    text = " ".join(text.split())
    return next((short for most in range(len(text), 0, -1) if _width(short := shorten(text, most)) <= width), "")


def _width(text: str) -> int:
    return math.ceil(_MEASURE.textlength(text))


def _text(text: str) -> Image.Image:
    page = Image.new("RGB", (_width(text), LINE), "white")
    ImageDraw.Draw(page).text((0, 0), text, fill="black")
    return page


def _png(page: Image.Image) -> bytes:
    buffer = BytesIO()
    page.save(buffer, "PNG")
    return buffer.getvalue()
