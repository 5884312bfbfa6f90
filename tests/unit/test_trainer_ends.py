"""How the loop ends early and goes on after a resume, on parts that are put together by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_trainer import ACCURACY, COMMON, RARE, RARELY, Always, Silent, fitted, network, trainer_of
from torch import nn

from lockstep.core.batch import Batch
from lockstep.core.errors import InputError, NumericalError, Stopped
from lockstep.core.tags import Monitor
from lockstep.core.world import World
from lockstep.metrics import F1
from lockstep.optim.schedule import Constant, Plateau
from lockstep.runtime.signals import StopNow
from lockstep.scores import Scores
from lockstep.strategy import AllReduce
from lockstep.tasks import Multiclass
from lockstep.training import trainer as trainer_module
from lockstep.training.averages import EMA
from lockstep.training.evaluate import Patience
from lockstep.training.network import Freezing
from lockstep.training.train_state import Progress
from lockstep.training.train_step import StepListener
from thread_ranks import ThreadRanks

EACH_STEP = {"log_every": 9, "eval_every": 1, "save_every": 9}


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("monitor", ["top1", "nobody's"])
def test_patience_ends_a_run_at_its_evaluation_saved_and_with_a_best_step(limit: int, monitor: str) -> None:
    """The score never improves, or has no value."""
    options = {"patience": Patience(limit=limit), "monitor": Monitor(monitor), "every": EACH_STEP}
    trainer = trainer_of(Always(RARE), World.solo(), steps=9, **options)
    trainer.telemetry.display = trainer.telemetry  # type: ignore[misc, assignment]
    events, step, _ = fitted(trainer)
    last = 1 + limit
    assert step == last
    assert [event[1] for event in events if event[0] == "eval"] == [*range(1, last + 1)]
    best = last if monitor == "nobody's" else 1  # without a score the present weights are the best
    assert [event for event in events if event[0] == "save"] == [("save", at, True) for at in sorted({best, last})]
    assert trainer.progress.best_step == best
    assert trainer.progress.best_figures["top1"] == pytest.approx(ACCURACY[RARE])
    best_score = "has had no value" if monitor == "nobody's" else f"has not been better than {ACCURACY[RARE]:.2f} %"
    says = f" {best_score} (step 1) for {limit} evaluation{'s' * (limit > 1)}; train.patience={limit} ends the run"
    assert trainer.ended_early.endswith(says)
    again = trainer_of(Always(RARE), World.solo(), steps=9, progress=trainer.progress, **options)
    assert fitted(again) == ([], last, ""), "a resume takes no step more"


@pytest.mark.parametrize(("start", "averaged"), [(1, True), (2, True), (3, False)])
def test_the_end_by_patience_says_if_the_last_score_is_of_averaged_weights(start: int, averaged: bool) -> None:
    model = Always(RARE)
    ema = EMA(model, 0.9)
    ema.start = start
    progress = Progress(step=2, scores=[(1, 50.0), (2, 50.0)])
    trainer = trainer_of(model, World.solo(), steps=9, ema=ema, progress=progress, patience=Patience(limit=1))
    assert trainer.ended_early.startswith(
        "val top-1" + " of the averaged weights" * averaged + " has not been better"
    )


def test_the_score_of_the_raw_weights_is_kept_beside_the_score_of_the_average() -> None:
    model = Always(COMMON)
    ema = EMA(model, 0.9)
    ema.n_averaged += 1
    model.label = RARE
    trainer = trainer_of(model, World.solo(), ema=ema)
    trainer.evaluate(1)
    assert trainer.raw_score == pytest.approx(ACCURACY[RARE])
    assert trainer.progress.score == trainer.progress.best == pytest.approx(ACCURACY[COMMON])
    figures = {name: value for name, value in trainer.telemetry.figures[1].items() if name.endswith("top1")}
    assert figures == pytest.approx({"acc/val_top1": ACCURACY[RARE], "acc/val_ema_top1": ACCURACY[COMMON]})


def test_an_average_is_evaluated_with_statistics_that_have_just_been_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = list[str]()
    model = nn.Sequential(nn.BatchNorm2d(1).double(), *network())
    average = EMA(model, 0.9)
    average.n_averaged += 1
    average.norms, average.images = [(average.module[0], model[0])], 2
    monkeypatch.setattr(average, "renew_statistics", lambda *_: events.append("renewed"))
    average.module.register_forward_hook(lambda *_: events.append("evaluated"))
    trainer_of(model, World.solo(), ema=average).evaluate(1)
    assert [event for event, _ in groupby(events)] == ["renewed", "evaluated"]


def test_a_resume_gives_the_schedule_the_gains_of_the_evaluations_that_had_a_score() -> None:
    options: dict[str, Any] = {"monitor": Monitor.parse("-loss"), "schedule": Plateau(patience=0, gamma=0.5)}
    progress = Progress(step=2, scores=[(1, 0.0), (2, 3.0)])
    assert trainer_of(network(), World.solo(), steps=9, progress=progress, **options).step.scores == [(1, 0), (2, -3)]
    scores = [(1, 3.0), (2, None), (3, float("nan")), (4, 3.5)]
    trainer = trainer_of(network(), World.solo(), steps=9, progress=Progress(step=4, scores=scores), **options)
    assert trainer.step.scores == [(1, -3.0), (4, -3.5)]
    for step, rate in ((4, 0.5), (5, 0.25)):  # the loss of step 4 is no better
        trainer.step.set_learning_rate(step)
        assert trainer.step.state.optimizer.param_groups[0]["lr"] == rate
    trainer.progress.step = 5
    trainer.judge({"loss": 2.0})
    assert trainer.step.scores[2:] == [(5, -2.0)]


class Keeping(Silent):
    """Keeps the progress that it is to write, as a thread that has not written it yet does."""

    def save(self, *, progress: dict[str, Any], **state: Any) -> None:
        self.events.append(progress)


def test_scores_that_come_while_a_checkpoint_is_written_are_not_in_it() -> None:
    trainer = trainer_of(network(), World.solo(), steps=3, every={**EACH_STEP, "save_every": 1})
    trainer.checkpointer = keeping = Keeping()  # type: ignore[assignment]
    fitted(trainer)
    assert [(progress["step"], [step for step, _ in progress["scores"]]) for progress in keeping.events] == [
        (step, [*range(1, step + 1)]) for step in (1, 2, 3)
    ]


def test_broken_images_of_both_loaders_are_counted() -> None:
    trainer = trainer_of(network(), World.solo())
    trainer.loader = SimpleNamespace(count_skipped=lambda: 2)  # type: ignore[assignment]
    assert trainer.count_skipped() == 2
    trainer.test_loader = SimpleNamespace(count_skipped=lambda: 5)  # type: ignore[assignment]
    assert trainer.count_skipped() == 7


def test_a_step_is_undone_while_it_is_compiled_for_its_shape_frozen_and_thawed() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1).double(), *network())
    trainer = trainer_of(model, World.solo(), interrupts_compiling=True)
    freezing = Freezing.of(model, frozenset({"0.weight", "0.bias"}), until=2)
    trainer.state = trainer.step.state = replace(trainer.state, freezing=freezing)
    shard, short = next(groups := trainer.transforms.train(trainer.loader.train(after=0))), next(groups)
    undone = list[bool]()
    model[-1].register_forward_hook(lambda *_: undone.append(trainer.stop.undoes))
    for shape, step in ((shard, 1), (shard, 2), (short, 2), (shard, 3), (short, 3), (shard, 4), (short, 4)):
        trainer.step_or_undo(replace(shape, step=step))
        assert not trainer.stop.undoes, "an evaluation is not undone"
    assert undone == [True, False, True, True, True, False, False]


def test_a_step_that_is_compiled_again_after_its_undoing_is_undone_again() -> None:
    trainer = trainer_of(network(), World.solo(), interrupts_compiling=True)
    shard = next(iter(trainer.transforms.train(trainer.loader.train(after=0))))
    undone = list[bool]()

    def stop_at_first(*_: Any) -> None:
        undone.append(trainer.stop.undoes)
        if len(undone) == 1:
            raise StopNow

    trainer.state.model[-1].register_forward_hook(stop_at_first)
    with pytest.raises(StopNow):
        trainer.step_or_undo(shard)
    trainer.step_or_undo(shard)
    assert undone == [True, True]


class Renewed(EMA):
    """An average that keeps what its statistics are to be computed from."""

    def renew_statistics(self, frozen: Any, blocks: Any, number: int, forward: Any, world: World) -> None:  # type: ignore[override]
        self.request = (len([*frozen]), [len(block) for block in blocks], number)


@pytest.mark.parametrize(
    ("images", "sizes"), [(1, [2]), (2, [2]), (3, [2]), (4, [2, 2]), (9, [2] * 4), (10, [2] * 5), (99, [2] * 5)]
)
@pytest.mark.parametrize(("step", "frozen"), [(1, 1), (2, 1), (3, 0)])
def test_a_mean_has_the_statistics_of_whole_blocks_and_frozen_norms_keep_theirs(
    images: int, sizes: list[int], step: int, frozen: int
) -> None:
    model = nn.Sequential(nn.BatchNorm2d(1).double(), *network())
    average = Renewed(model, 0.9)
    average.norms, average.images = [(average.module[0], model[0])], images
    trainer = trainer_of(model, World.solo(), ema=average)
    trainer.state = replace(trainer.state, freezing=Freezing.of(model, frozenset({"0.weight", "0.bias"}), until=2))
    trainer._renew_statistics(step)
    assert average.request == (frozen, sizes, len(sizes))


def test_a_mean_has_statistics_of_the_images_of_its_epoch_as_they_are_augmented_at_its_step() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1).double(), *network())
    average = Renewed(model, 0.9)
    average.norms, average.images = [(average.module[0], model[0])], 9
    trainer = trainer_of(model, World.solo(), steps=9, ema=average)
    requests, places = list[Any](), list[Any]()

    def blocks_of_epoch(epoch: int, number: int) -> list[Any]:
        requests.append((epoch, number))
        steps = [SimpleNamespace(step=4), SimpleNamespace(step=5)]
        return [SimpleNamespace(images="images", epoch=7, indices=f"block {at}", steps=steps) for at in (1, 2)]

    ranks = SimpleNamespace(rank=1, size=3)
    trainer.loader = SimpleNamespace(world=ranks, eval_batch=2, blocks_of_epoch=blocks_of_epoch)  # type: ignore[assignment]
    own: Any = SimpleNamespace(memory_format="a format", augmented=lambda *parts: parts)
    trainer.transforms = own
    trainer.between_blocks = lambda *place: places.append(place)  # type: ignore[method-assign]
    renewed = list[Any]()
    average.renew_statistics = lambda *parts: renewed.extend((*parts[:1], [*parts[1]], *parts[2:]))  # type: ignore[method-assign]
    trainer._renew_statistics(4)
    frozen, blocks, number, forward, world = renewed
    assert requests == [(1, 4)], "an epoch has two steps, and a block of nine images would be short"
    assert blocks == [("images", 7, f"block {at}", 4) for at in (1, 2)]
    assert places == [(1, 2), (2, 2)], "of four blocks three ranks have two each"
    assert (frozen, number, world) == ((), 4, ranks)
    assert forward.keywords == {"precision": trainer.step.precision, "memory_format": "a format", "views": 1}


class Agreeing:
    """A consensus that keeps what it is sent, and its end."""

    can_wait = False

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def agree(self, *requests: bool, busy: float) -> list[bool]:
        self.events.append((requests, busy))
        return [*requests]

    def close(self) -> None:
        self.events.append("closed")


@pytest.mark.parametrize("stops", [True, False])
def test_the_ranks_agree_on_a_stop_and_on_a_late_checkpoint_and_finish_their_messages(stops: bool) -> None:
    trainer = trainer_of(network(), World.solo(), steps=2, every=dict.fromkeys(RARELY, 9))
    events = trainer.telemetry.events
    trainer.consensus = Agreeing(events)  # type: ignore[assignment]
    trainer.telemetry.stragglers.busy = 0.25  # type: ignore[misc]
    trainer.checkpointer.is_overdue = True  # type: ignore[attr-defined]
    trainer.stop.requested = stops
    trainer.stop.begun = True
    fitted(trainer)
    sent = [((stops, True), 0.25)] * (1 if stops else 2)
    assert [event for event in events if event[0] not in ("log", "eval", "save") and event != "closed"] == sent
    last = [event if event == "closed" else event[0] for event in events[-3:]]
    assert last[-2:] == (["closed", "save"] if stops else ["save", "closed"])


@pytest.mark.parametrize("can_wait", [True, False])
def test_ranks_whose_steps_are_short_do_not_wait_within_one_and_those_of_long_ones_undo_it(
    can_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.BatchNorm2d(1).double(), *network())
    trainer = trainer_of(model, World.solo(), micro_batches=2)
    trainer.consensus = Agreeing([])  # type: ignore[assignment]
    trainer.consensus.can_wait = can_wait  # type: ignore[misc]
    trainer.world = replace(World.solo(), size=2)
    monkeypatch.setattr(World, "any", lambda world, flag: flag)
    trainer.stop.requested = True
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shard = next(iter(trainer.transforms.train(trainer.loader.train(after=0))))
    with pytest.raises(StopNow) if can_wait else nullcontext():
        trainer.step_or_undo(shard)
    same = [name for name, tensor in model.state_dict().items() if torch.equal(tensor, before[name])]
    assert (len(same) == len(before)) == can_wait


class AtTheEnd(Silent):
    """Keeps what is written of a test."""

    failure: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.observer = SimpleNamespace(write=lambda step, scalars: self.events.append((step, scalars)))
        self.run_dir = SimpleNamespace(weights="the best weights")

    def wait(self) -> None:
        self.events.append("wait")


class Rooted(AtTheEnd):
    """The telemetry and the checkpointer of a rank, of which main's may have failed."""

    def __init__(self, failure: Any) -> None:
        super().__init__()
        self.failure = failure


