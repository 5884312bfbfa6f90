"""What the user sees on the terminal while a command runs."""

import io
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from lockstep.core import console, log
from lockstep.core.plan import Plan
from lockstep.core.tags import Monitor
from lockstep.telemetry import display as shown
from lockstep.telemetry import progress as shown_progress
from lockstep.telemetry.display import Bar, Display, Lines, TimeLeft, display
from lockstep.telemetry.progress import (
    ALWAYS,
    FigureColumn,
    Work,
    format_duration,
    format_timestamp,
    in_line,
    progress,
)
from lockstep.telemetry.time_spent import TrainingClock
from lockstep.telemetry.window import Window
from processes import wait_for

PLAN = Plan(examples=100, batch=10, total_steps=25, micro_batches=1, log_every=2, eval_every=10, save_every=10)
WINDOW = Window(first=1, last=4, loss=0.51234, top1=81.25, examples=3000, seconds=2.0, waited=0.5)
LARGE = Window(first=5, last=9, loss=1234.5, top1=100.0, examples=9_000_000, seconds=2.0, waited=2.0)
SCORES = {"loss/val": 0.25, "acc/val_top1": 93.456, "acc/val_top5": 99.0}
AVERAGED = {**SCORES, "acc/val_ema_top1": 95.0}


def left(step: int) -> TimeLeft:
    """The time left of a process that begins at a step."""
    return TimeLeft(PLAN, TrainingClock(), step)


