"""Where the time of a run goes, what is left of it, and which rank is slow."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers import train_here
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.telemetry.display import TimeLeft
from lockstep.telemetry.time_spent import JUDGED_STEPS, LEAST_TIMED, Stragglers, TimeSpent, TrainingClock

CPU = torch.device("cpu")


def step(times: TimeSpent, passes: Callable[[float], None], *, micro_batches: int, reduction: float) -> None:
    """A timed step: a second of each forward, two of each backward, and three of the optimizer."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            passes(1)
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            passes(2)
            return grad

    times.start()
    for _ in range(micro_batches):
        loss = Slow.apply(nn.functional.linear(torch.ones(2, 3), *times.parameters)).sum()
        times.forward_done()
        loss.backward()
    passes(reduction)
    times.reduced()
    passes(3)
    times.stop()


def timed(times: TimeSpent, *steps: dict[str, float]) -> None:
    """Have steps been timed that took so many seconds in their parts."""
    for parts in steps:
        ends = [("", 0.0)]
        for part, seconds in parts.items():
            ends.append((part, ends[-1][1] + seconds))
        times.timed.append(ends)


def shown(shares: dict[str, float]) -> dict[str, float]:
    return {part: share for part, share in shares.items() if share}


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("reduces", [True, False])
def test_a_timed_step_is_split_into_parts(passes: Callable[[float], None], micro_batches: int, reduces: bool) -> None:
    times = TimeSpent(nn.Linear(3, 4), CPU, reduces=reduces, period=1)
    times.parameters[1].requires_grad_(False)
    for _ in range(LEAST_TIMED):
        step(times, passes, micro_batches=micro_batches, reduction=4 * reduces)
        assert not times.timing
        passes(5)
        times.reduced()  # of a step that is not timed
    expected = {"forward": micro_batches, "backward": 2 * micro_batches, "optimizer": 3}
    if reduces:
        expected["communication"] = 4
    total = sum(expected.values())
    for _ in range(2):  # a timed step counts once, however often one looks
        assert shown(times.shares(0.0)) == pytest.approx({part: units / total for part, units in expected.items()})
    assert not any(parameter._post_accumulate_grad_hooks for parameter in times.parameters)


def test_the_backward_pass_ends_with_the_last_gradient(passes: Callable[[float], None]) -> None:
    times = TimeSpent(nn.Linear(3, 4), CPU, reduces=True, period=1)
    for _ in range(LEAST_TIMED):
        times.start()
        times.forward_done()
        for parameter, seconds in zip(times.parameters, (1, 2), strict=True):
            passes(seconds)
            parameter.sum().backward()
        passes(1)
        times.reduced()
        times.stop()
    assert shown(times.shares(0.0)) == pytest.approx({"backward": 0.75, "communication": 0.25})


def test_a_timed_step_leaves_no_hook_at_any_parameter(passes: Callable[[float], None]) -> None:
    times = TimeSpent(nn.Linear(3, 4), CPU, reduces=False, period=1)
    step(times, passes, micro_batches=1, reduction=0)
    assert [bool(parameter._post_accumulate_grad_hooks) for parameter in times.parameters] == [False, False]


def test_the_wait_for_the_slowest_rank_is_taken_from_the_communication(passes: Callable[[float], None]) -> None:
    times = TimeSpent(nn.Linear(3, 4), CPU, reduces=True, period=1)
    timed(times, *[{"forward": 6.0, "communication": 4.0}] * LEAST_TIMED)
    passes(50)
    assert shown(times.shares(0.0)) == pytest.approx({"forward": 0.6, "communication": 0.4})
    assert shown(times.shares(0.1)) == pytest.approx({"forward": 0.6, "communication": 0.3, "slowest_rank": 0.1})
    assert times.shares(0.99)["communication"] == 0, "no more than there is"


def test_waits_and_interruptions_are_timed_as_they_are(passes: Callable[[float], None]) -> None:
    times = TimeSpent(None, CPU, reduces=False, period=20)
    assert not any(times.shares(0.0).values()), "there is no time yet"

    def groups() -> Iterator[int]:
        for number in range(3):
            passes(2)
            yield number

    requested, before = time.perf_counter(), times.clock.so_far()
    for _ in times.loading(groups()):
        passes(1)  # augmenting
        times.clock.add_arrival(requested, time.perf_counter())
        assert times.clock.before_step() == before, "without the wait for its data"
        passes(1)  # a step
        with times.clock.pause("evaluation"):
            passes(2)
            assert times.clock.so_far().busy == pytest.approx(before.busy + 4), "up to the pause"
        requested, before = time.perf_counter(), times.clock.so_far()
    expected = {"data": 2 / 6, "augmentation": 1 / 6, "step": 1 / 6, "evaluation": 2 / 6}
    assert shown(times.shares(0.0)) == pytest.approx(expected)


