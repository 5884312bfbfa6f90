"""The figures of a run, a row each: their tags, their words, and where they are shown; and the one that decides.

Pages, TensorBoard's charts, `metrics.csv`, tables of runs and the terminal read this table, and the code that logs a
figure names it by its tag here. Figures of metrics begin with `METRIC`; other options name their own ones.

The monitor is the figure of an evaluation that decides which weights, job or trial is better: `loss`, `top1`, `top5`,
a metric (`f1`) or one of its classes (`recall/defect`), with a minus if less is better. Imports no torch.
"""

import math
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self, TypeVar

from lockstep.core.errors import as_unicode

T = TypeVar("T")

TRAIN_LOSS, EPOCH_LOSS, VAL_LOSS = "loss/train", "loss/train_epoch", "loss/val"
TRAIN_TOP1, EPOCH_TOP1, VAL_TOP1, VAL_TOP5 = "acc/train_top1", "acc/train_epoch_top1", "acc/val_top1", "acc/val_top5"
LEARNING_RATE, GRAD_NORM, SCALE = "optim/lr", "optim/grad_norm", "optim/scale"
RATE, WAIT, STEP_MS, MFU, TIME = "perf/img_per_s", "perf/data_wait_pct", "perf/step_ms", "perf/mfu_pct", "perf/time/"
ACCURACY, METRIC, TEST, CPU, GPU = "acc/", "metric/", "test/", "cpu/", "gpu/"  # the beginnings of several tags

# The category of the charts in TensorBoard, by the beginning of a tag. Tags of options begin in another way.
PAGES = {"loss": "Learning", "acc": "Learning", "metric": "Learning", "test": "", "perf": "Throughput"}
PAGES |= {"cpu": "CPU", "gpu": "GPU", "optim": "Optimisation"}
# The names of the figures of an evaluation that are no metrics, and of one that `lockstep evaluate` adds.
LOSS, TOP1, TOP5, CALIBRATION_ERROR = "loss", "top1", "top5", "calibration_error"
BLUE, ORANGE, GREEN, DARK_GREY = "#1f5fb4", "#d95f02", "#1b9e77", "#666666"
SO_FAR, AVERAGE = "training, epoch so far", "validation, averaged weights"


@dataclass(frozen=True)
class Figure:
    """A row of the table.

    Fields:
        tag: its tag in `metrics.jsonl`. At the end of one with `/` comes a part of the time, a class or a local rank.
        words, unit: the title of its chart.
        column: its name in `metrics.csv`.
        curve, colour: the label and the colour of its curve on the run's page. No colour is the next of the palette;
            with None, the page does not have it.
        delay: by how many steps it is later than its step: an evaluation follows its step, a test all evaluations.
    """

    tag: str
    words: str
    unit: str = ""
    column: str = ""
    curve: str = ""
    colour: str | None = None
    delay: float = 0.0

    @property
    def page(self) -> str:
        """The category of its chart; empty without one."""
        return PAGES[self.tag.partition("/")[0]]

    @property
    def title(self) -> str:
        return f"{self.words}, {self.unit}" if self.unit else self.words

    def covers(self, tag: str) -> bool:
        return tag.startswith(self.tag) if self.tag.endswith("/") else tag == self.tag


