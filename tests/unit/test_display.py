"""What the user sees on the terminal while a command runs."""

import dataclasses
import io
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import FAKE, train_here
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


@pytest.mark.parametrize("damaged", [0, math.nan, math.inf, -math.inf, 1e18, 1e20])
def test_what_is_no_time_is_shown_as_nothing(damaged: float) -> None:
    assert format_timestamp(damaged) == ""


@pytest.mark.parametrize(
    ("share", "room", "cells"),
    [(0.5, 9, ""), (0.5, 10, "####----  "), (0.2, 10, "##------  "), (1.0, 11, "#########  ")]
    + [(0.0, 10, "--------  ")]
    + [(0.25, room, "#" * 6 + "-" * 16 + "  ") for room in (24, 25, 200)]
    + [(0.25, 23, "#" * 5 + "-" * 16 + "  ")],
)
def test_a_bar_is_as_full_as_its_share_and_as_long_as_there_is_room(share: float, room: int, cells: str) -> None:
    assert shown_progress.bar(share, room, unicode=False).plain == cells
    assert shown_progress.bar(share, room, unicode=True).plain == cells.replace("#", "━").replace("-", "─")


def test_a_name_a_figure_and_a_unit_have_one_gap() -> None:
    columns = [FigureColumn(name, figure, " %", 0).text().plain for name in ("a", "") for figure in ("5", "")]
    assert columns == ["a 5 %", "a %", "5 %", " %"]


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
    assert (lines.step, Bar(PLAN, left(7), Monitor()).step) == (5, 7), "a resume begins where it goes on"
    for step in (15, 25, 5):
        lines.evaluated(step, SCORES, None, best=False)
    lines.close()
    times = [line.rpartition("  left ")[2] for line in capsys.readouterr().out.splitlines()]
    assert times == ["1:40", "0:00", "?"]


def test_a_log_point_is_a_line_when_nothing_was_printed_for_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(PLAN, left(0), Monitor())
    lines.window(WINDOW, WINDOW)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(shown, "LINE_EVERY_S", 0.0)
    lines.window(WINDOW, WINDOW)
    assert capsys.readouterr().out.startswith("epoch 1/3  step  4/25  loss 0.5123")
    assert lines.left.warm is not None
    assert lines.left.warm[0] == 4
    for window, epoch, loss in ((WINDOW, LARGE, "1234.5"), (LARGE, None, "1234.5"), (LARGE, WINDOW, "0.5123")):
        lines.window(window, epoch)
        assert f"loss {loss}" in capsys.readouterr().out
    lines.window(dataclasses.replace(WINDOW, last=10), WINDOW)
    assert capsys.readouterr().out == "", "an evaluation follows, which has its own line"
    monkeypatch.setattr(shown, "LINE_EVERY_S", 10.0)
    lines.shown_at -= 11
    lines.evaluated(10, SCORES, None, best=False)
    lines.window(WINDOW, WINDOW)
    lines.warn("it is slow")
    lines.close()
    (_, warning) = capsys.readouterr().out.splitlines()
    assert warning == "warning: it is slow"


def test_the_loss_that_is_monitored_is_shown_once_and_is_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    lines = Lines(PLAN, left(0), Monitor.parse("-loss"))
    lines.evaluated(5, SCORES, None, best=True)
    lines.evaluated(5, {**SCORES, "loss/val_ema": 0.125}, None, best=True)
    lines.close()
    first, second = (line.partition("left")[0] for line in screen.getvalue().splitlines())
    assert first.endswith("val loss \x1b[32m0.2500\x1b[0m  ")
    assert "val loss 0.2500  average \x1b[32m0.125" in second
    assert "top-1" not in first + second


@pytest.mark.parametrize(
    ("loss", "top1", "text"),
    [
        (0.5, 0.0, "loss 0.5000  top-1   0.0 %   1,500 img/s  wait  25 %"),
        (0.5, None, "loss 0.5000   1,500 img/s  wait  25 %"),
        (math.nan, math.nan, "loss -  top-1     - %   1,500 img/s  wait  25 %"),
    ],
)
def test_a_figure_that_a_window_does_not_have_is_a_dash_or_nothing(
    loss: float, top1: float | None, text: str
) -> None:
    assert in_line(shown.figures(dataclasses.replace(WINDOW, loss=loss, top1=top1)), None).plain == text


class Output:
    """The output of a notebook's cell: what is shown at each time."""

    def __init__(self) -> None:
        self.states: list[str] = []

    def display(self, cell: Any, *, display_id: bool) -> "Output":
        assert display_id, "else it could not be changed"
        self.update(cell)
        return self

    def update(self, cell: Any) -> None:
        self.states.append(cell._repr_html_())