def test_the_parts_of_a_step_divide_the_time_without_waits_and_pauses(passes: Callable[[float], None]) -> None:
    times = TimeSpent(nn.Linear(3, 4), CPU, reduces=False, period=1)
    timed(times, *[{"forward": 1.0, "backward": 1.0}] * LEAST_TIMED)
    passes(8)
    times.clock.loaded += 7.0  # workers may read for longer than anybody waits
    times.clock.add_arrival(100.0, 106.0)
    with times.clock.pause("evaluation"):
        passes(10)
    passes(2)
    expected = {"data": 0.3, "forward": 0.1, "backward": 0.1, "evaluation": 0.5}
    assert shown(times.shares(0.0)) == pytest.approx(expected)


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


def test_timing_steps_changes_no_bit_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ("model=linear", "steps=45", "batch=50", "precision=fp64", "train.micro_batches=2")
    with_times = train_here(tmp_path / "with", *job)
    monkeypatch.setattr("lockstep.telemetry.time_spent.LEAST_PERIOD", 1000)
    without = train_here(tmp_path / "without", *job, "telemetry.interval=1000")
    assert with_times.weights.read_bytes() == without.weights.read_bytes()


@pytest.mark.parametrize("warm_up", [0.0, 30.0])
def test_the_time_left_is_at_the_pace_after_the_first_steps(passes: Callable[[float], None], warm_up: float) -> None:
    plan = Plan(examples=100, batch=10, total_steps=100, micro_batches=1, log_every=5, eval_every=20, save_every=50)
    left = TimeLeft(plan, TrainingClock(), 0)
    assert left.seconds(0) is None, "nothing is known before the first step"
    passes(warm_up + 5)
    left.window_ended(5)
    passes(5)
    with left.clock.pause("evaluation"):
        passes(10)
    assert left.seconds(10) == pytest.approx(90 * (20 + warm_up) / 10)
    passes(10)
    assert left.seconds(20) == pytest.approx(80 * 25 / 15)
    assert left.seconds(100) == 0


@pytest.mark.parametrize("model", [None, nn.Linear(1, 1)])
@pytest.mark.parametrize("reduces", [False, True])
def test_the_parts_are_the_same_from_the_first_evaluation_on(model: nn.Module | None, reduces: bool) -> None:
    times = TimeSpent(model, CPU, reduces=reduces, period=1)
    before = times.shares(0.0)
    if model is not None:
        times.start()
        times.stop()
    assert list(times.shares(0.0)) == list(before)


def sentences(busy: list[list[float]], step_s: float) -> list[str]:
    """The sentences at the log points of a run, one point every `STEPS` steps; `busy` is by step and rank."""
    stragglers = Stragglers(World.solo())
    points = [torch.tensor(busy[at : at + JUDGED_STEPS]).double().T for at in range(0, len(busy), JUDGED_STEPS)]
    judged = [stragglers.judge(torch.stack([torch.full_like(times, step_s), times], 2)) for times in points]
    return [sentence for sentence in judged if sentence]


@pytest.mark.parametrize("ranks", [2, 3, 1000])
def test_a_slow_rank_is_named_once(ranks: int) -> None:
    (sentence,) = sentences([[0.05, 0.35, *[0.05] * (ranks - 2)]] * 3 * JUDGED_STEPS, 0.4)
    assert sentence.startswith("rank 1 is slow: at each step the others wait 300 of 400 ms for it")


def test_one_hiccup_hides_no_slow_rank_and_a_few_do_not_make_one() -> None:
    usual, slow = [0.05, 0.05, 0.05], [0.05, 0.05, 0.35]
    assert len(sentences([usual] + [slow] * (JUDGED_STEPS - 1), 0.4)) == 1
    assert sentences([usual] * 2 + [slow] * (JUDGED_STEPS - 2), 0.4) == []
    hiccups = [[0.05, 3.0 if step % 3 == 0 else 0.05] for step in range(10 * JUDGED_STEPS)]
    assert sentences(hiccups, 0.1) == []
    assert sentences([busy[::-1] for busy in hiccups], 0.1) == []


