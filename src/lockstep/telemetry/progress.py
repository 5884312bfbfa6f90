"""Shows the progress of a command other than training: a bar on a terminal, a line now and then elsewhere."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from stat import S_ISFIFO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lockstep.core import log
from lockstep.telemetry.columns import ALWAYS, LONGEST_BAR, FigureColumn, bar, fitting, format_duration
from lockstep.telemetry.display import SILENCE_S


class Work:
    """A piece of work in a word, such as `evaluating`, and how many of its items are done; `total` may be unknown."""

    def __init__(self, activity: str, total: int | None) -> None:
        self.activity, self.total = activity, total
        self.done, self.began = 0, time.monotonic()

    def advance(self, items: int = 1) -> None:
        self.done += items

    def text(self) -> Text:
        """The work in a word, its progress, and the time that is left or has passed."""
        passed = time.monotonic() - self.began
        if self.total is None:
            return FigureColumn(self.activity, format_duration(passed), "", ALWAYS).text()
        left = format_duration(passed / self.done * (self.total - self.done)) if self.done else "?"
        count = f"{self.done:>{len(f'{self.total:,}')},}/{self.total:,}"
        return fitting([FigureColumn(self.activity, count, "", ALWAYS), FigureColumn("left", left, "", ALWAYS)], None)

    def moving(self, console: Console) -> Text:
        """The line with a bar, in the width of a terminal."""
        line = self.text()
        if not self.total:
            return line
        room = min(LONGEST_BAR, console.width - 1 - line.cell_len)
        return Text.assemble(bar(self.done / self.total, room, unicode=console.encoding.startswith("utf")), line)


@contextmanager
def progress(activity: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show the progress of a piece of work during the context. Call the function that it yields with finished items.

    The results of the command go to standard output. If that is no terminal, the progress goes to standard error. On
    a terminal it is a moving line, unless the results go to a program that may write there too (`| head`); elsewhere
    it is a new line every `SILENCE_S` seconds.
    """
    work = Work(activity, total)
    errors = log.Terminal(stderr=True, highlight=False)
    console = log.console if log.has_terminal() else errors
    moves_beside = sys.stderr.isatty() and not errors.is_dumb_terminal and not S_ISFIFO(os.fstat(1).st_mode)
    if console is log.console or moves_beside:
        with Live(
            get_renderable=lambda: work.moving(console),
            console=console,
            transient=True,
            refresh_per_second=4,
            redirect_stdout=False,  # what is printed may go to a file
            redirect_stderr=False,
        ):
            yield work.advance
        return
    ended = threading.Event()
    watcher = threading.Thread(target=_lines, args=(work, ended, errors), name="progress", daemon=True)
    watcher.start()
    try:
        yield work.advance
    finally:
        ended.set()
        watcher.join()


def _lines(work: Work, ended: threading.Event, console: Console) -> None:
    while not ended.wait(SILENCE_S):
        console.print(work.text(), soft_wrap=True)