def test_a_notebook_has_a_bar_above_a_table_of_evaluations_and_at_the_end_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output, now = Output(), 100.0
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=output))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", output)  # type: ignore[arg-type]
    monkeypatch.setattr(log, "in_notebook", lambda: True)
    monkeypatch.setattr(shown.time, "perf_counter", lambda: now)
    cell = display(PLAN, left(0), Monitor(), is_main=True)
    assert isinstance(cell, shown.Cell)
    for step, passed in enumerate((0.4, 0.1, 0.4, 0.2), start=1):
        now += passed
        cell.advance(step, now)
    pattern = r'<progress value="(\d+)" max="25"></progress> step (.*?)  left'
    bars = [re.findall(pattern, state) for state in output.states]
    assert bars == [[("0", " 0/25")], [("2", " 2/25")], [("4", " 4/25")]], "twice a second at most"
    now += 0.5
    cell.evaluating(3, 8)
    assert output.states[-1].endswith("evaluating 3/8")
    cell.evaluated(4, SCORES, WINDOW, best=True)
    assert "evaluating" not in output.states[-1]
    (row,) = cell.rows
    assert row == {
        "epoch": "1/3",
        "step": " 4/25",
        "loss": "0.5123",
        "top-1": " 81.2 %",
        "img/s": " 1,500 img/s",
        "wait": " 25 %",
        "val loss": "0.2500",
        "val top-1": "93.46 %",
        "left": row["left"],
    }
    assert all(f">{text}<" in output.states[-1] for text in (*row, "0.5123"))
    count = len(output.states)
    cell.close()
    assert len(output.states) == count + 1
    assert ("<progress" in output.states[-2], "<progress" in output.states[-1]) == (True, False)
    assert ">0.5123<" in output.states[-1]
    at_its_end = shown.Cell(PLAN, left(25), Monitor())
    assert '<progress value="25" max="25">' in output.states[-1], "a resume at the end evaluates"
    at_its_end.close()
    assert "<progress" not in output.states[-1]


def test_a_run_that_is_slow_says_where_it_is_from_its_first_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "SILENCE_S", 0.01)
    messages: list[str] = []
    monkeypatch.setattr(log, "say", lambda message, *, shown: messages.append(message))
    lines = Lines(PLAN, left(0), Monitor())
    wait_for(lambda: any("epoch 1/3  step  0/25  in step 1 for 0:00  left ?" in text for text in messages))
    lines.stepped_at -= 65
    wait_for(lambda: any("in step 1 for 1:05" in text for text in messages))
    lines.advance(1, time.perf_counter() - 125)
    wait_for(lambda: any("in step 2 for 2:05" in text for text in messages))
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
    for in_notebook in (False, True):
        monkeypatch.setattr(log, "in_notebook", lambda in_notebook=in_notebook: in_notebook)
        nothing = display(PLAN, left(0), Monitor(), is_main=False)
        assert type(nothing) is Display
    nothing.advance(1, 0.0)
    nothing.window(WINDOW, WINDOW)
    nothing.evaluating(3, 8)
    nothing.evaluated(1, SCORES, WINDOW, best=True)
    nothing.warn("it is slow")
    nothing.close()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(log, "in_notebook", lambda: False)
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
    assert Work("evaluating", 0).with_bar(console.terminal).plain == "evaluating 0/0  left ?"


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_bar_of_a_command_needs_ten_cells_beside_its_line(encoding: str) -> None:
    work = Work("evaluating", 4)
    work.began -= 10
    work.advance()
    line, full = "evaluating 1/4  left 0:30", "━" if encoding == "utf-8" else "#"
    for width, cells in ((len(line) + 10, 0), (len(line) + 11, 2), (len(line) + 99, 6)):
        screen: Any = SimpleNamespace(width=width, encoding=encoding)
        shown_line = work.with_bar(screen).plain
        assert shown_line.endswith(line)
        assert (shown_line.count(full), len(shown_line) < width) == (cells, True)


def test_a_command_shows_its_bar_on_a_terminal_and_removes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    stderr = sys.stderr
    with progress("evaluating", 2) as advance:
        advance(1)
        wait_for(lambda: "evaluating 1/2" in screen.getvalue())
        assert (sys.stdout, sys.stderr) == (screen, stderr), "what is printed goes where it went"
    assert screen.getvalue().endswith("\x1b[2K"), "the line is erased"


