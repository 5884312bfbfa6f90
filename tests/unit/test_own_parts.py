"""What a network or an optimizer of a user's own says of itself, and what is said where it does not."""

import ast
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pytest
import torch
from timm.models import group_parameters
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from helpers import FAKE, built, resolved
from lockstep.core.batch import Batch
from lockstep.core.errors import InputError, shown
from lockstep.core.figures import check_declared, check_figures, figures_of, is_of_option
from lockstep.core.model import UpdateScope, blocks, head_parameters, how_to_group
from lockstep.core.model_card import CLASSES, ModelCard
from lockstep.core.observer import TrainingRun
from lockstep.core.protocols import Loss
from lockstep.core.world import World
from lockstep.job import auto_training
from lockstep.job.resolve import resolve
from lockstep.job.validate import _check_closure, check_targets, check_whole_steps, named_objects
from lockstep.losses import BCE, MSE, CrossEntropy, MaskedLoss, check_losses
from lockstep.optim import SAM, SGD, AdamW, Muon, Timm
from lockstep.optim.optimizers import OptimizerOption, UsualRate
from lockstep.precision import FP16
from lockstep.strategy import DDP, FSDP, Pipeline, ZeRO
from lockstep.strategy.base import Single
from lockstep.tasks import Multiclass, Multilabel, Regression
from lockstep.training import own_losses
from lockstep.training.network import frozen_names, recompute_blocks
from lockstep.training.objects import LossObject, ModelObject, digest
from lockstep.training.resolved_job import card_of
from lockstep.training.train_state import build_loss, ready_task


