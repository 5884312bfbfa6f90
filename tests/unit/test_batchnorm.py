"""Synchronised batch norm computes the same as torch's batch norm over the examples of all ranks."""

from collections.abc import Iterator

import pytest
import timm
import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from lockstep.core.model import has_batchnorm
from lockstep.core.world import World
from lockstep.strategy.sync_batchnorm import (
    CUDAKernels,
    PlainKernels,
    SyncBatchNorm,
    SyncBatchNormAct,
    _dense,
    convert_sync_batchnorm,
)
from thread_ranks import ThreadRanks

pytestmark = pytest.mark.numerics


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pair(norm: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A layer of torch in float64 with random weights, and a converted copy of it."""
    generator = torch.Generator().manual_seed(0)
    norm.double()
    with torch.no_grad():
        for tensor in norm.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) + 0.5)
    twin = type(norm)(*_arguments(norm)).double()
    twin.load_state_dict(norm.state_dict())
    return norm, convert_sync_batchnorm(nn.Sequential(twin))[0]


def _arguments(norm: nn.Module) -> tuple[object, ...]:
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    return norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats


def values(*shape: int) -> Tensor:
    return 3 + 2 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train_twice(layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Two training passes on other numbers: output, gradients and state of the layer after the second one."""
    layer.train()
    for factor in (2, 1):
        layer.zero_grad()
        inputs = (factor * x).requires_grad_()
        output = layer(inputs)
        (output * torch.arange(output.numel(), dtype=torch.float64).view_as(output).sin()).sum().backward()
    assert inputs.grad is not None
    pairs = [(name, parameter.grad) for name, parameter in layer.named_parameters() if parameter.grad is not None]
    gradients = {f"gradient of {name}": gradient for name, gradient in pairs}
    return {"output": output.detach(), "gradient": inputs.grad, **gradients, **layer.state_dict()}


def assert_alike(norm: nn.Module, x: Tensor) -> None:
    reference, ours = pair(norm)
    assert isinstance(ours, SyncBatchNorm)
    expected, actual = train_twice(reference, x), train_twice(ours, x)
    assert expected.keys() == actual.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-12, atol=1e-12, msg=name)
    torch.testing.assert_close(ours.eval()(x), reference.eval()(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("shares", [(5, 3, 0), (0, 1, 7), (1, 1, 6), (2, 3, 3), (0, 8, 0)])
def test_the_parts_of_the_ranks_are_one_batch_however_uneven_they_are(
    shares: tuple[int, ...], momentum: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = values(sum(shares), 3, 4, 5)
    weights = torch.arange(x.numel(), dtype=torch.float64).view_as(x).sin()
    parts = list(zip(x.split(shares), weights.split(shares), strict=True))

    def train(world: World) -> dict[str, Tensor]:
        """The second of two passes on this rank's part."""
        _, layer = pair(nn.BatchNorm2d(3, momentum=momentum))
        for factor in (2, 1):
            layer.zero_grad()
            part, weights_of_part = parts[world.rank]
            inputs = (factor * part).requires_grad_()
            output = layer.train()(inputs)
            (output * weights_of_part).sum().backward()
        gradients = {f"gradient of {name}": parameter.grad for name, parameter in layer.named_parameters()}
        return {"output": output.detach(), "gradient": inputs.grad, **gradients, **layer.state_dict()}

    expected = train_twice(pair(nn.BatchNorm2d(3, momentum=momentum))[0], x)
    ranks = ThreadRanks(3, monkeypatch).run(train)
    for name, tensor in expected.items():
        of_ranks = [rank[name] for rank in ranks]
        if name in ("output", "gradient"):
            of_ranks = [torch.cat(of_ranks)]
        elif name.startswith("gradient of"):
            of_ranks = [torch.stack(of_ranks).sum(0)]
        for actual in of_ranks:
            torch.testing.assert_close(actual, tensor, rtol=1e-12, atol=1e-12, msg=name)


def test_it_is_batch_norm_of_vectors_sequences_and_volumes_and_without_running_statistics() -> None:
    assert_alike(nn.BatchNorm1d(3, eps=0.125), values(8, 3))
    assert_alike(nn.BatchNorm1d(3), values(4, 3, 7))
    assert_alike(nn.BatchNorm3d(2), values(3, 2, 2, 3, 2))
    assert_alike(nn.BatchNorm2d(3, track_running_stats=False), values(5, 3, 4, 4))


def test_float32_keeps_its_digits_where_the_mean_is_large() -> None:
    mean, deviation, summed = 3000, 2, 5 * 4 * 4
    x = (mean - 3 + values(5, 3, 4, 4)).float()
    expected = nn.BatchNorm2d(3).double()(x.double())
    # The error of a mean of n numbers is at most n roundings of one number, in any order of addition: 0.014 here.
    # A variance computed as mean square minus squared mean has no correct digits, and would be wrong by 0.8.
    bound = summed * torch.finfo(torch.float32).eps * mean / deviation
    torch.testing.assert_close(SyncBatchNorm(3).train()(x).double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_an_empty_batch_between_two_others_counts_nothing(momentum: float | None) -> None:
    layers = [SyncBatchNorm(3, momentum=momentum).double().train() for _ in range(2)]
    for batch in (values(4, 3, 2, 2), values(5, 3, 2, 2)):
        for layer in layers:
            layer(batch)
        layers[1](batch[:0])
    for name, tensor in layers[0].state_dict().items():
        assert torch.equal(layers[1].state_dict()[name], tensor), name


def test_a_single_value_leaves_no_infinite_statistics() -> None:
    layer = SyncBatchNorm(3, momentum=0.5).train()
    layer(torch.full((1, 3), 4.0))
    assert layer.running_mean.tolist() == [2.0] * 3
    assert layer.running_var.tolist() == [0.5] * 3


def test_its_gradient_is_its_derivative_and_an_empty_input_passes() -> None:
    layer = SyncBatchNorm(2).double().train()
    assert torch.autograd.gradcheck(layer, values(3, 2, 2, 2).requires_grad_())
    layer = SyncBatchNorm(3).train()
    inputs = torch.empty(0, 3, 4, 4, requires_grad=True)
    output = layer(inputs)
    assert layer.num_batches_tracked == 0
    output.sum().backward()
    assert output.shape == (0, 3, 4, 4)
    assert torch.equal(layer.running_mean, torch.zeros(3))
    assert torch.equal(layer.running_var, torch.ones(3))
    assert torch.equal(layer.weight.grad, torch.zeros(3))


def test_a_fused_layer_of_timm_keeps_its_activation_behind_its_drop() -> None:
    torch.manual_seed(0)
    fused = BatchNormAct2d(3, eps=0.125, act_layer=nn.SiLU).double()
    twin = BatchNormAct2d(3, eps=0.125, act_layer=nn.SiLU).double()
    fused.drop, twin.drop = nn.Softshrink(), nn.Softshrink()  # draws no numbers
    converted = convert_sync_batchnorm(nn.Sequential(twin))[0]
    assert isinstance(converted, SyncBatchNormAct)
    expected, actual = train_twice(fused, values(5, 3, 4, 4)), train_twice(converted, values(5, 3, 4, 4))
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
def test_a_converted_model_has_the_parameters_and_names_of_before(name: str) -> None:
    model = timm.create_model(name, num_classes=3)
    assert has_batchnorm(model)
    assert not has_batchnorm(timm.create_model("test_vit"))
    keys, parameters = list(model.state_dict()), [id(parameter) for parameter in model.parameters()]
    converted = convert_sync_batchnorm(model)
    layers = [module for module in converted.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert layers
    assert all(isinstance(layer, SyncBatchNorm) for layer in layers)
    assert list(converted.state_dict()) == keys
    assert [id(parameter) for parameter in converted.parameters()] == parameters


# torch 2.11's compiler makes an instance of the function, which it deprecates itself.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
def test_the_compiler_traces_it_without_a_break() -> None:
    def layers() -> nn.Module:
        return convert_sync_batchnorm(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3, momentum=None)))

    plain, traced = layers().double(), layers().double()
    expected = train_twice(plain, values(5, 3, 4, 4))
    # Only the tracer is tested: aot_eager does not have Inductor generate code.
    actual = train_twice(torch.compile(traced, backend="aot_eager", fullgraph=True), values(5, 3, 4, 4))
    for name in ("output", "gradient"):
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-12, atol=1e-12, msg=name)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(traced.state_dict()[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_an_input_keeps_a_format_without_gaps_and_loses_any_other(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape)
    dense = [x]
    if len(shape) > 3:
        dense.append(x.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d))
    assert all(_dense(one) is one for one in dense)
    with_gaps = torch.rand(*shape[:-1], 2 * shape[-1])[..., ::2]
    assert _dense(with_gaps).is_contiguous()
    assert torch.equal(_dense(with_gaps), with_gaps)


def of_channels(vector: Tensor) -> Tensor:
    return vector[None, :, None, None]


@pytest.mark.parametrize("affine", [False, True])
def test_the_kernels_of_a_gpu_are_called_as_torch_documents_them(
    affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU they are formulas here, by the names of their arguments in torch's `native_functions.yaml`."""

    def stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(input, [0, 2, 3], correction=0)
        return mean, (variance + eps).rsqrt()

    def elemt(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
    ) -> Tensor:
        assert eps == 0.25
        output = (input - of_channels(mean)) * of_channels(invstd)
        return output if weight is None or bias is None else output * of_channels(weight) + of_channels(bias)

    def reduce(
        grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *computed: bool
    ) -> tuple[Tensor, Tensor, None, None]:
        assert computed == (True, False, False)
        return grad_out.sum([0, 2, 3]), (grad_out * (input - of_channels(mean))).sum([0, 2, 3]), None, None

    def backward_elemt(
        grad_out: Tensor,
        input: Tensor,
        mean: Tensor,
        invstd: Tensor,
        weight: Tensor | None,
        sum_dy: Tensor,
        sum_dy_xmu: Tensor,
        count: Tensor,
    ) -> Tensor:
        assert (count.dtype, count.shape) == (torch.int32, (2,))
        number, scale = count.sum(), of_channels(invstd)
        slope = (input - of_channels(mean)) * of_channels(sum_dy_xmu / number) * scale**2
        own = (grad_out - of_channels(sum_dy / number) - slope) * scale
        return own if weight is None else own * of_channels(weight)

    for name, formula in (("stats", stats), ("elemt", elemt), ("backward_reduce", reduce)):
        monkeypatch.setattr(torch, f"batch_norm_{name}", formula)
    monkeypatch.setattr(torch, "batch_norm_backward_elemt", backward_elemt)
    x, grad, eps = values(5, 3, 4, 2), values(5, 3, 4, 2).sin(), 0.25
    weight, bias = (torch.tensor([[0.5, 1.5, 2.5], [7.0, 8.0, 9.0]]).double()) if affine else (None, None)
    (mean, variance), expected = CUDAKernels.moments(x, eps), PlainKernels.moments(x, eps)
    torch.testing.assert_close((mean, variance), expected)
    scale, counts = (variance + eps).rsqrt(), torch.tensor([[30.0], [10.0]]).double()
    results = []
    for kernels in (PlainKernels, CUDAKernels):
        sums = kernels.sums(grad, x, mean, scale)
        output = kernels.normalize(x, weight, bias, mean, scale, eps)
        results.append((sums, output, kernels.gradient(grad, x, weight, mean, scale, sums, counts)))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_a_variance_of_nothing_is_not_negative_by_a_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = torch.tensor([2.0, 1.001e5**0.5])  # of a variance that is zero, and an eps of 1e-5
    monkeypatch.setattr(torch, "batch_norm_stats", lambda x, eps: (torch.zeros(2), rounded), raising=False)
    assert CUDAKernels.moments(torch.zeros(1, 2), 1e-5)[1].tolist() == [pytest.approx(0.25 - 1e-5), 0.0]


def test_activations_of_16_bits_have_statistics_in_float32_and_gradients_in_their_own_format() -> None:
    layer = SyncBatchNorm(3, momentum=1.0).train()
    inputs = values(64, 3, 4, 4).bfloat16().requires_grad_()
    output = layer(inputs)
    output.float().square().sum().backward()
    assert output.dtype is inputs.grad.dtype is torch.bfloat16
    assert layer.running_mean.dtype is torch.float32
    wide = inputs.detach().double()
    # With a momentum of 1 the statistics are those of the batch, to the rounding of float32.
    torch.testing.assert_close(layer.running_mean.double(), wide.mean((0, 2, 3)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.running_var.double(), wide.var((0, 2, 3)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shares", [(3, 5), (0, 8)])
def test_16_bits_are_rounded_once_and_a_rank_without_examples_sends_numbers_as_wide_as_the_others(
    shares: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, grad = values(8, 3, 4, 5).to(dtype), values(8, 3, 4, 5).sin().to(dtype)
    reference = nn.BatchNorm2d(3, momentum=1.0).double()
    with torch.no_grad():
        reference.weight.copy_(torch.tensor([0.5, 4.0, 1.5]))
        reference.bias.copy_(torch.tensor([3.0, -5.0, 0.25]))  # near the other summand, which has more digits

    def train(world: World) -> dict[str, Tensor]:
        layer = SyncBatchNorm(3, momentum=1.0)
        layer.load_state_dict(reference.state_dict())
        part = x.split(shares)[world.rank].requires_grad_()
        output = layer.train()(part)
        output.backward(grad.split(shares)[world.rank])
        return {"output": output.detach(), "x": part.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}

    first, second = ThreadRanks(2, monkeypatch).run(train)
    inputs = x.double().requires_grad_()
    output = reference.train()(inputs)
    output.backward(grad.double())
    once = {"rtol": torch.finfo(dtype).eps / 2, "atol": 1e-5}  # and the roundings of float32
    for name, expected in (("output", output), ("x", inputs.grad)):
        actual = torch.cat([first[name], second[name]])
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, **once)
    for name, expected in (("weight", reference.weight.grad), ("bias", reference.bias.grad)):
        torch.testing.assert_close((first[name] + second[name]).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_an_input_without_channels_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"expected an input of at least 2 dimensions, got {len(shape)}"):
        SyncBatchNorm(3).eval()(torch.zeros(shape))
    assert SyncBatchNorm(3).eval()(torch.zeros(2, 3)).shape == (2, 3)


def test_a_norm_of_timm_without_a_drop_and_an_activation_is_a_plain_one() -> None:
    fused, bare = BatchNormAct2d(3), BatchNormAct2d(3)
    bare.drop = None  # as of layers of timm before 0.6
    model = convert_sync_batchnorm(nn.Sequential(fused, bare, nn.BatchNorm2d(3)))
    assert [type(layer) for layer in model] == [SyncBatchNormAct, SyncBatchNorm, SyncBatchNorm]


def test_a_blank_input_is_passed_on_and_counts_nothing() -> None:
    layer = SyncBatchNorm(3).train()
    layer.blank = True
    x = torch.randn(2, 3, 4, requires_grad=True)
    output = layer(x)
    output.sum().backward()
    assert torch.equal(output, x)
    assert layer.num_batches_tracked == 0
    assert layer.weight.grad.tolist() == [0.0] * 3
    layer.blank = False
    assert not torch.equal(layer(x), x)
