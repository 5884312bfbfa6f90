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
    durations |= {"0.9%": 2, "5%": 10, "2.5 %": 5, "0.7%": 1, "0.31ep": 12, "1.25%": 2, "0.0625ep": 2}
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
        ({"eval_every": "often"}, "^train.eval_every is 'often', expected steps"),
        ({"save_every": "often"}, "^checkpoint.every is 'often', expected steps"),
        (
            {"save_every": "501h"},
            "^checkpoint.every is '501h', expected a time such as 30s, 10min or 2h, at most 500",
        ),
        ({"batch": 101}, "^batch is 101, but the training split has 100 examples; use batch=100 or less$"),
        ({"micro_batches": 31}, "^train.micro_batches is 31, but a global batch has 30 examples; use train.micro_b"),
        ({"examples": 0}, "no examples; use another data set, or other files of this one$"),
    ],
)
def test_an_impossible_plan_is_refused_by_its_key(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        make_plan(**{**OPTIONS, **change})


def test_a_plan_has_what_it_is_made_of_and_counts_the_durations_of_all_keys_in_its_steps() -> None:
    plan = make_plan(**{**OPTIONS, "micro_batches": 3, "total_steps": 50})
    assert (plan.examples, plan.batch, plan.micro_batches, plan.total_steps) == (100, 30, 3, 50)
    assert [plan.in_steps("key", value) for value in ("1ep", "50%", 7, "0")] == [4, 25, 7, 0]
    with pytest.raises(InputError, match=r"^schedule\.warmup is 'x', expected steps \(100\), epochs \(2ep\) or a"):
        plan.in_steps("schedule.warmup", "x")
    shorter = make_plan(**{**OPTIONS, "total_steps": 10, "batch": 50})
    assert [shorter.in_steps("key", value) for value in ("1ep", "50%")] == [2, 5], "of its own steps"
    assert [make_plan(**{**OPTIONS, "save_every": every}).save_every for every in ("1%", 0, "10min")] == [1, 1, 20]


def test_the_steps_of_an_epoch_are_counted_from_nothing_up_to_its_last_one() -> None:
    plan = make_plan(**OPTIONS)
    assert [(plan.epoch(step), plan.position(step)) for step in (1, 4, 5, 20)] == [(0, 0), (0, 3), (1, 0), (4, 3)]
