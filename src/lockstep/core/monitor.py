"""The monitor: the figure of an evaluation that decides which weights, job or trial is better. Imports no torch.

A figure is `loss`, `top1`, `top5`, a metric (`f1`) or one of its classes (`recall/defect`). A monitor is written as
its name, with a minus if less is better.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from lockstep.core.errors import as_unicode

T = TypeVar("T")

TAGS = {"loss": "loss/val", "top1": "acc/val_top1", "top5": "acc/val_top5"}
AVERAGED = {name: tag.replace("val", "val_ema") for name, tag in TAGS.items()}  # of the averaged weights
METRIC, TEST = "metric/", "test/"
LOSS, TOP1 = "loss", "top1"
CALIBRATION_ERROR = "calibration_error"
PERCENT = {"top1": "top-1", "top5": "top-5", CALIBRATION_ERROR: "calibration error"}  # in words, by name
# Our metrics of which less is better, by option. A user's metric says so with `higher_is_better = False`.
LESS_IS_BETTER = {"calibration": "Calibration", "mae": "MAE", "rmse": "RMSE"}
# What `monitor=auto` is for a task, by the name of its option; the loss for a task of the user that does not say it.
USUAL = {"multiclass": TOP1, "distill": TOP1, "multilabel": "map", "regression": "-mae"}


class Direction(StrEnum):
    """Which score is better: the larger or the smaller one."""

    maximize = "maximize"
    minimize = "minimize"

    def gain(self, score: float) -> float:
        """A score as a number that is larger for a better one."""
        return score if self is Direction.maximize else -score


@dataclass(frozen=True)
class Monitor:
    name: str = TOP1
    direction: Direction = Direction.maximize

    @classmethod
    def parse(cls, text: str) -> Monitor:
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


def chosen_monitor(
    text: str, *, tasks: Iterable[str] = (), metrics: Mapping[str, str] = {}, classes: Mapping[str, type] = {}
) -> Monitor:
    """The monitor that the key `monitor` of a config names.

    `tasks` are the option of the group `task` and those from which its class derives. `metrics` has the name of the
    class of each metric of the config, by its name; any other is an option that the task adds. `classes` are the
    classes of metrics by option.
    """
    usual = next((USUAL[name] for name in tasks if name in USUAL), LOSS)
    monitor = Monitor.parse(usual if text == "auto" else text)
    less_is_better = {key: cls.__name__ for key, cls in classes.items() if not getattr(cls, "higher_is_better", True)}
    falling = {**LESS_IS_BETTER, **less_is_better}
    metric = monitor.name.partition("/")[0]
    falls = monitor.name == LOSS or metrics.get(metric, falling.get(metric)) in falling.values()
    return Monitor(monitor.name, Direction.minimize) if falls else monitor


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
    return {name: value for name, value in figures.items() if not (says_nothing and name in ("top5", TAGS["top5"]))}


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
