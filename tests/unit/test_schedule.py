"""The learning rate at known steps."""

import math
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from helpers import FAKE, built, records, train_here, weights
from lockstep.core.errors import InputError
from lockstep.core.plan import Plan
from lockstep.core.protocols import Schedule
from lockstep.core.run import Run
from lockstep.optim.schedule import Chain, Constant, Cosine, Exponential, Linear, Plateau, Polynomial, Step

PLAN = Plan(examples=100, batch=10, total_steps=100, micro_batches=1, log_every=1, eval_every=1, save_every=1)
ALL: list[type[Constant]] = [Chain, Constant, Cosine, Exponential, Linear, Plateau, Polynomial, Step]


def at(schedule: Schedule, *steps: int) -> list[float]:
    return [schedule.factor(step, PLAN, ()) for step in steps]


def of_torch(scheduler: Callable[[torch.optim.Optimizer], LRScheduler], steps: int = 100) -> list[float]:
    """The rates of a scheduler of torch that is stepped after each step, for a base rate of 1."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the constructors step, and the optimizer does not
        schedule = scheduler(optimizer)
        rates = []
        for _ in range(steps):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            schedule.step()
    return rates


@pytest.mark.parametrize("schedule", ALL)
def test_the_warm_up_climbs_in_a_line_and_may_be_longer_than_the_run(schedule: Any) -> None:
    assert at(schedule(warmup=10), 1, 5, 10, 11) == pytest.approx([0.1, 0.5, 1, 1])
    if schedule is not Chain:
        assert at(schedule(warmup=200), 1, 100) == pytest.approx([0.005, 0.5])


@pytest.mark.parametrize("warmup", [20, "20", "2ep", "20%"])
def test_a_warm_up_may_be_steps_epochs_or_a_share_and_moves_no_milestone(warmup: int | str) -> None:
    assert at(Linear(warmup=warmup), 10, 20, 21, 61) == pytest.approx([0.5, 1, 1, 0.5])
    assert at(Step(warmup=10, milestones=["30"]), 10, 11, 30, 31) == pytest.approx([1, 1, 1, 0.1])


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
    with pytest.raises(InputError, match=r"schedule\.milestones is empty; use schedule=constant"):
        Step(milestones=[])


@pytest.mark.parametrize(
    ("schedule", "steps", "scheduler"),
    [
        (Cosine(restarts=3, final=0.1), 100, lambda sgd: lr_scheduler.CosineAnnealingWarmRestarts(sgd, 25, 1, 0.1)),
        (Cosine(restarts=2, restart_mult=2), 70, lambda sgd: lr_scheduler.CosineAnnealingWarmRestarts(sgd, 10, 2)),
        (Constant(), 100, lambda sgd: lr_scheduler.ConstantLR(sgd, 1)),
        (Cosine(), 100, lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, 100)),
        (Cosine(final=0.2), 100, lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, 100, 0.2)),
        (Linear(), 100, lambda sgd: lr_scheduler.LinearLR(sgd, 1, 0, 100)),
        (Linear(final=0.5), 100, lambda sgd: lr_scheduler.LinearLR(sgd, 1, 0.5, 100)),
        (Step(milestones=["30", "6ep", "90%"]), 100, lambda sgd: lr_scheduler.MultiStepLR(sgd, [30, 60, 90], 0.1)),
        (Polynomial(), 100, lambda sgd: lr_scheduler.PolynomialLR(sgd, 100, 0.9)),
        (Polynomial(power=3), 100, lambda sgd: lr_scheduler.PolynomialLR(sgd, 100, 3)),
    ],
)
def test_the_usual_schedules_are_those_of_torch(
    schedule: Constant, steps: int, scheduler: Callable[[torch.optim.Optimizer], LRScheduler]
) -> None:
    plan = replace(PLAN, total_steps=steps)
    rates = [schedule.factor(step, plan, ()) for step in range(1, steps + 1)]
    assert rates == pytest.approx(of_torch(scheduler, steps), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("final", [0.2, 1.5])
@pytest.mark.parametrize("power", [0.5, 1, 3])
def test_a_polynomial_is_of_the_way_from_the_base_rate_to_its_final_share(power: float, final: float) -> None:
    rates = of_torch(lambda sgd: lr_scheduler.PolynomialLR(sgd, 100, power))
    expected = [final + (1 - final) * rate for rate in rates]
    assert at(Polynomial(power=power, final=final), *range(1, 101)) == pytest.approx(expected, rel=1e-9)


def test_an_exponential_is_that_of_torch_in_a_loop_of_epochs() -> None:
    epochs = of_torch(lambda sgd: lr_scheduler.ExponentialLR(sgd, 0.8), 10)
    assert at(Exponential(gamma=0.8), *range(1, 101)) == pytest.approx([rate for rate in epochs for _ in range(10)])
    assert at(Exponential(gamma=0.8, warmup=5), 5, 15, 16) == pytest.approx([1, 1, 0.8])


@given(restarts=st.integers(0, 6), mult=st.integers(1, 3), steps=st.integers(1, 400))
def test_a_cosine_begins_again_as_often_as_restarts_says(restarts: int, mult: int, steps: int) -> None:
    schedule, plan = Cosine(restarts=restarts, restart_mult=mult), replace(PLAN, total_steps=steps)
    rates = [schedule.factor(step, plan, ()) for step in range(1, steps + 1)]
    rises = sum(later > rate for rate, later in pairwise(rates))
    shortest = steps / sum(mult**period for period in range(restarts + 1))
    assert rises == restarts if shortest >= 2 else rises <= restarts
    assert all(0 <= rate <= 1 for rate in rates)


def test_a_chain_has_the_rates_of_a_sequence_of_torch() -> None:
    def sequence(sgd: torch.optim.Optimizer) -> LRScheduler:
        parts = [lr_scheduler.LinearLR(sgd, 1, 0.5, 30), lr_scheduler.ConstantLR(sgd, 1, 30)]
        return lr_scheduler.SequentialLR(sgd, [*parts, lr_scheduler.PolynomialLR(sgd, 40, 2)], [30, 60])

    words = ("schedule=chain", "schedule.parts=[linear:30%:final:0.5,constant:3ep,polynomial:power:2]")
    assert at(built(*words).schedule, *range(1, 101)) == pytest.approx(of_torch(sequence), rel=1e-9)


def test_the_parts_of_a_chain_see_their_own_part_of_the_run() -> None:
    chain = Chain(parts=["constant:40:warmup:50%", "plateau:40:patience:0", "step"], warmup=10)
    assert at(chain, 5, 10, 20, 21) == pytest.approx([0.5 * 0.25, 0.5, 1, 1])
    assert at(chain, 80, 86, 87, 88, 93, 94) == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01])
    scores = [(40, 9.0), (50, 1.0), (60, 1.0), (70, 2.0)]  # the one of step 40 is of the part before
    assert [chain.factor(step, PLAN, scores) for step in (51, 60, 61, 80)] == pytest.approx([1, 1, 0.1, 0.1])


@pytest.mark.parametrize("steps", range(1, 12))
def test_a_chain_takes_every_step_of_a_run_of_a_few_steps(steps: int) -> None:
    plan, chain = (
        replace(PLAN, total_steps=steps),
        Chain(parts=["constant:30%", "linear:30%", "step:30%", "cosine:10%"]),
    )
    assert all(0 < chain.factor(step, plan, ()) <= 1 for step in range(1, steps + 1))


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([], r"schedule\.parts is \[\], expected a length for each part but the last"),
        (["constant", "linear"], "expected a length for each part but the last"),
        (["constant:50%", "linear:40%"], "expected a length for each part but the last"),
        (["constant:50", "linear:50"], "expected a length for each part but the last"),
        (["constnt:50%", "linear"], "'constnt:50%', expected a schedule before the colon.* Did you mean 'constant'"),
        (["constnt:50%:final:0.125", "linear"], "expected a schedule before the colon.* Did you mean 'constant'"),
        (["linear:half", "cosine"], "schedule.parts is 'half', expected steps"),
        (["linear:9%:finl:1", "cosine"], "'linear:9%:finl:1': linear.finl is not a key .* Did you mean 'final'"),
        (["linear:9%:final:-1", "cosine"], "linear.final is -1.0, expected a number from 0"),
        (["constant:90%", "linear:20%", "cosine"], "has 110 steps before 'cosine', but the run has 100; shorten"),
        (
            ["constant:12345", "linear:20%", "step"],
            "has 12,365 steps before 'step', but the run has 100; shorten the",
        ),
    ],
)
def test_parts_that_make_no_run_are_refused(parts: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        at(Chain(parts=parts), 1)


@pytest.mark.parametrize(
    ("parts", "fits"),
    [
        (["constant:100", "linear:2", "cosine"], True),  # as many steps more as there are parts: of rounded shares
        (["constant:100", "linear:3", "cosine"], True),
        (["constant:100", "linear:4", "cosine"], False),
        (["linear"], True),
        (["linear:100%"], True),
        (["linear:50%", "cosine:50%"], True),
        (["linear:16.1%", "constant:48.2%", "cosine:35.7%"], True),  # as floats they add up to a little more
        (["linear:50%", "cosine:51%"], False),
        (["linear:50", "cosine:50%"], False),
        (["linear:5ep", "cosine:5ep"], False),
        (["linear:final:0.5"], True),
        (["linear:10%:final:0.5:warmup:3", "cosine"], True),
    ],
)
def test_a_chain_has_one_length_for_each_part_but_its_last(parts: list[str], fits: bool) -> None:
    if fits:
        assert all(0 <= rate <= 1 for rate in at(Chain(parts=parts), 1, 100))
    else:
        with pytest.raises(InputError, match=r"^schedule\.parts "):
            at(Chain(parts=parts), 1)


VALUE = st.sampled_from([0.0, 0.5, 0.5 * 1.25, 0.5 * 0.75, 0.5 + 0.25, 0.25, 1.0, math.nan, math.inf])
KEYS = st.fixed_dictionaries(
    {
        "patience": st.integers(0, 3),
        "threshold": st.sampled_from([0.0, 1e-4, 0.25]),
        "threshold_mode": st.sampled_from(["rel", "abs"]),
        "cooldown": st.integers(0, 3),
    }
)


@settings(max_examples=300)
@given(
    values=st.lists(VALUE | st.floats(0, 1e6), min_size=3, max_size=20),
    mode=st.sampled_from(["min", "max"]),
    least=st.sampled_from([0.0, 0.03]),
    words=KEYS,
)
def test_a_plateau_is_that_of_torch_after_each_evaluation(
    values: list[float], mode: Any, least: float, words: dict[str, Any]
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    reference = lr_scheduler.ReduceLROnPlateau(optimizer, mode, 0.3, min_lr=least, eps=0, **words)
    schedule = Plateau(gamma=0.3, min_factor=least, **words)
    scores = [(10 * number, value if mode == "max" else -value) for number, value in enumerate(values, 1)]
    for step, gain in scores:
        assert schedule.factor(step, PLAN, scores) == optimizer.param_groups[0]["lr"]
        reference.step(gain if mode == "max" else -gain)
        assert schedule.factor(step + 1, PLAN, scores) == optimizer.param_groups[0]["lr"]


def test_a_worse_score_below_zero_and_one_in_the_warm_up_are_no_improvement() -> None:
    schedule = Plateau(patience=0, threshold=0.1)
    assert schedule.factor(21, PLAN, [(10, -1.0), (20, -1.05)]) == 0.1  # such as R2
    assert schedule.factor(21, PLAN, [(10, -1.0), (20, -0.95)]) == 0.1
    assert schedule.factor(21, PLAN, [(10, -1.0), (20, -0.85)]) == 1
    first = Plateau(patience=0, threshold=1)  # whatever the threshold, the first score is the best one
    assert [first.factor(step, PLAN, [(10, 0.2), (20, 0.3)]) for step in (11, 21)] == [1, 0.1]
    schedule, scores = Plateau(patience=0, warmup=20), [(10, 9.0), (20, 8.0), (30, 1.0), (40, 1.0)]
    assert [schedule.factor(step, PLAN, scores) for step in (10, 20, 31, 41)] == pytest.approx([0.5, 1, 1, 0.1])


def test_an_evaluation_at_the_last_step_of_a_part_is_not_one_of_the_next_part() -> None:
    chain, alone = Chain(parts=["constant:40", "plateau:patience:0"]), Plateau(patience=0)
    scores = [(step, 1.0 - step / 1000) for step in (20, 40, 60, 80)]
    later = [(step - 40, gain) for step, gain in scores if step > 40]
    second = replace(PLAN, total_steps=60)
    for step in (41, 60, 61, 80, 81, 100):
        assert chain.factor(step, PLAN, scores) == alone.factor(step - 40, second, later), step
    assert [chain.factor(step, PLAN, scores) for step in (40, 80, 81)] == pytest.approx([1, 1, 0.1])


def test_a_part_of_a_chain_ends_with_the_run() -> None:
    chain = Chain(parts=["linear:5", "constant"])
    assert [chain.factor(step, replace(PLAN, total_steps=3), ()) for step in (1, 2, 3)] == pytest.approx(
        [1, 2 / 3, 1 / 3]
    )
    assert [chain.factor(step, replace(PLAN, total_steps=7), ()) for step in (5, 6, 7)] == pytest.approx([0.2, 1, 1])
    later = Chain(parts=["constant:1", "linear:5", "constant"])  # its second part is cut by what the first one took
    assert [later.factor(step, replace(PLAN, total_steps=4), ()) for step in (1, 2, 3, 4)] == pytest.approx(
        [1, 1, 2 / 3, 1 / 3]
    )


@pytest.mark.parametrize(
    "schedule",
    [
        *(schedule(warmup=7) for schedule in ALL),
        Plateau(patience=0, cooldown=1),
        Cosine(restarts=4, restart_mult=2),
        Chain(parts=["plateau:50%:patience:1", "cosine:30%:restarts:2", "polynomial"]),
    ],
)
def test_the_order_of_calls_and_later_evaluations_change_no_rate(schedule: Constant) -> None:
    order = random.Random(0)
    scores = [(step, order.choice([0.1, 0.2, 0.3])) for step in range(4, 101, 4)]
    straight = [schedule.factor(step, PLAN, [item for item in scores if item[0] < step]) for step in range(1, 101)]
    steps = order.sample(range(1, 101), 100)
    assert {step: schedule.factor(step, PLAN, scores) for step in steps} == dict(enumerate(straight, 1))


def test_a_run_on_a_plateau_that_is_stopped_at_any_step_ends_with_the_same_bits(tmp_path: Path) -> None:
    job = ("model=linear", "steps=12", "train.eval_every=2", "optimizer.lr=0.01", "telemetry.interval=1")
    words = (*job, "schedule=plateau", "schedule.patience=0", "schedule.threshold=0.3")
    whole = train_here(tmp_path / "whole", *words)
    rates = [line["optim/lr"] for line in records(whole) if "optim/lr" in line]
    assert len(set(rates)) > 2
    for stop in (3, 6, 11):
        run = train_here(tmp_path / str(stop), *words, stop_at=stop)
        assert Run(run.path).summary["step"] == stop
        train_here(run.path, *words)
        assert [line["optim/lr"] for line in records(run) if "optim/lr" in line] == rates
        assert all(weights(run.path)[name].equal(tensor) for name, tensor in weights(whole.path).items())


@pytest.mark.parametrize("factor", ["0.1", None, math.nan, -1.0, math.inf])
@pytest.mark.parametrize("from_step", [1, 2])
def test_a_schedule_of_the_users_that_returns_no_number_from_0_on_is_one_sentence(
    factor: Any, from_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Constant, "factor", lambda self, step, plan, scores: factor if step == from_step else 0.5)
    with pytest.raises(InputError, match=rf"^the schedule Constant gives step {from_step} the factor .*, expected"):
        train_here(tmp_path / "run", *FAKE, "schedule=constant", "steps=3")
