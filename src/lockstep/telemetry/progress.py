"""Shows how far a command other than training is: its bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from lockstep.core import log
from lockstep.telemetry.columns import ALWAYS, LONGEST_BAR, Column, bar, clock, fitting
from lockstep.telemetry.display import SILENCE_S


class Work:
    """Something that is being done.

    Args:
        what: in a word: `evaluating`.
        total: how many items it has; None if nobody can tell before its end.
    """

    def __init__(self, what: str, total: int | None) -> None:
        self.what, self.total = what, total
        self.done, self.began = 0, time.monotonic()

    def advance(self, items: int = 1) -> None:
        """Items are done."""
        self.done += items

    def text(self) -> Text:
        """What is done, how much of it, and how long it will take or has taken."""
        passed = time.monotonic() - self.began
        if self.total is None:
            return fitting([Column(self.what, clock(passed), "", ALWAYS)], None)
        left = clock(passed / self.done * (self.total - self.done)) if self.done else "?"
        count = f"{self.done:>{len(f'{self.total:,}')},}/{self.total:,}"
        return fitting([Column(self.what, count, "", ALWAYS), Column("left", left, "", ALWAYS)], None)

    def moving(self, console: Console) -> Text:
        """The moving line, in the width of a terminal."""
        line = self.text()
        if not self.total:
            return line
        room = min(LONGEST_BAR, console.width - 1 - line.cell_len)
        return Text.assemble(bar(self.done / self.total, room, unicode=console.encoding.startswith("utf")), line)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show how far something is, in the context; what it returns is called with the number of items that are done.

    What the command prints goes to standard output, which may be a file: then the line is on standard error. It moves
    on a terminal; elsewhere it comes anew every `SILENCE_S` seconds.
    """
    work = Work(what, total)
    errors = Console(stderr=True, highlight=False)
    console = log.console if log.has_terminal() else errors
    if console is log.console or (sys.stderr.isatty() and not errors.is_dumb_terminal):
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
