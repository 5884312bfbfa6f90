"""The trainer's step, stop and best score, on parts that are put together by hand: one rank, and ranks in threads."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import StopAfter
from lockstep.core.errors import LockstepError, NumericalError, Stopped
from lockstep.core.plan import Plan
from lockstep.core.rng import permutation
from lockstep.core.world import World
from lockstep.data.datasets import Fake
from lockstep.data.loading.loaders import Resident
from lockstep.data.loading.shards import IGNORE_INDEX, Loader
from lockstep.data.transforms.augment import NoAugment
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.losses import CrossEntropy, MaskedLoss
from lockstep.optim import SGD
from lockstep.optim.schedule import Constant
from lockstep.precision import FP64
from lockstep.runtime.signals import StopNow, StopRequest
from lockstep.scores import EvaluationBlock, EvaluationObserver, Scores
from lockstep.stochastic import ForwardDraws
from lockstep.strategy import AllReduce, AllReduceHooks, Single
from lockstep.tasks import Multiclass
from lockstep.training.averages import EMA
from lockstep.training.experiment import inputs_of
from lockstep.training.network import Freezing
from lockstep.training.train_state import Progress, TrainState
from lockstep.training.train_step import StepListener, TrainStep
from lockstep.training.trainer import Trainer
from thread_ranks import ThreadRanks

pytestmark = pytest.mark.numerics

# An epoch has a batch of eight examples and one of two: three ranks have 2, 3 and 3 of them, then 0, 1 and 1.
SOURCE = Fake(examples=10, classes=3, channels=1, size=4)
LOSS = CrossEntropy(label_smoothing=0.1, class_weights=[0.5, 1.0, 2.0])
RARELY = ("log_every", "eval_every", "save_every")


class Silent:
    """A telemetry and a checkpointer that keep a list of what they were asked to do."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.figures: dict[int, Any] = {}
        self.ended: list[Any] = []
        self.stragglers, self.loss_limit = SimpleNamespace(busy=0.0), 2303.0
        self.is_overdue = False

    def watch(self, groups: Iterator[Any], prepare: Any) -> Any:
        return prepare(groups)

    def record(self, loss: Tensor, logits: Tensor, micro: Any, images: Tensor) -> None:
        assert not any(tensor.requires_grad for tensor in (loss, logits)), "a graph would live until the log point"

    def ignore(self, *arguments: Any) -> None:
        """Do nothing."""

    log = reduced = evaluating = open_window = wait = ignore

    def warn(self, sentence: str) -> None:
        self.events.append(("warn", sentence))

    def pause(self, purpose: str) -> Any:
        return nullcontext()

    def write_windows(self) -> list[Any]:
        return self.ended

    def end_window(self, step: int, scalars: Any, checksums: Any) -> list[Any]:
        self.events.append(("log", step, float(scalars["optim/lr"])))
        self.figures[step] = {name: float(value) for name, value in scalars.items()}
        sums = [] if checksums is None else checksums.tolist()
        return [SimpleNamespace(scalars={}, first_bad_step=None, checksums=sums, last=step)]

    def forget(self, after: int) -> None:
        self.events.append(("forget", after))

    def evaluated(self, step: int, scalars: Any, *, best: bool) -> None:
        self.events.append(("eval", step, best))
        self.figures[step] = scalars

    def overdue(self) -> bool:
        return self.is_overdue

    def save(self, *, progress: dict[str, Any], **state: Any) -> None:
        evaluated = [step for step, _ in progress["scores"]]
        self.events.append(("save", progress["step"], progress["step"] in evaluated))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def trainer_of(
    model: nn.Module,
    world: World,
    *,
    strategy: Any = None,
    steps: int = 4,
    micro_batches: int = 1,
    ema: EMA | None = None,
    every: dict[str, int] | None = None,
    **options: Any,
) -> Trainer:
    strategy = strategy or Single()
    train, val, silent = SOURCE.train(), SOURCE.eval(), Silent()
    events = {"log_every": 1, "eval_every": 1, "save_every": 1, **(every or {})}
    plan = Plan(examples=10, batch=8, total_steps=steps, micro_batches=micro_batches, **events)
    replica = strategy.replicate(model, plan, ()) if world.size > 1 else model
    transforms = DeviceTransforms.of(SOURCE.preprocessing, NoAugment(), device=world.device, precision=FP64(), seed=0)
    draws, sgd = ForwardDraws(seed=0, device=world.device), SGD(momentum=0.0, lr=0.5).build(model)
    scaler = options.pop("scaler", torch.amp.GradScaler("cpu", enabled=False))
    state = TrainState(model=model, replica=replica, draws=draws, optimizer=sgd, scaler=scaler, ema=ema)
    place: dict[str, Any] = {"world": world, "plan": plan}
    loss = MaskedLoss(LOSS.build(3, train.labels).double(), tolerates_broken=False)
    data: dict[str, Any] = {"train_labels": train.labels, "train_feeds": {0: Resident().feed(train, world)}}
    data |= {"eval_labels": val.labels, "eval_feed": Resident().feed(val, world)}
    return Trainer(
        step=TrainStep(
            state=state,
            strategy=strategy,
            precision=FP64(),
            schedule=options.pop("schedule", Constant()),
            lr=0.5,
            clip_norm=options.pop("clip_norm", None),
            task=Multiclass(),
            loss=loss,
            inputs=partial(inputs_of, transforms, state.draws),
            **place,
        ),
        loader=Loader(seed=0, eval_batch=2, **place, **data),
        transforms=transforms,
        scores=options.pop("scores", Scores({}, 3, (), world)),
        checkpointer=silent,
        telemetry=silent,
        stop=options.pop("stop", StopRequest()),
        heartbeat=lambda: None,
        **options,
    )


