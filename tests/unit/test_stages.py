"""Where a model can be cut into stages, and in which order a stage takes its micro-batches."""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

from lockstep.core.errors import InputError
from lockstep.core.world import World
from lockstep.precision import FP32
from lockstep.strategy import Pipeline, Single, pipeline
from lockstep.strategy.cutting import cut
from lockstep.strategy.pipeline import become_stage
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
        (Network("plain"), "secnd", "the model runs no module 'secnd', expected some of first, second, third. Did"),
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


@pytest.mark.parametrize(
    ("layers", "entry"),
    [
        ([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)], "1"),
        ([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)], "1"),
        ([nn.Linear(4, 8), nn.MaxPool1d(2), nn.Linear(4, 8)], "2"),
        ([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))], "1"),
        ([nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh())), nn.Linear(4, 4)], "1"),
    ],
    ids=["balance: the first", "no parameters: the first", "what sends less", "the outer one", "the outer one later"],
)
def test_of_cuts_that_are_equal_the_first_is_taken_that_sends_least(layers: list[nn.Module], entry: str) -> None:
    assert cut(nn.Sequential(*layers), IMAGES, 2, None).entries == (entry,)


def test_a_buffer_that_no_traced_pass_uses_is_in_the_stage_of_its_module() -> None:
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    homes = cut(nn.Sequential(*blocks), IMAGES, 3, ["1", "2"]).homes
    assert {f"{number}.1.num_batches_tracked" for number in range(3)} < {*homes}
    assert {name: stage for name, stage in homes.items() if stage != int(name[0])} == {}


def test_cuts_are_in_the_order_of_the_layers() -> None:
    with pytest.raises(InputError, match="in the order in which they run"):
        cut(Network("plain"), IMAGES, 3, ["third", "second"])


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
        become_stage(model := copy.deepcopy(whole), cut(whole, IMAGES, 2, ["second"]), world)
        return trained(model)

    whole = Network("plain")
    whole.first.requires_grad_(False)
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
