"""Layers that draw random numbers: they depend on example, epoch and layer only, however the batch is cut."""

import copy
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep.models import DigitNet, Linear, Timm, WhiteNet
from lockstep.stochastic import ForwardDraws, KeyedModel, key_draws

SHAPE = (3, 64, 64)
PIECES = ((0, 1), (1, 4), (4, 4), (4, 7))


@dataclass(frozen=True)
class Micro:
    """A micro-batch, as a loader yields it."""

    indices: Tensor
    step: int = 1
    epoch: int = 0
    number: int = 0

    @property
    def labels(self) -> Tensor:
        return self.indices


class Calls(nn.Module):
    """A convolution, and then any function of its output (B, 8, 8, 8)."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 8, 8)
        self.function = function

    def forward(self, images: Tensor) -> Tensor:
        return self.function(self.stem(images), self.training)


def attention(tokens: Tensor, training: bool, **options: Any) -> Tensor:
    heads = tokens.flatten(2).transpose(1, 2).unflatten(2, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3 * training, **options)


def grouped(tokens: Tensor, p: float, **options: Any) -> Tensor:
    """Attention of four heads, of which two share a key and a value."""
    rows = tokens.flatten(2).transpose(1, 2)
    query, shared = (part.unflatten(2, (-1, 2)).transpose(1, 2) for part in (rows, rows[..., 2:6]))
    return F.scaled_dot_product_attention(query, shared, shared, dropout_p=p, enable_gqa=True, **options)


MASK = torch.ones(64, 64, dtype=torch.bool).triu(-3)
FUNCTIONS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "dropout": lambda x, on: F.dropout(x, 0.3, on),
    "dropout in place": lambda x, on: F.dropout(x * 1, 0.3, on, inplace=True),
    "torch.dropout": lambda x, on: torch.dropout(x, 0.3, on),
    "dropout1d": lambda x, on: F.dropout1d(x.flatten(2), 0.3, on),
    "dropout2d": lambda x, on: F.dropout2d(x, 0.3, on),
    "dropout3d": lambda x, on: F.dropout3d(x[..., None], 0.3, on),
    "attention": attention,
    "causal attention": lambda x, on: attention(x, on, is_causal=True),
    "masked attention": lambda x, on: attention(x, on, attn_mask=MASK),
    "biased attention": lambda x, on: attention(x, on, attn_mask=MASK.to(x.dtype), scale=0.2),
    "grouped attention": lambda x, on: grouped(x, 0.3 * on),
    "bernoulli_": lambda x, on: x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.7) if on else x,
    "bernoulli": lambda x, on: x * torch.bernoulli(torch.full_like(x, 0.7)) if on else x,
    "rand": lambda x, on: x + torch.rand(x.shape, dtype=x.dtype) if on else x,
    "rand_like": lambda x, on: x + torch.rand_like(x) if on else x,
    "randn": lambda x, on: x + torch.randn(*x.shape, dtype=x.dtype) if on else x,
    "randn_like": lambda x, on: x + torch.randn_like(x) if on else x,
    "uniform_": lambda x, on: x + torch.empty_like(x).uniform_(-2, 3) if on else x,
    "normal_": lambda x, on: x + torch.empty_like(x).normal_(1, 2) if on else x,
    "one for the batch": lambda x, on: x * torch.rand(1, 8, 1, 1, dtype=x.dtype) if on else x,
    "tokens first": lambda x, on: F.dropout(x.flatten(2)[..., :22].permute(2, 0, 1), 0.3, on).transpose(0, 1),
    "windows": lambda x, on: F.dropout(x.unfold(2, 4, 4).permute(0, 2, 1, 3, 4).flatten(0, 1), 0.3, on),
}


# Calls of these functions that draw nothing, while the model is in training.
STILL: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.dropout(x, 0.3, training=False),
    lambda x: grouped(x, 0.0, attn_mask=MASK, scale=0.2),
    lambda x: grouped(x, 0.0, is_causal=True),
]


def keyed(model: nn.Module, seed: int = 0) -> tuple[nn.Module, ForwardDraws]:
    model = model.double().train()
    draws = key_draws(model, torch.zeros(1, *SHAPE, dtype=torch.float64), seed)
    return draws.keyed(model), draws


def images(indices: Tensor) -> Tensor:
    """An image for each example, which depends on its index only."""
    rows = [torch.linspace(-1, 1 + int(i), 3 * 64 * 64).double().sin().view(SHAPE) for i in indices]
    return torch.stack(rows) if rows else torch.zeros(0, *SHAPE, dtype=torch.float64)


def outputs(model: nn.Module, draws: ForwardDraws, micro: Micro) -> Tensor:
    output: Tensor = model(images(micro.indices), *draws.keys_of(micro))
    return output


INDICES = torch.tensor([5, 9, 100, 3, 77, 8, 4])


def in_pieces(model: nn.Module, draws: ForwardDraws) -> Tensor:
    pieces = [Micro(INDICES[start:stop]) for start, stop in PIECES]
    return torch.cat([outputs(model, draws, piece) for piece in pieces if len(piece.indices)])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_draws_gives_an_example_the_same_numbers_in_any_batch(name: str) -> None:
    torch.manual_seed(0)
    model, draws = keyed(Calls(FUNCTIONS[name]))
    before = torch.get_rng_state()
    whole = outputs(model, draws, Micro(INDICES))
    torch.testing.assert_close(in_pieces(model, draws), whole, rtol=1e-12, atol=1e-12)
    assert len(outputs(model, draws, Micro(INDICES[:0]))) == 0
    changed = {"step": 2} if name == "one for the batch" else {"epoch": 1}
    assert not torch.equal(outputs(model, draws, Micro(INDICES, **changed)), whole)
    assert torch.equal(outputs(model, draws, Micro(INDICES)), whole)
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn from torch's generator"
    assert draws.unknown == ()


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "one for the batch"])
def test_its_numbers_have_the_distribution_of_torchs_own(name: str) -> None:
    torch.manual_seed(0)
    plain = Calls(FUNCTIONS[name])
    model, draws = keyed(copy.deepcopy(plain))
    seen, keys = images(torch.zeros(1)), draws.keys_of(Micro(torch.arange(300)))  # the same image for 300 examples
    with torch.no_grad():
        theirs, ours = plain.double()(seen.expand(300, *SHAPE)), model(seen.expand(300, *SHAPE), *keys)
    for moment in (1, 2):
        expected, actual = (x.double() ** moment for x in (theirs, ours))
        # Both means have a standard error of std / sqrt(n). No element of some thousands is 6.5 of them off.
        error = ((expected.var(0) + actual.var(0)) / 300).sqrt()
        assert ((expected.mean(0) - actual.mean(0)).abs() <= 6.5 * error + 1e-12).all()


def test_a_module_that_draws_has_the_words_of_its_call() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, power: int, *, factor: float = 1.0) -> Tensor:
            return factor * F.dropout(x, 0.3, self.training) ** power

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.scaled = Scaled(), Scaled()

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.plain(x, power=1), self.scaled(x, power=2, factor=3.0)], 1)

    model, draws = keyed(Twice())
    plain, scaled = outputs(model, draws, Micro(INDICES)).unbind(1)
    pixels = images(INDICES)
    for output, expected in ((plain, pixels / 0.7), (scaled, 3 * (pixels / 0.7) ** 2)):
        torch.testing.assert_close(output, torch.where(output == 0, 0, expected), rtol=1e-12, atol=0)
    plain, scaled = model.model.eval()(pixels).unbind(1)
    assert torch.equal(plain, pixels)
    assert torch.equal(scaled, 3 * pixels**2)


def test_a_call_that_draws_nothing_is_torchs_own() -> None:
    def function(x: Tensor, training: bool) -> Tensor:
        still = [call(x).flatten(1) for call in STILL]
        return torch.cat([*still, F.dropout(x, 0.3, training).flatten(1)], 1)

    torch.manual_seed(0)
    plain = Calls(function)
    model, draws = keyed(copy.deepcopy(plain))
    assert draws.keys.draws == 1, "only the last call draws"
    expected = plain.double()(images(INDICES))[:, : -8 * 8 * 8]
    torch.testing.assert_close(outputs(model, draws, Micro(INDICES))[:, : -8 * 8 * 8], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("test_vit", {"proj_drop_rate": 0.1, "attn_drop_rate": 0.1, "pos_drop_rate": 0.1, "img_size": 64}),
        ("test_vit", {"patch_drop_rate": 0.25, "img_size": 64}),
        ("test_resnet", {}),
        ("test_resnet", {"drop_block_rate": 0.2}),
        ("test_efficientnet", {}),
        ("test_convnext", {}),
        ("test_byobnet", {}),
        ("test_mambaout", {}),
    ],
)
def test_models_of_timm_draw_by_example(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    built = Timm(name=name, drop_rate=0.2, drop_path_rate=0.3, options=options).build(10, SHAPE)
    model, draws = keyed(built)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    assert draws.keys.draws >= 1
    assert draws.unknown == ()
    whole = outputs(model, draws, Micro(INDICES))
    torch.testing.assert_close(in_pieces(model, draws), whole, rtol=1e-9, atol=1e-12)
    assert not torch.equal(outputs(model, draws, Micro(INDICES, epoch=1)), whole)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_transformer_of_torch_draws_by_example_wherever_the_batch_is(batch_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=batch_first)

    def tokens(x: Tensor, _: bool) -> Tensor:
        first = x.flatten(2).permute(0, 2, 1)
        return layer(first) if batch_first else layer(first.transpose(0, 1)).transpose(0, 1)

    calls = Calls(tokens)
    calls.layer = layer
    model, draws = keyed(calls)
    assert (draws.keys.draws, draws.unknown) == (4, ())
    whole = outputs(model, draws, Micro(INDICES))
    torch.testing.assert_close(in_pieces(model, draws), whole, rtol=1e-12, atol=1e-12)


def drop_block(**options: Any) -> tuple[nn.Module, ForwardDraws, Tensor, Tensor]:
    """A model that drops blocks of ones, with its draws, its outputs for 500 examples, and those of timm's own."""
    from timm.layers import DropBlock2d

    block = DropBlock2d(0.3, **options)
    calls = Calls(lambda x, _: block(torch.ones_like(x)))
    calls.block = block
    torch.manual_seed(0)
    theirs = block(torch.ones(500, 8, 8, 8, dtype=torch.float64))
    model, draws = keyed(calls)
    return model, draws, outputs(model, draws, Micro(torch.arange(500))), theirs


