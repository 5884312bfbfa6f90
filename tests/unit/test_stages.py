"""Where a model can be cut into stages, and in which order a stage takes its micro-batches."""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from lockstep.core.errors import InputError
from lockstep.core.world import World
from lockstep.optim import SGD
from lockstep.precision import BF16, FP32, FP64
from lockstep.strategy import Pipeline, Single, pipeline
from lockstep.strategy.cutting import MOST_PLACES, cut
from lockstep.strategy.pipeline import become_stage
from lockstep.strategy.zero import OwnedOptimizer
from thread_ranks import ThreadRanks

IMAGES = torch.zeros(2, 4)


def world(rank: int, size: int) -> World:
    return World(rank=rank, local_rank=rank, size=size, local_size=size, device=torch.device("cpu"))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Network(nn.Module):
    """Three layers; `between` chooses an operation between the second and the third."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.shift = [torch.ones(1, 4)]  # in a list it is no buffer, so every stage has it
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        if self.between == "unsaved":
            first = first - self.mean
        second = self.second(first)
        if self.between == "skip":
            second = second + first
        if self.between == "tied":
            second = nn.functional.linear(second, self.first.weight)
        if self.between == "again":
            second = self.second(second)
        if self.between == "unsaved":
            second = second + self.mean
        if self.between == "constant":
            second = second[:, self.shift[0].to(second.device).argmax() :]
        logits: Tensor = self.third(second)
        return logits


@pytest.mark.parametrize(
    ("name", "stages", "entries"),
    [
        ("test_vit", 3, ("blocks.1", "blocks.4")),
        ("test_resnet", 2, ("layer4",)),
        ("resnet18", 4, ("layer3.1", "layer4", "layer4.1")),
    ],
)
def test_models_of_timm_are_cut_between_blocks_where_parameters_balance(
    name: str, stages: int, entries: tuple[str, ...]
) -> None:
    model = timm.create_model(name, num_classes=10)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    plan = cut(model, torch.zeros(1, 3, 32, 32) if "res" in name else torch.zeros(1, 3, 160, 160), stages, None)
    assert plan.entries == entries
    assert plan.classes == 10
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert set(plan.homes) == {key for key, _ in (*model.named_parameters(), *model.named_buffers())}
    assert sorted(set(plan.homes.values())) == list(range(stages))


@pytest.mark.parametrize(
    ("model", "entry", "obstacle"),
    [
        (Network("skip"), "second", "more than its input is used behind it"),
        (Network("skip"), "third", ""),
        (nn.Sequential(nn.Linear(4, 4), Residual()), "1", ""),
        (nn.Sequential(nn.Linear(4, 4), Residual()), "1.inner", "more than its input is used behind it"),
        (nn.Sequential(nn.Linear(4, 4), Residual()), "1.inner.1", "more than its input is used behind it"),
        (Network("tied"), "second", "first.weight is used on both sides of it"),
        (Network("tied"), "third", ""),
        (Network("unsaved"), "second", "mean is used on both sides of it"),
        (Network("again"), "second", "it runs more than once"),
        (Network("plain"), "secnd", "the model runs no module 'secnd', expected some of second, third. Did"),
        (Network("skip"), "secnd", "expected some of third. Did you mean 'second'"),
        (Network("plain"), "first", "leaves stage 0 without parameters"),
    ],
)
def test_a_cut_is_where_only_one_tensor_goes_on(model: nn.Module, entry: str, obstacle: str) -> None:
    if not obstacle:
        assert cut(model, IMAGES, 2, [entry]).entries == (entry,)
        return
    with pytest.raises(InputError, match=r"strategy\.cuts") as raised:
        cut(model, IMAGES, 2, [entry])
    assert obstacle in str(raised.value)


def test_a_skip_connection_over_a_cut_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Residual(), nn.Linear(4, 3))
    assert cut(model, IMAGES, 3, None).entries == ("1", "2")
    with pytest.raises(InputError, match=r"can be cut into 3 at the most; use launcher\.ranks=3, or strategy=fsdp"):
        cut(model, IMAGES, 4, None)


def with_table(layer: nn.Module) -> nn.Module:
    """A layer with many numbers that are not trained."""
    layer.register_buffer("table", torch.zeros(1000))
    return layer


@pytest.mark.parametrize(
    ("layers", "entry"),
    [
        ([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)], "1"),
        ([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)], "1"),
        ([nn.Linear(4, 8), nn.MaxPool1d(2), nn.Linear(4, 8)], "2"),
        ([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))], "1"),
        ([nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh())), nn.Linear(4, 4)], "1"),
        ([nn.Linear(4, 8), nn.Sequential(nn.MaxPool1d(2), nn.Linear(4, 8))], "1.1"),
        ([nn.Linear(4, 4), nn.Linear(4, 4), with_table(nn.Linear(4, 4))], "1"),
    ],
    ids=[
        *("balance: the first", "no parameters: the first", "what sends less", "the outer one"),
        *("the outer one later", "an inner one that sends less", "a buffer is no parameter"),
    ],
)
def test_of_cuts_that_are_equal_the_first_is_taken_that_sends_least(layers: list[nn.Module], entry: str) -> None:
    assert cut(nn.Sequential(*layers), IMAGES, 2, None).entries == (entry,)


def test_a_buffer_that_no_traced_pass_uses_is_in_the_stage_of_its_module() -> None:
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    homes = cut(nn.Sequential(*blocks), IMAGES, 3, ["1", "2"]).homes
    assert {f"{number}.1.num_batches_tracked" for number in range(3)} < {*homes}
    assert {name: stage for name, stage in homes.items() if stage != int(name[0])} == {}


def test_a_weight_is_in_the_stage_that_uses_it_and_not_in_that_of_its_module() -> None:
    class Lent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
            self.first.lent = nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.third(self.second(self.first(x)) @ self.first.lent)  # type: ignore[operator]
            return logits

    homes = {entry: cut(Lent(), IMAGES, 2, [entry]).homes for entry in ("second", "third")}
    assert {entry: (of["first.lent"], of["first.bias"]) for entry, of in homes.items()} == {
        "second": (1, 0),
        "third": (0, 0),
    }


def test_cuts_are_in_the_order_of_the_layers() -> None:
    with pytest.raises(InputError, match="in the order in which they run"):
        cut(Network("plain"), IMAGES, 3, ["third", "second"])


def test_a_model_is_cut_without_a_graph_of_its_activations() -> None:
    model, graphs = Network("plain"), list[bool]()
    model.first.register_forward_hook(lambda module, inputs, output: graphs.append(output.requires_grad))
    cut(model, IMAGES, 2, ["second"])
    assert {*graphs} == {False}


def test_stages_have_their_own_layers_and_pass_on_activations_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, images = Network("plain"), torch.randn(2, 4)
    models = [copy.deepcopy(whole), copy.deepcopy(whole)]
    expected = whole(images)
    expected.sum().backward()

    def trained(world: World) -> tuple[Tensor, dict[str, Tensor], float]:
        model = models[world.rank]
        become_stage(model, cut(model, images, 2, ["second"]), world)
        logits = model(images)
        logits.sum().backward()
        own = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
        gradients = {name: parameter.grad for name, parameter in own.items()}
        return logits.detach(), gradients, Pipeline().gradient_norm([*model.parameters()]).item()

    (first, of_first, norm), (last, of_last, other) = ThreadRanks(2, monkeypatch).run(trained)
    assert norm == other == pytest.approx(Single().gradient_norm([*whole.parameters()]).item(), rel=1e-6)
    assert first.shape == (0, 3)
    assert torch.equal(last, expected)
    assert {*of_first} == {"first.weight", "first.bias"}
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert gradients.keys() == {*of_first, *of_last}
    assert all(torch.equal(gradient, gradients[name]) for name, gradient in (of_first | of_last).items())


def test_a_frozen_layer_is_frozen_on_the_ranks_that_lack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(model: nn.Module) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in model.named_parameters()}

    def staged(world: World) -> dict[str, bool]:
        model = copies[world.rank]  # each rank traces its own, as a process would
        become_stage(model, cut(model, IMAGES, 2, ["second"]), world)
        return trained(model)

    whole = Network("plain")
    whole.first.requires_grad_(False)
    copies = [copy.deepcopy(whole) for _ in range(2)]
    assert ThreadRanks(2, monkeypatch).run(staged) == [trained(whole)] * 2


def test_a_model_whose_shapes_depend_on_numbers_is_refused() -> None:
    with pytest.raises(InputError, match=r"this model's depend on numbers \(.*\); use strategy=fsdp"):
        Pipeline().shard(Network("constant"), world(1, 2), FP32(), IMAGES)


@pytest.mark.parametrize(
    ("schedule", "rank", "order"),
    [
        ("1f1b", 0, "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"),
        ("1f1b", 1, "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"),
        ("1f1b", 2, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"),
        ("gpipe", 1, "F0 F1 F2 F3 F4 B0 B1 B2 B3 B4"),
    ],
)
def test_a_schedule_orders_the_passes_of_a_stage(schedule: str, rank: int, order: str) -> None:
    passes: list[str] = []

    def forward(number: int) -> Tensor:
        passes.append(f"F{number}")
        return torch.tensor(number)

    Pipeline(schedule=schedule).run_micro_batches(
        nn.Identity(),
        ((number, number == 4) for number in range(5)),
        world(rank, 3),
        forward=forward,
        backward=lambda loss: passes.append(f"B{int(loss)}"),
        between=lambda: pytest.fail("it waits for all stages"),
    )
    assert " ".join(passes) == order


@pytest.mark.parametrize("shape", [(0, 3), (2, 3)])
def test_nobody_waits_for_an_empty_message_which_is_not_sent(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(pipeline.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(pipeline.dist, "recv", lambda message, source, group, tag: calls.append(("from", source)))
    monkeypatch.setattr(pipeline.dist, "isend", lambda message, target, group, tag: calls.append(("to", target)))
    neighbours = pipeline.Neighbours(world(1, 3))
    for kind in (pipeline.ACTIVATIONS, pipeline.GRADIENTS):
        assert neighbours.receive(torch.Size(shape), torch.float64, kind).shape == shape
        neighbours.send(torch.zeros(shape), kind)
    assert calls == ([("from", 0), ("to", 2), ("from", 2), ("to", 0)] if shape[0] else [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_stage_receives_the_gradient_of_its_activations_in_their_format(dtype: torch.dtype) -> None:
    """The neighbours are pretended: what a stage sends is kept, and what it receives are ones."""
    messages: list[tuple[str, torch.Size, torch.dtype, int]] = []

    class Pretended:
        def send(self, message: Tensor, kind: int) -> None:
            messages.append(("sent", message.shape, message.dtype, kind))

        def receive(self, shape: torch.Size, dtype: torch.dtype, kind: int) -> Tensor:
            messages.append(("received", shape, dtype, kind))
            return torch.ones(shape, dtype=dtype)

    activations, anchor = torch.zeros(2, 3, dtype=dtype, requires_grad=True), torch.zeros((), requires_grad=True)
    logits = pipeline._Send.apply(activations, anchor, Pretended(), 10)
    assert (logits.shape, logits.dtype) == ((0, 10), dtype)
    logits.sum().backward()
    shape = torch.Size((2, 3))
    assert messages == [("sent", shape, dtype, pipeline.ACTIVATIONS), ("received", shape, dtype, pipeline.GRADIENTS)]
    assert torch.equal(activations.grad, torch.ones(2, 3, dtype=dtype))


class Calls(nn.Module):
    """Three layers; `how` says in which way the middle one gets its input, or what its input is used for later."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.third, self.spare = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(2, 2)
        self.second: nn.Module = nn.Bilinear(4, 4, 4) if how == "two" else nn.Linear(4, 4)
        if how == "in place":
            self.second = nn.ReLU(inplace=True)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        if self.how == "two":
            second = self.second(first, first.relu())
        elif self.how == "by name":
            second = self.second(input=first)
        else:
            second = self.second(first)
        if self.how == "shape":
            second = second.reshape(first.shape).to(first.dtype)
        if self.how in ("keyword", "in place"):
            second = torch.add(input=second, other=first)
        if self.how == "list":
            second = torch.stack([second, first]).sum(0)
        if self.how == "images":
            second = second + x
        if self.how == "parameter":
            second = second * self.first.bias
        logits: Tensor = self.third(second)
        return logits