class Bare(nn.Module):
    """A network in one module, with a head that is not its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.position = nn.Parameter(torch.zeros(4, 4))
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)))

    def forward(self, images: Tensor) -> Any:
        return self.head(self.body(images + self.position).mean(1))


class Described(Bare):
    pretrained_cfg: ClassVar[dict[str, str]] = {"classifier": "head"}

    def group_matcher(self, coarse: bool) -> dict[str, str]:
        return {"stem": r"position", "blocks": r"body\.(\d+)"}

    def no_weight_decay(self) -> set[str]:
        return {"position"}


def test_the_groups_of_a_network_are_its_layers_wherever_layers_are_needed() -> None:
    model = Described()
    groups = AdamW(layer_decay=0.5, weight_decay=0.1).groups(model)
    scales = {id(weight): group["scale"] for group in groups for weight in group["params"]}
    layers = [model.position, model.body[0][0].weight, model.body[1][2].bias, model.head.weight]
    assert [scales[id(layer)] for layer in layers] == [0.125, 0.25, 0.5, 1.0]
    assert [group["weight_decay"] for group in groups if group["scale"] == 0.125] == [0]
    assert [*blocks(model)] == [*model.body]
    assert head_parameters(model) == ("head.weight", "head.bias")
    model.head_norm = nn.LayerNorm(4)
    assert head_parameters(model) == ("head.weight", "head.bias"), "its name only begins like the head's"
    del model.head_norm
    assert not any(name.startswith("head") for name in frozen_names(model, ["backbone"]))
    recompute_blocks(model)
    model(torch.ones(3, 4, 4)).sum().backward()


def test_a_network_without_groups_is_told_which_method_to_define() -> None:
    says = r"define group_matcher\(self, coarse\) in Bare, .*\"blocks\": r\"blocks"
    with pytest.raises(InputError, match=says):
        AdamW(layer_decay=0.5).groups(Bare())
    with pytest.raises(InputError, match=says):
        recompute_blocks(Bare())
    advised = re.search(r"{.*}", how_to_group(Bare()))
    assert advised is not None
    model: Any = nn.ModuleDict(
        {"stem": nn.Linear(2, 2), "blocks": nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))}
    )
    layers = group_parameters(model, ast.literal_eval(advised[0]), reverse=True)
    names = ["stem", *(f"blocks.{number}" for number in range(12))]
    assert [layers[f"{name}.weight"] for name in names] == [layers[f"{name}.bias"] for name in names] == [*range(13)]


class Undeclared(OptimizerOption):
    def make(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.Adamax(groups, lr=self.rate)


class Declared(Undeclared):
    scope = UpdateScope.element
    usual = UsualRate(lr=2e-3, batch=50, power=1)


@pytest.mark.parametrize("strategy", [FSDP(), ZeRO(), Pipeline()])
def test_an_optimizer_without_a_scope_is_told_what_to_write(strategy: Single) -> None:
    precision = resolved().precision
    needed = {UpdateScope.element: "a number", UpdateScope.parameter: "a parameter"}[strategy.widest]
    says = f"if Undeclared updates {needed} by its own gradients alone, write scope = "
    says += f"UpdateScope.{strategy.widest.name} in it"
    with pytest.raises(InputError, match=re.escape(says)):
        strategy.check_parts(Undeclared(), precision, 4)
    strategy.check_parts(Declared(), precision, 4)
    DDP().check_parts(Undeclared(), precision, 4)
    if strategy.widest == UpdateScope.element:
        with pytest.raises(InputError, match=r"use optimizer=adamw, adam or sgd, or strategy=ddp$"):
            strategy.check_parts(Muon(), precision, 4)


@pytest.mark.parametrize("lr", ["auto", 0.1])
def test_only_a_rate_that_nobody_chose_is_explained(lr: float | str) -> None:
    def notes(cls: type[OptimizerOption]) -> list[str]:
        composed = replace(built("batch=100"), optimizer=cls(lr=lr))
        return auto_training.notes(composed, resolve(composed, sweep=False), 1000)

    says = "optimizer.lr is 0.00125, which is usual for Adam, because Undeclared has no usual rate; use"
    assert [note[: len(says)] for note in notes(Undeclared)] == [says] * (lr == "auto")
    assert not any(map(notes, (Declared, SGD, AdamW, Muon, Timm, type("Mine", (AdamW,), {}))))
    assert Declared().at_batch(100, trained=False).lr == pytest.approx(4e-3)


class Alone(nn.Module):
    """The squared error of the probabilities, and a part that `beside` takes from all logits."""

    def __init__(self, beside: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.beside = beside
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.mean += 0.1 * (logits.detach().mean() - self.mean)  # what a loss counts is not from the trial
        return F.cross_entropy(logits, targets, reduction="none") + self.beside(logits)


def contrast(features: Tensor) -> Tensor:
    """How unlike the others an example is (van den Oord et al. 2018)."""
    alike = F.normalize(features, dim=1) @ F.normalize(features, dim=1).T
    return -F.log_softmax(alike / 0.5, 1).diagonal()


BESIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "contrast": contrast,
    "a sum over the batch": lambda logits: 0.05 * logits.var(0).sum().expand(len(logits)),
    "a share of the batch": lambda logits: logits.square().sum(1) / len(logits),
    "the order": lambda logits: logits[:, 0].argsort().float(),
    "a sum beside what is no number": lambda logits: logits[:, 0].log() + logits.square().sum(),
}
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda logits: logits[:, 0] * 0,
    "its own logits": lambda logits: logits.logsumexp(1).square(),
    "random numbers": lambda logits: torch.rand(len(logits)),
    "what is below zero": lambda logits: -9 - logits.square().sum(1),
    "no half of a batch": lambda logits: logits.view(4, -1).sum(1),
    "what is no number": lambda logits: logits[:, 0].log(),
}
MIXES = "gives an example another loss beside other examples, as two halves of a batch show"


@dataclass(frozen=True, kw_only=True)
class OwnLoss(Loss):
    beside: str = "contrast"

    def build(self, classes: int, labels: Tensor) -> nn.Module:
        return Alone({**BESIDE, **APART}[self.beside])


@dataclass(frozen=True, kw_only=True)
class OwnTask(Multiclass):
    beside: str = "contrast"

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = batch.network(batch.images)
        other = batch.network(batch.images.flip(-1))
        return batch.loss(outputs, batch.targets) + {**BESIDE, **APART}[self.beside](outputs + other), outputs


@dataclass(frozen=True, kw_only=True)
class TaskOfShares(OwnTask):
    """A task for mixed targets alone."""

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert batch.targets.shape[1:] == (10,)
        return super().losses(batch)


@dataclass(frozen=True, kw_only=True)
class TaskOfClasses(OwnTask):
    """A task for classes alone."""

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert batch.targets.dtype is torch.int64
        return super().losses(batch)


def tried(*words: str, **parts: Any) -> MaskedLoss:
    """The loss of a job, and its task, as a run tries them; the generator is left as it was."""
    job, state = replace(resolved(*FAKE, "model=digitnet", *words), **parts), torch.get_rng_state()
    loss = build_loss(job, torch.arange(10), World.solo(), skip=0)
    ready_task(job, card_of(job), loss, World.solo())
    assert torch.equal(torch.get_rng_state(), state)
    return loss


@pytest.mark.parametrize("beside", BESIDE)
def test_a_loss_of_the_whole_batch_is_refused_before_the_first_step(beside: str) -> None:
    with pytest.raises(InputError, match=f"the loss OwnLoss.* {MIXES}"):
        tried(loss=OwnLoss(beside=beside))
    with pytest.raises(InputError, match=f"task=OwnTask {MIXES}"):
        tried(task=OwnTask(beside=beside))


@pytest.mark.parametrize(
    ("task", "words"),
    [(TaskOfClasses(), ()), (TaskOfShares(), ("train.mixup=0.5",)), (TaskOfShares(), ("train.cutmix=1",))],
)
def test_a_task_of_the_whole_batch_is_refused_for_the_targets_that_it_will_get(
    task: OwnTask, words: tuple[str, ...]
) -> None:
    with pytest.raises(InputError, match=rf"task={type(task).__name__} {MIXES}"):
        tried(*words, task=task)


@pytest.mark.parametrize("beside", APART)
def test_a_loss_of_each_example_is_not_refused_and_keeps_what_it_counts(beside: str) -> None:
    loss = tried(loss=OwnLoss(beside=beside), task=OwnTask(beside=beside))
    assert isinstance(loss.loss, Alone)
    assert loss.loss.mean == 0


@pytest.mark.parametrize(("off", "refused"), [(0.009, False), (-0.009, False), (0.011, True), (-0.011, True)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, -50.0])
def test_a_loss_may_be_rounded_in_another_way_beside_other_examples_up_to_a_hundredth_of_the_largest(
    off: float, refused: bool, scale: float
) -> None:
    inputs = torch.tensor([0.5, 1.0, 0.25, 0.75], dtype=torch.float64) * scale

    def losses(values: Tensor, targets: Tensor) -> Tensor:
        rounded = torch.zeros(4, dtype=torch.float64)
        rounded[2] = off * scale * (len(values) == 2 and targets[0] == 2)
        return values + rounded[targets]

    says = r"^it gives an example another loss .* compare an example with what no batch changes, such as another view"
    with pytest.raises(InputError, match=says) if refused else nullcontext():
        own_losses.check_apart("it", losses, inputs, torch.arange(4))


def test_a_task_with_a_network_whose_outputs_are_not_known_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*parts: Any) -> None:
        raise NotImplementedError("a tensor on the meta device has no numbers")

    monkeypatch.setattr(own_losses, "sketch", fail)
    tried(task=OwnTask(beside="contrast"))


class Dense(nn.Module):
    """A network that keeps the shape of its images, with an output for each of their columns, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def forward(self, images: Tensor) -> Tensor:
        self.shapes.append(images.shape)
        return images.mean((1, 2) if self.training else (1, 2, 3))


