"""The figures of training: what is counted of each step, and when observers and the display get it."""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.core.errors import InputError
from lockstep.core.observer import Observer
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.telemetry import meter, window
from lockstep.telemetry.display import Display
from lockstep.telemetry.meter import Telemetry
from lockstep.telemetry.time_spent import TimeSpent
from lockstep.telemetry.window import Tally, Window

CPU = torch.device("cpu")
PLAN = Plan(
    examples=10, batch=4, total_steps=30, micro_batches=2, log_every=2, eval_every=3, save_every=6
)  # 3 an epoch
USUAL = ("perf/img_per_s", "perf/data_wait_pct", "perf/step_ms")


class Calls(Observer, Display):  # type: ignore[misc]
    """An observer, and a display, that keep their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if name in ("calls", "of") or name.startswith("__"):
            return super().__getattribute__(name)
        return lambda *values, **options: self.calls.append((name, *values, *options.values()))

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [values for called, *values in self.calls if called == name]  # type: ignore[misc]


def right(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.argmax(1) == labels).sum()


def meter_of(step: int = 0, **fields: Any) -> tuple[Telemetry, Calls, Calls]:
    """The telemetry of a run, with its observer and its display."""
    observer, display = Calls(), Calls()
    times = TimeSpent(None, CPU, reduces=False, period=2)
    usual: dict[str, Any] = {"world": World.solo(), "plan": PLAN, "times": times, "hits": right}
    return Telemetry(**{**usual, "observer": observer, "display": display, "step": step, **fields}), observer, display


def add(telemetry: Telemetry, step: int, loss: float, hits: int, *, images: int = 2, broken: int = 0) -> None:
    """Record a micro-batch of a step with this summed loss, and so many right and broken images."""
    labels = torch.zeros(images, dtype=torch.int64)
    labels[images - broken :] = -1
    logits = torch.tensor([[1.0, 0.0]] * hits + [[0.0, 1.0]] * (images - hits))
    micro: Any = SimpleNamespace(step=step, epoch=PLAN.epoch(step), labels=labels)
    telemetry.step = step
    telemetry.record(torch.tensor(loss), logits, micro, torch.zeros(images, 1, 2, 2))


def test_a_window_is_the_mean_over_its_images_at_the_pace_of_its_steps(passes: Callable[[float], None]) -> None:
    telemetry, observer, display = meter_of(peak_rate=12.0)
    add(telemetry, 1, 2.0, 1)
    add(telemetry, 1, 4.0, 2)
    passes(1)
    add(telemetry, 2, 6.0, 0)
    passes(1)
    with telemetry.pause("evaluation"):
        passes(5)
    assert telemetry.trained() == {"images": 0, "training_seconds": 0.0, "waiting_seconds": 0.0}
    (window,) = telemetry.end_window(2, {"optim/lr": 0.5, "optim/grad_norm": torch.tensor(3.0)}, torch.tensor([7, 7]))
    figures = {"loss/train": 2.0, "acc/train_top1": 50.0, "optim/lr": 0.5, "optim/grad_norm": 3.0}
    figures |= dict(zip((*USUAL, "perf/mfu_pct"), (3.0, 0.0, 1000.0, 25.0), strict=True))
    assert observer.of("write") == [[2, figures]]
    assert (window.first, window.last, window.first_bad_step, window.checksums) == (1, 2, None, [7, 7])
    assert telemetry.trained() == {"images": 6, "training_seconds": 2.0, "waiting_seconds": 0.0}

    add(telemetry, 3, 8.0, 1)
    passes(1)
    requested = time.perf_counter()
    passes(0.5)
    telemetry.clock.loaded += 0.5
    telemetry.clock.add_arrival(requested, time.perf_counter())
    add(telemetry, 4, 1.0, 2)
    passes(1)
    (window,) = telemetry.end_window(4, {}, None)
    shown, of_epoch = display.of("window")[1]
    assert shown == window == Window(3, 4, 9 / 4, 75.0, 4, 2.5, 0.5)
    assert of_epoch == Window(4, 4, 0.5, 100.0, 2, 1.5, 0.5), "the second epoch has begun with the wait for its data"
    assert observer.of("write")[1][1]["perf/data_wait_pct"] == 20.0
    assert observer.of("write")[1][1]["perf/mfu_pct"] == pytest.approx(100 * 4 / 2.5 / 12), "of the window alone"
    assert telemetry.trained() == {"images": 10, "training_seconds": 4.5, "waiting_seconds": 0.5}

    add(telemetry, 5, 3.0, 0)
    telemetry.evaluated(5, {"loss/val": 4.0}, best=False)
    (step, scores, best), (_, scalars) = observer.of("evaluated")[0], observer.of("write")[2]
    assert [call[0] for call in observer.calls][-2:] == ["evaluated", "write"]
    epoch = {"loss/train_epoch": 1.0, "acc/train_epoch_top1": 50.0}
    assert (step, scores, best) == (5, {**epoch, "loss/val": 4.0}, False)
    spent = {tag: value for tag, value in scalars.items() if tag.startswith("perf/time/")}
    assert {**scores, **spent} == scalars
    assert spent["perf/time/evaluation"] == pytest.approx(100 * 5 / 9.5)
    assert sum(spent.values()) == pytest.approx(100)
    step, _, epoch_shown, best = display.of("evaluated")[0]
    assert (step, epoch_shown.loss, best) == (5, 1.0, False)
    telemetry.end_window(6, {}, None)
    assert display.of("window")[2][1].loss == 1.0, "an evaluation counts no step twice"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_figures_of_a_task_are_added_up_in_float64(dtype: torch.dtype) -> None:
    telemetry, observer, _ = meter_of(names=["gap"])
    add(telemetry, 1, 0.0, 0, images=4097)
    telemetry.log("gap", values := torch.cat([torch.tensor([2.0**15]), torch.full((4096,), 2.0**-9)]).to(dtype))
    telemetry.end_window(1, {}, None)
    assert observer.of("write")[-1][1]["gap"] == math.fsum(values.tolist()) / 4097


def test_the_figures_of_a_gpu_are_read_once_their_copy_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    host, events = torch.zeros(2), list[Any]()

    class Event:
        def record(self) -> None:
            events.append("record")

        def synchronize(self) -> None:
            host.copy_(torch.tensor([3.0, 4.0]))

    def begin(tensor: Any, *, non_blocking: bool) -> Any:
        events.append((tensor, non_blocking))
        return host

    memory = SimpleNamespace(copy_=begin)
    monkeypatch.setattr(window.torch, "empty", lambda *_, pin_memory, **options: memory if pin_memory else None)
    monkeypatch.setattr(window.torch.cuda, "Event", Event)
    on_gpu: Any = SimpleNamespace(is_cuda=True, shape=(2,), dtype=torch.float32)
    read = window.copied(on_gpu)
    assert events == [(on_gpu, True), "record"]
    assert read() == [3.0, 4.0]


def test_a_figure_that_no_image_has_is_nan_and_a_task_may_have_no_accuracy() -> None:
    telemetry, observer, _ = meter_of(names=["gap", "kl"])
    telemetry.evaluated(0, {"loss/val": 1.0}, best=True)
    assert observer.of("evaluated") == [[0, {"loss/val": 1.0}, True]], "there is no epoch yet"
    add(telemetry, 1, 0.0, 0, broken=2)
    (window,) = telemetry.end_window(1, {}, None)
    figures = observer.of("write")[-1][1]
    assert all(math.isnan(figures[name]) for name in ("loss/train", "acc/train_top1", "gap", "kl"))
    assert (window.first_bad_step, window.examples) == (None, 0)
    telemetry, observer, _ = meter_of(hits=None, names=["gap"])
    add(telemetry, 1, 3.0, 2, images=3, broken=1)
    telemetry.log("gap", torch.tensor([1.0, 4.0]))
    telemetry.end_window(1, {}, None)
    telemetry.end_window(2, {}, None)
    (_, figures), (_, empty) = observer.of("write")
    assert {"loss/train": 1.5, "gap": 2.5}.items() <= figures.items(), "the broken image counts nowhere"
    assert "acc/train_top1" not in figures
    assert math.isnan(empty["gap"])
    telemetry.evaluated(2, {}, best=True)
    assert observer.of("evaluated")[-1][1] == {"loss/train_epoch": 1.5}
    micro: Any = SimpleNamespace(
        step=3, epoch=PLAN.epoch(3), labels=torch.zeros(2, 5)
    )  # several labels of each image
    telemetry.record(torch.tensor(3.0), torch.zeros(2, 5), micro, torch.zeros(2, 1, 2, 2))
    (window,) = telemetry.end_window(3, {}, None)
    assert (window.examples, observer.of("write")[-1][1]["loss/train"]) == (2, 1.5)
    with pytest.raises(InputError, match="the figure 'other' is not declared, expected one of gap"):
        telemetry.log("other", torch.zeros(1))


@pytest.mark.parametrize(
    ("losses", "limit", "bad"),
    [
        ((2.0, 2.0, 2.0), 1.0, None),
        ((2.0, 2.1, 2.0), 1.0, 2),
        ((2.0, 9.0, 9.0), 1.0, 2),
        ((2.0, 2.0, math.nan), math.inf, 3),
        ((math.inf, 2.0, 2.0), 1e9, 1),
        ((0.0, 0.0, 2.1), 1.0, None),  # a mean below the limit
    ],
)
def test_the_first_step_is_named_whose_loss_has_diverged(
    losses: tuple[float, ...], limit: float, bad: int | None
) -> None:
    telemetry, *_ = meter_of(loss_limit=limit)
    for step, loss in enumerate(losses, start=1):
        add(telemetry, step, loss, 0)
    (window,) = telemetry.end_window(3, {}, None)
    assert window.first_bad_step == bad


def test_micro_batches_at_the_limit_or_without_images_are_no_bad_steps() -> None:
    tally = Tally(0, CPU)
    tally.steps, tally.counts = [1, 2, 3, 4, 5], [2, 2, 0, 2, 2]
    tally.losses = torch.tensor([2.0, 2.1, 0.0, math.nan, math.inf], dtype=torch.float64)
    assert tally.bad_steps(1.0) == [2, 4, 5]
    assert tally.bad_steps(math.inf) == [4]


def test_a_step_that_is_done_again_counts_once() -> None:
    telemetry, observer, _ = meter_of(names=["gap"])
    for step in (1, 2, 2):
        if step == 2:
            telemetry.forget(after=1)
        add(telemetry, step, 2.0 * step, 1)
        telemetry.log("gap", torch.tensor([4.0]))
    telemetry.end_window(2, {}, None)
    ((_, figures),) = observer.of("write")
    assert {"loss/train": 6 / 4, "acc/train_top1": 50.0, "gap": 2.0}.items() <= figures.items()


@pytest.mark.parametrize(
    ("logits", "many", "counted"),
    [(8, 99, [1, 2, 1, 2]), (12, 99, [1, 2, 3, 4]), (10**6, 2, [1, 2, 1, 2]), (10**6, 3, [1, 2, 3, 4])],
)
def test_finished_steps_are_counted_once_they_are_many_and_no_step_under_way(
    logits: int, many: int, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "UNCOUNTED", logits)
    monkeypatch.setattr(meter, "UNCOUNTED_MICRO_BATCHES", many)
    telemetry, *_ = meter_of()
    left = []
    for step in (1, 1, 2, 2):  # of four logits each
        add(telemetry, step, 1.0, 0)
        left.append(len(telemetry.uncounted))
    assert left == counted
    for _ in range(4):
        add(telemetry, 2, 1.0, 0)
    assert len(telemetry.uncounted) == counted[-1] + 4, "the step may be done again"


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 5])
def test_a_resume_inside_a_window_has_the_figures_of_the_whole_one(stop_at: int) -> None:
    def run(telemetry: Telemetry, first: int, last: int) -> None:
        for step in range(first, last + 1):
            for number in (1, 2):
                add(telemetry, step, step / 7 + number, number, broken=step == 2)
                telemetry.log("gap", torch.tensor([step / 3]))
            if step in (3, 6):
                telemetry.end_window(step, {}, None)

    telemetry, whole, whole_display = meter_of(names=["gap"])
    run(telemetry, 1, 6)
    telemetry, first, _ = meter_of(names=["gap"])
    run(telemetry, 1, stop_at)
    state = telemetry.open_window()
    assert [call[0] for call in first.calls][-1] == "flush"
    before = copy.deepcopy(state)
    run(telemetry, stop_at + 1, 6)
    assert state == before, "it is written later"
    telemetry, second, display = meter_of(stop_at, names=["gap"], opened=state)
    run(telemetry, stop_at + 1, 6)
    assert state == before
    figures = [
        (step, {tag: value for tag, value in of_step.items() if tag not in USUAL})
        for observer in (first, second)
        for step, of_step in observer.of("write")
        if observer is second or step <= stop_at
    ]
    assert figures == [
        (step, {tag: v for tag, v in of.items() if tag not in USUAL}) for step, of in whole.of("write")
    ]
    window, epoch = display.of("window")[-1]
    for part, expected in zip((window, epoch), whole_display.of("window")[-1], strict=True):
        facts = [(of.first, of.last, of.loss, of.top1) for of in (part, expected)]
        assert facts[0] == facts[1]
    own = [step for step in range(stop_at + 1, 7) if step > 3]
    assert (window.examples, epoch.examples) == (4 * len(own), 4 * len(own)), "the rate is that of this process"
    assert telemetry.examples == 4 * (6 - stop_at) - 2 * (stop_at < 2)


def test_another_number_of_ranks_deals_the_open_windows_out() -> None:
    telemetry, *_ = meter_of()
    for step in (2, 3, 4):
        add(telemetry, step, float(step), 1)
    state = telemetry.open_window()
    (of_first_epoch, of_second) = state["trails"]
    assert (of_first_epoch["steps"], of_second["steps"]) == ([2, 3], [4])
    state["trails"] = [{**of_first_epoch, "hits": number} for number in (10, 11, 12)] + [of_second]
    dealt = []
    for rank in (0, 1):
        here = replace(World.solo(), rank=rank, size=2)
        dealt.append([(tally.epoch, int(tally.hits)) for tally in meter_of(4, world=here, opened=state)[0].tallies])
    assert dealt == [[(0, 10), (0, 12), (1, 0)], [(0, 11), (1, 1)]]


def test_of_a_gpu_the_window_before_is_written_with_its_own_time(passes: Callable[[float], None]) -> None:
    telemetry, observer, _ = meter_of()
    telemetry.late = True
    for step in (1, 2, 3):
        add(telemetry, step, float(step), 0)
        passes(step)
        windows = telemetry.end_window(step, {}, None)
        assert [window.last for window in windows] == [step - 1] * (step > 1)
    passes(50)
    assert [window.last for window in telemetry.write_windows()] == [3]
    assert [(step, figures["perf/step_ms"]) for step, figures in observer.of("write")] == [
        (n, 1e3 * n) for n in (1, 2, 3)
    ]


def test_each_micro_batch_of_the_first_step_and_no_other_is_shown_and_sampled() -> None:
    sampled: list[tuple[int, int]] = []
    samples = SimpleNamespace(
        record=lambda micro, images, examples: sampled.append((micro.step, examples)),
        close=lambda: sampled.append((0, 0)),
    )
    telemetry, observer, display = meter_of(samples=samples)
    for step in (1, 1, 2, 4):  # the second epoch begins with step 4
        add(telemetry, step, 1.0, 0)
    assert [micro.step for micro, _ in observer.of("first_batch")] == [1, 1]
    resumed, of_resumed, _ = meter_of(1)
    add(resumed, 2, 1.0, 0)
    assert of_resumed.of("first_batch") == []
    telemetry.close()
    assert sampled == [(1, 10), (1, 10), (2, 10), (4, 10), (0, 0)]
    assert observer.of("end") == [["failed"]], "nothing else is known"
    telemetry.outcome = "completed"

    def fail(outcome: str) -> None:
        raise ZeroDivisionError(outcome)

    telemetry.observer = SimpleNamespace(end=fail)  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError, match="completed"):
        telemetry.close()
    assert len(display.of("close")) == 2
    telemetry.observer = observer
    telemetry.display = SimpleNamespace(close=lambda: fail("of the display"))  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError, match="of the display"):
        telemetry.close()
    assert observer.of("end") == [["failed"], ["completed"]]
    assert sampled[-3:] == [(0, 0)] * 3


def test_each_step_is_shown_and_one_of_many_is_timed(passes: Callable[[float], None]) -> None:
    times = TimeSpent(nn.Linear(1, 1), CPU, reduces=False, period=20)
    telemetry, _, display = meter_of(times=times)
    timed: list[int] = []

    def shards(groups: Iterator[int]) -> Iterator[Any]:
        return (SimpleNamespace(step=step) for step in groups)

    for shard in telemetry.watch(range(1, 31), shards):
        assert telemetry.step == shard.step
        timed += [shard.step] * times.timing
        passes(1)
    assert timed == [10, 30]
    assert display.of("advance") == [[step, 100.0 + step] for step in range(1, 31)]
    passes(1)
    telemetry.evaluating(3, 8)
    assert display.calls[-2:] == [("advance", 30, 131.0), ("evaluating", 3, 8)]


def test_the_end_of_the_forward_pass_is_noted_for_the_ranks_and_in_a_timed_step() -> None:
    noted: list[str] = []
    telemetry, _, display = meter_of()
    telemetry.stragglers = SimpleNamespace(  # type: ignore[assignment]
        forward_done=lambda: noted.append("rank"), find=lambda: "rank 1 is slow", waited_share=0.0
    )
    telemetry.times.forward_done = lambda: noted.append("times")  # type: ignore[method-assign]
    for size, timing in ((1, False), (2, False), (1, True)):
        telemetry.world, telemetry.times.timing = replace(World.solo(), size=size), timing
        add(telemetry, 1, 1.0, 0)
    assert noted == ["rank", "times"]
    telemetry.end_window(1, {}, None)
    assert display.of("warn") == [["rank 1 is slow"]]


def test_the_wait_for_the_slowest_rank_is_told_from_communication() -> None:
    telemetry, _, _ = meter_of()
    telemetry.stragglers = SimpleNamespace(waited_share=0.25)  # type: ignore[assignment]
    telemetry.times.shares = lambda waited: {"wait": waited}  # type: ignore[method-assign]
    assert telemetry.time_shares() == {"wait": 0.25}


def test_without_a_peak_rate_there_is_no_utilisation() -> None:
    telemetry, observer, _ = meter_of()
    add(telemetry, 1, 1.0, 0)
    telemetry.end_window(1, {}, None)
    figures: Mapping[str, float] = observer.of("write")[0][1]
    assert "perf/mfu_pct" not in figures
    assert telemetry.mfu(5.0) == 0.0


def test_an_evaluation_inside_a_window_has_the_figures_of_its_epoch_alone() -> None:
    telemetry, observer, display = meter_of()
    add(telemetry, 3, 8.0, 0)
    add(telemetry, 4, 0.0, 2)
    telemetry.evaluated(4, {}, best=True)
    assert observer.of("evaluated")[0][1] == {"loss/train_epoch": 0.0, "acc/train_epoch_top1": 100.0}
    assert display.of("evaluated")[0][3:] == [True]
    telemetry, observer, _ = meter_of()
    add(telemetry, 4, 3.0, 0)
    telemetry.evaluated(4, {}, best=True)
    assert observer.of("evaluated")[0][1] == {"loss/train_epoch": 1.5, "acc/train_epoch_top1": 0.0}


def test_the_pace_of_a_resumed_window_is_that_of_the_steps_of_this_process(passes: Callable[[float], None]) -> None:
    telemetry, *_ = meter_of()
    for step in (1, 2):
        add(telemetry, step, 1.0, 0)
    telemetry, observer, _ = meter_of(2, opened=telemetry.open_window())
    for step in (3, 4):
        passes(1)
        add(telemetry, step, 1.0, 0)
    telemetry.end_window(4, {}, None)
    ((_, figures),) = observer.of("write")
    assert (figures["perf/step_ms"], figures["perf/img_per_s"]) == (1000.0, 2.0)


@pytest.mark.parametrize("logged", [(1,), (2,), (1, 2), (4,), (4, 5), (2, 5)], ids=str)
def test_an_epoch_of_a_resume_has_its_steps_in_and_before_the_open_window(logged: tuple[int, ...]) -> None:
    """Six steps in two epochs; the evaluation at the end is of the second one, from step 4 on."""

    def run(telemetry: Telemetry, first: int, last: int) -> None:
        for step in range(first, last + 1):
            add(telemetry, step, step / 7, step % 3, broken=int(step == 5))
            if step in logged:
                telemetry.end_window(step, {}, None)

    telemetry, whole, _ = meter_of()
    run(telemetry, 1, 6)
    telemetry.evaluated(6, {}, best=False)
    for stop_at in range(1, 6):
        telemetry, *_ = meter_of()
        run(telemetry, 1, stop_at)
        telemetry, observer, display = meter_of(stop_at, opened=telemetry.open_window())
        run(telemetry, stop_at + 1, 6)
        telemetry.evaluated(6, {}, best=False)
        assert observer.of("evaluated") == whole.of("evaluated")
        epoch = display.of("evaluated")[0][2]
        own = sum(2 - (step == 5) for step in range(stop_at + 1, 7) if step > 3)
        assert (epoch.first, epoch.last, epoch.examples) == (4, 6, own), "the rate is that of this process"


def test_the_open_windows_of_several_ranks_are_kept_rank_by_rank_the_earlier_epoch_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gathered(self: World, own: list[Any]) -> list[list[Any]]:
        return [own, [{**own[1], "hits": 7}], [{**state, "hits": 8} for state in own]]

    monkeypatch.setattr(World, "gather_to_main", gathered)
    telemetry, *_ = meter_of()
    for step in (3, 4):
        add(telemetry, step, 1.0, step - 3)
    trails = telemetry.open_window()["trails"]
    assert [(trail["steps"], trail["hits"]) for trail in trails] == [([3], 0), ([4], 7), ([3], 8), ([4], 1), ([4], 8)]


def test_a_step_is_timed_from_the_first_request_of_its_data_on(passes: Callable[[float], None]) -> None:
    telemetry, *_ = meter_of(world=replace(World.solo(), size=2))
    passes(7)  # before the first request

    def groups() -> Iterator[int]:
        for number in (1, 2):
            passes(2)
            yield number

    def prepare(numbers: Iterator[int]) -> Iterator[Any]:
        for number in numbers:
            passes(1)
            yield SimpleNamespace(step=number)

    for _ in telemetry.watch(groups(), prepare):
        passes(2)
        telemetry.stragglers.forward_done()
        passes(1)
    assert [*telemetry.stragglers.history] == [(6.0, 5.0)] * 2
    assert telemetry.clock.so_far() == (12.0, 4.0)


@pytest.mark.parametrize("comparable", [True, False])
def test_ranks_are_compared_where_they_do_the_same_work(comparable: bool) -> None:
    telemetry, *_ = meter_of(world=replace(World.solo(), size=2), comparable=comparable)
    assert telemetry.stragglers.comparable == comparable
    assert telemetry.stragglers.world.size == 2


@pytest.mark.parametrize(("rank", "of_other", "own", "first"), [(0, 2, 3, 2), (0, 3, 2, 2), (1, 1, None, 1)])
def test_the_first_bad_step_is_that_of_any_rank(
    rank: int, of_other: int, own: int | None, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def summed(self: World, tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.int64:
            assert tensor[1 - rank] == 0, "each rank fills in its own place"
            tensor[1 - rank] = of_other
            return tensor
        return tensor + torch.tensor([math.inf, 0.0, 0.0], dtype=torch.float64)  # what the other rank has lost

    monkeypatch.setattr(World, "sum", summed)
    world = replace(World.solo(), rank=rank, size=2)
    telemetry, *_ = meter_of(world=world, comparable=False, loss_limit=1e9)
    for step in (1, 2, 3):
        add(telemetry, step, math.nan if step == own else 1.0, 0)
    (window,) = telemetry.end_window(3, {}, None)
    assert window.first_bad_step == first


@pytest.mark.parametrize("steps", [((4, 5), (4,)), ((4,), (4, 5)), ((5,), (4,), (6,))], ids=str)
def test_the_first_bad_step_is_that_of_any_part_of_a_window_that_several_ranks_have_begun(
    steps: tuple[tuple[int, ...], ...],
) -> None:
    telemetry, *_ = meter_of()
    add(telemetry, 4, 1.0, 0)
    state = telemetry.open_window()
    *_, trail = state["trails"]
    state["trails"] = []
    for own in steps:
        losses = [math.nan if step == own[-1] else 1.0 for step in own]
        state["trails"].append({**trail, "steps": [*own], "losses": losses, "examples": [2] * len(own)})
    telemetry, *_ = meter_of(6, opened=state)
    (window,) = telemetry.end_window(7, {}, None)
    assert window.first_bad_step == 4


def test_each_figure_of_a_task_has_its_own_mean_and_a_scalar_its_digits() -> None:
    telemetry, observer, _ = meter_of(names=["gap", "kl"])
    add(telemetry, 1, 0.0, 0)
    telemetry.log("kl", torch.tensor([1.0, 2.0]))
    telemetry.log("gap", torch.tensor([10.0, 20.0]))
    telemetry.end_window(1, {"optim/lr": 0.1, "optim/scale": torch.tensor(3)}, None)
    ((_, figures),) = observer.of("write")
    assert {"gap": 15.0, "kl": 1.5, "optim/lr": 0.1, "optim/scale": 3.0}.items() <= figures.items()


def test_micro_batches_of_several_sizes_count_by_their_images() -> None:
    telemetry, *_ = meter_of(loss_limit=1.5)
    for step, loss, images in ((1, 2.0, 2), (1, 4.0, 4), (2, 3.0, 2), (2, 1.0, 1)):
        add(telemetry, step, loss, 1, images=images)
    (window,) = telemetry.end_window(2, {}, None)
    assert (window.loss, window.top1, window.examples) == (10 / 9, pytest.approx(100 * 4 / 9), 9)
    telemetry, *_ = meter_of(loss_limit=1.5)
    for step, loss, images in ((1, 4.0, 4), (2, 4.0, 2), (3, 9.0, 1)):
        add(telemetry, step, loss, 0, images=images)
    (window,) = telemetry.end_window(3, {}, None)
    assert window.first_bad_step == 2


def test_a_run_that_goes_on_at_the_end_of_an_epoch_is_in_the_next_one() -> None:
    for step, first, number in ((2, 1, 0), (3, 4, 1), (4, 4, 1), (6, 7, 2)):
        telemetry, *_ = meter_of(step)
        assert (telemetry.window.first, telemetry.epoch.first) == (step + 1, first)
        assert [tally.epoch for tally in telemetry.tallies] == [number]


def test_steps_that_took_no_time_have_a_rate(passes: Callable[[float], None]) -> None:
    telemetry, *_ = meter_of()
    add(telemetry, 1, 1.0, 0)
    (window,) = telemetry.end_window(1, {}, None)
    assert math.isfinite(window.rate)
    assert window.wait_share == 0


def test_each_window_has_its_own_waits(passes: Callable[[float], None]) -> None:
    telemetry, observer, _ = meter_of()
    for step, waited in ((1, 1.0), (2, 3.0), (3, 0.0)):
        requested = time.perf_counter()
        passes(waited)
        telemetry.clock.loaded += waited
        telemetry.clock.add_arrival(requested, time.perf_counter())
        add(telemetry, step, 1.0, 0)
        passes(4.0 - waited)
        (window,) = telemetry.end_window(step, {}, None)
        assert (window.seconds, window.waited) == (4.0, waited)
    assert [figures["perf/data_wait_pct"] for _, figures in observer.of("write")] == [25.0, 75.0, 0.0]
    assert telemetry.trained() == {"images": 6, "training_seconds": 12.0, "waiting_seconds": 4.0}


def test_one_rank_continues_the_epoch_of_two() -> None:
    telemetry, *_ = meter_of()
    for step in (3, 4):
        add(telemetry, step, float(step), 1)
    state = telemetry.open_window()
    state["trails"] = [trail for trail in state["trails"] for _ in range(2)]  # each rank had as much
    telemetry, observer, display = meter_of(4, opened=state)
    add(telemetry, 5, 13.0, 2)
    telemetry.evaluated(5, {}, best=False)
    epoch = {"loss/train_epoch": (2 * 4.0 + 13.0) / 6, "acc/train_epoch_top1": 100 * 4 / 6}
    assert observer.of("evaluated")[0][1] == pytest.approx(epoch)
    (window,) = telemetry.end_window(5, {}, None)
    assert (window.first, window.loss, window.examples) == (1, (2 * 7.0 + 13.0) / 10, 2)
    assert display.of("window")[0][1].loss == pytest.approx(epoch["loss/train_epoch"])