@pytest.mark.parametrize(("busy", "step_s"), [([0.050, 0.070], 0.4), ([0.001, 0.009], 0.02)])
def test_a_small_difference_is_not_worth_a_word(busy: list[float], step_s: float) -> None:
    assert sentences([busy] * 10 * JUDGED_STEPS, step_s) == []


def test_a_slow_rank_is_judged_by_its_usual_step_and_against_the_usual_rank() -> None:
    """Rank 0 has one hiccup, the last rank is always somewhat late, and the steps of rank 1 are the shorter ones."""
    busy = torch.tensor([[0.05], [0.35], [0.05], [0.25]]).double().repeat(1, JUDGED_STEPS)
    whole = torch.tensor([[0.8], [0.4], [0.8], [0.8]]).double().repeat(1, JUDGED_STEPS)
    busy[0, 3], whole[:, 3] = 30.0, 31.0
    sentence = Stragglers(World.solo()).judge(torch.stack([whole, busy], 2))
    assert sentence.startswith("rank 1 is slow: at each step the others wait 300 of 400 ms for it")


def test_each_slow_rank_is_named() -> None:
    first, second = ([[0.05, 0.35, 0.05]] * JUDGED_STEPS, [[0.05, 0.05, 0.35]] * JUDGED_STEPS)
    shown_sentences = sentences([*first, *second, *first], 0.4)
    assert [sentence[:14] for sentence in shown_sentences] == ["rank 1 is slow", "rank 2 is slow"]


def test_the_time_of_a_process_has_its_pauses(passes: Callable[[float], None]) -> None:
    clock = TrainingClock()
    passes(3)
    with clock.pause("evaluation"):
        passes(4)
    assert (clock.passed(), clock.so_far().busy) == (7.0, 3.0)


def test_a_clock_that_is_started_again_has_no_time_of_before(passes: Callable[[float], None]) -> None:
    times = TimeSpent(None, CPU, reduces=False, period=20)
    for _ in range(2):
        passes(5)
        times.clock.loaded += 4
        times.clock.add_arrival(time.perf_counter() - 5, time.perf_counter())
        assert (times.clock.so_far(), times.clock.prepared) == ((5, 4), 5)
        times.clock.start()
        assert not any(times.shares(0.0).values())


@pytest.mark.parametrize(("rank", "share"), [(0, 0.75), (1, 0.0), (2, 0.5)])
def test_a_rank_waits_for_the_slowest_one(rank: int, share: float) -> None:
    stragglers = Stragglers(replace(World.solo(), rank=rank, size=3))
    busy = torch.tensor([[0.1], [0.4], [0.2]]).double().expand(3, JUDGED_STEPS)
    for _ in range(2):
        stragglers.judge(torch.stack([torch.full_like(busy, 0.4), busy], 2))
    assert stragglers.waited_share == pytest.approx(share)


def test_a_step_is_timed_from_its_request_to_the_end_of_its_forward_pass(passes: Callable[[float], None]) -> None:
    stragglers = Stragglers(replace(World.solo(), size=2, rank=1))
    passes(3)
    stragglers.forward_done()
    passes(1)
    assert stragglers.next_step() == time.perf_counter()
    passes(1)
    stragglers.forward_done()
    stragglers.next_step()
    assert [*stragglers.history] == [(4.0, 3.0), (1.0, 1.0)], "the next step has a time of its own"
    assert stragglers.find() == ""


@pytest.mark.parametrize(("steps", "judged"), [(JUDGED_STEPS - 1, 0), (JUDGED_STEPS, 1), (JUDGED_STEPS + 3, 1)])
def test_the_last_ten_steps_of_each_rank_are_judged(
    steps: int, judged: int, passes: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "sum", lambda self, tensor: tensor.index_fill(0, torch.tensor([0, 2]), 0.5))
    world = replace(World.solo(), size=3, rank=1)
    times: list[torch.Tensor] = []
    for comparable in (False, True):
        stragglers = Stragglers(world, comparable=comparable)
        stragglers.judge = lambda of_ranks: times.append(of_ranks) or "named"  # type: ignore[method-assign]
        for step in range(steps):
            passes(step)
            stragglers.forward_done()
            passes(1)
            stragglers.next_step()
        assert stragglers.find() == "named" * (judged * comparable)
    assert len(times) == judged
    for of_ranks in times:
        expected = torch.full((3, JUDGED_STEPS, 2), 0.5, dtype=torch.float64)
        expected[1] = torch.tensor([(step + 1, step) for step in range(steps)])[-JUDGED_STEPS:]
        assert torch.equal(of_ranks, expected)
    stragglers.judged, stragglers.behind = 0.5, 0.125
    assert stragglers.waited_share == 0.25
    assert Stragglers(World.solo()).comparable is False
    assert Stragglers(World.solo()).waited_share == 0


