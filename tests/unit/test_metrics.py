"""Counting while training, and the figures of a window."""

import json
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import records, train_here
from lockstep.core.errors import InputError
from lockstep.core.observer import Observer, Outcome
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.telemetry.display import Display, figures
from lockstep.telemetry.hardware_watch import rates
from lockstep.telemetry.meter import Telemetry
from lockstep.telemetry.time_spent import TimeSpent
from lockstep.telemetry.window import Tally, TallyState, Window, WindowState
from thread_ranks import ThreadRanks

PLAN = Plan(examples=100, batch=10, total_steps=40, micro_batches=1, log_every=1, eval_every=1, save_every=1)


@dataclass
class Collector(Observer):
    """An observer that records what it gets."""

    lines: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    ended: str = ""
    flushed: int = 0

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.lines.append((step, dict(scalars)))

    def flush(self) -> None:
        self.flushed += 1

    def end(self, outcome: Outcome) -> None:
        self.ended = outcome


class Closed(Display):
    """A display that knows whether it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


@dataclass(frozen=True)
class Step:
    """The fields of a shard that telemetry reads."""

    step: int
    labels: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    indices: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @property
    def epoch(self) -> int:
        return PLAN.epoch(self.step)


def recorder(sink: Collector, **options: Any) -> Telemetry:
    options = {"world": World.solo(), "step": 0, "opened": None, "peak_rate": 0.0, **options}
    options["times"] = TimeSpent(None, torch.device("cpu"), reduces=False, period=PLAN.log_every)
    options["hits"] = lambda outputs, labels: (outputs.argmax(1) == labels).sum()
    return Telemetry(plan=PLAN, observer=sink, display=Closed(), **options)


def count(telemetry: Telemetry, losses: list[float], hits: list[bool | None]) -> None:
    """Record one micro-batch with these losses and hits; None is a broken image, which has no loss."""
    labels = torch.tensor([-100 if hit is None else 0 for hit in hits], dtype=torch.int64)
    logits = torch.tensor([[1.0, 0.0] if hit else [0.0, 1.0] for hit in hits])
    micro = Step(telemetry.step, labels=labels, indices=torch.arange(len(hits)))
    telemetry.record(torch.tensor(sum(losses)), logits, micro, torch.zeros(0))


def ended(telemetry: Telemetry, step: int, scalars: Mapping[str, Any] | None = None) -> Window:
    """The window that ends at a step."""
    (window,) = telemetry.end_window(step, scalars or {}, None)
    return window


def test_a_window_is_the_mean_over_its_examples() -> None:
    sink = Collector()
    telemetry = recorder(sink)
    count(telemetry, [1.0, 2.0, 3.0], [True, True, False])
    count(telemetry, [6.0], [False])
    window = ended(telemetry, 2, {"optim/lr": 0.1, "optim/grad_norm": torch.tensor(2.0)})
    assert (window.first, window.last, window.examples) == (1, 2, 4)
    assert window.loss == pytest.approx(3)
    assert window.top1 == pytest.approx(50)
    (line,) = sink.lines
    assert line[0] == 2
    assert line[1]["loss/train"] == pytest.approx(3)
    assert line[1]["acc/train_top1"] == pytest.approx(50)
    assert (line[1]["optim/lr"], line[1]["optim/grad_norm"]) == (0.1, 2.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_a_window_names_the_first_step_whose_loss_is_unsound(bad: float) -> None:
    telemetry = recorder(Collector(), step=3)
    telemetry.loss_limit = 2000
    for step, losses in ((4, [2000.0] * 3), (5, [bad]), (6, [1.0]), (7, [bad])):
        telemetry.step = step
        count(telemetry, losses, [True] * len(losses))
    assert ended(telemetry, 7).first_bad_step == 5
    telemetry.step = 8
    count(telemetry, [1.0], [True])
    assert ended(telemetry, 8).first_bad_step is None


def test_a_million_small_losses_are_summed_without_loss() -> None:
    telemetry = recorder(Collector())
    count(telemetry, [2.0**24], [True])
    for _ in range(100):
        count(telemetry, [0.01], [True])
    assert ended(telemetry, 101).loss * 101 == pytest.approx(2.0**24 + 1, abs=1e-4)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=200), st.data())
def test_a_window_that_is_resumed_has_the_bits_of_one_that_is_not(losses: list[float], data: st.DataObject) -> None:
    at = data.draw(st.integers(1, len(losses) - 1))
    whole, first = recorder(Collector()), recorder(sink := Collector())
    whole.step = first.step = 1
    for loss in losses:
        count(whole, [loss], [loss > 0, True])
    for loss in losses[:at]:
        count(first, [loss], [loss > 0, True])
    resumed = recorder(Collector(), step=1, opened=json.loads(json.dumps(first.open_window())))
    for loss in losses[at:]:
        count(resumed, [loss], [loss > 0, True])
    expected, actual = ended(whole, 2), ended(resumed, 2)
    assert (actual.first, actual.loss, actual.top1) == (expected.first, expected.loss, expected.top1)
    assert actual.examples == expected.examples - 2 * at
    assert sink.flushed == 1, "the files have every step of the checkpoint"


def test_a_tally_has_all_that_it_counted_before_a_resume() -> None:
    counts: Any = {"losses": [1.5, 2.5], "steps": [7, 8], "examples": [10, 3], "hits": 5, "broken": 2}
    state: TallyState = {**counts, "logged": [4.0, 6.0]}
    tally = Tally(0, torch.device("cpu"), logged=2)
    tally.restore(state)
    assert tally.state() == state
    assert tally.sums().tolist() == [4.0, 5, 11, 4.0, 6.0]


@given(st.lists(st.floats(0, 1e6, width=32), min_size=3, max_size=40), st.data())
def test_an_epoch_is_the_mean_over_all_its_examples_whatever_was_logged_and_resumed(
    losses: list[float], data: st.DataObject
) -> None:
    """Steps of two examples, epochs of ten steps; log points anywhere, and a resume anywhere."""
    logged = data.draw(st.sets(st.integers(1, len(losses) - 1)))
    at = data.draw(st.integers(1, len(losses) - 1))

    def steps(telemetry: Telemetry, numbers: range) -> None:
        for telemetry.step in numbers:
            count(telemetry, [losses[telemetry.step - 1]], [telemetry.step % 3 == 0, True])
            if telemetry.step in logged:
                ended(telemetry, telemetry.step)

    last = len(losses)
    whole, first = Collector(), recorder(Collector())
    uncut = recorder(whole)
    steps(uncut, range(1, last + 1))
    steps(first, range(1, at + 1))
    resumed = Collector()
    then = recorder(resumed, step=at, opened=json.loads(json.dumps(first.open_window())))
    steps(then, range(at + 1, last + 1))
    for telemetry in (uncut, then):
        telemetry.evaluated(last, {}, best=True)
    (_, expected), (_, actual) = whole.lines[-1], resumed.lines[-1]
    assert actual == expected  # to the bit
    own = range(10 * ((last - 1) // 10) + 1, last + 1)
    assert expected["loss/train_epoch"] == pytest.approx(sum(losses[step - 1] for step in own) / (2 * len(own)))
    hits = sum(1 + (step % 3 == 0) for step in own)
    assert expected["acc/train_epoch_top1"] == pytest.approx(100 * hits / (2 * len(own)))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_window_of_three_ranks_goes_on_on_any_number_of_them(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is of three examples, of which only the one of rank 0 is a hit; an epoch ends after step 10."""
    group = ThreadRanks(3, monkeypatch)

    def begun(world: World) -> WindowState:
        telemetry = recorder(Collector(), world=world, step=8)
        for telemetry.step in (9, 10, 11, 12):
            count(telemetry, [10.0 * telemetry.step + world.rank], [world.rank == 0])
        return telemetry.open_window()

    state = json.loads(json.dumps(group.run(begun)[0]))
    group = ThreadRanks(ranks, monkeypatch)

    def resumed(world: World) -> list[tuple[int, dict[str, float]]]:
        sink = Collector()
        telemetry = recorder(sink, world=world, step=12, opened=state)
        telemetry.evaluated(12, {}, best=True)
        ended(telemetry, 13)
        return sink.lines

    for (_, of_epoch), (_, of_window) in group.run(resumed):
        assert of_window["loss/train"] == 106  # the mean of 90 to 122
        assert of_epoch["loss/train_epoch"] == 116
        assert of_epoch["acc/train_epoch_top1"] == of_window["acc/train_top1"] == pytest.approx(100 / 3)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_broken_images_count_in_no_training_score(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, three steps of an epoch of two micro-batches, a stop after the second step, a resume on others."""

    def begun(world: World) -> WindowState:
        telemetry = recorder(Collector(), world=world)
        for telemetry.step in (1, 2):
            count(telemetry, [3.0], [True, None, None])
            count(telemetry, [5.0], [False] if world.rank else [None, False])
        return telemetry.open_window()

    state = json.loads(json.dumps(ThreadRanks(2, monkeypatch).run(begun)[0]))

    def resumed(world: World) -> list[tuple[int, dict[str, float]]]:
        sink = Collector()
        telemetry = recorder(sink, world=world, step=2, opened=state)
        telemetry.step = 3
        count(telemetry, [14.0] if world.rank == 0 else [], [True, None] if world.rank == 0 else [None])
        assert ended(telemetry, 3).examples == 1  # of this process
        telemetry.evaluated(3, {}, best=True)
        return sink.lines

    for (_, of_window), (_, of_epoch) in ThreadRanks(ranks, monkeypatch).run(resumed):
        assert of_window["loss/train"] == of_epoch["loss/train_epoch"] == (2 * 2 * (3 + 5) + 14) / 9
        assert of_window["acc/train_top1"] == of_epoch["acc/train_epoch_top1"] == pytest.approx(100 * 5 / 9)


def test_a_window_of_broken_images_has_no_score_and_is_no_divergence() -> None:
    sink = Collector()
    telemetry = recorder(sink)
    telemetry.loss_limit = 2000
    count(telemetry, [0.0], [None, None])
    window = ended(telemetry, 1)
    assert window.first_bad_step is None
    assert isnan(window.loss)
    assert isnan(window.top1)
    assert "nan" not in " ".join(column.figure for column in figures(window))
    count(telemetry, [1.0], [True, None])
    assert ended(telemetry, 2).loss == 1


def test_forgotten_steps_leave_no_trace_in_a_window() -> None:
    telemetry = recorder(Collector(), names=("my_figure",))
    for telemetry.step, loss in ((1, 1.0), (2, 100.0), (2, 100.0)):
        count(telemetry, [loss], [False])
        telemetry.log("my_figure", torch.tensor([loss]))
    telemetry.forget(after=1)
    telemetry.step = 2
    count(telemetry, [3.0], [True])
    telemetry.log("my_figure", torch.tensor([3.0]))
    window = ended(telemetry, 2)
    assert (window.examples, window.loss, window.top1, window.scalars) == (2, 2.0, 50.0, {"my_figure": 2.0})


def test_large_logits_are_counted_and_freed_before_the_window_ends() -> None:
    telemetry, alive = recorder(Collector()), []
    for telemetry.step in range(1, 21):
        logits = torch.zeros(512, 512)
        micro = Step(telemetry.step, labels=torch.zeros(512, dtype=torch.int64))
        telemetry.record(torch.zeros(()), logits, micro, torch.zeros(0))
        alive.append(weakref.ref(logits))
        del logits
        assert sum(reference() is not None for reference in alive) <= 5, "5 MB are held"
    assert ended(telemetry, 20).top1 == 100


def test_the_time_of_a_step_is_that_of_the_steps_since_the_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    now, sink = 0.0, Collector()
    monkeypatch.setattr("time.perf_counter", lambda: now)
    first = recorder(Collector())
    first.step = 6
    count(first, [1.0] * 60, [True] * 60)
    resumed = recorder(sink, step=6, opened=first.open_window())
    for shard in resumed.watch([Step(7), Step(8)], iter):
        now += 2
        count(resumed, [1.0] * 10, [True] * 10)
        assert resumed.step == shard.step
    ended(resumed, 8)
    ((_, figures),) = sink.lines
    assert (figures["perf/step_ms"], figures["perf/img_per_s"]) == (2000, 5)
    assert rates(resumed.trained())["img_per_s"] == 5


def test_waiting_for_data_is_measured_and_pauses_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def slowly() -> Iterator[Step]:
        nonlocal now
        for step in (1, 2):
            now += 3
            yield Step(step)

    sink = Collector()
    telemetry = recorder(sink)
    for _ in telemetry.watch(slowly(), iter):
        now += 1
        count(telemetry, [1.0], [True])
        with telemetry.pause("evaluation"):
            now += 10
    window = ended(telemetry, 2)
    assert (window.waited, window.seconds) == (6, 8)
    shown = [sink.lines[0][1][f"perf/{name}"] for name in ("data_wait_pct", "step_ms", "img_per_s")]
    assert shown == [75, 4000, 0.25]
    totals = rates(telemetry.trained())
    assert (totals["img_per_s"], totals["data_wait_pct"]) == (0.25, 75)


def test_utilisation_is_shown_where_the_peak_is_known() -> None:
    for peak_rate, shown in ((0.0, False), (1e4, True)):
        sink = Collector()
        telemetry = recorder(sink, peak_rate=peak_rate)
        count(telemetry, [1.0], [True])
        window = ended(telemetry, 1)
        assert ("perf/mfu_pct" in sink.lines[0][1]) is shown
        if shown:
            assert sink.lines[0][1]["perf/mfu_pct"] == pytest.approx(100 * window.rate / peak_rate)


def test_an_evaluation_reaches_the_observers_and_closing_ends_them() -> None:
    sink = Collector()
    telemetry = recorder(sink)
    telemetry.evaluated(7, {"acc/val_top1": 90.0}, best=True)
    telemetry.close()
    ((step, scalars),) = sink.lines
    assert (step, scalars["acc/val_top1"]) == (7, 90.0)
    assert [tag for tag in scalars if not tag.startswith("perf/time/")] == ["acc/val_top1"]
    assert sink.ended == "failed"  # the default, unless the run completes
    assert isinstance(telemetry.display, Closed)
    assert telemetry.display.is_closed


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read each window at the log point after it, as on a GPU."""
    begin = Telemetry.__init__

    def init(self: Telemetry, **arguments: Any) -> None:
        begin(self, **arguments)
        self.late = True

    monkeypatch.setattr(Telemetry, "__init__", init)


def lines(folder: Path) -> list[dict[str, Any]]:
    """What a run has logged, without what its clock measured."""
    return [
        {name: value for name, value in line.items() if name != "time" and not name.startswith("perf/")}
        for line in records(folder)
    ]


# Evaluations between log points and at one, a checkpoint in a window, an epoch's end in a window.
WORDS = "model=linear batch=200 steps=14 telemetry.interval=3 train.eval_every=5 checkpoint.every=4 precision=fp64"
JOB = tuple(WORDS.split())


def test_windows_that_are_read_late_are_the_same_lines(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    expected = train_here(tmp_path / "expected", *JOB)
    request.getfixturevalue("late")
    late_run = train_here(tmp_path / "late", *JOB)
    assert lines(late_run.path) == lines(expected.path)
    for steps in (7, 3):  # the tenth step is evaluated
        train_here(tmp_path / "resumed", *JOB, stop_at=steps)
    with pytest.raises(InputError, match="seed"):
        train_here(tmp_path / "resumed", *JOB, "seed=1")
    resumed = train_here(tmp_path / "resumed", *JOB)
    assert lines(resumed.path) == lines(expected.path)


@pytest.mark.usefixtures("late")
def test_a_window_that_is_read_late_names_its_own_bad_step() -> None:
    telemetry = recorder(Collector())
    for telemetry.step in range(1, 5):
        count(telemetry, [float("nan") if telemetry.step == 1 else 1.0], [True])
        if telemetry.step == 2:
            assert telemetry.end_window(2, {"optim/scale": torch.tensor(4.0)}, torch.tensor([7, 7])) == []
    count(telemetry, [1.0], [True])
    (window,) = telemetry.end_window(4, {}, None)
    assert (window.first, window.last, window.first_bad_step) == (1, 2, 1)
    assert (window.scalars, window.checksums) == ({"optim/scale": 4.0}, [7, 7])
    (window,) = telemetry.write_windows()
    assert (window.first, window.last, window.first_bad_step) == (3, 4, None)
    assert telemetry.write_windows() == []


def test_the_first_bad_step_is_that_of_the_rank_that_had_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_bad_step(world: World) -> int | None:
        telemetry = recorder(Collector(), world=world)
        telemetry.loss_limit = 2000
        for telemetry.step in range(1, 6):
            count(telemetry, [1e9 if telemetry.step >= (4, 2, 6)[world.rank] else 1.0], [True])
        return ended(telemetry, 5).first_bad_step

    assert ThreadRanks(3, monkeypatch).run(first_bad_step) == [2, 2, 2]
