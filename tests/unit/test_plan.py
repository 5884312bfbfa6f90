"""Durations are converted to steps in one place; events are due at steps."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import InputError
from lockstep.core.plan import Event, Plan, make_plan, seconds, steps

OPTIONS: dict[str, Any] = {"examples": 100, "batch": 30, "epochs": 5, "total_steps": None, "micro_batches": 1}
OPTIONS |= {"log_every": 3, "eval_every": "1ep", "save_every": "50%"}


def test_a_time_is_in_seconds_minutes_or_hours() -> None:
    times = {"30s": 30, "10min": 600, "2h": 7200, "1.5h": 5400, 45: 45, "45": 45, "2 h": 7200}
    assert {value: seconds("key", value) for value in times} == times


def test_a_duration_is_in_steps_epochs_or_a_share_of_the_run() -> None:
    durations = {100: 100, "100": 100, "2ep": 80, "0.5ep": 20, "0.32ep": 13, "1 ep": 40, 0: 0}
    durations |= {"0.9%": 2, "5%": 10, "2.5 %": 5}
    assert {value: steps("key", value, steps_per_epoch=40, total_steps=200) for value in durations} == durations


def test_epochs_end_with_a_short_batch() -> None:
    plan = make_plan(**OPTIONS)
    assert plan.steps_per_epoch == 4
    assert plan.total_steps == 20
    assert (plan.log_every, plan.eval_every, plan.save_every) == (3, 4, 10)


def test_checkpoints_may_go_by_the_clock() -> None:
    plan = make_plan(**{**OPTIONS, "save_every": "10min"})
    assert plan.save_every_s == 600
    assert [step for step in range(1, 21) if plan.due("save", step)] == [20]
    assert make_plan(**OPTIONS).save_every_s is None


def test_an_event_falls_on_its_multiples_and_on_the_last_step() -> None:
    plan = make_plan(**{**OPTIONS, "total_steps": 10})
    events: list[Event] = ["log", "eval", "save"]
    falls = {event: [step for step in range(1, 11) if plan.due(event, step)] for event in events}
    assert falls == {"log": [3, 6, 9, 10], "eval": [4, 8, 10], "save": [5, 10]}


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 1000))
def test_a_step_is_at_one_place_of_one_epoch(examples: int, batch: int, step: int) -> None:
    every = {"log_every": 1, "eval_every": 1, "save_every": 1}
    plan = Plan(examples=examples, batch=batch, total_steps=1000, micro_batches=1, **every)
    assert plan.epoch(step) * plan.steps_per_epoch + plan.position(step) == step - 1
    assert 0 <= plan.position(step) * batch < examples


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"micro_batches": 31}, "use train.micro_batches=30 or less"),
        ({"batch": 101}, "use batch=100 or less"),
        ({"examples": 0}, "the training split has no examples"),
        ({"log_every": "often"}, "telemetry.interval is 'often'"),
    ],
)
def test_an_impossible_plan_is_refused_by_its_key(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        make_plan(**{**OPTIONS, **change})