def test_all_ranks_have_the_metrics_that_main_computes_in_an_evaluation_and_in_a_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_module, "load_exported", lambda model, weights: weights[0])
    models = [network() for _ in range(3)]

    def figures(world: World) -> list[Any]:
        scores = Scores({"f1": F1()}, 3, (), world)
        trainer = trainer_of(models[world.rank], world, strategy=AllReduce(), scores=scores, monitor=Monitor("f1"))
        trainer.progress.step = 1
        trainer.evaluate(1)
        trainer.telemetry = trainer.checkpointer = Rooted(None)  # type: ignore[assignment]
        trainer.test_loader = trainer.loader
        trainer.test()
        trainer.telemetry = trainer.checkpointer = Rooted(OSError("full") if world.is_main else None)  # type: ignore[assignment]
        trainer.checkpointer.run_dir.weights = None  # type: ignore[misc, assignment]
        trainer.test()
        assert trainer.telemetry.events == ["wait"], "no rank tests what main could not write"
        return [trainer.progress.scores, trainer.progress.figures, trainer.tested]

    first, *further = ThreadRanks(3, monkeypatch).run(figures)
    assert further == [first] * 2
    scores, evaluated, tested = first
    assert evaluated == tested
    assert scores == [(1, evaluated["f1"])]