def plain_loop(steps: int, clip_norm: float | None) -> tuple[nn.Module, list[float]]:
    """SGD on the mean loss of whole global batches; returns the model and the norm of each gradient."""
    split, model, norms = SOURCE.train(), network(), []
    pixels = (split.images.double() / 255 - 0.5) / 0.25
    for step in range(steps):
        epoch, position = divmod(step, 2)
        batch = permutation(0, epoch, 10)[8 * position : 8 * position + 8]
        logits, labels = model(pixels[batch]), split.labels[batch]
        weights = torch.tensor(LOSS.class_weights, dtype=torch.float64)
        losses = weights[labels] * F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")
        gradients = torch.autograd.grad(losses.mean(), list(model.parameters()))
        norm = sum(gradient.square().sum() for gradient in gradients).sqrt().item()
        norms.append(norm)
        factor = 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / (norm + 1e-6)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.5 * factor * gradient
    return model, norms


def updated(trainer: Trainer) -> list[float]:
    """Take every step of the plan; returns the norms of the gradients."""
    norms = []
    for shard in trainer.transforms.train(trainer.loader.train(after=0)):
        norm = trainer.step.update(shard, measures_norm=True)
        assert norm is not None
        norms.append(norm.item())
    return norms


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    for parameter, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clip_norm", [None, 0.05, 100.0])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("strategy", [AllReduce(), AllReduceHooks(), None, "scaled"], ids=repr)
def test_steps_of_uneven_ranks_and_micro_batches_are_those_of_the_mean_loss_of_the_global_batch(
    strategy: Any, micro_batches: int, clip_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, norms = plain_loop(4, clip_norm)
    assert clip_norm != 0.05 or min(norms) > 0.1
    options = {"strategy": strategy, "micro_batches": micro_batches, "clip_norm": clip_norm}
    if strategy == "scaled":  # a loss scaler changes neither a step nor what is clipped
        options |= {"strategy": None, "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)}
    if options["strategy"] is None:
        trainers = [trainer_of(network(), World.solo(), **options)]
        actual = [updated(trainers[0])]
    else:
        ranks, models = ThreadRanks(3, monkeypatch), [network() for _ in range(3)]
        trainers = ranks.run(lambda world: trainer_of(models[world.rank], world, **options))
        actual = ranks.run(lambda world: updated(trainers[world.rank]))
    for trainer, norms_of_rank in zip(trainers, actual, strict=True):
        assert norms_of_rank == pytest.approx(norms, rel=1e-12)
        assert_equal(trainer.state.model, expected)


def test_an_overflow_skips_its_step_and_halves_the_loss_scale_which_grows_again() -> None:
    model, before = network(), network()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    trainer = trainer_of(model, World.solo(), scaler=scaler)
    overflow = model[3].weight.register_hook(lambda gradient: gradient * torch.inf)
    scales = []
    for shard in trainer.transforms.train(trainer.loader.train(after=0)):
        trainer.step.update(shard, measures_norm=False)
        scales.append(scaler.get_scale())
        if shard.step == 1:
            assert_equal(model, before)
            overflow.remove()
    assert scales == [512.0, 512.0, 1024.0, 1024.0]
    assert not torch.equal(model[3].weight, before[3].weight)


def fitted(trainer: Trainer) -> tuple[list[Any], int, str]:
    """What a rank did, the last step that it saved, and how it was stopped, or "" if it was not."""
    message = ""
    try:
        trainer.fit()
    except Stopped as stop:
        message = str(stop)
    return trainer.telemetry.events, trainer.progress.step, message


class Asked(StopRequest):
    """A stop that is asked for during a step."""

    def __init__(self, step: int | None) -> None:
        super().__init__()
        self.step = step

    def step_done(self) -> None:
        super().step_done()
        if self.step is not None:
            self.step -= 1
            self.requested = self.requested or self.step == 0


@pytest.mark.parametrize("asker", range(3))
def test_a_stop_asked_of_one_rank_ends_all_at_the_same_step(asker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, models = ThreadRanks(3, monkeypatch), [network() for _ in range(3)]

    def run(world: World) -> tuple[list[Any], int, str]:
        stop = Asked(2 if world.rank == asker else None)
        stop.reason = "main says why" * (world.rank == 0)
        every = {"save_every": 100, "eval_every": 100}
        options = {"strategy": AllReduce(), "steps": 9, "every": every, "stop": stop}
        return fitted(trainer_of(models[world.rank], world, **options))

    events = [*(("log", step, 0.5) for step in (1, 2, 3)), ("save", 3, False)]
    assert ranks.run(run) == [(events, 3, "stopped at step 3 of 9 and saved: main says why")] * 3


@pytest.mark.parametrize("asker", range(3))
def test_all_ranks_stop_at_the_end_of_a_round_that_one_knows_of(asker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, models = ThreadRanks(3, monkeypatch), [network() for _ in range(3)]

    def run(world: World) -> tuple[list[Any], int, str]:
        stop = StopRequest()
        stop.rung_end = 0.25 if world.rank == asker else float("inf")
        every = {"log_every": 100, "save_every": 100, "eval_every": 2}  # of eight steps the second is its end
        options = {"strategy": AllReduce(), "steps": 8, "every": every, "stop": stop}
        return fitted(trainer_of(models[world.rank], world, **options))

    message = "stopped at step 2 of 8 and saved"
    assert ranks.run(run) == [([("eval", 2, True), ("save", 2, True)], 2, message)] * 3


def test_a_stop_after_the_last_evaluation_changes_nothing() -> None:
    stopped, whole = (trainer_of(network(), World.solo(), stop=StopAfter(step)) for step in (4, None))
    assert fitted(stopped) == fitted(whole)
    assert_equal(stopped.state.model, whole.state.model)


@pytest.mark.parametrize("asker", [None, 0, 1, 2])
def test_a_stop_between_two_blocks_is_seen_by_every_rank(asker: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, models = ThreadRanks(3, monkeypatch), [network() for _ in range(3)]

    def stops(world: World) -> bool:
        trainer = trainer_of(models[world.rank], world, strategy=AllReduce())
        trainer.stop.requested = world.rank == asker
        try:
            trainer.between_blocks(1, 2)
        except StopNow:
            return True
        return False

    assert ranks.run(stops) == [asker is not None] * 3


def test_each_event_comes_at_its_steps_and_at_the_last_one() -> None:
    every = {"log_every": 3, "eval_every": 4, "save_every": 5}
    events, _, _ = fitted(trainer_of(network(), World.solo(), steps=7, every=every, schedule=Constant(warmup=7)))
    order = [("log", 3), ("eval", 4), ("save", 4), ("save", 5), ("log", 6), ("log", 7), ("eval", 7), ("save", 7)]
    assert [event[:2] for event in events] == order
    assert [event[2] for event in events if event[0] == "save"] == [True, False, True], "whether it has a score"
    assert [event[2] for event in events if event[0] == "log"] == [0.5 * step / 7 for step in (3, 6, 7)]


@pytest.mark.parametrize("late", range(3))
def test_all_ranks_save_when_a_checkpoint_is_overdue_for_one(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, models = ThreadRanks(3, monkeypatch), [network() for _ in range(3)]

    def saved(world: World) -> list[int]:
        trainer = trainer_of(models[world.rank], world, strategy=AllReduce(), every=dict.fromkeys(RARELY, 9))
        trainer.checkpointer.is_overdue = world.rank == late
        return [event[1] for event in fitted(trainer)[0] if event[0] == "save"]

    steps = ranks.run(saved)
    assert steps[0][0] < 4
    assert steps == steps[:1] * 3


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_log_point_has_the_rate_the_gradient_norm_and_the_loss_scale_of_its_step(clip_norm: float | None) -> None:
    _, norms = plain_loop(4, clip_norm)
    every = {"log_every": 2, "eval_every": 9, "save_every": 9}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer = trainer_of(network(), World.solo(), every=every, clip_norm=clip_norm, scaler=scaler)
    trainer.evaluate = lambda step: False  # type: ignore[method-assign]
    fitted(trainer)
    names = ("optim/lr", "optim/grad_norm", "optim/scale")
    expected = {step: dict(zip(names, (0.5, norms[step - 1], 1024.0), strict=True)) for step in (2, 4)}
    assert trainer.telemetry.figures.keys() == expected.keys()
    for step, figures in expected.items():
        assert trainer.telemetry.figures[step] == pytest.approx(figures, rel=1e-12)
    unscaled = trainer_of(network(), World.solo(), steps=1)
    unscaled.evaluate = lambda step: False  # type: ignore[method-assign]
    fitted(unscaled)
    assert [*unscaled.telemetry.figures[1]] == [*names[:2]], "a bad loss is tolerated under a scale alone"


def ended(scalars: dict[str, float], first_bad_step: int | None = 3) -> Any:
    return SimpleNamespace(
        first=1, last=4, loss=float("nan"), scalars=scalars, first_bad_step=first_bad_step, checksums=[]
    )


def test_a_bad_loss_ends_the_run_at_its_step_unless_a_loss_scaler_can_still_halve_its_scale() -> None:
    trainer = trainer_of(network(), World.solo())
    trainer.check([ended({"optim/scale": 1.0}), ended({}, first_bad_step=None)])
    for scalars in ({}, {"optim/scale": 0.5}):
        with pytest.raises(NumericalError, match="nan between steps 1 and 4, first at step 3; ") as caught:
            trainer.check([ended(scalars)])
        assert caught.value.step == 3
    window = ended({})
    window.loss = 2e6  # finite
    with pytest.raises(NumericalError, match=r"first at step 3 \(above 2,303, 1,000 times .* has diverged\); "):
        trainer.check([window])


@pytest.mark.parametrize("act", ["evaluate", "save"])
def test_a_bad_loss_is_noticed_before_an_evaluation_and_before_a_save(act: str) -> None:
    trainer = trainer_of(network(), World.solo(), progress=Progress(step=4))
    trainer.telemetry.ended = [ended({})]
    with pytest.raises(NumericalError):
        trainer.evaluate(4) if act == "evaluate" else trainer.save()
    assert trainer.telemetry.events == []


def test_layers_are_frozen_up_to_their_last_frozen_step_and_trained_from_the_next_one_on() -> None:
    model = network()  # without a batch norm
    trainer = trainer_of(model, World.solo())
    freezing = Freezing.of(model, frozenset({"1.weight", "1.bias"}), until=2)
    trainer.step.state = replace(trainer.state, freezing=freezing)
    moved = []
    for shard in trainer.transforms.train(trainer.loader.train(after=0)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        trainer.step(shard)
        moved.append([not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)])
    assert moved == [[False, False, True, True]] * 2 + [[True] * 4] * 2


class Ordered(Silent):
    """Keeps the order in which a checkpoint is made and awaited."""

    def open_window(self) -> str:
        return "the counts of this step"

    def save(self, *, progress: dict[str, Any], **state: Any) -> None:
        self.events.append(("save", progress["window"]))

    def wait(self) -> None:
        self.events.append("wait")


def test_a_stop_saves_what_was_counted_and_leaves_with_all_ranks_when_all_of_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = trainer_of(network(), World.solo(), every=dict.fromkeys(RARELY, 9), stop=StopAfter(2))
    trainer.telemetry = trainer.checkpointer = ordered = Ordered()  # type: ignore[assignment]
    monkeypatch.setattr(World, "barrier", lambda world: ordered.events.append("barrier"))
    order = [("save", "the counts of this step"), "wait", "barrier"]
    assert fitted(trainer) == (order, 2, "stopped at step 2 of 4 and saved")


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_a_stop_before_the_first_step_saves_nothing(micro_batches: int) -> None:
    trainer = trainer_of(network(), World.solo(), micro_batches=micro_batches)
    trainer.stop.requested = True
    with pytest.raises(StopNow):
        trainer.fit()
    assert trainer.telemetry.events == [("forget", 0)]


def test_a_resume_goes_on_behind_the_step_that_was_saved() -> None:
    model = network()
    updated(trainer_of(model, World.solo(), steps=4))
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    resumed = network()
    updated(trainer_of(resumed, World.solo(), steps=2))
    fitted(trainer_of(resumed, World.solo(), steps=4, progress=Progress(step=2, scores=[(2, 1.0)])))
    assert all(torch.equal(*pair) for pair in zip(resumed.parameters(), expected, strict=True))


@pytest.mark.parametrize(("score", "events"), [(None, [("eval", 4, True), ("save", 4, True)]), (1.0, [])])
def test_a_resume_makes_up_for_an_evaluation_that_a_stop_interrupted(score: float | None, events: list[Any]) -> None:
    progress = Progress(step=4, scores=[] if score is None else [(4, score)])
    trainer = trainer_of(network(), World.solo(), steps=4, progress=progress, schedule=Constant(warmup=8))
    assert fitted(trainer)[0] == events
    assert trainer.state.optimizer.param_groups[0]["lr"] == (0.25 if events else 0.5), "the rate that is saved"


def test_a_stop_within_a_step_leaves_weights_and_buffers_as_they_were() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1).double(), *network())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainer = trainer_of(model, World.solo(), micro_batches=3)
    shard = next(iter(trainer.transforms.train(trainer.loader.train(after=0))))
    trainer.stop.requested = True
    with pytest.raises(StopNow):
        trainer.step_or_undo(shard)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert trainer.telemetry.events == [("forget", 0)]


def test_a_step_is_undone_and_its_buffers_are_saved_only_while_it_may_still_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, saved = nn.Sequential(nn.BatchNorm2d(1).double(), *network()), list[bool]()
    trainer, buffers = trainer_of(model, World.solo(), interrupts_compiling=True), model.buffers
    monkeypatch.setattr(model, "buffers", lambda: saved.append(True) or buffers())
    shard, other = itertools.islice(trainer.transforms.train(trainer.loader.train(after=0)), 2)

    def compile_last(*_: Any) -> None:
        with trainer.stop.interrupting(trainer.stop.undoes):
            pass

    model[-1].register_forward_hook(compile_last)
    for _ in range(2):
        trainer.step_or_undo(shard)
    assert len(saved) == 1
    trainer.stop.requested, trainer.stop.immediate = True, False
    trainer.step_or_undo(shard)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(StopNow):
        trainer.step_or_undo(other)
    assert len(saved) == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize("logs", [True, False])
def test_a_log_point_or_a_save_compares_replicas(broken: int, logs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, models = ThreadRanks(3, monkeypatch), [network() for _ in range(3)]
    models[broken][3].bias.data[1] += 1

    def refuses(world: World) -> list[Any]:
        options = {"strategy": AllReduce(), "every": {"log_every": 3}, "progress": Progress(step=2)}
        trainer = trainer_of(models[world.rank], world, **options)
        compares = partial(trainer.log, 3, {"optim/lr": 0.5}) if logs else trainer.save
        with pytest.raises(LockstepError, match=f"the weights of rank {broken} differ"):
            compares()
        return [event for event in trainer.telemetry.events if event[0] == "save"]

    assert ranks.run(refuses) == [[]] * 3


def test_weights_that_are_not_finite_are_never_saved() -> None:
    model = network()
    model[3].bias.data[1] = torch.inf
    trainer = trainer_of(model, World.solo(), progress=Progress(step=2))
    with pytest.raises(NumericalError, match="not finite after step 2"):
        trainer.save()
    assert trainer.telemetry.events == []


@pytest.mark.parametrize("every", [1, 2])
def test_the_average_follows_the_steps_from_the_first_weights_on(every: int) -> None:
    model = network()
    ema = EMA(model, 0.75, every=every)
    trainer = trainer_of(model, World.solo(), steps=3, ema=ema)
    expected: list[Tensor] = []
    for shard in trainer.transforms.train(trainer.loader.train(after=0)):
        trainer.step(shard)
        if (shard.step - 1) % every:
            continue
        now = [parameter.detach().clone() for parameter in model.parameters()]
        expected = [0.75 * old + 0.25 * new for old, new in zip(expected or now, now, strict=True)]
    for average, value in zip(ema.module.parameters(), expected, strict=True):
        torch.testing.assert_close(average, value, rtol=1e-12, atol=1e-12)


class Always(nn.Module):
    """Predicts one class, whatever the image is."""

    def __init__(self, label: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.label = label

    def forward(self, images: Tensor) -> Tensor:
        return F.one_hot(torch.full((len(images),), self.label), 3).double() * self.weight


COMMON, RARE = (int(number) for number in SOURCE.eval().labels.bincount(minlength=3).argsort()[[2, 0]])
ACCURACY = {label: 100 * (SOURCE.eval().labels == label).double().mean().item() for label in (COMMON, RARE)}


class Told(EvaluationObserver):
    """Keeps the steps of the evaluations whose predictions are told."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def finish(self, step: int) -> None:
        self.steps.append(step)


def test_the_best_score_is_the_first_of_the_highest_ones_also_after_a_resume() -> None:
    model, predictions = Always(RARE), Told()
    trainer = trainer_of(model, World.solo(), predictions=predictions)
    improved = []
    for step, label in enumerate((RARE, RARE, COMMON, RARE, COMMON), start=1):
        model.label = label
        trainer.progress.step = step
        improved.append(trainer.evaluate(step))
        assert trainer.progress.score == pytest.approx(ACCURACY[label])
    assert ACCURACY[COMMON] > ACCURACY[RARE]
    assert improved == [True, False, True, False, False]
    assert (trainer.progress.best_step, trainer.progress.best) == (3, pytest.approx(ACCURACY[COMMON]))
    assert [event[2] for event in trainer.telemetry.events] == improved
    assert predictions.steps == [1, 3], "predictions are those of the best model"
    figures = trainer.telemetry.figures[4]
    assert figures["acc/val_top1"] == pytest.approx(ACCURACY[RARE])
    assert figures["acc/val_top5"] == 100  # there are three classes
    before = Progress(step=2, scores=[(2, 0.0)], best=ACCURACY[COMMON], best_step=1)
    trainer = trainer_of(Always(COMMON), World.solo(), progress=before)
    assert not trainer.evaluate(3)
    assert trainer.progress.best_step == 1


@pytest.mark.parametrize("views", [1, 2])
def test_an_evaluation_averages_as_many_views_as_the_job_says(views: int) -> None:
    trainer = trainer_of(network(), World.solo(), eval_views=views)
    trainer.evaluate(1)
    split = SOURCE.eval()
    pixels = (split.images.double() / 255 - 0.5) / 0.25
    with torch.no_grad():
        model = network()
        logits = torch.stack([model(pixels), model(pixels.flip(-1))])[:views].mean(0)
    expected = F.cross_entropy(logits, split.labels).item()
    assert trainer.telemetry.figures[1]["loss/val"] == pytest.approx(expected, rel=1e-12)


class Predicted(Scores):
    """Keeps the predicted class of each example."""

    def __init__(self) -> None:
        super().__init__({}, 3, (), World.solo())
        self.classes: list[int] = []

    def update(self, block: EvaluationBlock) -> None:
        self.classes += block.logits.argmax(1).tolist()


@pytest.mark.parametrize(("label", "averaged"), [(COMMON, RARE), (RARE, COMMON)])
def test_the_average_of_the_weights_decides_where_there_is_one(label: int, averaged: int) -> None:
    model = Always(averaged)
    ema = EMA(model, 0.9)
    ema.n_averaged += 1
    model.label = label
    scored = Predicted()
    trainer = trainer_of(model, World.solo(), ema=ema, scores=scored, predictions=scored)
    trainer.evaluate(1)
    assert trainer.progress.best == pytest.approx(ACCURACY[averaged])
    assert scored.classes == [averaged] * (2 * len(SOURCE.eval().labels)), "scores and predictions are of it alone"


@pytest.mark.parametrize("broken", [[], [1], [0, 2]])
def test_a_figure_of_a_task_is_zero_for_broken_images(broken: list[int]) -> None:
    step, values = trainer_of(network(), World.solo()).step, torch.tensor([5.0, 6.0, 7.0])
    labels = torch.tensor([IGNORE_INDEX if number in broken else 1 for number in range(3)])
    logged: dict[str, list[float]] = {}
    step.listener = StepListener(log=lambda name, counted: logged.update({name: counted.tolist()}))
    step.log(labels, "my_figure", values)
    assert logged == {"my_figure": [0.0 if number in broken else 5.0 + number for number in range(3)]}


def test_the_gradient_is_clipped_with_that_of_layers_that_thaw_later() -> None:
    model = network()
    model[1].requires_grad_(False)
    trainer = trainer_of(model, World.solo(), clip_norm=0.5)
    model.requires_grad_(True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = trainer.step.strategy.gradient_norm(trainer.step.parameters)
    assert norm.item() == pytest.approx(sum(map(Tensor.numel, model.parameters())) ** 0.5)
    nn.utils.clip_grads_with_norm_(trainer.step.parameters, 0.5, norm)
    assert torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item() < 0.5
