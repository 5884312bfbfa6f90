"""Shows progress: a bar on a terminal, a line now and then elsewhere, nothing on other ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.core import log
from lockstep.core.plan import Plan
from lockstep.telemetry.window import Window

LINE_EVERY_S = 10.0


class Display:
    """Shows nothing: the display of ranks other than main."""

    def advance(self, step: int) -> None:
        """Show that a step is done."""

    def window(self, window: Window) -> None:
        """Show the window of a log point."""

    def evaluated(self, step: int, scores: Mapping[str, float], window: Window | None) -> None:
        """Show the scores of an evaluation."""

    def warn(self, sentence: str) -> None:
        """Show a warning to the user."""

    def close(self) -> None:
        """Remove the display: training is over."""


def figures(window: Window) -> str:
    """The figures of a window as a text."""
    return (
        f"loss {window.loss:.4f}  top-1 {window.top1:.1f} %  {window.rate:,.0f} img/s  wait {window.wait_share:.0f} %"
    )


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss, or m:ss if less than an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Lines(Display):
    """One line per evaluation, and one every ten seconds in between."""

    def __init__(self, plan: Plan, step: int) -> None:
        self.plan = plan
        self.first = step
        self.began = self.shown_at = time.monotonic()
        self.digits = len(str(plan.total_steps))

    def window(self, window: Window) -> None:
        evaluated_next = self.plan.due("eval", window.last)
        if time.monotonic() - self.shown_at >= LINE_EVERY_S and not evaluated_next:
            self._line(window.last, figures(window))

    def evaluated(self, step: int, scores: Mapping[str, float], window: Window | None) -> None:
        average = f" (average {scores['acc/val_ema_top1']:.2f} %)" if "acc/val_ema_top1" in scores else ""
        self._line(
            step,
            f"{figures(window) + '  ' if window else ''}"
            f"val loss {scores['loss/val']:.4f}  val top-1 {scores['acc/val_top1']:.2f} %{average}",
        )

    def warn(self, sentence: str) -> None:
        log.warn(sentence)

    def _line(self, step: int, text: str) -> None:
        now = time.monotonic()
        left = (now - self.began) / max(1, step - self.first) * (self.plan.total_steps - step)
        self.shown_at = now
        epochs = -(-self.plan.total_steps // self.plan.steps_per_epoch)
        log.say(
            f"epoch {self.plan.epoch(step) + 1}/{epochs}  step {step:>{self.digits}}/{self.plan.total_steps}  "
            f"{text}  left {clock(left)}"
        )


class Bar(Lines):
    """The lines of evaluations above a progress bar."""

    def __init__(self, plan: Plan, step: int) -> None:
        super().__init__(plan, step)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=log.console,
            transient=True,
        )
        self.task = self.progress.add_task("training", total=plan.total_steps, completed=step, figures="")
        self.progress.start()

    def advance(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    def window(self, window: Window) -> None:
        self.progress.update(self.task, figures=figures(window))

    def close(self) -> None:
        self.progress.stop()


def display(plan: Plan, step: int, *, is_main: bool) -> Display:
    """The display for this rank and this terminal."""
    if not is_main:
        return Display()
    return Bar(plan, step) if log.console.is_terminal else Lines(plan, step)
