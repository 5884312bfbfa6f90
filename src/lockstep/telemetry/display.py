"""Shows main's progress: a bar on a terminal or in a notebook, or else a line now and then. Others show nothing."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from rich.live import Live
from rich.text import Text

from lockstep.core import console, log
from lockstep.core.plan import Plan
from lockstep.core.tags import AVERAGED, LOSS, VAL_LOSS, Monitor, figure_name, figure_parts
from lockstep.telemetry.progress import ALWAYS, SHORTEST_BAR, SILENCE_S, FigureColumn, bar, format_duration, in_line
from lockstep.telemetry.time_spent import TrainingClock
from lockstep.telemetry.window import Window

REDRAW_S = 0.5  # the least time between two states of the bar in a notebook
LINE_EVERY_S = 10.0  # the least time between two lines that are not of an evaluation
BEST_STYLE = "green"


@dataclass
class TimeLeft:
    """Estimates the time that a run still takes, at its pace so far, with evaluations and saves.

    Fields:
        first: the step from which this process continues.
        warm: the step after the first window of this process, and the seconds up to it. Later steps are the measure
            then: the first ones load libraries, and may compile the model.
    """

    plan: Plan
    clock: TrainingClock
    first: int
    warm: tuple[int, float] | None = field(default=None, init=False)

    def window_ended(self, step: int) -> None:
        if self.warm is None:
            self.warm = step, self.clock.passed()

    def seconds(self, step: int) -> float | None:
        """The seconds from the end of `step` to the end of the run; None if nothing is known of its pace."""
        begun, before = self.first, 0.0
        if self.warm is not None and step - self.warm[0] > self.warm[0] - self.first:
            begun, before = self.warm
        if step <= begun:
            return None if step < self.plan.total_steps else 0.0
        return (self.clock.passed() - before) / (step - begun) * (self.plan.total_steps - step)


class Display:
    """Shows nothing: the display of ranks other than main."""

    def advance(self, step: int, now: float) -> None:
        """Show that a step was done at `now`, a time of `time.perf_counter`."""

    def window(self, window: Window, epoch: Window | None) -> None:
        """Show the window of a log point, and the epoch so far."""

    def evaluating(self, done: int, blocks: int) -> None:
        """Show how many blocks of an evaluation are done."""

    def evaluated(self, step: int, scores: Mapping[str, float], epoch: Window | None, *, best: bool) -> None:
        """Show the scores of an evaluation, with the figures of the epoch so far; whether they are the best ones."""

    def warn(self, sentence: str) -> None:
        """Show a warning to the user."""

    def close(self) -> None:
        """Remove the display: training is over."""


class Screen(Display):
    """The base class for a terminal and a file: a line per evaluation."""

    def __init__(self, plan: Plan, left: TimeLeft, monitor: Monitor) -> None:
        self.plan, self.left, self.monitor = plan, left, monitor
        self.step = left.first
        self.stepped_at = self.shown_at = time.perf_counter()
        self.phase, self.evaluated_share = "", 0.0

    def window(self, window: Window, epoch: Window | None) -> None:
        self.left.window_ended(window.last)

    def advance(self, step: int, now: float) -> None:
        self.step, self.stepped_at = step, now

    def evaluating(self, done: int, blocks: int) -> None:
        self.phase, self.evaluated_share = f"evaluating {done}/{blocks}", done / blocks

    def evaluated(self, step: int, scores: Mapping[str, float], epoch: Window | None, *, best: bool) -> None:
        self.phase = ""
        name, style = self.monitor.name, BEST_STYLE if best else ""
        averaged = scores.get(AVERAGED.get(name, ""))
        own = "" if averaged is not None else style
        columns = [FigureColumn("val loss", f"{scores[VAL_LOSS]:.4f}", "", 2, own if name == LOSS else "")]
        if name != LOSS and (value := scores.get(self.monitor.tags[-1])) is not None:
            columns.append(FigureColumn(figure_name(name), *figure_parts(name, value), 5, own))
        if averaged is not None:
            columns.append(FigureColumn("average", *figure_parts(name, averaged), 6, style))
        self._line(step, [*(figures(epoch) if epoch else []), *columns])

    def warn(self, sentence: str) -> None:
        log.warn(sentence)

    def _line(self, step: int, columns: list[FigureColumn]) -> None:
        """Show a line. The log gets all columns, a terminal only the columns that fit."""
        self.shown_at = time.perf_counter()
        epochs = -(-self.plan.total_steps // self.plan.steps_per_epoch)
        epoch = f"{self.plan.epoch(max(1, step)) + 1:>{len(str(epochs))}}"
        position = [FigureColumn("epoch", epoch, f"/{epochs}", ALWAYS), self._position(step, 1)]
        self._show([*position, *columns, FigureColumn("left", self._left(step), "", ALWAYS)])

    def _show(self, line: Sequence[FigureColumn]) -> None:
        log.say(in_line(line, None).plain, shown=in_line(line, self._width()))

    def _position(self, step: int, priority: int) -> FigureColumn:
        total = str(self.plan.total_steps)
        return FigureColumn("step", f"{step:>{len(total)}}", f"/{total}", priority)

    def _width(self) -> int | None:
        """The width of the terminal in characters; None if the output is not a terminal."""
        return None

    def _left(self, step: int) -> str:
        """The time until the end of the run; `?` before the first step of this process."""
        seconds = self.left.seconds(step)
        return "?" if seconds is None else format_duration(seconds)


class Lines(Screen):
    """Lines for a file: one per evaluation, one every `LINE_EVERY_S` seconds, and no silence above `SILENCE_S`."""

    def __init__(self, plan: Plan, left: TimeLeft, monitor: Monitor) -> None:
        super().__init__(plan, left, monitor)
        self.closed = threading.Event()
        self.watcher = threading.Thread(target=self._break_silence, name="display", daemon=True)
        self.watcher.start()

    def window(self, window: Window, epoch: Window | None) -> None:
        super().window(window, epoch)
        if time.perf_counter() - self.shown_at >= LINE_EVERY_S and not self.plan.due("eval", window.last):
            self._line(window.last, figures(epoch or window))

    def close(self) -> None:
        self.closed.set()
        self.watcher.join()

    def _break_silence(self) -> None:
        """Show a line after each long silence, because steps and evaluations may take minutes."""
        while not self.closed.wait(max(0.0, self.shown_at + SILENCE_S - time.perf_counter())):
            now = time.perf_counter()
            if now - self.shown_at >= SILENCE_S:
                phase = self.phase or f"in step {self.step + 1} for {format_duration(now - self.stepped_at)}"
                self._line(self.step, [FigureColumn(phase, "", "", 4)])


class Bar(Screen):
    """The lines of evaluations above one line that moves: the step, a bar, the last figures, the time left."""

    def __init__(self, plan: Plan, left: TimeLeft, monitor: Monitor) -> None:
        super().__init__(plan, left, monitor)
        self.last: Window | None = None
        self.live = Live(get_renderable=self.status, console=console.terminal, transient=True, refresh_per_second=4)
        self.live.start()

    def window(self, window: Window, epoch: Window | None) -> None:
        super().window(window, epoch)
        self.last = window

    def close(self) -> None:
        self.live.stop()

    def status(self) -> Text:
        """The moving line. A narrow terminal drops figures first, and then the bar."""
        left = FigureColumn("left", self._left(self.step), "", ALWAYS)
        share = self.evaluated_share if self.phase else self.step / self.plan.total_steps
        middle = [FigureColumn(self.phase, "", "", 8)] if self.phase else figures(self.last) if self.last else []
        width = self._width() - 1  # a full line would wrap on some terminals
        line = in_line([self._position(self.step, ALWAYS), *middle, left], width - SHORTEST_BAR)
        moving = bar(share, width - line.cell_len, unicode=console.terminal.encoding.startswith("utf"))
        return Text.assemble(moving, line)

    def _width(self) -> int:
        return console.terminal.width


class Cell(Screen):
    """A bar in a notebook's cell, above a table with a row for each evaluation. At the end the bar is removed."""

    def __init__(self, plan: Plan, left: TimeLeft, monitor: Monitor) -> None:
        super().__init__(plan, left, monitor)
        self.rows, self.has_ended, self.drawn_at = list[dict[str, str]](), False, time.perf_counter()
        from IPython.display import display  # a notebook has imported it

        self.output: Any = display(self, display_id=True)

    def advance(self, step: int, now: float) -> None:
        super().advance(step, now)
        self._redraw()

    def evaluating(self, done: int, blocks: int) -> None:
        super().evaluating(done, blocks)
        self._redraw()

    def close(self) -> None:
        self.has_ended = True
        self.output.update(self)

    def _redraw(self) -> None:
        if time.perf_counter() - self.drawn_at >= REDRAW_S:
            self.drawn_at = time.perf_counter()
            self.output.update(self)

    def _show(self, line: Sequence[FigureColumn]) -> None:
        log.logger.info(in_line(line, None).plain)
        self.rows.append({column.name or column.unit.strip(): f"{column.figure}{column.unit}" for column in line})
        self.output.update(self)

    def __repr__(self) -> str:
        columns = [self._position(self.step, ALWAYS), FigureColumn("left", self._left(self.step), "", ALWAYS)]
        return in_line([*columns, *[FigureColumn(self.phase, "", "", ALWAYS)] * bool(self.phase)], None).plain

    def _repr_html_(self) -> str:
        from lockstep.core.table import html_table  # few runs are of a notebook

        progress = f'<progress value="{self.step}" max="{self.plan.total_steps}"></progress> {escape(repr(self))}'
        return progress * (not self.has_ended) + html_table(self.rows)


def figures(window: Window) -> list[FigureColumn]:
    top1 = "" if window.top1 is None else f"{window.top1:5.1f}".replace("nan", "  -")
    return [
        FigureColumn("loss", f"{window.loss:.4f}".replace("nan", "-"), "", 4),
        *([FigureColumn("top-1", top1, " %", 2)] if top1 else []),
        FigureColumn("", f"{window.rate:6,.0f}", " img/s", 4),
        FigureColumn("wait", f"{window.wait_share:3.0f}", " %", 0),
    ]


def display(plan: Plan, left: TimeLeft, monitor: Monitor, *, is_main: bool) -> Display:
    if not is_main:
        return Display()
    if log.in_notebook():
        return Cell(plan, left, monitor)
    return (Bar if log.has_terminal() else Lines)(plan, left, monitor)