@pytest.mark.numerics
def test_a_task_is_tried_on_images_of_the_size_and_the_format_of_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ("model=test_resnet", "dataset=fake", "dataset.size=16", "train.size=[32,24]", "augment=standard")
    job = replace(resolved(*words, "precision=fp64"), task=OwnTask(beside="nothing"))
    network, checked = Dense().eval(), list[Any]()
    monkeypatch.setattr(own_losses, "sketch", lambda *parts: network)
    monkeypatch.setattr(own_losses, "check_apart", lambda *parts: checked.extend(parts))
    monkeypatch.setattr(OwnTask, "losses", lambda self, batch: (batch.network(batch.images), None))
    loss: Any = nn.Module()
    own_losses.check_task(job, job.task, loss, torch.arange(3), World.solo())
    assert network.shapes == [(2, 3, 32, 24)]
    option, losses, images, targets = checked
    assert (option, targets.tolist()) == ("task=OwnTask", [0, 1, 2])
    assert (images.shape, images.dtype) == ((3, 3, 32, 24), torch.float64)
    outputs = losses(images, targets)
    assert (outputs.shape, outputs.dtype) == ((3, 24), torch.float64)
    torch.testing.assert_close(losses(images[1:], targets[1:]), outputs[1:])


def test_losses_that_are_refused_on_a_few_examples_are_not_judged_and_a_wrong_shape_is() -> None:
    def fail(inputs: Tensor, targets: Tensor) -> Tensor:
        raise ValueError("too few examples")

    own_losses.check_apart("it", fail, torch.zeros(4), torch.arange(4))
    with pytest.raises(InputError, match=r"^it gives a tensor of shape \(\) for 4 examples"):
        own_losses.check_apart("it", lambda inputs, targets: inputs.sum(), torch.zeros(4), torch.arange(4))