@pytest.mark.parametrize("event", RARELY)
def test_a_step_that_is_exactly_due_is_due_once_and_the_last_one_always(event: str) -> None:
    name = {"log_every": "log", "eval_every": "eval", "save_every": "save"}[event]
    every = {**dict.fromkeys(RARELY, 9), event: 2}
    for steps, expected in ((4, [2, 4]), (5, [2, 4, 5])):
        trainer = trainer_of(network(), World.solo(), steps=steps, every=every)
        trainer.judge = lambda figures: False  # type: ignore[method-assign]
        assert [at[1] for at in fitted(trainer)[0] if at[0] == name] == expected


def test_weights_are_checked_for_being_finite_at_a_save_between_log_points_too() -> None:
    model = network()
    trainer = trainer_of(model, World.solo(), every={"log_every": 2}, progress=Progress(step=3))
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    with pytest.raises(NumericalError, match="not finite after step 3"):
        trainer.save()


def test_a_figure_of_a_task_leaves_out_broken_images_and_has_one_number_for_each_example() -> None:
    trainer = trainer_of(network(), World.solo())
    logged, graphs = list[tuple[str, list[float]]](), set[bool]()

    def log(name: str, values: torch.Tensor) -> None:
        logged.append((name, values.tolist()))
        graphs.add(values.requires_grad)

    trainer.step.listener = replace(trainer.step.listener, log=log)
    labels, values = torch.tensor([2, -1, 0]), torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    trainer.step.log(labels, "my/figure", values)
    trainer.step.log(labels, "my/figure", values[:0])  # of a stage without the last layer
    assert logged == [("my/figure", [1.0, 0.0, 3.0]), ("my/figure", [])]
    assert graphs == {False}, "a graph would live until the log point"
    for wrong in (values[:2], values[None], values.sum()):
        with pytest.raises(InputError, match=r"task: the figure 'my/figure' has the shape .* \(3,\)$"):
            trainer.step.log(labels, "my/figure", wrong)


