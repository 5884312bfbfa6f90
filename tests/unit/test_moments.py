"""The moments of callbacks in the loop, on parts that are put together by hand: their order, a stop, their state."""

from __future__ import annotations

from collections.abc import Callable as Function
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_trainer import fitted, network, trainer_of
from torch import Tensor, nn

from lockstep.core.errors import InputError, LockstepError
from lockstep.core.observer import Callback, Observer, TrainingRun
from lockstep.core.world import World
from lockstep.optim.sam import SAM
from lockstep.runtime.signals import StopNow
from lockstep.training.moments import Callbacks, Moments
from lockstep.training.train_state import Progress
from lockstep.training.train_step import StepListener
from lockstep.training.trainer import Trainer
from thread_ranks import ThreadRanks

MOMENTS = ("run_start", "epoch_start", "after_backward", "step_end")
MOMENTS += ("evaluation_start", "evaluation_end", "epoch_end", "run_end")
LATER = {"log_every": 9, "eval_every": 2, "save_every": 9}  # an epoch has two steps


class Told(Callback):
    """Keeps what it is told, as its state too, in a list that grows; `acts` may add to it."""

    def __init__(self, acts: Function[[str, TrainingRun], None] = lambda moment, run: None) -> None:
        self.acts, self.moments = acts, list[tuple[str, int]]()
        for moment in MOMENTS:
            setattr(self, moment, lambda run, *_, moment=moment: self.tell(moment, run))

    def tell(self, moment: str, run: TrainingRun) -> None:
        self.moments.append((moment, run.step))
        self.acts(moment, run)

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = [*map(tuple, state["moments"])]


def told_by(callback: Callback, **options: Any) -> Trainer:
    """A trainer that tells a callback."""
    trainer = trainer_of(network(), World.solo(), **{"every": LATER, **options})
    run = TrainingRun(
        folder=Path(),
        config={},
        plan=trainer.plan,
        world=trainer.world,
        model=trainer.state.model,
        optimizer=trainer.state.optimizer,
        log=lambda name, value: None,
        step=trainer.progress.step,
    )
    callbacks = Callbacks({"told": callback})
    return replace(trainer, moments=Moments(callbacks=callbacks, run=run, progress=trainer.progress, saved={}))


def epoch(step: int, *after: str) -> list[tuple[str, int]]:
    """The moments of the epoch that begins with a step."""
    steps = [(moment, at) for at in (step, step + 1) for moment in ("after_backward", "step_end")]
    return [("epoch_start", step), *steps, *((moment, step + 1) for moment in after)]


def test_each_moment_comes_at_its_step_whether_an_evaluation_is_the_best_or_not() -> None:
    watch = Told()
    trainer = told_by(watch, steps=4)
    trainer.predictions.finish = lambda step: None  # type: ignore[method-assign]
    events = fitted(trainer)[0]
    ends = ("evaluation_start", "evaluation_end", "epoch_end")
    assert watch.moments == [("run_start", 0), *epoch(1, *ends), *epoch(3, *ends), ("run_end", 4)]
    assert [event[:2] for event in events if event[0] == "eval"] == [("eval", 2), ("eval", 4)]
    assert events[:2] == [("eval", 2, True), ("save", 2, True)], "the first one is the best so far"


def test_callbacks_take_none_of_a_steps_calls_from_its_listener() -> None:
    names = [field.name for field in fields(StepListener)]
    calls = list[str]()
    listener = StepListener(**{name: lambda *_, name=name: calls.append(name) for name in names})
    moments = told_by(Told(lambda moment, run: calls.append(moment)), steps=4).moments
    assert moments is not None
    for own in (listener, moments.listening(listener)):
        for name in names:
            getattr(own, name)(*[torch.zeros(1)] * {"record": 4, "log": 2}.get(name, 0))
    behind = names.index("reduced") + 1
    assert calls == [*names, *names[:behind], "after_backward", *names[behind:]], "a callback's time is its own"


@pytest.mark.parametrize("has_callbacks", [True, False])
def test_a_checkpoint_has_the_states_of_the_callbacks(has_callbacks: bool) -> None:
    trainer = told_by(Told()) if has_callbacks else trainer_of(network(), World.solo())
    saved = list[Any]()
    trainer.checkpointer.save = lambda **state: saved.append(state["callbacks"])  # type: ignore[method-assign]
    trainer.save()
    assert saved == [{"told": {"moments": []}} if has_callbacks else None]