@pytest.mark.parametrize(
    ("how", "obstacle"),
    [
        ("plain", ""),
        ("shape", ""),
        ("two", "it takes 2 tensors, expected one"),
        ("by name", "it takes 1 tensors, expected one"),
        ("keyword", "more than its input is used behind it, as by a skip connection"),
        ("in place", "more than its input is used behind it, as by a skip connection"),
        ("list", "more than its input is used behind it, as by a skip connection"),
        ("images", "more than its input is used behind it, as by a skip connection"),
        ("parameter", "first.bias is used on both sides of it"),
    ],
)
def test_a_cut_is_before_a_module_of_one_tensor_whose_numbers_nobody_else_needs(how: str, obstacle: str) -> None:
    model = Calls(how)
    if obstacle:
        says = f"strategy.cuts: the model cannot be cut before second: {obstacle}; cut elsewhere, or remove strategy."
        with pytest.raises(InputError, match=f"^{re.escape(says)}cuts$"):
            cut(model, IMAGES, 2, ["second"])
    else:
        stages = cut(model, IMAGES, 2, ["second"])
        own = {name.partition(".")[0]: stage for name, stage in stages.homes.items()}
        assert own == {"first": 0, "second": 1, "third": 1, "spare": 0}, "what never runs is in the first stage"
    assert cut(model, IMAGES, 2, ["third"]).entries == ("third",)