def test_a_task_that_returns_a_mean_is_refused_and_none_of_ours_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnTask, "losses", lambda self, batch: (batch.images.mean(), batch.images))
    with pytest.raises(InputError, match=r"task=OwnTask gives a tensor of shape \(\) for 4 examples, expected "):
        tried(task=OwnTask())
    monkeypatch.setattr(own_losses, "check_apart", None)
    for loss, task in ((CrossEntropy(), Multiclass()), (BCE(), Multilabel()), (MSE(), Regression())):
        tried(loss=loss, task=task)


@pytest.mark.parametrize("beside", BESIDE)
def test_a_task_is_tried_as_it_is_once_it_is_ready(beside: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Readied(OwnTask):
        once_ready: str = "nothing"

        def ready(self, card: ModelCard, device: torch.device) -> Self:
            return replace(self, beside=self.once_ready)

    tried(task=Readied(beside=beside))
    with pytest.raises(InputError, match=f"task=Readied {MIXES}"):
        tried(task=Readied(beside="nothing", once_ready=beside))


@pytest.mark.parametrize("shape", [(), (1,), (4, 1), (1, 4), (2, 2), (4, 4), (3,), (5,), (0,)])
def test_one_loss_for_each_example_has_no_other_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=rf"it gives a tensor of shape {re.escape(str(shape))} for 4 examples"):
        check_losses("it", torch.zeros(shape), 4)
    check_losses("it", torch.zeros(4), 4)


def test_modules_that_a_program_gives_are_trained_in_copies() -> None:
    net, loss = nn.Linear(2, 2), nn.CrossEntropyLoss(reduction="none")
    copies = (
        ModelObject(original=net).build(2, (2, 1, 1)),
        LossObject(original=loss).build(2, torch.zeros(3, dtype=torch.int64)),
    )
    for copied, original in zip(copies, (net, loss), strict=True):
        assert type(copied) is type(original)
        copied.eval().half()
        assert original.training
    assert net.weight.dtype is torch.float32