def test_a_bar_on_standard_error_is_as_wide_as_its_own_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lives: list[Any] = []
    screen: Any = SimpleNamespace(width=50, encoding="utf-8")
    monkeypatch.setattr(console, "terminal", SimpleNamespace(width=30, encoding="utf-8"))
    monkeypatch.setattr(console, "Terminal", lambda **_: screen)
    monkeypatch.setattr(log, "has_terminal", lambda stream="stdout": stream == "stderr")
    monkeypatch.setattr(shown_progress, "S_ISFIFO", lambda mode: False)
    monkeypatch.setattr(shown_progress, "Live", lambda **options: nullcontext(lives.append(options)))
    with progress("evaluating", 4):
        ((live),) = lives
        assert live["console"] is screen
        assert live["get_renderable"]().plain.startswith("─")


@pytest.mark.usefixtures("capfd")  # standard output is a file
def test_nothing_moves_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def moving(**options: Any) -> Any:
        raise AssertionError(options)

    monkeypatch.setattr(shown_progress, "Live", moving)
    with progress("predicting", 40) as advance:
        advance(8)


def test_a_command_without_a_terminal_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown_progress, "SILENCE_S", 0.01)
    errors = list[str]()

    def is_shown() -> bool:
        captured = capfd.readouterr()
        assert captured.out == "", "predictions may be read by a program"
        errors.append(captured.err)
        return "predicting  8/40" in "".join(errors)

    with progress("predicting", 40) as advance:
        advance(8)
        wait_for(is_shown)
    assert "progress" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(KeyError, match="of the work"), progress("predicting"):
        raise KeyError("of the work")
    assert "progress" not in {thread.name for thread in threading.enumerate()}, "nothing is said after the end"


def test_no_bar_moves_where_another_program_shows_the_results() -> None:
    code = "from lockstep.telemetry.progress import progress\nwith progress('predicting', 4): print('cat')"
    screen, stderr = os.openpty()
    os.set_blocking(screen, False)
    command, environment = [sys.executable, "-c", code], {**os.environ, "TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, env=environment)
    with pytest.raises(BlockingIOError):
        os.read(screen, 1)
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment, check=True)
    assert b"predicting" in os.read(screen, 10_000), "a file is not read on the terminal"
    os.close(screen)
    os.close(stderr)
    assert (done.returncode, done.stdout) == (0, b"cat\n")