def test_each_cut_has_the_format_of_its_activations() -> None:
    assert cut(Network("plain"), IMAGES, 3, ["second", "third"]).formats == (torch.float32,) * 2
    assert cut(Network("plain").double(), IMAGES.double(), 2, ["second"]).formats == (torch.float64,)
    with torch.autocast("cpu", torch.bfloat16):
        assert cut(Network("plain"), IMAGES, 2, ["second"]).formats == (torch.bfloat16,)


@pytest.mark.parametrize("number", [MOST_PLACES - 1, MOST_PLACES, MOST_PLACES + 1])
def test_an_unknown_module_is_told_with_the_first_places_for_a_cut(number: int) -> None:
    # Of the residual block nobody can cut the inside, and a stage before it or behind the last layer trains nothing.
    model = nn.Sequential(Residual(), *(nn.Linear(4, 4) for _ in range(number)), nn.Identity())
    names = [str(1 + at) for at in range(min(number, MOST_PLACES))]
    shown = ", ".join([*names, *["..."] * (number > MOST_PLACES)])
    with pytest.raises(InputError, match=rf"the model runs no module 'x', expected some of {re.escape(shown)}\.$"):
        cut(model, IMAGES, 2, ["x"])


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        (["1", "1"], r"strategy\.cuts is \[1,1\], expected different modules in the order in which they run"),
        (["2", "1"], r"strategy\.cuts is \[2,1\], expected different modules in the order in which they run"),
        (["1", "2"], r"is \[1,2\], which leaves stage 1 without parameters; cut elsewhere, or remove strategy\.cuts"),
        (["2", "3"], r"is \[2,3\], which leaves stage 2 without parameters"),
    ],
)
def test_each_stage_has_parameters_and_an_entry_of_its_own(entries: list[str], says: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    with pytest.raises(InputError, match=says):
        cut(model, IMAGES, 3, entries)


def test_no_stage_begins_behind_the_last_parameter() -> None:
    with pytest.raises(InputError, match=r"has 2 stages, but this model can be cut into 1 at the most; use launcher"):
        cut(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Tanh()), IMAGES, 2, None)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_cuts_balance_better(stages: int, seed: int) -> None:
    sizes = [random.Random(seed).randint(1, 40) for _ in range(8)]
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise([4, *sizes])]
    numbers = [layer.weight.numel() for layer in layers]

    def unevenness(starts: tuple[int, ...]) -> int:
        return sum(sum(numbers[a:b]) ** 2 for a, b in itertools.pairwise([0, *starts, len(numbers)]))

    best = min(itertools.combinations(range(1, 8), stages - 1), key=unevenness)
    assert cut(nn.Sequential(*layers), IMAGES, stages, None).entries == tuple(map(str, best))