def test_the_parts_of_a_step_on_a_gpu_are_timed_by_events_and_waited_for_when_they_are_read(
    passes: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.at: float | None = None

        def record(self) -> None:
            self.at = time.perf_counter()

        def elapsed_time(self, later: "Event") -> float:
            assert waits, "it has not happened yet"
            assert self.at is not None
            assert later.at is not None
            return 1000 * (later.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(time.perf_counter()))
    times = TimeSpent(nn.Linear(3, 4), torch.device("cuda", 0), reduces=True, period=1)
    assert not any(times.shares(0.0).values())
    for _ in range(LEAST_TIMED):
        step(times, passes, micro_batches=1, reduction=4)
    assert waits == [], "no step waits"
    expected = {"forward": 0.1, "backward": 0.2, "optimizer": 0.3, "communication": 0.4}
    for _ in range(2):
        assert shown(times.shares(0.0)) == pytest.approx(expected)
    assert len(waits) == 1, "nothing was timed since"


@pytest.mark.parametrize(
    ("excess", "step_s", "named"),
    [(0.25, 0.8, True), (0.25, 0.85, False), (0.01, 0.02, True), (0.0099, 0.02, False), (0.3, 1.0, True)],
)
def test_a_rank_is_slow_from_three_tenths_of_a_step_and_ten_milliseconds_on(
    excess: float, step_s: float, named: bool
) -> None:
    busy = torch.zeros(2, JUDGED_STEPS, dtype=torch.float64)
    busy[1] = excess
    sentence = Stragglers(World.solo()).judge(torch.stack([torch.full_like(busy, step_s), busy], 2))
    assert sentence.startswith("rank 1 is slow") == named


def test_each_slow_rank_is_named_once_with_the_middle_of_its_waits_and_of_its_own_steps() -> None:
    stragglers, sentences_shown = Stragglers(replace(World.solo(), rank=1, size=3)), list[str]()
    for slow, other in ((2, 0), (0, 1), (2, 0)):
        busy, whole = torch.zeros(3, JUDGED_STEPS).double(), torch.ones(3, JUDGED_STEPS).double()
        busy[slow] = torch.tensor([0.35, 0.35, 0.35, 0.4, 0.4, 0.4, 0.4, 0.9, 0.9, 0.9])
        whole[slow] = torch.tensor([9.0, 0.7, 0.7, 0.7, 0.8, 0.8, 0.8, 0.9, 0.9, 9.0])
        busy[other, -1] = 5.0  # once is no habit
        sentences_shown.append(stragglers.judge(torch.stack([whole, busy], 2)))
    words = "is slow: at each step the others wait 400 of 800 ms for it; look at what else runs on its cores"
    assert [sentence.partition(", and")[0] for sentence in sentences_shown] == [
        f"rank 2 {words}",
        f"rank 0 {words}",
        "",
    ]


def test_a_pause_is_over_when_its_context_ends(passes: Callable[[float], None]) -> None:
    clock = TrainingClock()
    passes(1)
    for purpose, seconds in (("evaluation", 2), ("checkpoint", 4), ("evaluation", 8)):
        with clock.pause(purpose):
            passes(seconds)
        passes(1)
        assert clock.so_far().busy == time.perf_counter() - 100.0 - sum(clock.paused_for.values())
    assert dict(clock.paused_for) == {"evaluation": 10, "checkpoint": 4}
    assert clock.passed() == 18


@pytest.mark.parametrize(
    ("model", "reduces", "of_step"),
    [
        (None, True, []),
        (nn.Linear(1, 1), False, ["forward", "backward", "optimizer"]),
        (nn.Linear(1, 1), True, ["forward", "backward", "communication", "slowest_rank", "optimizer"]),
    ],
)
def test_the_parts_of_a_run_are_those_that_it_has_in_their_order(
    model: nn.Module | None, reduces: bool, of_step: list[str]
) -> None:
    times = TimeSpent(model, CPU, reduces=reduces, period=1)
    assert [*times.shares(0.0)] == ["data", "augmentation", *of_step, "step", "evaluation", "checkpoint"]
    assert (times.next_step is None) == (model is None)