@pytest.mark.parametrize("is_imported", [True, False])
def test_the_import_of_torch_is_shown_once(is_imported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(shown_progress, "progress", lambda name: nullcontext(begun.append(name)))
    if not is_imported:
        monkeypatch.delitem(sys.modules, "torch")
    with shown_progress.loading():
        assert begun == ["loading torch"] * (not is_imported)


def test_the_first_steps_are_no_measure_once_more_have_followed() -> None:
    """Five steps took 100 s, the later ones take 10 s each."""
    estimate = left(5)
    estimate.clock = SimpleNamespace(passed=lambda: 100.0)  # type: ignore[assignment]
    estimate.window_ended(10)
    times = ((10, 100.0, 20 * 15), (15, 150.0, 15 * 10), (16, 160.0, 10 * 9), (20, 200.0, 10 * 5), (25, 250.0, 0))
    for step, passed, seconds in times:
        estimate.clock = SimpleNamespace(passed=lambda passed=passed: passed)  # type: ignore[assignment]
        assert estimate.seconds(step) == seconds, step
        estimate.window_ended(step)
    assert left(24).seconds(24) is None
    assert left(25).seconds(25) == 0, "a run that has nothing left to do"


def test_a_line_that_is_as_wide_as_the_terminal_loses_no_figure() -> None:
    columns = [
        FigureColumn("step", "7", "/25", ALWAYS),
        FigureColumn("loss", "0.5", "", 4),
        FigureColumn("wait", "3", " %", 0),
    ]
    whole = in_line(columns, None)
    assert in_line(columns, whole.cell_len).plain == whole.plain
    assert in_line(columns, whole.cell_len - 1).plain == in_line(columns[:2], None).plain
    alike = [FigureColumn(name, "1", "", 3) for name in "abc"]
    assert in_line(alike, in_line(alike, None).cell_len - 1).plain == in_line(alike[1:], None).plain, "the first"
    equals = [FigureColumn(name, "1", "", 4) for name in "abc"]
    assert [in_line(equals, width).plain for width in (13, 12, 7)] == ["a 1  b 1  c 1", "b 1  c 1", "c 1"]


def test_the_bar_is_the_share_of_the_steps_or_of_the_evaluation_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    bar = Bar(PLAN, left(0), Monitor())
    try:
        bar.advance(5, 0.0)
        assert bar.status().plain.count("━") == round(5 / 25 * 22)
        bar.window(LARGE, WINDOW)
        assert bar.left.warm is not None
        assert bar.left.warm[0] == 9
        assert "loss 1234.5000  top-1 100.0 %  4,500,000 img/s  wait 100 %" in bar.status().plain
        bar.window(WINDOW, None)
        assert "loss 0.5123" in bar.status().plain, "of the last window"
        bar.evaluating(6, 8)
        assert bar.status().plain.count("━") == round(6 / 8 * 22)
        bar.evaluated(5, SCORES, None, best=False)
        assert bar.status().plain.count("━") == round(5 / 25 * 22)
    finally:
        bar.close()


@pytest.mark.parametrize(
    ("examples", "batch", "steps", "epochs"),
    [
        (101, 1, 1, "less than 0.01 epochs of 101"),
        (100, 1, 1, "0.01 epochs of 100"),
        (101, 4, 26, "1 epoch of 26"),
        (101, 101, 10, "10 epochs of 1"),
        (101, 60, 3, "1.5 epochs of 2"),
    ],
)
def test_a_run_says_how_many_epochs_its_steps_are(
    examples: int, batch: int, steps: int, epochs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rarely = ("train.eval_every=100%", "telemetry.report=never", "augment=none", "model=linear", "device=cpu")
    train_here(tmp_path / "run", *FAKE, *rarely, f"dataset.examples={examples}", f"batch={batch}", f"steps={steps}")
    assert f"of global batch {batch}: {epochs}, seed 0\n" in (shown_by_run := capsys.readouterr().out)
    assert "warning" not in shown_by_run


@pytest.mark.parametrize(
    ("steps", "step", "position"),
    [
        (20, 0, "epoch 1/2  step  0/20  "),
        (20, 10, "epoch 1/2  step 10/20  "),
        (20, 11, "epoch 2/2  step 11/20  "),
        (21, 21, "epoch 3/3  step 21/21  "),
        (100, 1, "epoch  1/10  step   1/100  "),
        (101, 101, "epoch 11/11  step 101/101  "),
    ],
)
def test_an_epoch_that_has_begun_counts_and_the_places_of_a_run_are_below_each_other(
    steps: int, step: int, position: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = dataclasses.replace(PLAN, total_steps=steps)
    lines = Lines(plan, TimeLeft(plan, TrainingClock(), 0), Monitor())
    lines.evaluated(step, SCORES, None, best=False)
    lines.close()
    assert capsys.readouterr().out.startswith(f"{position}val loss")


@pytest.mark.parametrize(
    ("monitor", "scores", "columns"),
    [
        ("-mae", {**SCORES, "metric/mae": 0.123456}, "val loss 0.2500  val mae 0.1235  left"),
        ("-mae", SCORES, "val loss 0.2500  left"),
        ("top5", SCORES, "val loss 0.2500  val top-5 99.00 %  left"),
        ("recall/cat", {**SCORES, "metric/recall/cat": 0.0}, "val loss 0.2500  val recall/cat 0  left"),
    ],
)
def test_the_figure_that_is_monitored_stands_behind_the_loss(
    monitor: str, scores: dict[str, float], columns: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(PLAN, left(0), Monitor.parse(monitor))
    lines.evaluated(5, scores, None, best=True)
    lines.close()
    assert f"step  5/25  {columns}" in capsys.readouterr().out


@pytest.mark.parametrize("first", [0, 10])
def test_a_resumed_run_counts_its_steps_from_the_beginning(first: int, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(PLAN, left(first), Monitor())
    lines.evaluated(15, SCORES, None, best=True)
    lines.close()
    assert capsys.readouterr().out.startswith("epoch 2/3  step 15/25  ")


def test_a_narrow_line_keeps_the_score_that_decides_and_the_log_has_them_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", log.logger.name)
    texts = {}
    for width in (40, 58):
        screen = terminal(monkeypatch, width)
        bar = Bar(PLAN, left(0), Monitor())
        bar.evaluated(11, AVERAGED, WINDOW, best=True)
        bar.close()
        texts[width] = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", screen.getvalue())
    assert "epoch 2/3  average 95.00 %  left" in texts[40]
    assert "epoch 2/3  val top-1 93.46 %  average 95.00 %  left" in texts[58]
    whole = "epoch 2/3  step 11/25  loss 0.5123  top-1  81.2 %   1,500 img/s  wait  25 %  val loss 0.2500  val top-1 "
    assert [message.startswith(f"{whole}93.46 %  average 95.00 %") for message in caplog.messages] == [True] * 2


def test_the_bar_is_erased_at_the_end_and_has_the_letters_of_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ascii(Screenful):
        encoding = "ascii"

    for screen, full, other in ((Screenful(), "━", "#"), (Ascii(), "#", "━")):
        monkeypatch.setattr(console, "terminal", console.Terminal(file=screen, width=120, highlight=False))
        monkeypatch.setattr(sys, "stdout", screen)
        bar = Bar(PLAN, left(0), Monitor())
        bar.advance(20, 0.0)
        shown_line = bar.status().plain
        bar.close()
        assert (full in shown_line, other in shown_line) == (True, False)
        assert screen.getvalue().endswith("\x1b[2K")


def test_ten_seconds_after_a_line_a_log_point_is_another(
    passes: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(PLAN, left(0), Monitor())
    for seconds, is_shown in ((9.5, False), (0.5, True), (9.5, False), (0.5, True)):
        passes(seconds - 0.1)
        lines.advance(3, time.perf_counter())  # a step shows nothing
        lines.evaluating(1, 2)
        passes(0.1)
        lines.window(WINDOW, WINDOW)
        assert bool(capsys.readouterr().out) == is_shown
    lines.close()


def test_a_silence_is_counted_from_the_last_line_whatever_it_was(
    passes: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A line is shown 20 s after the beginning; the two that break a silence come 30 s after the line before."""
    lines, waits = Lines(PLAN, left(0), Monitor()), list[float]()
    lines.close()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        passes(20)
        if len(waits) == 1:
            lines.evaluated(1, SCORES, None, best=False)
        if len(waits) == 3:
            lines.advance(7, time.perf_counter())
        passes(seconds - 20)
        return len(waits) == 4

    lines.closed = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    lines._break_silence()
    assert waits == [30, 20, 30, 30]
    first, *later = capsys.readouterr().out.splitlines()
    assert "val loss" in first
    assert [re.findall("in step ([0-9]+) for ([0-9:]+)", line) for line in later] == [
        [("1", "0:50")],
        [("8", "0:10")],
    ]


def test_a_log_point_ends_the_warm_up_also_where_the_epoch_has_no_figures(passes: Callable[[float], None]) -> None:
    lines = Lines(PLAN, left(0), Monitor())
    passes(40)
    lines.window(WINDOW, None)
    passes(6)
    lines.close()
    assert lines.left.seconds(10) == pytest.approx((25 - 10) * 6 / (10 - 4))


def test_a_warning_is_shown_and_is_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(PLAN, left(0), Monitor())
    lines.warn("no best yet")
    lines.close()
    assert (caplog.messages, capsys.readouterr().out) == (["no best yet"], "warning: no best yet\n")


def test_a_row_of_a_notebook_is_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO", log.logger.name)
    monkeypatch.setitem(sys.modules, "IPython.display", Output())  # type: ignore[arg-type]
    cell = shown.Cell(PLAN, left(0), Monitor())
    cell.evaluated(11, SCORES, None, best=True)
    (message,) = caplog.messages
    assert message.startswith("epoch 2/3  step 11/25  val loss 0.2500  val top-1 93.46 %  left")
    assert capsys.readouterr().out == ""


def test_a_long_line_about_the_progress_of_a_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown_progress, "SILENCE_S", 0.01)
    activity, errors = "predicting " + "x" * 200, list[str]()
    with progress(activity, 40):
        wait_for(lambda: errors.append(capfd.readouterr().err) or "\n" in "".join(errors))
    assert f"{activity}  0/40  left ?\n" in "".join(errors)


def test_a_notebook_without_html_has_the_step_the_time_left_and_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython.display", Output())  # type: ignore[arg-type]
    estimate = left(0)
    estimate.clock = SimpleNamespace(passed=lambda: 50.0)  # type: ignore[assignment]
    cell = shown.Cell(PLAN, estimate, Monitor())
    assert repr(cell) == "step  0/25  left ?"
    cell.advance(5, 0.0)
    assert repr(cell) == "step  5/25  left 3:20"
    cell.evaluating(3, 8)
    assert repr(cell) == "step  5/25  left 3:20  evaluating 3/8"


@pytest.mark.usefixtures("capfd")
def test_no_thread_that_shows_progress_keeps_a_program_from_ending() -> None:
    lines = Lines(PLAN, left(0), Monitor())
    with progress("predicting", 4):
        threads = {
            thread.name: thread.daemon for thread in threading.enumerate() if thread.name in ("display", "progress")
        }
    lines.close()
    assert threads == {"display": True, "progress": True}