class Measuring(Multiclass):
    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        batch.log("my/figure", torch.ones(len(batch.images)))
        return super().losses(batch)


def test_a_broken_image_that_is_mixed_with_another_counts_for_no_figure() -> None:
    step, logged = trainer_of(network(), World.solo()).step, list[list[float]]()
    step.task, step.listener = Measuring(), StepListener(log=lambda name, values: logged.append(values.tolist()))
    labels, targets = torch.tensor([2, -1, 0]), torch.tensor([[0.0, 0.4, 0.6], [0.0, 0.7, 0.0], [1.0, 0.0, 0.0]])
    step.inputs = lambda micro: [torch.zeros(3, 1, 4, 4).double(), targets.double(), labels]
    micro: Any = SimpleNamespace(first=lambda number: None)
    step.forward(micro)
    assert logged == [[1.0, 0.0, 1.0]]


class Beating(Silent):
    """Keeps signs of life among the events."""

    def beat(self) -> None:
        self.events.append("beat")

    def evaluating(self, done: int, blocks: int) -> None:  # type: ignore[override]
        self.events.append(("block", done, blocks))


def test_a_run_gives_a_sign_of_life_in_each_step_each_block_and_each_save() -> None:
    trainer = trainer_of(network(), World.solo(), steps=2, every={"log_every": 9, "eval_every": 9, "save_every": 9})
    trainer.telemetry = trainer.checkpointer = beating = Beating()  # type: ignore[assignment]
    trainer.heartbeat = beating.beat
    fitted(trainer)
    blocks = [item for at in (1,) for item in (("block", at, 1), "beat")]
    assert beating.events == ["beat", "beat", ("log", 2, 0.5), *blocks, ("eval", 2, True), ("save", 2, True), "beat"]


