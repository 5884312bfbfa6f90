"""Lines of figures in aligned columns, no wider than the terminal."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from rich.text import Text

from lockstep.telemetry.window import Window

GAP = "  "
ALWAYS = 9  # the priority of a column that is never left out
SHORTEST_BAR, LONGEST_BAR = 10, 24  # with the gap behind it


@dataclass(frozen=True)
class FigureColumn:
    """A figure with its name in front and its unit behind.

    Fields:
        priority: on a narrow terminal, columns with a low priority are left out first.
        style: the style of the figure and its unit.
    """

    name: str
    figure: str
    unit: str
    priority: int
    style: str = ""

    def text(self) -> Text:
        gap = " " * bool(self.name and self.figure)
        return Text.assemble(self.name, gap, (self.figure + self.unit, self.style))


class Columns:
    """Pads the figures of a column to the width of its widest figure so far."""

    def __init__(self) -> None:
        self.widths: Counter[str] = Counter()

    def aligned(self, columns: Sequence[FigureColumn]) -> list[FigureColumn]:
        for column in columns:
            self.widths[column.name] = max(self.widths[column.name], len(column.figure))
        return [replace(column, figure=column.figure.rjust(self.widths[column.name])) for column in columns]


def figures(window: Window) -> list[FigureColumn]:
    return [
        FigureColumn("loss", f"{window.loss:.4f}".replace("nan", "-"), "", 4),
        FigureColumn("top-1", f"{window.top1:5.1f}".replace("nan", "-"), " %", 2),
        FigureColumn("", f"{window.rate:6,.0f}", " img/s", 4),
        FigureColumn("wait", f"{window.wait_share:3.0f}", " %", 0),
    ]


def fitting(columns: Sequence[FigureColumn], width: int | None) -> Text:
    """The columns in one line. Those of the lowest priority are left out until it has `width` cells at most."""
    shown = list(columns)
    while True:
        line = Text(GAP).join(column.text() for column in shown)
        least_important = min(shown, key=lambda column: column.priority)
        if width is None or line.cell_len <= width or least_important.priority == ALWAYS:
            return line
        shown.remove(least_important)


def bar(share: float, room: int, *, unicode: bool) -> Text:
    """A bar that is filled to `share`, with a gap behind it; empty if there is too little room."""
    if room < SHORTEST_BAR:
        return Text()
    width = min(LONGEST_BAR, room) - len(GAP)
    done = round(share * width)
    filled, empty = ("━", "─") if unicode else ("#", "-")  # two characters: there may be no colours
    return Text.assemble((filled * done, "cyan"), (empty * (width - done), "bright_black"), GAP)


def format_timestamp(seconds: float) -> str:
    """Seconds since 1970 as a date and a time; empty for 0, and for what a damaged file has in their place."""
    with suppress(OverflowError, OSError, ValueError):
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)) if seconds else ""
    return ""


def format_duration(seconds: float) -> str:
    """Seconds as h:mm:ss, or m:ss if less than an hour."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"