@pytest.mark.parametrize(("size", "scale", "coupled"), [(3, 1.0, True), (4, 0.5, False)])
def test_drop_block_scales_each_example_by_what_it_keeps(size: int, scale: float, coupled: bool) -> None:
    model, draws, whole, theirs = drop_block(block_size=size, gamma_scale=scale, couple_channels=coupled)
    assert torch.equal(whole[3:6], outputs(model, draws, Micro(torch.arange(3, 6))))
    torch.testing.assert_close(whole.mean((1, 2, 3)), torch.ones(500, dtype=torch.float64))
    dropped = (theirs == 0).double().mean().item()
    assert (whole == 0).double().mean().item() == pytest.approx(dropped, abs=0.03)
    assert torch.equal(whole == 0, (whole[:, :1] == 0).expand_as(whole)) == coupled
    assert (model.eval()(images(INDICES), *draws.keys_of(Micro(INDICES))) == 1).all(), "an evaluation drops nothing"


def test_drop_block_fills_its_blocks_with_noise_where_it_is_asked_to() -> None:
    noise, theirs = (values[values != 1] for values in drop_block(block_size=3, with_noise=True)[2:])
    assert noise.numel() == pytest.approx(theirs.numel(), rel=0.1)
    assert (noise.mean().item(), noise.std().item()) == (pytest.approx(0, abs=0.03), pytest.approx(1, abs=0.03))