@pytest.mark.parametrize(("first", "second"), [("my/a", "my/a"), ("-my/a", "my/a"), ("my/a", "-my/a")])
@pytest.mark.parametrize("between", [(), ("other/b", "my/aa")])
def test_two_options_cannot_have_one_figure_whatever_its_direction(
    first: str, second: str, between: tuple[str, ...]
) -> None:
    with pytest.raises(InputError, match=f"^logger: another option has the figure '{second}', too; rename it"):
        check_figures([("task", [first, *between]), ("logger", [second])])
    check_figures([("task", [first, *between]), ("logger", [f"{second}2", "-more/c"])])


def test_an_object_and_a_callback_of_the_config_cannot_have_one_figure() -> None:
    class Mine(lockstep.Callback):
        figures: ClassVar[tuple[str, ...]] = ("my/a",)

    class Other(lockstep.Callback):
        figures: ClassVar[tuple[str, ...]] = ("my/b",)

    job = replace(resolved(*FAKE), callback={"mine": Mine()})
    assert [*named_objects(job, [Other()])] == ["Other"]
    with pytest.raises(InputError, match=r"^callback: another option has the figure 'my/a', too; rename it"):
        named_objects(job, [Other(), Mine()])


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"optimizer": SAM()}, "optimizer=sam computes several gradients in a step, of which after_backward of the"),
        ({"train.cuda_graph": True}, "train.cuda_graph is true, but no replay calls after_backward of the callbacks"),
        ({}, None),
    ],
)
def test_no_callback_acts_between_the_parts_of_a_step_that_has_none(
    changed: dict[str, Any], sentence: str | None
) -> None:
    class Between(lockstep.Callback):
        def after_backward(self, run: TrainingRun) -> None: ...

    class Inherited(Between): ...

    class After(lockstep.Callback):
        def step_end(self, run: TrainingRun) -> None: ...

    job = resolved(*FAKE)
    train = replace(job.train, cuda_graph=changed.get("train.cuda_graph", False))
    job = replace(job, optimizer=changed.get("optimizer", job.optimizer), train=train)
    check_whole_steps(job, {"after": After()})
    refused = pytest.raises(InputError, match=f"{sentence}.* between, too\\b") if sentence else nullcontext()
    with refused:
        check_whole_steps(job, {"after": After(), "between": Between(), "too": Between()})
    refused = pytest.raises(InputError, match=f"{sentence}.* Between\\b") if sentence else nullcontext()
    with refused:
        named_objects(job, [After(), Between()])
        check_whole_steps(job, {"after": After(), "between": Between(), "too": Inherited()})


class Twice(SAM): ...


@pytest.mark.parametrize(
    ("strategy", "changed", "sentences"),
    [
        *((strategy, {}, [" strategy="]) for strategy in (ZeRO(), FSDP(), Pipeline())),
        *((strategy, {}, []) for strategy in (DDP(), Single())),
        (DDP(), {"precision": FP16()}, [" a loss scaler cannot skip; use precision=bf16"]),
        (FSDP(), {"precision": FP16()}, [" a loss scaler cannot skip; use precision=bf16", " strategy="]),
    ],
    ids=str,
)
def test_a_step_that_computes_its_gradient_again_needs_what_can_do_so(
    strategy: Any, changed: dict[str, Any], sentences: list[str]
) -> None:
    job = replace(resolved(*FAKE), strategy=strategy, optimizer=Twice(), **changed)
    own = f" strategy={type(strategy).__name__.lower()} cannot; use strategy=ddp"
    expected = [own if sentence == " strategy=" else sentence for sentence in sentences]
    with pytest.raises(InputError) if expected else nullcontext() as refused:
        _check_closure(job)
    problems = [*refused.value.args] if refused else []
    assert problems == [
        f"optimizer=twice computes several gradients in a step, which{sentence}" for sentence in expected
    ]
    _check_closure(replace(job, optimizer=SGD()))


