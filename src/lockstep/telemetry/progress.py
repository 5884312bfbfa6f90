"""Lines of figures, no wider than the terminal; and with them the progress of commands other than training."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from stat import S_ISFIFO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lockstep.core import console, log

SILENCE_S = 30.0  # the longest time without a line, if the output is not a terminal
BAR_GAP = "  "
ALWAYS = 9  # the priority of a column that is never dropped
SHORTEST_BAR, LONGEST_BAR = 10, 24  # with the gap behind it


@dataclass(frozen=True)
class FigureColumn:
    """A figure with its name in front and its unit behind.

    Fields:
        priority: on a narrow terminal, columns with a low priority are dropped first.
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


def in_line(columns: Sequence[FigureColumn], width: int | None) -> Text:
    """The columns in one line. The ones with the lowest priority are dropped until it has `width` cells at most."""
    shown = list(columns)
    while True:
        line = Text(BAR_GAP).join(column.text() for column in shown)
        least_important = min(shown, key=lambda column: column.priority)
        if width is None or line.cell_len <= width or least_important.priority == ALWAYS:
            return line
        shown.remove(least_important)


def bar(share: float, room: int, *, unicode: bool) -> Text:
    """A bar that is filled to `share`, with a gap behind it; empty if there is too little space."""
    if room < SHORTEST_BAR:
        return Text()
    width = min(LONGEST_BAR, room) - len(BAR_GAP)
    done = round(share * width)
    filled, empty = ("━", "─") if unicode else ("#", "-")  # two characters: there may be no colours
    return Text.assemble((filled * done, "cyan"), (empty * (width - done), "bright_black"), BAR_GAP)


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


class Work:
    """A piece of work in a word, such as `evaluating`; `total` is the number of its items, if it is known."""

    def __init__(self, activity: str, total: int | None) -> None:
        self.activity, self.total = activity, total
        self.done, self.began = 0, time.monotonic()

    def advance(self, items: int = 1) -> None:
        self.done += items

    def text(self) -> Text:
        passed = time.monotonic() - self.began
        if self.total is None:
            return FigureColumn(self.activity, format_duration(passed), "", ALWAYS).text()
        left = format_duration(passed / self.done * (self.total - self.done)) if self.done else "?"
        count = f"{self.done:>{len(f'{self.total:,}')},}/{self.total:,}"
        return in_line([FigureColumn(self.activity, count, "", ALWAYS), FigureColumn("left", left, "", ALWAYS)], None)

    def with_bar(self, console: Console) -> Text:
        line = self.text()
        if not self.total:
            return line
        room = console.width - 1 - line.cell_len
        return Text.assemble(bar(self.done / self.total, room, unicode=console.encoding.startswith("utf")), line)


@contextmanager
def progress(activity: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show the progress of a piece of work during the context. Call the function that it yields with finished items.

    The results of the command go to standard output. If that is not a terminal, the progress goes to standard error.
    On a terminal it is a moving line, unless the results go to a program that may write there too (`| head`);
    otherwise it is a new line every `SILENCE_S` seconds.
    """
    work = Work(activity, total)
    errors = console.Terminal(stderr=True, highlight=False)
    moves_beside = log.has_terminal("stderr") and not S_ISFIFO(os.fstat(1).st_mode)
    if log.has_terminal() or moves_beside:
        terminal = console.terminal if log.has_terminal() else errors
        with Live(
            get_renderable=lambda: work.with_bar(terminal),
            console=terminal,
            transient=True,
            refresh_per_second=4,
            redirect_stdout=False,  # what is printed may go to a file
            redirect_stderr=False,
        ):
            yield work.advance
        return
    ended = threading.Event()

    def show_lines() -> None:
        while not ended.wait(SILENCE_S):
            errors.print(work.text(), soft_wrap=True)

    watcher = threading.Thread(target=show_lines, name="progress", daemon=True)
    watcher.start()
    try:
        yield work.advance
    finally:
        ended.set()
        watcher.join()


@contextmanager
def loading() -> Iterator[None]:
    """Show that torch is being imported, which takes seconds, unless it was imported before."""
    if "torch" in sys.modules:
        yield
    else:
        with progress("loading torch"):
            yield