class Screenful(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch, width: int = 120) -> Screenful:
    """A terminal that records its output."""
    screen = Screenful()
    terminal = console.Terminal(file=screen, highlight=False, width=width, color_system="standard")
    monkeypatch.setattr(console, "terminal", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "stdout", screen)
    return screen


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599, "59:59"), (3600, "1:00:00"), (36_061, "10:01:01")],
)
def test_seconds_on_a_clock(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


@pytest.mark.parametrize(("zone", "expected"), [("UTC0", "1970-01-01 12:00"), ("XYZ-5:30", "1970-01-01 17:30")])
def test_a_time_is_in_the_zone_of_the_machine(zone: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert format_timestamp(43_200.0) == expected
    finally:
        monkeypatch.undo()
        time.tzset()


def test_an_evaluation_is_a_line_with_epoch_step_and_scores(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(PLAN, left(0), Monitor())
    lines.evaluated(11, SCORES, WINDOW, best=True)
    lines.evaluated(12, AVERAGED, None, best=True)
    lines.close()
    first, second = capsys.readouterr().out.splitlines()
    figures = "loss 0.5123  top-1  81.2 %   1,500 img/s  wait  25 %  val loss 0.25"
    assert first.startswith(f"epoch 2/3  step 11/25  {figures}")
    assert second.startswith("epoch 2/3  step 12/25  val loss 0.2500  val top-1 93.46 %  average 95.00 %  left 0:0")


@pytest.mark.parametrize("width", range(24, 140, 11))
def test_a_line_fits_the_terminal_and_keeps_step_and_time_left(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    screen = terminal(monkeypatch, width)
    bar = Bar(PLAN, left(0), Monitor())
    try:
        bar.advance(7, 0.0)
        for change in (lambda: None, lambda: bar.window(LARGE, None), lambda: bar.evaluating(3, 8)):
            change()
            status = bar.status()
            assert status.cell_len < width
            assert "7/25" in status.plain
            assert "left" in status.plain
            assert "━" in status.plain or width < 40
        bar.evaluated(7, AVERAGED, LARGE, best=False)
    finally:
        bar.close()
    text = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", screen.getvalue())
    (line,) = (line for line in text.splitlines() if "epoch" in line)
    assert len(line.rpartition("\r")[2]) <= width


def test_at_eighty_columns_the_rate_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch, 80)
    bar = Bar(PLAN, left(0), Monitor())
    bar.evaluated(11, SCORES, WINDOW, best=True)
    bar.close()
    text = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", screen.getvalue())
    assert re.search(r"epoch 2/3  loss 0\.5123   1,500 img/s  val top-1 93\.46 %  left", text)


def test_only_a_new_best_has_a_colour_and_the_average_where_it_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    green = "\x1b[32m"
    for scores, best, coloured in (
        (SCORES, True, f"{green}93.46 %"),
        (AVERAGED, True, f"{green}95"),
        (SCORES, False, ""),
    ):
        screen = terminal(monkeypatch)
        lines = Lines(PLAN, left(0), Monitor())
        lines.evaluated(5, scores, WINDOW, best=best)
        lines.close()
        assert coloured in screen.getvalue()
        assert screen.getvalue().count("\x1b[32m") == best


def test_the_time_left_is_that_of_the_steps_of_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    at_step_five = left(5)
    at_step_five.clock.began -= 100  # ten seconds a step
    lines = Lines(PLAN, at_step_five, Monitor())
    lines.evaluated(15, SCORES, None, best=False)
    lines.close()
    assert "left 1:40" in capsys.readouterr().out


def test_a_log_point_is_a_line_when_nothing_was_printed_for_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(PLAN, left(0), Monitor())
    lines.window(WINDOW, WINDOW)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(shown, "LINE_EVERY_S", 0.0)
    lines.window(WINDOW, WINDOW)
    lines.close()
    assert capsys.readouterr().out.startswith("epoch 1/3  step  4/25  loss 0.5123")


def test_a_run_that_is_slow_says_where_it_is_from_its_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "SILENCE_S", 0.01)
    messages: list[str] = []
    monkeypatch.setattr(log, "say", lambda message, *, shown: messages.append(message))
    lines = Lines(PLAN, left(0), Monitor())
    wait_for(lambda: any("epoch 1/3  step  0/25  in step 1 for 0:00  left ?" in text for text in messages))
    lines.evaluating(3, 8)
    wait_for(lambda: any("evaluating 3/8" in text for text in messages))
    lines.close()
    assert not lines.watcher.is_alive()


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    bar = display(PLAN, left(10), Monitor(), is_main=True)
    assert isinstance(bar, Bar)
    bar.advance(12, 0.0)
    bar.window(WINDOW, WINDOW)
    bar.evaluated(20, SCORES, WINDOW, best=True)
    bar.live.refresh()
    bar.close()
    seen = screen.getvalue()
    assert "12/25" in seen
    assert "1,500 img/s" in seen
    assert "epoch 2/3  step 20/25" in seen


def test_other_ranks_show_nothing_and_a_pipe_gets_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = display(PLAN, left(0), Monitor(), is_main=False)
    assert type(nothing) is Display
    nothing.evaluated(1, SCORES, WINDOW, best=True)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(console, "terminal", console.Terminal(file=io.StringIO()))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    lines = display(PLAN, left(0), Monitor(), is_main=True)
    lines.close()
    assert type(lines) is Lines


@pytest.mark.parametrize("width", [120, 80, 24])
def test_other_commands_have_the_bar_of_training(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    terminal(monkeypatch, width)
    work = Work("evaluating", 5000)
    assert work.with_bar(console.terminal).plain.endswith("evaluating     0/5,000  left ?")
    work.began -= 10
    work.advance(1250)
    line = work.with_bar(console.terminal)
    assert line.plain.endswith("evaluating 1,250/5,000  left 0:30")
    assert line.plain.count("━") == (6 if width > 24 else 0)
    assert Work("exporting", None).with_bar(console.terminal).plain == "exporting 0:00"


def test_a_command_shows_its_bar_on_a_terminal_and_removes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with progress("evaluating", 2) as advance:
        advance(1)
        wait_for(lambda: "evaluating 1/2" in screen.getvalue())
    assert screen.getvalue().endswith("\x1b[2K"), "the line is erased"


def test_a_command_without_a_terminal_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown_progress, "SILENCE_S", 0.01)
    stderr = ""
    with progress("predicting", 40) as advance:
        advance(8)
        while "predicting  8/40" not in stderr:
            captured = capfd.readouterr()
            assert captured.out == "", "predictions may be read by a program"
            stderr += captured.err


def test_no_bar_moves_where_another_program_shows_the_results() -> None:
    code = "from lockstep.telemetry.progress import progress\nwith progress('predicting', 4): print('cat')"
    screen, stderr = os.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr, env={**os.environ, "TERM": "xterm"}
    )
    os.set_blocking(screen, False)
    with pytest.raises(BlockingIOError):
        os.read(screen, 1)
    os.close(screen)
    os.close(stderr)
    assert (done.returncode, done.stdout) == (0, b"cat\n")


def test_the_first_steps_are_no_measure_once_more_have_followed() -> None:
    """Five steps took 100 s, the later ones take 10 s each."""
    estimate = left(5)
    estimate.clock = SimpleNamespace(passed=lambda: 100.0)  # type: ignore[assignment]
    estimate.window_ended(10)
    for step, passed, seconds in ((10, 100.0, 20 * 15), (15, 150.0, 15 * 10), (16, 160.0, 10 * 9), (25, 250.0, 0)):
        estimate.clock = SimpleNamespace(passed=lambda passed=passed: passed)  # type: ignore[assignment]
        assert estimate.seconds(step) == seconds, step


def test_a_line_that_is_as_wide_as_the_terminal_loses_no_figure() -> None:
    columns = [
        FigureColumn("step", "7", "/25", ALWAYS),
        FigureColumn("loss", "0.5", "", 4),
        FigureColumn("wait", "3", " %", 0),
    ]
    whole = in_line(columns, None)
    assert in_line(columns, whole.cell_len).plain == whole.plain
    assert in_line(columns, whole.cell_len - 1).plain == in_line(columns[:2], None).plain


def test_the_bar_is_the_share_of_the_steps_or_of_the_evaluation_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    bar = Bar(PLAN, left(0), Monitor())
    try:
        bar.advance(5, 0.0)
        assert bar.status().plain.count("━") == round(5 / 25 * 22)
        bar.evaluating(6, 8)
        assert bar.status().plain.count("━") == round(6 / 8 * 22)
        bar.evaluated(5, SCORES, None, best=False)
        assert bar.status().plain.count("━") == round(5 / 25 * 22)
    finally:
        bar.close()