FIGURES = (
    Figure(TRAIN_LOSS, "Loss", curve="training", colour="#f3b98c"),
    Figure(EPOCH_LOSS, "Loss", column="train_loss", curve=SO_FAR, colour=ORANGE, delay=0.5),
    Figure(TRAIN_TOP1, "Accuracy", "%"),
    Figure(EPOCH_TOP1, "Accuracy", "%", "train_top1", SO_FAR, ORANGE),
    Figure(VAL_LOSS, "Loss", column="val_loss", curve="validation", colour=BLUE, delay=0.5),
    Figure(VAL_TOP1, "Accuracy", "%", "val_top1", "validation", BLUE),
    Figure(VAL_TOP5, "Accuracy", "%", "val_top5", "validation, top-5", "#9ab8dd"),
    Figure("loss/val_ema", "Loss", curve=AVERAGE, colour=GREEN, delay=0.5),
    Figure("acc/val_ema_top1", "Accuracy", "%", "val_ema_top1", AVERAGE, GREEN),
    Figure("acc/val_ema_top5", "Accuracy", "%"),
    Figure(METRIC, "Metrics"),
    Figure(TEST, "Test", delay=0.75),
    Figure(LEARNING_RATE, "Learning rate", column="lr", colour=DARK_GREY),
    Figure(GRAD_NORM, "Gradient norm"),
    Figure(SCALE, "Loss scale"),
    Figure(RATE, "Images per second", column="img_per_s"),
    Figure(WAIT, "Waiting for data", "%", "data_wait_pct"),
    Figure(STEP_MS, "Step", "ms"),
    Figure(TIME, "Where the time goes", "%", delay=0.5),
    Figure(MFU, "Model FLOPs utilisation", "%", colour=DARK_GREY),
    Figure(CPU + "cores", "CPU cores in use"),
    Figure(CPU + "mem_gb", "CPU memory", "GB"),
    Figure(CPU + "power_w", "CPU power", "W"),
    Figure(CPU + "read_mb_s", "CPU read", "MB/s"),
    Figure(CPU + "write_mb_s", "CPU written", "MB/s"),
    Figure(GPU + "util/", "GPU utilisation", "%", colour=""),
    Figure(GPU + "mem_gb/", "GPU memory", "GB", colour=""),
    Figure(GPU + "power_w/", "GPU power", "W", colour=""),
    Figure(GPU + "temp_c/", "GPU temperature", "°C"),
    Figure(GPU + "sm/", "GPU clock", "MHz"),
    Figure(GPU + "slowed/", "GPU slowed by heat or the power limit", "share of the time"),
    Figure(GPU + "sm_active/", "GPU multiprocessors at work", "%"),
    Figure(GPU + "tensor_active/", "GPU tensor cores at work", "%"),
    Figure(GPU + "memory_active/", "GPU memory at work", "%"),
)
TAGS = {LOSS: VAL_LOSS, TOP1: VAL_TOP1, TOP5: VAL_TOP5}
AVERAGED = {name: tag.replace("val", "val_ema") for name, tag in TAGS.items()}  # of the averaged weights
SEVERAL = 10  # classes, for a metric that is built only to see which score is better
PERCENT = {TOP1: "top-1", TOP5: "top-5", CALIBRATION_ERROR: "calibration error"}  # in words, by name


def part_words(part: str) -> str:
    """A part of the time of a run (`TIME`) in words."""
    return "waiting for data" if part == "data" else part.replace("_", " ")


class Direction(StrEnum):
    """Which score is better: the larger or the smaller one."""

    maximize = "maximize"
    minimize = "minimize"

    def gain(self, score: float) -> float:
        """A score as a number that is larger for a better one."""
        return score if self is Direction.maximize else -score


Directions = Mapping[str, Direction]  # by the tag of a figure; `metric/recall` also stands for its classes


@dataclass(frozen=True)
class Monitor:
    name: str = TOP1
    direction: Direction = Direction.maximize

    @classmethod
    def parse(cls, text: str) -> Self:
        """The monitor that `str` has written."""
        return cls(text.removeprefix("-"), Direction.minimize if text.startswith("-") else Direction.maximize)

    def __str__(self) -> str:
        return "-" * (self.direction is Direction.minimize) + self.name

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of the figure in `metrics.jsonl`; the first one that an evaluation has decides."""
        name = self.name
        return (AVERAGED[name], TAGS[name]) if name in TAGS else (METRIC + name,)

    def value_in(self, figures: Mapping[str, float | None]) -> float | None:
        """The value that decides among the figures of an evaluation, by tag; None if they have none."""
        return next((value for tag in self.tags if (value := figures.get(tag)) is not None), None)

    def gain(self, value: float | None) -> float | None:
        """A value as a number that is larger for a better one; None without a value."""
        return None if value is None or math.isnan(value) else self.direction.gain(value)


def monitor_of(text: str, usual: str, metrics: Mapping[str, Any]) -> Monitor:
    """The monitor that the key `monitor` names; `usual` is `Task.monitor`, `metrics` are a job's metrics by name."""
    monitor = Monitor.parse(usual if text == "auto" else text)
    metric = metrics.get(monitor.name.partition("/")[0])
    falls = monitor.name == LOSS if metric is None else direction_of(metric) is Direction.minimize
    return Monitor(monitor.name, Direction.minimize) if falls else monitor