def staged(whole: nn.Module, entry: str, world: World, images: Tensor) -> nn.Module:
    """A copy of a model that is the stage of this rank, of two."""
    model = copy.deepcopy(whole)
    become_stage(model, cut(model, images, 2, [entry]), world)
    return model


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_trains_nothing_takes_and_sends_no_gradient(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, images = Network("plain"), torch.randn(2, 4)
    for module in [whole.first] if stage == 0 else [whole.second, whole.third]:
        module.requires_grad_(False)
    whole(images).sum().backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    whole.zero_grad()

    def trained(world: World) -> list[str]:
        model = staged(whole, "second", world, images)
        model(images).sum().backward()
        own = {name: parameter.grad for name, parameter in model.named_parameters() if not parameter.is_meta}
        for name, gradient in own.items():
            assert (gradient is None) == (gradients[name] is None), name
            assert gradient is None or torch.equal(gradient, gradients[name]), name
        return [*own]

    first, second = ThreadRanks(2, monkeypatch).run(trained)
    assert {name.partition(".")[0] for name in first} == {"first"}
    assert {name.partition(".")[0] for name in second} == {"second", "third"}


class Images(nn.Module):
    """A factor for each channel, then a convolution and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.PReLU(3), nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(self.first(x)).mean((2, 3)))
        return logits


@pytest.mark.parametrize("last", [False, True])
def test_a_stage_gets_its_images_in_the_order_in_memory_that_one_rank_has(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = torch.channels_last if last else torch.contiguous_format
    whole = Images().to(memory_format=order)
    images = torch.randn(2, 3, 8, 8).contiguous(memory_format=order)
    alone: list[Tensor] = []
    handle = whole.second.register_forward_pre_hook(lambda _, args: alone.append(args[0]))
    expected = whole(images)
    handle.remove()

    def passed(world: World) -> tuple[Tensor, list[bool]]:
        model, orders = staged(whole, "second", world, images), list[bool]()
        model.second.register_forward_pre_hook(
            lambda _, args: orders.append(args[0].is_contiguous(memory_format=torch.channels_last))
        )
        return model(images).detach(), orders

    _, (logits, orders) = ThreadRanks(2, monkeypatch).run(passed)
    torch.testing.assert_close(logits, expected.detach())
    assert orders == [alone[0].is_contiguous(memory_format=torch.channels_last)] == [last]


class Tokens(nn.Module):
    """Patches as a sequence, which lies transposed in memory, then a layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 4, 4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(self.first(x).flatten(2).mT).mean(1))
        return logits