def test_a_figure_of_an_option_is_a_tag_that_begins_in_its_own_way() -> None:
    for name in ("my/a", "-my/a", "my/a/b.c-d", "lossy/a", "my_own-1/2"):
        check_figures([("task", [name])])
        assert is_of_option(name.removeprefix("-"))
    wrong: list[Any] = ["my", "my/", "/a", "my/a b", "m\u00fd/a", "my/\u00e4", "--my/a", "", 3, None]
    for name in [*wrong, *(f"{page}/a" for page in ("loss", "acc", "metric", "test", "perf", "cpu", "gpu", "optim"))]:
        with pytest.raises(
            InputError, match=f"^task: the class has the figure {re.escape(shown(name))}, expected names"
        ):
            check_figures([("task", [name])])
    with pytest.raises(
        InputError, match=r"^task: the figure 'my/b' is not declared, expected one of my/a, my/c; name"
    ):
        check_declared("task", "my/b", ("my/a", "my/c"))
    with pytest.raises(InputError, match="is not declared, expected one of none; name"):
        check_declared("task", "my/b", ())
    own = SimpleNamespace(figures=("my/a", "-my/b"))
    assert figures_of(own, SimpleNamespace(figures=("-my/c",))) == {
        "my/a": "maximize",
        "my/b": "minimize",
        "my/c": "minimize",
    }
    assert not is_of_option("loss/val")


@pytest.mark.parametrize("group", ["task", "callback", "logger"])
@pytest.mark.parametrize("figure", ["loss/mine", "mine", "other/b"])
def test_a_figure_that_is_no_tag_or_of_two_options_is_refused_before_the_run(group: str, figure: str) -> None:
    free = {name: SimpleNamespace(figures=(f"{name}/a",), targets=CLASSES) for name in ("task", "callback", "logger")}

    def checked(parts: dict[str, Any]) -> None:
        components = {
            name: {"other": SimpleNamespace(figures=()), "mine": parts[name]} for name in ("callback", "logger")
        }
        components["callback"]["other"] = SimpleNamespace(figures=("other/b",))
        check_targets(replace(resolved("device=cpu"), task=parts["task"], **components))

    checked(free)
    with pytest.raises(InputError, match=f"the figure '{figure}'"):
        checked({**free, group: SimpleNamespace(figures=(f"{group}/a", figure), targets=CLASSES)})


def test_the_identity_of_a_model_from_python_sees_each_of_its_tensors_and_its_type() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    module.register_buffer("table", torch.zeros(2, 3))
    digests = {digest(module), digest(module)}
    for name in module.state_dict():
        changed = {key: value + (key == name) for key, value in module.state_dict().items()}
        other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        other.register_buffer("table", torch.zeros(2, 3))
        other.load_state_dict(changed)
        digests.add(digest(other))
    for table in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int32)):
        module.table = table
        digests.add(digest(module))
    assert len(digests) == 1 + len(module.state_dict()) + 2
    large = [nn.Linear(2**16, 1) for _ in range(2)]
    large[1].load_state_dict(large[0].state_dict())
    large[1].weight.data[0, -1] += 1
    assert len({*map(digest, large)}) == 2, "of all its numbers"


def test_a_figure_that_cannot_be_is_told_with_what_it_may_be_and_where() -> None:
    with pytest.raises(InputError) as caught:
        check_figures([("task", ["my/a"]), ("logger", ["other/b", "loss/mine"])])
    assert str(caught.value) == (
        "logger: the class has the figure 'loss/mine', expected names such as my/scalar, which do not begin with "
        "loss/, acc/, metric/, test/, perf/, cpu/, gpu/, optim/; correct its `figures`"
    )
    with pytest.raises(InputError) as caught:
        check_declared("callback", "my/b", ("my/a",))
    assert str(caught.value) == (
        "callback: the figure 'my/b' is not declared, expected one of my/a; name it in the class, as "
        "`figures: ClassVar[tuple[str, ...]]`"
    )
    check_declared("callback", "my/b", ("my/a", "my/b"))
    with pytest.raises(
        InputError, match=r"^task: another option has the figure 'my/a', too; rename it in `figures`$"
    ):
        check_figures([("task", ["my/a", "my/a"])])
