"""The charts of a run's page: its figures by step, and its predictions."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from lockstep.core.figures import Figures, Predictions, finite
from lockstep.core.model_card import LABELS
from lockstep.core.monitor import METRIC
from lockstep.core.run import Run
from lockstep.telemetry import pictures
from lockstep.telemetry.pictures import COLOURS

SHOWN = 20  # curves of a chart, and charts of single figures
OWN = "(?!acc/|cpu/|gpu/|loss/|metric/|optim/|perf/|test/)"  # the beginning of the tags that a task has named
Curves = Mapping[str, tuple[str, str]]  # for each tag, or beginning of tags, the label and the colour of its curve
VAL, TRAIN, OTHER = COLOURS[0], COLOURS[1], COLOURS[-1]
CURVES: dict[str, Curves] = {
    "Loss": {
        "loss/train$": ("training", "#f3b98c"),
        "loss/train_epoch": ("training, epoch so far", TRAIN),
        "loss/val$": ("validation", VAL),
        "loss/val_ema": ("validation, averaged weights", COLOURS[2]),
    },
    "Accuracy, %": {
        "acc/train_epoch_top1": ("training, epoch so far", TRAIN),
        "acc/val_top1": ("validation", VAL),
        "acc/val_top5": ("validation, top-5", "#9ab8dd"),
        "acc/val_ema_top1": ("validation, averaged weights", COLOURS[2]),
    },
}
USAGE: dict[str, Curves] = {
    "Images per second": {"perf/img_per_s": ("", OTHER)},
    "Waiting for data, %": {"perf/data_wait_pct": ("", OTHER)},
    "Model FLOPs utilisation, %": {"perf/mfu_pct": ("", OTHER)},
    "GPU utilisation, %": {"gpu/util/": ("", "")},
    "GPU memory, GB": {"gpu/mem_gb/": ("", "")},
    "GPU power, W": {"gpu/power_w/": ("", "")},
}


def learning_titles(run: Run) -> dict[str, Curves]:
    """The charts of a run, as `CURVES`: a monitored metric comes first, and the learning rate last.

    A metric that leaves the range from -1 to 1 has a chart of its own, as has each figure of a task.
    """
    largest: dict[str, float] = {}
    for _, scalars in run.figures:
        largest |= {tag: max(abs(value), largest.get(tag, 0.0)) for tag, value in finite(scalars).items()}
    metrics = [tag for tag in largest if re.fullmatch(METRIC + "[^/]*", tag)]
    first = [tag for tag in run.monitor.tags if tag in largest and tag.startswith(METRIC)]
    alone = [tag for tag in metrics if largest[tag] > 1] + [tag for tag in largest if re.match(OWN, tag)]
    together = [tag for tag in metrics if tag not in (*first, *alone)]

    def each(tags: Sequence[str]) -> dict[str, Curves]:
        names = {tag: f"{tag.removeprefix(METRIC)}, validation" if tag.startswith(METRIC) else tag for tag in tags}
        return {names[tag]: {re.escape(tag) + "$": ("", VAL)} for tag in tags}

    several: dict[str, Curves] = {"Metrics, validation": {f"({'|'.join(map(re.escape, together))})$": ("", "")}}
    others = (several if len(together) > 1 else each(together)) | each(alone[:SHOWN])
    return each(first) | CURVES | others | {"Learning rate": {"optim/lr": ("", OTHER)}}


def charts(figures: Figures, titles: Mapping[str, Curves]) -> Iterator[tuple[str, str]]:
    """The titles and addresses of the charts that have a figure."""
    figures = [(step, finite(scalars)) for step, scalars in figures]
    tags = dict.fromkeys(tag for _, scalars in figures for tag in scalars)
    for title, patterns in titles.items():
        pairs = itertools.product(tags, patterns.items())
        matches = [(tag, *style) for tag, (pattern, style) in pairs if re.match(pattern, tag)]
        lines: list[pictures.Curve] = []
        for tag, label, colour in matches[:SHOWN]:
            points = [(float(step), scalars[tag]) for step, scalars in figures if tag in scalars]
            colour = colour or COLOURS[len(lines) % len(COLOURS)]
            lines.append((label or tag.partition("/")[2], colour, *zip(*points, strict=True)))
        if lines:
            more = f" (the first {SHOWN} of {len(matches):,})" if len(matches) > SHOWN else ""
            yield title + more, pictures.curves(lines)


def charts_of_predictions(predictions: Predictions) -> Iterator[tuple[str, str]]:
    """The charts of labels and of values."""
    if predictions.targets == LABELS and predictions.curves:
        yield "Precision over recall", pictures.precision_over_recall(predictions)
    for value, name in enumerate(predictions.names[: min(SHOWN, len(predictions.points))]):
        title = "Predicted against true" + f": {name}" * (len(predictions.names) > 1)
        yield title, pictures.drawn(pictures.against_true(predictions, value), 4.4, 4.4)