def direction_of(metric: Any) -> Direction:
    """Which score of a metric is better, as its option says, or else what it builds: torchmetrics' metrics do."""
    higher_is_better: bool | None = metric.higher_is_better
    if higher_is_better is None:
        with suppress(Exception):  # it may be for other numbers of classes; if it is wrong, its job will say so
            higher_is_better = getattr(metric.build(SEVERAL), "higher_is_better", None)
    return Direction.minimize if higher_is_better is False else Direction.maximize


def job_directions(
    monitor: Monitor, counted: Iterable[str], metrics: Mapping[str, Any], figures: Directions
) -> dict[str, Direction]:
    """The directions of the figures of a job: of its task's `counted` scores, its metrics, and options' `figures`."""
    return {
        VAL_LOSS: Direction.minimize,
        **dict.fromkeys(tagged(dict.fromkeys(counted, 0.0)), Direction.maximize),
        **{as_unicode(METRIC + name): direction_of(metric) for name, metric in metrics.items()},
        **figures,
        monitor.tags[-1]: monitor.direction,
    }


def direction_in(directions: Directions, name: str) -> Direction | None:
    """The direction of a figure by its name, its tag or a monitor, also on the test split; None for anything else."""
    if name.startswith("-"):
        return Direction.minimize
    name = name.removeprefix(TEST).replace("val_ema", "val")
    tags = TAGS.get(name, name), METRIC + name
    keys = (key for tag in tags for key in (tag, "/".join(tag.split("/")[:2])))
    return next((directions[key] for key in keys if key in directions), None)


def name_of_tag(tag: str) -> str:
    """The name of a figure of an evaluation, by its tag or a monitor; anything else is its own name."""
    tag = tag.removeprefix("-")
    return next((name for name, other in TAGS.items() if other == tag), tag.removeprefix(METRIC))


def tagged(figures: Mapping[str, float], *, averaged: bool = False) -> dict[str, float]:
    """The figures of an evaluation by tag; `averaged` is whether the averaged weights were evaluated."""
    tags = AVERAGED if averaged else TAGS
    return {as_unicode(tags.get(name, METRIC + name)): value for name, value in figures.items()}


def chosen_on_itself(keys: Container[str]) -> str:
    """What is true of a score without a test split, with the override that gives one to data with these keys."""
    key = next((key for key in ("test_share", "val_share") if key in keys), None)
    override = "" if key is None else f" (dataset.{key}=0.1)"
    return f"the score was chosen on the split that it is measured on; a test split gives an honest one{override}"


def telling(figures: Mapping[str, T], classes: int | None) -> dict[str, T]:
    """Figures by name, or tag, without the top-5 of a few classes, which is always 100 %. None: it is not known."""
    says_nothing = classes is not None and classes <= 5
    return {name: value for name, value in figures.items() if not (says_nothing and name_of_tag(name) == TOP5)}


def figure_name(name: str) -> str:
    """A figure of an evaluation in words: `val top-1`, `val loss`, `val f1`."""
    return "val " + figure_word(name)


def figure_word(name: str) -> str:
    """A figure of any split in words."""
    return PERCENT.get(name, name)


def figure_parts(name: str, value: float) -> tuple[str, str]:
    """The number and the unit of a figure."""
    return (f"{value:.2f}", " %") if name in PERCENT else (f"{value:.4g}", "")


def figure_text(name: str, value: float, spread: float | None = None) -> str:
    """A figure of an evaluation with its name and its unit: `98.61 % top-1`, `loss 0.0421`, `98.6 ± 0.1 % f1`."""
    number, unit = figure_parts(name, value)
    number += "" if spread is None else f" ± {figure_parts(name, spread)[0]}"
    return f"{number}{unit} {figure_word(name)}" if unit else f"{figure_word(name)} {number}"
