"""What the user watches: a bar on a terminal, a line now and then elsewhere, nothing on other ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.core import log
from lockstep.core.plan import Plan
from lockstep.telemetry.window import Window

LINE_EVERY_S = 10.0


class Display:
    """The null object: what ranks other than main show."""

    def advance(self, step: int) -> None:
        """A step is done."""

    def window(self, window: Window) -> None:
        """A log point was reached."""

    def evaluated(self, step: int, scores: Mapping[str, float], window: Window | None) -> None:
        """An evaluation is done."""

    def warn(self, sentence: str) -> None:
        """Something that the user should know."""

    def close(self) -> None:
        """Training is over."""


def figures(window: Window) -> str:
    """A window in words."""
    return (
        f"loss {window.loss:.4f}  top-1 {window.top1:.1f} %  {window.rate:,.0f} img/s  wait {window.wait_share:.0f} %"
    )


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss, without the hours where there are none."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Lines(Display):
    """One line per evaluation, and one every ten seconds between."""

    def __init__(self, plan: Plan, step: int) -> None:
        self.plan = plan
        self.first = step
        self.began = self.said = time.monotonic()
        self.digits = len(str(plan.total_steps))

    def window(self, window: Window) -> None:
        evaluated_next = self.plan.due("eval", window.last)
        if time.monotonic() - self.said >= LINE_EVERY_S and not evaluated_next:
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
        self.said = now
        epochs = -(-self.plan.total_steps // self.plan.steps_per_epoch)
        log.say(
            f"epoch {self.plan.epoch(step) + 1}/{epochs}  step {step:>{self.digits}}/{self.plan.total_steps}  "
            f"{text}  left {clock(left)}"
        )


class Bar(Lines):
    """The same lines above a bar that moves."""

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
