"""Naming a slow rank from what the ranks say; the clock itself is tested on real ranks."""

from __future__ import annotations

import time

import pytest

from lockstep.telemetry import straggler
from lockstep.telemetry.straggler import STEPS, Stragglers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that moves by hand."""
    now = [0.0]
    monkeypatch.setattr(straggler.time, "perf_counter", lambda: now[0])
    return now


def said(clock: list[float], busy: list[list[float]], step_s: float) -> list[str]:
    """The sentences that a course of steps leads to."""
    stragglers = Stragglers()
    found = []
    for each in busy:
        clock[0] += step_s
        found.append(stragglers.record(each))
    return [sentence for sentence in found if sentence]


def test_a_slow_rank_is_named_once_and_in_time(clock: list[float]) -> None:
    (sentence,) = said(clock, [[0.05, 0.35, 0.05]] * 100, 0.4)
    assert sentence.startswith("rank 1 is slow: at each step the others wait 300 of 400 ms for it")
    assert said(clock, [[0.05, 0.35, 0.05]] * STEPS, 0.4) == [sentence]


def test_hiccups_do_not_make_a_straggler(clock: list[float]) -> None:
    hiccups = [[0.05, 3.0 if step % 3 == 0 else 0.05] for step in range(100)]
    assert said(clock, hiccups, 0.1) == []


@pytest.mark.parametrize(("busy", "step_s"), [([0.050, 0.070], 0.4), ([0.001, 0.009], 0.02)])
def test_a_small_difference_is_not_worth_a_word(clock: list[float], busy: list[float], step_s: float) -> None:
    assert said(clock, [busy] * 100, step_s) == []


def test_nothing_heard_is_nothing_said() -> None:
    stragglers = Stragglers()
    assert [stragglers.record([]) for _ in range(2 * STEPS)] == [""] * 2 * STEPS
    stragglers.begin()
    time.sleep(0.01)
    stragglers._forward_done()
    assert stragglers.busy >= 0.01
