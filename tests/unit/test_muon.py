"""Muon: orthogonal updates for matrices, Nesterov steps for all other parameters, the same decay for both."""

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.optim import muon
from lockstep.optim.muon import Muon, newton_schulz, orthogonalised
from lockstep.optim.optimizers import AdamW
from lockstep.training.train_step import set_learning_rate

pytestmark = pytest.mark.numerics


def network() -> nn.Module:
    """A small network in float64: the iteration amplifies rounding errors by 3.4445 ** 5 = 485."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 8), nn.ReLU(), nn.Linear(8, 3)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, lr: float | None = None) -> None:
    """Take some steps, with `lr` set in the way the trainer does it for our optimizers."""
    if lr is not None:
        set_learning_rate(optimizer, lr)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=generator)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (16, 4, 3, 3), (8, 2, 3)])
def test_an_update_becomes_orthogonal_and_keeps_its_directions(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    update = torch.randn(shape, dtype=torch.float64)
    (result,) = orthogonalised([update], 5)
    left, _, right = torch.linalg.svd(update.flatten(1), full_matrices=False)
    singular = torch.linalg.svdvals(result.flatten(1))
    assert result.shape == update.shape
    assert 0.6 < singular.min() <= singular.max() < 1.3
    # In the basis of the update's own singular vectors the result is diagonal.
    inner = left.T @ result.flatten(1) @ right.T
    torch.testing.assert_close(inner, inner.diagonal().diag(), atol=1e-11, rtol=0)


def test_matrices_of_one_shape_do_not_see_each_other() -> None:
    shapes = [(8, 3, 3, 3), (8, 27), (5, 7)]
    updates = [*(torch.randn(shape, dtype=torch.float64) for shape in shapes), torch.zeros(8, 27).double()]
    together = orthogonalised(updates, 5)
    for update, result in zip(updates, together, strict=True):
        torch.testing.assert_close(result, orthogonalised([update], 5)[0], rtol=1e-11, atol=1e-11)
    assert not together[3].any()


@pytest.mark.parametrize("shape", [(8, 27), (27, 8), (8, 3, 3, 3)])
@pytest.mark.parametrize("first", [torch.float32, torch.float64])
def test_matrices_of_one_shape_and_two_dtypes_each_keep_theirs(first: torch.dtype, shape: tuple[int, ...]) -> None:
    second = torch.float64 if first == torch.float32 else torch.float32
    updates = [torch.randn(shape, dtype=dtype) for dtype in (first, second, first)]
    for update, result in zip(updates, orthogonalised(updates, 3), strict=True):
        assert result.dtype == update.dtype
        tolerance = 1e-11 if update.dtype == torch.float64 else 1e-4
        torch.testing.assert_close(result, orthogonalised([update], 3)[0], rtol=tolerance, atol=tolerance)
        exact = orthogonalised([update.double()], 3)[0]
        torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (40, 4, 3, 3), (6, 1, 3, 3), (6, 4, 1, 1)])
def test_an_update_keeps_its_order_in_memory_which_changes_no_number(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    update = torch.randn(shape, dtype=torch.float64)
    turned = update.contiguous(memory_format=torch.channels_last)
    (plain,), (moved,) = orthogonalised([update], 5), orthogonalised([turned], 5)
    assert (plain.stride(), moved.stride()) == (update.stride(), turned.stride())
    torch.testing.assert_close(moved, plain, rtol=1e-11, atol=1e-11)
    for beside in ([update, turned], [turned, update]):
        for before, after in zip(beside, orthogonalised(beside, 5), strict=True):
            assert after.stride() == before.stride()
            torch.testing.assert_close(after, plain, rtol=1e-11, atol=1e-11)


def test_a_channels_last_network_takes_the_steps_of_any_other() -> None:
    plain, channels_last = network(), network().to(memory_format=torch.channels_last)
    for model in (plain, channels_last):
        train(model, Muon(lr=0.1, weight_decay=0.1, fixed_norm=True).build(model), lr=0.1)
    for expected, actual in zip(plain.parameters(), channels_last.parameters(), strict=True):
        torch.testing.assert_close(expected, actual, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(1, 16, 40), (2, 40, 16), (2, 64, 216)])
def test_the_iteration_in_bfloat16_ends_as_near_to_one(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    result = newton_schulz(torch.randn(shape).bfloat16(), 5)
    singular = torch.linalg.svdvals(result.double())
    assert result.dtype == torch.bfloat16
    assert 0.6 < singular.min() <= singular.max() < 1.3


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda: Any = True


@pytest.mark.parametrize(
    ("kind", "dtype", "inner"),
    [
        (OnGpu, torch.float32, torch.bfloat16),
        (OnGpu, torch.bfloat16, torch.bfloat16),
        (OnGpu, torch.float64, torch.float64),
        (torch.Tensor, torch.float32, torch.float32),
        (torch.Tensor, torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_gpu_multiplies_in_bfloat16_unless_it_is_in_float64_and_the_result_has_the_format_of_the_update(
    kind: type[torch.Tensor], dtype: torch.dtype, inner: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = list[torch.dtype]()

    def iterated(matrices: torch.Tensor, iterations: int) -> torch.Tensor:
        formats.append(matrices.dtype)
        return newton_schulz(matrices, iterations)

    monkeypatch.setattr(muon, "newton_schulz", iterated)
    (result,) = orthogonalised([torch.randn(4, 6, dtype=dtype).as_subclass(kind)], 5)
    assert (formats, result.dtype) == ([inner], dtype)


def test_inner_convolutions_and_linear_layers_are_matrices_and_the_last_one_is_the_head() -> None:
    model = network()
    groups = Muon(lr=0.1, head_lr=0.2, bias_lr=0.4).build(model).param_groups
    pairs = [(group, parameter) for group in groups for parameter in group["params"]]
    options = {id(parameter): (group["orthogonal"], group["scale"]) for group, parameter in pairs}
    assert len(options) == len(list(model.parameters()))
    assert [options[id(model[at].weight)] for at in (0, 3, 5)] == [(True, 1)] * 3
    assert options[id(model[7].weight)] == (False, 2)
    assert {options[id(parameter)] for parameter in (model[1].weight, model[1].bias, model[3].bias)} == {(False, 4)}


def test_tokens_and_positions_of_a_transformer_are_no_matrices() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3)
    groups = Muon().build(model).param_groups
    matrices = {id(parameter) for group in groups if group["orthogonal"] for parameter in group["params"]}
    assert id(model.blocks[0].attn.qkv.weight) in matrices
    assert not matrices & {id(model.pos_embed), id(model.cls_token), id(model.head.weight)}


def test_what_is_no_matrix_steps_as_torchs_nesterov_sgd() -> None:
    model, reference = network(), network()
    # The matrices move by 3 steps * 1e-12 only, so that they do not change the gradients of the other parameters.
    ours = Muon(lr=1e-12, head_lr=0.01, bias_lr=0.02, sgd_momentum=0.8).build(model)
    vectors = [parameter for parameter in reference.parameters() if parameter.dim() == 1]
    groups = [{"params": vectors, "lr": 0.02}, {"params": [reference[7].weight]}]
    train(model, ours, lr=1e-12)
    train(reference, torch.optim.SGD(groups, lr=0.01, momentum=0.8, nesterov=True))
    for actual, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_a_matrix_steps_with_its_own_momentum_and_as_many_iterations_as_asked_for() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)).double()
    optimizer = Muon(lr=0.1, momentum=0.6, sgd_momentum=0.9, iterations=2).build(model)
    matrix = model[0].weight
    expected, buffer = matrix.detach().clone(), torch.zeros(4, 6, dtype=torch.float64)
    for gradient in torch.randn((3, 4, 6), dtype=torch.float64):
        matrix.grad = gradient.clone()
        optimizer.step()
        buffer = 0.6 * buffer + gradient
        expected -= 0.1 * orthogonalised([gradient + 0.6 * buffer], 2)[0]
    torch.testing.assert_close(matrix.detach(), expected, rtol=1e-11, atol=1e-11)


def test_all_parameters_that_decay_lose_the_same_share() -> None:
    model = network()
    for parameter in model.parameters():
        parameter.register_hook(torch.zeros_like)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, Muon(lr=0.1, head_lr=3, bias_lr=7, weight_decay=0.5, decay_all=True).build(model), steps=1, lr=0.1)
    for weight, was in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(weight, 0.95 * was, rtol=1e-12, atol=0)


def test_a_fixed_norm_and_decay_go_together() -> None:
    model = network()
    options = {"lr": 0.1, "fixed_norm": True, "weight_decay": 0.5, "decay_all": True}
    for parameter in model.parameters():
        parameter.register_hook(torch.zeros_like)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, Muon(**options).build(model), steps=1, lr=0.1)
    for at in (0, 3, 5):
        assert model[at].weight.norm().item() == pytest.approx(0.95 * len(model[at].weight) ** 0.5, rel=1e-12)
        del before[f"{at}.weight"]
    for name, was in before.items():  # the head, norms and biases, which have no norm of their own
        torch.testing.assert_close(model.get_parameter(name).detach(), 0.95 * was, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(2, 4, 9), (1, 9, 4), (3, 5, 5)])
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_each_singular_value_goes_through_jordans_polynomial(shape: tuple[int, int, int], iterations: int) -> None:
    matrices = torch.randn(shape, dtype=torch.float64)
    result = newton_schulz(matrices, iterations)
    for matrix, actual in zip(matrices, result, strict=True):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        values = values / values.norm()
        for _ in range(iterations):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        torch.testing.assert_close(actual, left @ values.diag() @ right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(4, 64), (64, 4), (8, 8)])
def test_the_iteration_multiplies_squares_of_the_shorter_side(rows: int, columns: int) -> None:
    with FlopCounterMode(display=False) as counted:
        newton_schulz(torch.randn(3, rows, columns), 2)
    with_the_matrix = 3 * 2 * 2 * (2 * min(rows, columns) * rows * columns)
    assert with_the_matrix <= counted.get_total_flops() <= 1.5 * with_the_matrix, "a square's own product is the rest"


def test_a_group_without_a_gradient_stands_still_and_the_groups_behind_it_step() -> None:
    model = network()
    optimizer = Muon(lr=0.1, weight_decay=0.1).build(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    first, *behind = optimizer.param_groups
    for group in behind:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    still = {id(parameter) for parameter in first["params"]}
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, was) == (id(parameter) in still)


def test_the_rate_may_be_a_tensor_and_the_steps_go_downhill() -> None:
    steps = list[list[torch.Tensor]]()
    for rate in (0.125, torch.tensor(0.125, dtype=torch.float64)):
        model = network()
        optimizer = Muon(lr=0.125, weight_decay=0.5).build(model)
        for group in optimizer.param_groups:
            group["lr"] = rate
        train(model, optimizer, steps=2)
        steps.append([*model.parameters()])
    for number, tensor in zip(*steps, strict=True):
        torch.testing.assert_close(number, tensor, rtol=1e-12, atol=1e-12)


def test_without_a_rate_of_its_own_the_head_has_that_of_the_matrices() -> None:
    model = network()
    groups = Muon(lr=0.1, head_lr=None, bias_lr=0.4).build(model).param_groups
    scales = {id(parameter): group["scale"] for group in groups for parameter in group["params"]}
    assert (scales[id(model[7].weight)], scales[id(model[0].weight)], scales[id(model[7].bias)]) == (1, 1, 4)
    assert replace(Muon().usual, lr=1.0) == replace(AdamW().usual, lr=1.0)