def test_a_stage_gets_a_transposed_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, images = Tokens(), torch.randn(2, 3, 8, 8)
    _, logits = ThreadRanks(2, monkeypatch).run(lambda world: staged(whole, "second", world, images)(images).detach())
    torch.testing.assert_close(logits, whole(images).detach())


def test_stages_compute_in_the_format_of_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    images = torch.randn(2, 3, 8, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = whole(images)

    def passed(world: World) -> tuple[Any, Tensor]:
        model = copy.deepcopy(whole)
        Pipeline(cuts=["1"]).shard(model, world, BF16(), torch.zeros(2, 3, 8, 8))
        with torch.autocast("cpu", torch.bfloat16):
            return model.forward.stages.formats, model(images)

    (formats, first), (_, logits) = ThreadRanks(2, monkeypatch).run(passed)
    assert formats == (torch.bfloat16,)
    assert (first.shape, first.dtype) == ((0, 3), torch.bfloat16)
    assert torch.equal(logits, expected)


def test_a_stage_gets_its_images_in_the_format_of_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    class To(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.dtype = dtype

        def forward(self, x: Tensor) -> Tensor:
            return x.to(self.dtype)

    for dtype, other in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        later = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).to(other)
        whole = nn.Sequential(nn.Conv2d(1, 4, 3, dtype=dtype), To(other), later)
        images = torch.randn(2, 1, 5, 5, dtype=dtype)
        _, logits = ThreadRanks(2, monkeypatch).run(lambda world: staged(whole, "2", world, images)(images))  # noqa: B023
        torch.testing.assert_close(logits, whole(images))


def test_a_weight_of_several_layers_is_on_other_ranks_in_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Network("plain")
    whole.third = whole.second
    tied = nn.Linear(4, 4)
    tied.weight = whole.second.weight
    tied.register_parameter("again", tied.weight)
    whole.second, whole.third = tied, nn.Linear(4, 4)
    whole.third.weight = tied.weight

    def is_away(world: World) -> list[bool]:
        model = staged(whole, "second", world, IMAGES)
        weights = [model.second.weight, model.second.again, model.third.weight]
        assert len({id(weight) for weight in weights}) == 1
        return [weight.is_meta for weight in (model.first.weight, *weights)]

    assert ThreadRanks(2, monkeypatch).run(is_away) == [[False, True, True, True], [True, False, False, False]]


def test_each_stage_steps_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, images = Network("plain"), torch.randn(2, 4)

    def stepped(world: World) -> dict[str, Tensor]:
        model = staged(whole, "second", world, images)
        optimizer = Pipeline().build_optimizer(SGD(lr=0.1, momentum=0.9), model, world)
        for _ in range(2):
            optimizer.zero_grad()
            model(images).sum().backward()
            optimizer.step()
        own = {name: parameter for name, parameter in model.named_parameters() if not parameter.is_meta}
        assert isinstance(optimizer, OwnedOptimizer)
        (group,) = optimizer.own.param_groups
        assert {*map(id, group["params"])} == {*map(id, own.values())} == {*map(id, optimizer.state)}
        return {name: parameter.detach() for name, parameter in own.items()}

    first, last = ThreadRanks(2, monkeypatch).run(stepped)
    optimizer = SGD(lr=0.1, momentum=0.9).build(whole)
    for _ in range(2):
        optimizer.zero_grad()
        whole(images).sum().backward()
        optimizer.step()
    expected = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    assert first.keys() | last.keys() == expected.keys()
    for name, tensor in (first | last).items():
        torch.testing.assert_close(tensor, expected[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 2.0**80])  # whose square is infinite in float32
def test_the_norm_over_stages_has_the_format_of_the_gradients(
    dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def norm(world: World) -> tuple[torch.dtype, float]:
        parameters = [
            nn.Parameter(torch.zeros(1, dtype=dtype, device="cpu" if n == world.rank else "meta")) for n in (0, 1)
        ]
        parameters[world.rank].grad = torch.full((1,), scale * [3.0, 4.0][world.rank], dtype=dtype)
        total = Pipeline().gradient_norm(parameters)
        return total.dtype, total.item()

    assert ThreadRanks(2, monkeypatch).run(norm) == [(dtype, pytest.approx(5 * scale, rel=1e-6))] * 2


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_with_nccl_each_direction_has_a_group_of_its_own_and_tags_tell_them_apart(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, calls = itertools.count(1), list[tuple[str, int, Any, int, bool]]()
    work = SimpleNamespace(wait=lambda: None)

    def isend(message: Tensor, target: int, group: Any, tag: int) -> Any:
        calls.append(("to", target, group, tag, message.is_contiguous()))
        return work

    def recv(message: Tensor, source: int, group: Any, tag: int) -> None:
        calls.append(("from", source, group, tag, message.is_contiguous()))

    monkeypatch.setattr(pipeline.dist, "get_backend", lambda: backend)
    monkeypatch.setattr(pipeline.dist, "new_group", lambda: f"group {next(groups)}")
    monkeypatch.setattr(pipeline.dist, "isend", isend)
    monkeypatch.setattr(pipeline.dist, "recv", recv)
    neighbours = pipeline.Neighbours(world(1, 3))
    forward, back = ("group 1", "group 2") if backend == "nccl" else (None, None)
    for kind in (pipeline.ACTIVATIONS, pipeline.GRADIENTS):
        received = neighbours.receive(torch.Size((2, 3)), torch.bfloat16, kind)
        assert (received.dtype, received.device.type) == (torch.bfloat16, "cpu")
        neighbours.send(torch.zeros(3, 2).t(), kind)
    assert calls == [
        ("from", 0, forward, 0, True),
        ("to", 2, forward, 0, True),
        ("from", 2, back, 1, True),
        ("to", 0, back, 1, True),
    ]


def test_a_message_waits_for_the_one_before_it_of_its_own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    events, messages = list[str](), list[Tensor]()

    def isend(message: Tensor, target: int, group: Any, tag: int) -> Any:
        number = int(message[0])
        messages.append(message)
        events.append(f"send {number}")
        return SimpleNamespace(wait=lambda: events.append(f"wait {number}"))

    monkeypatch.setattr(pipeline.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(pipeline.dist, "isend", isend)
    neighbours = pipeline.Neighbours(world(1, 3))
    for number, kind in enumerate((pipeline.ACTIVATIONS, pipeline.GRADIENTS, pipeline.ACTIVATIONS)):
        neighbours.send(torch.full((2,), float(number)), kind)
        assert neighbours.pending[kind][1] is messages[-1], "it must not be freed before it has arrived"
    neighbours.send(torch.zeros(0), pipeline.ACTIVATIONS)
    neighbours.send(torch.full((2,), 3.0), pipeline.ACTIVATIONS)
    assert events == ["send 0", "send 1", "wait 0", "send 2", "wait 2", "send 3"]


def test_one_rank_is_a_whole_model_under_any_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "become_stage", lambda *_: pytest.fail("it is cut"))
    model = Network("constant")  # which several ranks refuse
    Pipeline(cuts=[]).shard(model, world(0, 1), FP32(), IMAGES)
    assert "forward" not in vars(model)


def test_stages_are_cut_on_images_in_the_format_of_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    def formats(world: World) -> Any:
        Pipeline(cuts=["second"]).shard(model := Network("plain").double(), world, FP64(), IMAGES.float())
        return model.forward.stages.formats

    assert ThreadRanks(2, monkeypatch).run(formats) == [(torch.float64,)] * 2


def test_a_constant_belongs_to_every_stage() -> None:
    assert cut(Network("constant"), IMAGES, 3, ["second", "third"]).entries == ("second", "third")


def test_ranks_with_a_whole_model_send_each_other_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_reduce", "all_gather", "send", "recv"):
        monkeypatch.setattr(pipeline.dist, name, lambda *_: pytest.fail("it is whole"))
    model = nn.Linear(2, 2)
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    assert Pipeline().gradient_norm([*model.parameters()]).item() == pytest.approx(52**0.5)
    tensors = [*model.parameters()]
    for keep in (False, True):
        assert [*Pipeline().whole_tensors(tensors, keep=keep)] == tensors


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, ValueError, TypeError, KeyError])
def test_whatever_torch_raises_for_shapes_without_numbers_is_one_sentence(error: type[Exception]) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise error("odd\nand long")

    is_ours = error is not KeyError
    says = r"^strategy=pipeline computes the shapes .* depend on numbers \(odd\); use strategy=fsdp$"
    with pytest.raises(InputError if is_ours else KeyError, match=says if is_ours else "odd"):
        Pipeline().shard(Odd(), world(1, 2), FP32(), IMAGES)


class Tangled(nn.Module):
    """Three layers; `use` makes the input of the last one of what the first two have made."""

    def __init__(self, use: Callable[[Tangled, Tensor, Tensor], Tensor], second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third, self.use = nn.Linear(4, 4), second, nn.Linear(4, 3), use

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(first, first) if isinstance(self.second, nn.Bilinear) else self.second(first)
        logits: Tensor = self.third(self.use(self, first, second))
        return logits


@pytest.mark.parametrize(
    ("use", "layer", "obstacle"),
    [
        (lambda own, first, second: (second + first) * own.first.bias, nn.Linear, "more than its input is used"),
        (lambda own, first, second: second * own.first.bias + first, nn.Linear, "first.bias is used on both sides"),
        (lambda own, first, second: second * own.first.bias + first, nn.Bilinear, "it takes 2 tensors"),
        (lambda own, first, second: second + first, nn.Bilinear, "it takes 2 tensors"),
    ],
)
def test_of_several_obstacles_the_first_is_told(use: Any, layer: Any, obstacle: str) -> None:
    model = Tangled(use, layer(4, 4, 4) if layer is nn.Bilinear else layer(4, 4))
    with pytest.raises(InputError, match=f"cut before second: {obstacle}"):
        cut(model, IMAGES, 2, ["second"])


class Wider(nn.Module):
    """A layer in float64 for an input of any format, and a factor that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        output: Tensor = self.layer(x.double()) * factor
        return output


class Mixed(nn.Module):
    """Four layers, of which the last two compute in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), Wider()
        self.fourth = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fourth(self.third(self.second(self.first(x)), 3.0))
        return logits


@pytest.mark.parametrize("entries", [("second", "fourth"), ("third", "fourth"), ("second", "third")])
def test_each_stage_receives_in_the_format_of_its_own_entry_and_passes_on_what_is_no_tensor(
    entries: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, images = Mixed(), torch.randn(2, 4)
    models = [copy.deepcopy(whole) for _ in range(3)]
    expected = whole(images)
    expected.sum().backward()

    def trained(world: World) -> tuple[Tensor, dict[str, Tensor | None]]:
        model = models[world.rank]
        become_stage(model, cut(model, images, 3, entries), world)
        logits = model(images)
        logits.sum().backward()
        own = {name: parameter.grad for name, parameter in model.named_parameters() if not parameter.is_meta}
        return logits.detach(), own

    (_, first), (_, second), (logits, last) = ThreadRanks(3, monkeypatch).run(trained)
    assert torch.equal(logits, expected)
    gradients = first | second | last
    assert gradients.keys() == {name for name, _ in whole.named_parameters()}
    for name, parameter in whole.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name
