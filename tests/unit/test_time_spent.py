"""Where the time of a run goes, and what is left of it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from helpers import train_here
from lockstep.core.plan import Plan
from lockstep.telemetry.clock import TimeLeft, TrainingClock
from lockstep.telemetry.time_spent import LEAST_TIMED, TimeSpent

CPU = torch.device("cpu")
UNIT = 0.02  # seconds
TRUE = {"forward": 0.3, "backward": 0.5, "optimizer": 0.2}  # the parts of a step


class Sleepy(torch.autograd.Function):
    """Takes a unit forward, and two backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        time.sleep(UNIT)
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(2 * UNIT)
        return grad


def step(times: TimeSpent, model: nn.Module, *, micro_batches: int, reduction: float) -> None:
    """One timed step, with three units for the optimizer."""
    times.start()
    for _ in range(micro_batches):
        loss = Sleepy.apply(model(torch.ones(2, 3))).sum()
        times.forward_done()
        loss.backward()
    time.sleep(reduction)
    times.reduced()
    time.sleep(3 * UNIT)
    times.stop()


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("reduces", [True, False])
def test_a_timed_step_is_divided_into_its_parts(micro_batches: int, reduces: bool) -> None:
    model = nn.Linear(3, 4)
    times = TimeSpent(model, CPU, reduces=reduces, period=1)
    reduction = 4 * UNIT * reduces
    for _ in range(LEAST_TIMED):
        step(times, model, micro_batches=micro_batches, reduction=reduction)
    shares = times.shares(0.0)
    expected = {"forward": micro_batches, "backward": 2 * micro_batches, "optimizer": 3}
    if reduces:
        expected["communication"] = 4
    total = sum(expected.values())
    parts = {part: share for part, share in shares.items() if part in expected}
    assert parts == pytest.approx({part: units / total for part, units in expected.items()}, abs=0.12)
    assert sum(shares.values()) == pytest.approx(1)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_the_wait_for_the_slowest_rank_is_taken_from_the_communication() -> None:
    model = nn.Linear(3, 4)
    times = TimeSpent(model, CPU, reduces=True, period=1)
    for _ in range(LEAST_TIMED):
        step(times, model, micro_batches=1, reduction=4 * UNIT)
    alone, waiting = times.shares(0.0), times.shares(0.1)
    assert waiting["slowest_rank"] == pytest.approx(0.1, abs=0.02)
    assert waiting["communication"] == pytest.approx(alone["communication"] - 0.1, abs=0.03)
    assert times.shares(0.99)["communication"] == 0, "no more than there is"


def test_waits_and_interruptions_are_timed_as_they_are() -> None:
    times = TimeSpent(None, CPU, reduces=False, period=20)

    def groups() -> Iterator[int]:
        for number in range(3):
            time.sleep(2 * UNIT)
            yield number

    requested = time.perf_counter()
    for _ in times.loading(groups()):
        time.sleep(UNIT)  # augmenting
        times.clock.add_arrival(requested, time.perf_counter())
        time.sleep(UNIT)  # a step
        with times.clock.pause("evaluation"):
            time.sleep(2 * UNIT)
        requested = time.perf_counter()
    assert {part: share for part, share in times.shares(0.0).items() if share} == pytest.approx(
        {"data": 2 / 6, "augmentation": 1 / 6, "step": 1 / 6, "evaluation": 2 / 6}, abs=0.06
    )


def test_the_parts_of_a_step_divide_the_time_that_is_neither_a_wait_nor_a_pause() -> None:
    times = TimeSpent(nn.Linear(3, 4), CPU, reduces=False, period=1)
    for _ in range(LEAST_TIMED):
        step(times, nn.Linear(3, 4), micro_batches=1, reduction=0.0)
    times.clock.start()
    times.clock.began -= 10e4
    times.clock.prepared, times.clock.waited = 6e4, 5e4
    times.clock.paused_for["evaluation"] = 10e4
    shares = times.shares(0.0)
    assert {part: shares.pop(part) for part in ("data", "augmentation", "evaluation", "checkpoint")} == pytest.approx(
        {"data": 0.25, "augmentation": 0.05, "evaluation": 0.5, "checkpoint": 0.0}, abs=1e-3
    )
    assert sum(shares.values()) == pytest.approx(0.2, abs=1e-3)
    times.clock.add_load(7e4)  # workers may read for longer than anybody waits
    times.clock.add_arrival(0.0, 0.0)
    assert times.shares(0.0)["data"] == pytest.approx(0.3, abs=1e-3)


def test_a_timed_step_counts_once_however_often_the_shares_are_looked_at() -> None:
    times = TimeSpent(nn.Linear(3, 4), CPU, reduces=True, period=1)
    for reduction in (0.0, 0.0, 12 * UNIT):
        step(times, nn.Linear(3, 4), micro_batches=1, reduction=reduction)
        looks = [times.shares(0.0)["communication"] for _ in range(3)]
        assert looks == pytest.approx(looks[:1] * 3)


@pytest.mark.parametrize(
    ("first", "period", "expected"),
    [(0, 1, [10, 30, 50]), (0, 50, [25, 75]), (30, 50, [75, 125]), (72, 50, [125]), (75, 50, [125])],
)
def test_a_step_in_the_middle_of_each_window_is_timed_but_none_of_the_first_ones(
    first: int, period: int, expected: list[int]
) -> None:
    times = TimeSpent(nn.Linear(1, 1), CPU, reduces=False, period=period, first=first)
    for number in expected:
        assert times.next_step == number
        times.start()
        times.stop()