def test_a_layer_that_is_called_twice_and_two_layers_draw_different_numbers() -> None:
    drop = nn.Dropout(0.5)
    calls = Calls(lambda x, _: torch.stack([drop(torch.ones_like(x)) for _ in range(calls.number)], 1))
    calls.drop, calls.number = drop, 2
    model, draws = keyed(calls)
    whole = outputs(model, draws, Micro(INDICES))
    for calls.number in (1, 2, 2):  # the first pass breaks off before the second draw
        passed = outputs(model, draws, Micro(INDICES))
        assert torch.equal(passed, whole[:, : calls.number])
    first, second = passed.unbind(1)
    assert (first == second).double().mean().item() == pytest.approx(0.5, abs=0.05)
    torch.testing.assert_close(in_pieces(model, draws), torch.stack([first, second], 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_masks_do_not_depend_on_the_number_format_or_the_memory_format(dtype: torch.dtype) -> None:
    drop = nn.Dropout(0.4)
    draws = key_draws(drop.train(), torch.zeros(1, 3, 8, 8), 0)
    model, (keys,) = KeyedModel(drop, draws), draws.keys_of(Micro(INDICES))
    reference = model(torch.ones(7, 3, 8, 8), keys) == 0
    ones = torch.ones(7, 3, 8, 8, dtype=dtype)
    assert torch.equal(model(ones, keys) == 0, reference)
    masked = model(ones.to(memory_format=torch.channels_last), keys)
    assert torch.equal(masked == 0, reference)
    assert masked.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(masked.max().item(), torch.tensor(1 / 0.6, dtype=dtype).item(), rtol=0, atol=0)
    values = torch.linspace(1, 2, 7 * 192).reshape(7, 3, 8, 8).to(dtype)
    scaled = torch.where(reference, 0, values * (1 / 0.6))
    assert torch.equal(model(values, keys), scaled), "the scale itself is not rounded to the format"


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_are_those_of_the_mask_also_through_a_recomputed_forward(inplace: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self, recompute: bool) -> None:
            super().__init__()
            self.recompute = recompute
            drop = nn.Dropout(0.5, inplace)
            self.block = nn.Sequential(nn.Conv2d(3, 4, 8, 8), drop, nn.Flatten(), nn.Dropout(0.5), drop)

        def forward(self, images: Tensor) -> Any:
            if not self.recompute:
                return self.block(images)
            return checkpoint(self.block, images, use_reentrant=False)

    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model, draws = keyed(Recomputed(recompute))
        outputs(model, draws, Micro(INDICES)).add(1).square().sum().backward()
        gradients.append(model.model.block[0].weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="with the vectors of torch's kernels turned off, the compiler's own do not compile",
)
def test_a_compiled_model_draws_the_same_masks_in_one_graph() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.drop = nn.Linear(12, 8), nn.Linear(8, 4), nn.Dropout(0.5)

        def forward(self, images: Tensor) -> Tensor:
            hidden = self.drop(self.first(images.flatten(1)))
            return self.drop(F.dropout(self.second(hidden), 0.3, self.training))

    torch.manual_seed(0)
    model = Small().train()
    draws = key_draws(model, torch.zeros(1, 3, 2, 2), 0)
    keyed_model, seen = KeyedModel(model, draws), torch.randn(7, 3, 2, 2)
    epochs = [keys for epoch in range(3) for keys in draws.keys_of(Micro(INDICES, epoch=epoch))]
    expected = [keyed_model(seen, keys).detach() for keys in epochs]
    model.compile(dynamic=False, fullgraph=True)
    for keys, plain in zip(epochs, expected, strict=True):
        compiled = keyed_model(seen, keys).detach()
        assert torch.equal(compiled == 0, plain == 0)
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)


def test_an_averaged_copy_and_evaluation_draw_nothing() -> None:
    model, draws = keyed(DigitNet().build(10, SHAPE))
    outputs(model, draws, Micro(INDICES))
    average = copy.deepcopy(model.model).eval()
    before = torch.get_rng_state()
    torch.testing.assert_close(average(images(INDICES)), model.model.eval()(images(INDICES)))
    assert torch.equal(torch.get_rng_state(), before)
    assert set(average.state_dict()) == set(DigitNet().build(10, SHAPE).state_dict())


@pytest.mark.parametrize("model", [Linear(), WhiteNet(), DigitNet(dropout=0), Timm(name="test_resnet")], ids=repr)
def test_a_model_that_draws_nothing_is_left_alone(model: Any) -> None:
    built = model.build(10, SHAPE)
    kinds = [type(module) for module in built.modules()]
    draws = key_draws(built.train(), torch.zeros(1, *SHAPE), 0)
    assert draws.keys_of(Micro(INDICES)) == ()
    assert [type(module) for module in built.modules()] == kinds


@pytest.mark.parametrize(
    ("draw", "word"),
    [
        (lambda x: x + F.gumbel_softmax(x), "own"),
        (lambda x: x + torch.poisson(x.abs()), "own"),
        (lambda x: x * random.random(), "Python's random"),
        (lambda x: x * float(np.random.rand()), "NumPy's random"),
        (lambda x: x * float(np.random.randn()), "NumPy's random"),
        (lambda x: x + torch.rand(x.shape, generator=torch.default_generator), "own"),
    ],
)
def test_an_unknown_random_call_is_named_for_the_user(draw: Callable[[Tensor], Tensor], word: str) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return draw(x)

    calls = Calls(lambda x, _: calls.own(x))
    calls.own = Own()
    random.random(), np.random.randn()  # else the first draw makes many new numbers, and a later one none
    draws = key_draws(calls.train(), torch.zeros(1, *SHAPE), 0)
    assert list(draws.unknown) == [word]
    (note,) = draws.notes
    assert word in note
    assert "on another number of ranks or micro-batches they differ" in note


@pytest.mark.parametrize("number", [0, 1])
def test_an_unknown_random_call_of_any_gpu_is_named(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            states[number] += 1
            return x

    states = torch.zeros(2, 4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [*states.clone()])
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states[0].clone())  # of the current one
    assert [*key_draws(nn.Sequential(Own()), torch.zeros(1, *SHAPE), 0).unknown] == ["0"]


def test_an_unknown_random_call_repeats_after_a_resume() -> None:
    model, draws = keyed(Calls(lambda x, _: x + F.gumbel_softmax(x)))
    first = outputs(model, draws, Micro(INDICES, step=3, number=1))
    torch.rand(5)
    assert torch.equal(outputs(model, draws, Micro(INDICES, step=3, number=1)), first)
    for other in ({"step": 4, "number": 1}, {"step": 3, "number": 2}):
        assert not torch.equal(outputs(model, draws, Micro(INDICES, **other)), first)
    another = ForwardDraws(1, draws.device, draws.keys, draws.unknown)
    assert not torch.equal(outputs(model, another, Micro(INDICES, step=3, number=1)), first), "of another seed"


def test_a_model_that_is_called_without_keys_draws_as_with_them_also_beside_unknown_numbers() -> None:
    model, draws = keyed(Calls(lambda x, on: F.dropout(x, 0.5, on) + F.gumbel_softmax(x)))
    assert isinstance(model, KeyedModel)
    micro, other = Micro(INDICES, step=3), Micro(INDICES + 1, step=4, epoch=1)
    with_keys = [outputs(model, draws, of) for of in (micro, other)]
    for of, expected in zip((micro, other), with_keys, strict=True):
        draws.set_keys(of)
        assert torch.equal(model.model(images(of.indices)), expected)


class Rooted(nn.Module):
    """Draws in the model itself, in a way that is not known, and counts its passes."""

    def __init__(self, returned: Callable[[Tensor], Any] = lambda x: x.mean((2, 3))) -> None:
        super().__init__()
        self.norm, self.returned = nn.BatchNorm2d(3), returned
        self.norm.eval()

    def forward(self, x: Tensor) -> Any:
        return self.returned(self.norm(F.gumbel_softmax(x)))


def test_a_look_at_a_model_leaves_its_buffers_its_modes_and_the_generators_as_they_were() -> None:
    model, state = Rooted(), torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    draws = key_draws(model, torch.zeros(1, *SHAPE), 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == [True, False]
    assert draws.unknown == ("Rooted",), "the model itself has no name but its class"
    assert draws.keys_of(Micro(INDICES)) == ()
    assert ForwardDraws(0, torch.device("cpu")).notes == []


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (lambda x: x.mean((2, 3)), "[3]"),
        (lambda x: x[:, :2], "[2, 64, 64]"),
        (lambda x: x.mean((1, 2, 3)), "[]"),
        (lambda x: {"logits": x}, "a dict"),
        (lambda x: (x, x), "a tuple"),
    ],
)
def test_a_look_at_a_model_says_what_it_returns_for_an_example(returned: Callable[[Tensor], Any], shown: str) -> None:
    assert key_draws(Rooted(returned), torch.zeros(1, *SHAPE), 0).returned == shown