@pytest.mark.parametrize(("size", "allowed"), [(1, True), (2, False)])
def test_only_a_lone_rank_is_interrupted_in_an_evaluation_and_buffers_are_mains(
    size: int, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = list[Any]()
    model = nn.Sequential(nn.BatchNorm2d(1).double(), *network())
    average = Renewed(model, 0.9)
    average.norms, average.images = [(average.module[0], model[0])], 2
    trainer = trainer_of(model, World.solo(), ema=average)
    trainer.world = replace(World.solo(), size=size)
    monkeypatch.setattr(World, "any", lambda world, flag: flag)

    @contextmanager
    def interrupting(allowed: bool) -> Iterator[None]:
        events.append(allowed)
        yield

    trainer.stop.interrupting = interrupting  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(type(trainer.step.strategy), "share_buffers", lambda _, of, world: events.append(of))
    monkeypatch.setattr(trainer_module, "evaluate_model", lambda of, **how: {"loss": 1.0})
    trainer._evaluate(average.module, trainer.loader, ())
    trainer._renew_statistics(1)
    assert events == [average.module, allowed, allowed]


def test_a_score_without_a_value_is_warned_of_until_there_was_one() -> None:
    trainer = trainer_of(network(), World.solo(), monitor=Monitor("f1"), steps=9)
    trainer.telemetry.display = trainer.telemetry  # type: ignore[misc, assignment]
    for step, figures in ((1, {}), (2, {"f1": float("nan")}), (3, {"f1": 0.0}), (4, {}), (5, {"f1": 0.5})):
        trainer.progress.step = step
        trainer.judge({"loss": 1.0, **figures})
    warnings = [("warn", f"f1 has no value after step {step}: no best yet") for step in (1, 2)]
    assert trainer.telemetry.events == warnings
    assert trainer.progress.scores == [(1, None), (2, None), (3, 0.0), (4, None), (5, 0.5)]
    assert trainer.step.scores == [(3, 0.0), (5, 0.5)]
    resumed = trainer_of(network(), World.solo(), monitor=Monitor("f1"), progress=Progress(step=4, scores=[(2, 0.5)]))
    resumed.telemetry.display = resumed.telemetry  # type: ignore[misc, assignment]
    resumed.judge({})
    assert resumed.telemetry.events == [], "there was a score, though not in this run's folder"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_stop_that_is_forced_or_before_a_step_saves_nothing(force: bool, begun: bool) -> None:
    trainer = trainer_of(network(), World.solo(), progress=Progress(step=2))
    trainer.stop.force, trainer.stop.begun, trainer.stop.reason = force, begun, "the budget is used up"
    saves = begun and not force
    with pytest.raises(Stopped if saves else StopNow) as stopped:
        trainer.leave(StopNow(), saves=True)
    assert trainer.stop.leaving == saves
    assert trainer.telemetry.events == [("save", 2, False)] * saves
    assert not saves or str(stopped.value) == "stopped at step 2 of 4 and saved: the budget is used up"
    if saves:
        with pytest.raises(Stopped):
            trainer.leave(StopNow(), saves=False)
        assert trainer.telemetry.events == [("save", 2, False)], "the test of the best weights saves nothing"


@pytest.mark.parametrize(
    ("best_step", "has_split", "failure", "has_average", "tests"),
    [
        (2, True, None, False, True),
        (2, True, None, True, True),
        (2, False, None, False, False),
        (0, True, None, False, False),
        (2, True, OSError("full"), False, False),
    ],
)
def test_the_best_weights_are_tested_once_they_are_written(
    best_step: int,
    has_split: bool,
    failure: Any,
    has_average: bool,
    tests: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = network()
    ema = EMA(model, 0.9) if has_average else None
    trainer = trainer_of(model, World.solo(), ema=ema, progress=Progress(step=4, best_step=best_step))
    trainer.telemetry = trainer.checkpointer = tested = AtTheEnd()  # type: ignore[assignment]
    tested.failure, loaded = failure, list[Any]()
    split: Any = object()
    trainer.test_loader = split if has_split else None
    monkeypatch.setattr(trainer_module, "load_exported", lambda *place: loaded.append(place))
    figures = {"loss": 0.5, "top1": float("nan")}
    evaluated = list[Any]()
    trainer._evaluate = lambda *values: (evaluated.append(values), figures)[1]  # type: ignore[method-assign]
    trainer.scores.compute = lambda: {"f1/ow\udcffl": 3.0}  # type: ignore[method-assign]
    trainer.test()
    of = model if ema is None else ema.module
    assert loaded == [(of, "the best weights")] * tests
    assert evaluated == [(of, split, (trainer.scores,))] * tests
    assert trainer.tested == ({"loss": 0.5, "f1/ow\udcffl": 3.0} if tests else {})
    if tests:
        wait, (step, scalars) = tested.events
        assert (wait, step, [*scalars]) == ("wait", 4, ["test/loss", "test/top1", "test/f1/ow\\udcffl"])
    else:
        assert tested.events == ["wait"] * (failure is not None)


def test_a_stop_in_the_test_of_the_best_weights_saves_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(network(), World.solo(), progress=Progress(step=4, best_step=2))
    trainer.telemetry = trainer.checkpointer = ended = AtTheEnd()  # type: ignore[assignment]
    trainer.test_loader = trainer.loader
    trainer.stop.requested = trainer.stop.begun = True
    monkeypatch.setattr(trainer_module, "load_exported", lambda *place: None)
    with pytest.raises(Stopped, match=r"^stopped at step 4 of 4 and saved"):
        trainer.test()
    assert (ended.events, trainer.tested) == (["wait", "wait"], {})


def test_tensors_of_several_formats_are_copied_each_to_its_place() -> None:
    sources = [
        torch.tensor(number, dtype=dtype)
        for number, dtype in ((1, torch.int64), (2.5, torch.float64), (3, torch.int64))
    ]
    targets = [torch.empty_like(source) for source in sources]
    trainer_module.copy_all(sources, targets)
    assert [target.item() for target in targets] == [1, 2.5, 3]
    cast = [torch.zeros((), dtype=dtype) for dtype in (torch.float32, torch.float64, torch.int64)]
    trainer_module.copy_all(sources, cast)
    assert [target.item() for target in cast] == [1, 2.5, 3]
    trainer_module.copy_all([], [])


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_only_a_step_of_several_micro_batches_can_be_stopped_within(micro_batches: int) -> None:
    model = nn.Sequential(nn.BatchNorm2d(1).double(), *network())
    trainer = trainer_of(model, World.solo(), micro_batches=micro_batches, steps=2, every=dict.fromkeys(RARELY, 9))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    passes = list[int]()

    def ask(*_: Any) -> None:
        passes.append(1)
        trainer.stop.requested = True

    model[-1].register_forward_hook(ask)
    shard = next(iter(trainer.transforms.train(trainer.loader.train(after=0))))
    with pytest.raises(StopNow) if micro_batches > 1 else nullcontext():
        trainer.step_or_undo(shard)
    assert len(passes) == 1
    same = [name for name, tensor in model.state_dict().items() if torch.equal(tensor, before[name])]
    assert (len(same) == len(before)) == (micro_batches > 1)


class Pausing(Silent):
    """Keeps what the training waits for."""

    @contextmanager
    def pause(self, purpose: str) -> Iterator[None]:
        self.events.append(f"{purpose} begins")
        yield
        self.events.append(f"{purpose} ends")


def test_an_evaluation_and_a_checkpoint_take_their_own_time() -> None:
    trainer = trainer_of(network(), World.solo(), steps=1, every=dict.fromkeys(RARELY, 9))
    trainer.telemetry = trainer.checkpointer = pausing = Pausing()  # type: ignore[assignment]
    fitted(trainer)
    evaluation = ["evaluation begins", ("eval", 1, True), "evaluation ends"]
    saving = ["checkpoint begins", ("save", 1, True), "checkpoint ends"]
    assert pausing.events == [("log", 1, 0.5), *evaluation, *saving]


def test_each_group_has_its_share_of_the_rate_and_a_log_point_that_of_the_first() -> None:
    trainer = trainer_of(network(), World.solo(), steps=2, schedule=Constant(warmup=4))
    first, second, *further = trainer.state.model.parameters()
    groups = [{"params": [first], "scale": 2.0}, {"params": [second, *further], "scale": 0.25}]
    optimizer = torch.optim.SGD(groups, lr=7.0)
    trainer.step.state = replace(trainer.state, optimizer=optimizer)
    rates = list[Any]()
    for shard in trainer.transforms.train(trainer.loader.train(after=0)):
        logged = trainer.step(shard)
        rates.append((logged["optim/lr"], [group["lr"] for group in optimizer.param_groups]))
    assert rates == [(0.25, [0.25, 0.03125]), (0.5, [0.5, 0.0625])]


def test_callbacks_see_gradients_without_the_scale_of_the_loss() -> None:
    gradients = list[Any]()
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", init_scale=1024.0)):
        model = network()
        trainer = trainer_of(model, World.solo(), scaler=scaler, clip_norm=1e-3)
        own = list[torch.Tensor]()
        reduced = replace(
            trainer.step.listener,
            reduced=lambda model=model, own=own: own.extend(part.grad.clone() for part in model.parameters()),
        )
        trainer.step.listener = reduced
        trainer.step.update(next(iter(trainer.transforms.train(trainer.loader.train(after=0)))))
        gradients.append(torch.cat([part.flatten() for part in own]))
    torch.testing.assert_close(*gradients)
    assert gradients[0].norm() > 0.01, "not clipped"


def test_the_outputs_of_a_network_have_the_wide_format_of_losses() -> None:
    trainer = trainer_of(network(), World.solo())
    trainer.state.model.float()
    outputs = trainer.step.network([], torch.rand(2, 1, 4, 4))
    assert (outputs.dtype, outputs.shape) == (torch.float64, (2, 3))