def test_an_epoch_without_an_evaluation_ends_too() -> None:
    watch = Told()
    fitted(told_by(watch, steps=5, every={**LATER, "eval_every": 9}))
    assert [step for moment, step in watch.moments if moment == "epoch_end"] == [2, 4], "the fifth step begins one"


def test_a_run_begins_in_its_first_epoch_and_each_step_is_in_its_own() -> None:
    epochs = set[tuple[str, int, int]]()
    watch = Told(lambda moment, run: epochs.add((moment, run.step, run.epoch)))
    fitted(told_by(watch, steps=5, every={**LATER, "eval_every": 9}))
    assert {moment for moment, *_ in epochs} > {"run_start", "epoch_start", "epoch_end", "run_end"}
    assert epochs == {(moment, step, max(0, step - 1) // 2) for moment, step, _ in epochs}


def test_a_step_has_its_own_losses_and_outputs_and_their_mean_over_the_examples() -> None:
    seen = list[tuple[int, list[int], Tensor, Tensor]]()

    def look(moment: str, run: TrainingRun) -> None:
        if moment == "step_end":
            assert len(run.losses) == len(run.outputs) == 3
            seen.append((run.step, [*map(len, run.outputs)], run.loss, sum(run.losses) / sum(map(len, run.outputs))))

    fitted(told_by(Told(look), steps=3, micro_batches=3))
    assert [(step, sizes) for step, sizes, *_ in seen] == [(1, [2, 3, 3]), (2, [0, 1, 1]), (3, [2, 3, 3])]
    assert [float(loss) for *_, loss, _ in seen] == [float(mean) for *_, mean in seen]


def test_a_step_of_a_rank_without_examples_has_no_loss_and_the_rate_is_that_of_the_first_group() -> None:
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups = [{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.25}]
    nothing: Any = {"folder": Path(), "config": {}, "plan": None, "world": None, "model": None, "log": print}
    run = TrainingRun(**nothing, optimizer=torch.optim.SGD(groups))
    assert (run.lr, run.loss, run.reason) == (0.5, 0, "")
    run.losses, run.outputs = [torch.tensor(0.0)], [torch.zeros(0, 3)]
    assert float(run.loss) == 0


@pytest.mark.parametrize(
    ("moment", "step", "last", "evaluated"),
    [
        ("epoch_start", 3, 3, [2, 3]),
        ("after_backward", 3, 3, [2, 3]),
        ("step_end", 3, 3, [2, 3]),
        ("step_end", 4, 4, [2, 4]),
        ("evaluation_end", 2, 2, [2]),
        ("epoch_end", 2, 2, [2]),
    ],
)
def test_a_stop_at_any_moment_ends_the_run_evaluated_saved_and_for_the_first_reason(
    moment: str, step: int, last: int, evaluated: list[int]
) -> None:
    def stop(now: str, run: TrainingRun) -> None:
        if (now, run.step) == (moment, step):
            run.stop("enough")
            run.stop("more than enough")

    watch = Told(stop)
    trainer = told_by(watch, steps=9)
    events, ended_at, message = fitted(trainer)
    assert (ended_at, message) == (last, "")
    assert [event[1] for event in events if event[0] == "eval"] == evaluated
    assert events[-1] == ("save", last, True), "with its evaluation"
    assert trainer.ended_early == "a callback ends the run: enough"
    assert watch.moments[-1] == ("run_end", last)


def test_a_stop_after_an_evaluation_within_an_epoch_ends_the_run_at_its_step() -> None:
    watch = Told(lambda moment, run: run.stop("enough") if moment == "evaluation_end" else None)
    trainer = told_by(watch, steps=9, every={**LATER, "eval_every": 3})
    assert fitted(trainer)[1:] == (3, "")
    assert watch.moments[-2:] == [("evaluation_end", 3), ("run_end", 3)]


@pytest.mark.parametrize(
    ("step", "eval_every", "moments"),
    [(3, 2, []), (4, 2, ["epoch_end"]), (4, 3, [])],  # the last epoch has ended before: its evaluation was not due
)
def test_the_evaluation_of_a_run_that_a_callback_has_ended_is_made_up(
    step: int, eval_every: int, moments: list[str]
) -> None:
    watch = Told()
    every = {**LATER, "eval_every": eval_every}
    trainer = told_by(watch, steps=9, every=every, progress=Progress(step=step, stopped="enough"))
    assert fitted(trainer) == ([("eval", step, True), ("save", step, True)], step, "")
    between = ["evaluation_start", "evaluation_end", *moments]
    assert [moment for moment, _ in watch.moments] == ["run_start", *between, "run_end"]


@pytest.mark.parametrize("moment", ["epoch_start", "evaluation_start"])
def test_a_stop_within_a_step_or_an_evaluation_leaves_the_state_of_before(moment: str) -> None:
    def ask(now: str, run: TrainingRun) -> None:
        if (now, run.step) == (moment, 3 if moment == "epoch_start" else 2):
            trainer.stop.requested = True

    watch = Told(ask)
    trainer = told_by(watch, steps=9, micro_batches=3)
    _, step, message = fitted(trainer)
    assert (step, message) == (2, "stopped at step 2 of 9 and saved")
    ends = () if moment == "evaluation_start" else ("evaluation_start", "evaluation_end", "epoch_end")
    assert watch.moments == [("run_start", 0), *epoch(1, *ends)]


def test_a_step_that_computes_several_gradients_tells_of_the_first_alone() -> None:
    watch = Told()
    trainer = told_by(watch, steps=2)
    optimizer = SAM(lr=0.5, momentum=0.0).build(trainer.state.model)
    trainer.step.state = trainer.state = replace(trainer.state, optimizer=optimizer)
    trainer.step.takes_closure = True
    fitted(trainer)
    assert [step for moment, step in watch.moments if moment == "after_backward"] == [1, 2]


def test_callbacks_that_a_checkpoint_does_not_have_start_fresh() -> None:
    one, other = Told(), Told()
    callbacks = Callbacks({"one": one, "other": other})
    callbacks.load_state_dict({"other": {"moments": [("step_end", 7)]}, "gone": {}})
    assert (one.moments, other.moments) == ([], [("step_end", 7)])


def test_of_a_callback_that_says_nothing_of_its_state_nothing_is_saved_and_nothing_changes() -> None:
    plain = Callback()
    plain.number = 7  # type: ignore[attr-defined]
    callbacks = Callbacks({"plain": plain})
    assert callbacks.state_dict() == {"plain": {}}
    callbacks.load_state_dict({"plain": {"number": 3}})
    assert vars(plain) == {"number": 7}


@pytest.mark.parametrize("stops", [(0,), (1,), (2,), (1, 2)])
def test_a_stop_on_any_rank_has_the_first_reason_on_all(
    stops: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(world: World) -> str:
        run: Any = SimpleNamespace(world=world, reason=f"rank {world.rank}" if world.rank in stops else "")
        moments = Moments(callbacks=Callbacks({}), run=run, progress=Progress(), saved={})
        moments.agree()
        return moments.progress.stopped

    assert ThreadRanks(3, monkeypatch).run(reason) == [f"rank {stops[0]}"] * 3


def test_a_callback_that_fails_is_named_with_its_line_and_its_moment() -> None:
    one, other = Told(), Told(lambda moment, run: [][1])
    run: Any = SimpleNamespace(step=3)
    with pytest.raises(LockstepError, match=rf"^{__file__}:\d+: callback other: step_end raised IndexError: list"):
        Callbacks({"one": one, "other": other}).tell("step_end", run)
    assert one.moments == [("step_end", 3)]


class Equal(Told):
    """A callback or a logger that is equal to any other, as one of a dataclass with the same values is."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = None  # type: ignore[assignment]


def test_of_equal_callbacks_and_loggers_the_one_that_fails_is_named() -> None:
    parts, run = [Equal(lambda moment, run: [][1]) for _ in range(4)], SimpleNamespace(step=3)
    callbacks = Callbacks(dict(zip(("one", "two", "three"), parts, strict=False)))
    names = ["callback one", "callback two", "callback three", "logger Equal"]
    for part, name in zip(parts, names, strict=True):
        with pytest.raises(LockstepError, match=rf": {name}: step_end raised IndexError: "):
            callbacks.call(part, "step_end", run)


def test_a_logger_that_fails_beside_callbacks_is_named_with_its_line_and_its_method() -> None:
    class Fails(Observer):
        def write(self, step: int, scalars: Mapping[str, float]) -> None:
            raise ZeroDivisionError("no examples")

    observers = Callbacks({"one": Told()})
    observers.observers = (*observers.observers, Fails())
    with pytest.raises(
        LockstepError, match=rf"^{__file__}:\d+: logger Fails: write raised ZeroDivisionError: no examples$"
    ):
        observers.write(3, {"loss": 0.5})


def test_a_state_that_no_checkpoint_can_have_is_refused_as_the_run_begins() -> None:
    watch = Told()
    trainer = told_by(watch)
    assert trainer.moments is not None
    trainer.moments.callbacks.callbacks = {"one": Told(), "other": watch}  # type: ignore[misc]
    watch.state_dict = lambda: {"number": object()}  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(
        InputError, match=r"^callback other: state_dict\['number'\] is of type object, expected tensors"
    ):
        trainer.moments.start()
    assert watch.moments == [("run_start", 0)]


def test_a_run_starts_before_its_state_is_loaded_which_is_a_copy_of_the_saved_one() -> None:
    watch = Told()
    saved = {"told": {"moments": [["step_end", 7]], "tensor": torch.zeros(2)}}
    trainer = told_by(watch)
    assert trainer.moments is not None
    trainer.moments.saved = saved
    loaded = list[Any]()
    load = watch.load_state_dict

    def loading(state: dict[str, Any]) -> None:
        loaded.append((list(watch.moments), state["tensor"]))
        load(state)

    watch.load_state_dict = loading  # type: ignore[method-assign]
    trainer.moments.start()
    ((before, tensor),) = loaded
    assert before == [("run_start", 0)]
    tensor += 1
    assert saved["told"]["tensor"].tolist() == [0, 0]  # type: ignore[attr-defined]
    assert watch.moments == [("step_end", 7)]


def test_the_end_of_an_evaluation_has_its_scores_by_tag() -> None:
    seen = list[Any]()

    class Scored(Callback):
        def evaluation_end(self, run: TrainingRun, scores: Any) -> None:
            seen.append((run.step, scores))

    trainer = told_by(Scored())
    assert trainer.moments is not None
    both = ({"top1": 50.0}, {"acc/val_top1": 50.0})
    trainer.moments.run.step = 2
    assert trainer.moments.evaluation(lambda: both) == both
    assert seen == [(2, {"acc/val_top1": 50.0})]


def test_a_stop_leaves_a_callback_that_had_no_state_without_one_again() -> None:
    class Counts(Callback):
        def __init__(self) -> None:
            self.counts: dict[str, int] = {}

        def state_dict(self) -> dict[str, Any]:
            return self.counts

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.counts = state

    counting = Counts()
    moments = told_by(counting).moments
    assert moments is not None

    def evaluate() -> Any:
        counting.counts["seen"] = 1
        raise StopNow

    with pytest.raises(StopNow):
        moments.evaluation(evaluate)
    assert counting.counts == {}


@pytest.mark.parametrize("error", [StopNow, ZeroDivisionError])
def test_only_a_stop_undoes_what_callbacks_have_done(error: type[BaseException]) -> None:
    watch = Told()
    trainer = told_by(watch)
    assert trainer.moments is not None
    watch.moments.append(("before", 1))

    def fail(shard: Any) -> None:
        watch.moments.append(("within", 1))
        raise error

    with pytest.raises(error), trainer.moments.undone_by_stop():
        fail(None)
    assert watch.moments == [("before", 1), *[("within", 1)] * (error is ZeroDivisionError)]


def test_the_losses_of_a_step_are_gone_before_the_next_one_and_its_scalars_are_passed_on() -> None:
    trainer = told_by(Told())
    moments, seen = trainer.moments, list[Any]()
    assert moments is not None
    shard = next(iter(trainer.transforms.train(trainer.loader.train(after=0))))
    moments.run.losses, moments.run.outputs = [torch.zeros(())], [torch.zeros(1)]

    def take(own: Any) -> dict[str, float]:
        seen.append((own, moments.run.step, [*moments.run.losses], [*moments.run.outputs]))
        return {"optim/lr": 0.5}

    assert moments.step(take, replace(shard, step=2)) == {"optim/lr": 0.5}
    assert [(own.step, *facts) for own, *facts in seen] == [(2, 2, [], [])]
