"""The learning rate at known steps."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.core.errors import InputError
from lockstep.core.plan import Plan
from lockstep.job.create import check_schedule
from lockstep.optim.schedule import Constant, Cosine, Linear, Step

PLAN = Plan(examples=100, batch=10, total_steps=100, micro_batches=1, log_every=1, eval_every=1, save_every=1)
ALL: list[type[Constant]] = [Constant, Cosine, Linear, Step]


def at(schedule: Constant, *steps: int) -> list[float]:
    return [schedule.factor(step, PLAN, ()) for step in steps]


def test_a_constant_rate_is_one() -> None:
    assert at(Constant(), 1, 50, 100) == [1, 1, 1]


@pytest.mark.parametrize("schedule", ALL)
def test_the_warm_up_climbs_in_a_line_and_ends_at_the_base_rate(schedule: type[Constant]) -> None:
    assert at(schedule(warmup=10), 1, 5, 10, 11) == pytest.approx([0.1, 0.5, 1, 1])


@pytest.mark.parametrize("warmup", [20, "20", "2ep", "20%"])
def test_a_warm_up_may_be_steps_epochs_or_a_share(warmup: int | str) -> None:
    assert at(Linear(warmup=warmup), 10, 20, 21, 61) == pytest.approx([0.5, 1, 1, 0.5])


def test_half_a_cosine_falls_from_the_base_rate_to_the_final_one() -> None:
    assert at(Cosine(), 1, 26, 51, 76) == pytest.approx([1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])
    assert at(Cosine(), 100)[0] == pytest.approx(0.000247, abs=1e-6)
    assert at(Cosine(final=0.2), 1, 51, 100) == pytest.approx([1, 0.6, 0.2], abs=1e-3)


def test_a_line_falls_evenly() -> None:
    assert at(Linear(), 1, 26, 51, 100) == pytest.approx([1, 0.75, 0.5, 0.01])
    assert at(Linear(final=0.5), 1, 51) == pytest.approx([1, 0.75])


def test_steps_divide_the_rate_behind_each_milestone() -> None:
    schedule = Step(milestones=["30", "6ep", "90%"], gamma=0.5)
    assert at(schedule, 30, 31, 60, 61, 90, 91) == pytest.approx([1, 0.5, 0.5, 0.25, 0.25, 0.125])


def test_milestones_are_counted_from_the_start_of_the_run_and_not_from_the_warm_up() -> None:
    assert at(Step(warmup=10, milestones=["30"]), 10, 11, 30, 31) == pytest.approx([1, 1, 1, 0.1])


@pytest.mark.parametrize("schedule", ALL)
def test_a_run_may_be_shorter_than_its_warm_up(schedule: type[Constant]) -> None:
    assert at(schedule(warmup=200), 1, 100) == pytest.approx([0.005, 0.5])


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (Constant(warmup="5 epochs"), "schedule.warmup is '5 epochs'"),
        (Cosine(warmup=-1), "schedule.warmup is -1"),
        (Step(milestones=["half"]), "schedule.milestones is 'half'"),
    ],
)
def test_a_unit_that_does_not_exist_is_refused_by_its_key(schedule: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        at(schedule, 1)


def test_steps_without_milestones_are_refused() -> None:
    with pytest.raises(InputError, match=r"schedule\.milestones is empty; use schedule=constant"):
        Step(milestones=[])


def test_a_schedule_that_takes_no_scores_is_refused_before_the_run() -> None:
    class Old:
        def factor(self, step: int, plan: Plan) -> float:
            return 1.0

    says = r"schedule: Old\.factor takes \(step, plan\), expected \(step, plan, scores\): add `scores`"
    with pytest.raises(InputError, match=says):
        check_schedule(Old(), PLAN)  # type: ignore[arg-type]