def test_every_module_that_draws_unknown_numbers_is_named_once() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + F.gumbel_softmax(x)

    model = nn.Sequential(nn.Sequential(Own(), nn.ReLU()), Own(), nn.Dropout(0.5))
    draws = key_draws(model, torch.zeros(1, *SHAPE), 0)
    assert (draws.unknown, draws.keys.draws) == (("0.0", "1"), 1)
    assert draws.notes == [
        "the model draws random numbers in a way that Lockstep does not know (0.0, 1); on another number of ranks or "
        "micro-batches they differ, and so does the run"
    ]


def test_a_module_that_fails_is_left_behind_by_what_watches_the_others() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("a branch that is not taken")

    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.drop = Failing(), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            with suppress(ValueError):
                x = self.one(x)
            return F.dropout(self.drop(x), 0.5, self.training)

    model = Trying()
    draws = key_draws(model, torch.zeros(1, *SHAPE), 0)
    assert draws.keys.draws == 2
    assert [len(getattr(module, "_draw_sites", ())) for module in model.modules()] == [1, 0, 1]


@pytest.mark.parametrize("drops", [True, False])
def test_blank_inputs_have_keys_where_a_model_draws(drops: bool) -> None:
    model = nn.Sequential(nn.Dropout(0.5 * drops), nn.Flatten())
    draws = key_draws(model, torch.zeros(1, *SHAPE), 0)
    blank = torch.zeros(2, *SHAPE)
    first, *keys = draws.blank_inputs(blank)
    assert first is blank
    assert [(own.shape, own.dtype, own.any().item()) for own in keys] == [((2, 2), torch.int64, False)] * drops
    assert isinstance(draws.keyed(model), KeyedModel) == drops
    if drops:
        draws.set_keys(Micro(INDICES))
        seen = torch.ones(7, *SHAPE)
        assert torch.equal(model(seen), draws.keyed(model)(seen, *draws.keys_of(Micro(INDICES))))


def test_a_pass_that_was_cut_within_a_layer_changes_no_number_of_the_next_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.is_cut = nn.Dropout(0.5), False

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(x) if self.is_cut else self.drop(self.drop(x) + 1)

    for depth in (0, 1, 3):
        inner = Twice()
        whole: nn.Module = inner
        for _ in range(depth):
            whole = nn.Sequential(whole)
        model, draws = keyed(whole)
        expected = outputs(model, draws, Micro(INDICES))
        inner.is_cut = True
        outputs(model, draws, Micro(INDICES))
        inner.is_cut = False
        assert torch.equal(outputs(model, draws, Micro(INDICES)), expected)


def test_another_seed_draws_other_numbers() -> None:
    outputs_of_seeds = []
    for seed in (0, 1):
        model, draws = keyed(nn.Sequential(nn.Dropout(0.5), nn.Flatten()), seed)
        outputs_of_seeds.append(outputs(model, draws, Micro(INDICES)))
    assert not torch.equal(*outputs_of_seeds)
