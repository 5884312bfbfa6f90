"""What the user watches."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lockstep.core import log
from lockstep.core.plan import Plan
from lockstep.telemetry import Window
from lockstep.telemetry import display as shown
from lockstep.telemetry.display import Bar, Display, Lines, clock, display, figures

PLAN = Plan(examples=100, batch=10, total_steps=25, micro_batches=1, log_every=2, eval_every=10, save_every=10)
WINDOW = Window(first=1, last=4, loss=0.51234, top1=81.25, examples=3000, seconds=2.0, waited=0.5)
SCORES = {"loss/val": 0.25, "acc/val_top1": 93.456, "acc/val_top5": 99.0}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """A terminal that keeps what is shown on it."""
    screen = io.StringIO()
    monkeypatch.setattr(log, "console", Console(file=screen, force_terminal=True, highlight=False, width=120))
    return screen


def test_a_window_in_words() -> None:
    assert figures(WINDOW) == "loss 0.5123  top-1 81.2 %  1,500 img/s  wait 25 %"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3599, "59:59"), (3600, "1:00:00"), (36_061, "10:01:01")],
)
def test_seconds_on_a_clock(seconds: float, expected: str) -> None:
    assert clock(seconds) == expected


def test_an_evaluation_is_a_line_with_epoch_step_and_scores(capsys: pytest.CaptureFixture[str]) -> None:
    Lines(PLAN, 0).evaluated(11, SCORES, WINDOW)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("epoch 2/3  step 11/25  loss 0.5123  top-1 81.2 %")
    assert "val loss 0.2500  val top-1 93.46 %  left 0:0" in line


def test_the_average_of_the_weights_is_shown_beside_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    Lines(PLAN, 0).evaluated(5, {**SCORES, "acc/val_ema_top1": 95.0}, None)
    line = capsys.readouterr().out
    assert "val top-1 93.46 % (average 95.00 %)" in line
    assert line.startswith("epoch 1/3  step  5/25  val loss")


def test_the_time_left_is_that_of_the_steps_of_this_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(PLAN, 5)
    lines.began -= 100
    lines.evaluated(15, SCORES, None)
    assert "left 1:40" in capsys.readouterr().out


def test_a_log_point_is_a_line_when_nothing_was_said_for_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(PLAN, 0)
    lines.window(WINDOW)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(shown, "LINE_EVERY_S", 0.0)
    lines.window(WINDOW)
    assert capsys.readouterr().out.startswith("epoch 1/3  step  4/25  loss 0.5123")


def test_lines_do_not_move_and_end_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines(PLAN, 0)
    lines.advance(3)
    lines.close()
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_bar_that_goes_away(terminal: io.StringIO) -> None:
    bar = display(PLAN, 10, is_main=True)
    assert isinstance(bar, Bar)
    bar.advance(12)
    bar.window(WINDOW)
    bar.evaluated(20, SCORES, WINDOW)
    bar.progress.refresh()
    bar.close()
    seen = terminal.getvalue()
    assert "12/25" in seen
    assert "1,500 img/s" in seen
    assert "epoch 2/3  step 20/25" in seen
    assert bar.progress.tasks[0].completed == 12


def test_a_file_gets_lines_and_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert type(display(PLAN, 0, is_main=True)) is Lines
    nothing = display(PLAN, 0, is_main=False)
    assert type(nothing) is Display
    nothing.advance(1)
    nothing.window(WINDOW)
    nothing.evaluated(1, SCORES, WINDOW)
    nothing.close()
    assert capsys.readouterr().out == ""