def timed(times: TimeSpent, *steps: dict[str, float]) -> None:
    """Have steps been timed that took so many seconds in their parts."""
    for parts in steps:
        ends = [("", 0.0)]
        for part, seconds in parts.items():
            ends.append((part, ends[-1][1] + seconds))
        times.timed.append(ends)


def test_too_few_timed_steps_are_not_divided() -> None:
    times = TimeSpent(nn.Linear(3, 4), CPU, reduces=False, period=1)
    for number in range(LEAST_TIMED):
        shares = times.shares(0.0)
        assert shares["step"] == pytest.approx(1), number
        assert times.spread() == {}
        timed(times, {"forward": 1.0, "backward": 2.0, "optimizer": 1.0})
    shares = {part: share for part, share in times.shares(0.0).items() if share}
    assert shares == pytest.approx({"forward": 0.25, "backward": 0.5, "optimizer": 0.25})
    assert times.spread() == pytest.approx({"forward": 0, "backward": 0, "optimizer": 0}, abs=1e-9)


def test_the_spread_is_twice_the_standard_error_of_the_shares() -> None:
    """Of steps of one length, this is the usual standard error of a mean, as the standard library counts it."""
    shares = [0.2, 0.3, 0.25, 0.45, 0.3]
    times = TimeSpent(nn.Linear(3, 4), CPU, reduces=False, period=1)
    timed(times, *({"forward": 2 * (1 - share), "optimizer": 2 * share} for share in shares))
    error = statistics.stdev(shares) / len(shares) ** 0.5
    assert times.spread() == pytest.approx({"forward": 2 * error, "optimizer": 2 * error})


def test_the_spread_covers_the_true_share_on_a_busy_machine() -> None:
    """Steps that other work stops at random places: the share is off by more than the spread in few runs of many."""
    rng, off = random.Random(0), 0
    for _ in range(200):
        times = TimeSpent(nn.Linear(3, 4), CPU, reduces=False, period=1)
        busy = [{part: share * (1 + 5 * (rng.random() < 0.2)) for part, share in TRUE.items()} for _ in range(40)]
        timed(times, *busy)
        off += abs(times.shares(0.0)["optimizer"] - TRUE["optimizer"]) > times.spread()["optimizer"]
    assert off < 40, "one in twenty by the normal distribution, more for so few steps of such a kind"


def test_timing_steps_changes_no_bit_of_a_run(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    job = ("model=linear", "steps=45", "batch=50", "precision=fp64", "train.micro_batches=2")
    with_times = train_here(folder / "with", *job)
    monkeypatch.setattr("lockstep.telemetry.time_spent.LEAST_PERIOD", 1000)
    without = train_here(folder / "without", *job, "telemetry.interval=1000")
    assert with_times.weights.read_bytes() == without.weights.read_bytes()


# 100 steps of a second, an evaluation of 5 s every 20 steps, a checkpoint of 2 s every 50.
PLAN = Plan(examples=100, batch=10, total_steps=100, micro_batches=1, log_every=5, eval_every=20, save_every=50)
WHOLE = 100 + 5 * 5 + 2 * 2


class Run:
    """A run whose clock is set by hand; its first step takes `warm_up` seconds more."""

    def __init__(self, warm_up: float = 0.0) -> None:
        self.clock = TrainingClock()
        self.left = TimeLeft(PLAN, self.clock, 0, evaluated=150)  # at a third of a step's cost: 5 s
        self.warm_up = warm_up

    def at(self, step: int) -> float | None:
        self.clock.start()
        self.clock.began -= step + self.warm_up * (step > 0)
        for purpose, every, seconds in (("evaluation", 20, 5.0), ("checkpoint", 50, 2.0)):
            self.clock.pauses[purpose] = step // every
            self.clock.paused_for[purpose] = step // every * seconds
        if step == 5:
            self.left.window_ended(5)
        return self.left.seconds(step)


@pytest.mark.parametrize("warm_up", [0.0, 30.0])
def test_the_time_left_is_within_a_tenth_after_a_tenth_of_the_run(warm_up: float) -> None:
    run = Run(warm_up)
    for step in range(1, 101):
        left = run.at(step)
        truth = WHOLE - step - 5 * (step // 20) - 2 * (step // 50)
        if step > 10:
            assert left == pytest.approx(truth, rel=0.1, abs=0.2), step
    assert run.at(100) == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("model", [None, nn.Linear(1, 1)])
@pytest.mark.parametrize("reduces", [False, True])
def test_the_parts_are_the_same_from_the_first_evaluation_on(model: nn.Module | None, reduces: bool) -> None:
    times = TimeSpent(model, CPU, reduces=reduces, period=1)
    before = times.shares(0.0)
    if model is not None:
        times.start()
        times.stop()
    assert list(times.shares(0.0)) == list(before)


def test_nothing_is_known_before_the_first_step() -> None:
    assert Run().at(0) is None


def test_the_evaluation_after_the_last_step_is_part_of_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(examples=100, batch=10, total_steps=25, micro_batches=1, log_every=2, eval_every=10, save_every=25)
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = TrainingClock()
    for _ in range(2):
        with clock.pause("evaluation"):
            now += 3.0
    now += 20.0
    assert TimeLeft(plan, clock, 0, evaluated=20).seconds(20) == pytest.approx(5 * 1.0 + 3.0)
