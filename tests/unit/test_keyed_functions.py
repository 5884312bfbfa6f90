"""Keyed attention and dropped blocks with drawn numbers that are known: against torch, or by a rule written anew."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.stochastic import functions
from lockstep.stochastic.functions import KEYED, drop_block, scaled_dot_product_attention

pytestmark = pytest.mark.numerics

LOWEST, HIGHEST = -(2**31), 2**31 - 1


def keeping(shape: torch.Size, like: Tensor) -> Tensor:
    """Bits that are below every probability."""
    return torch.full(shape, LOWEST, dtype=torch.int32)


QUERY, KEY = torch.randn(2, 4, 3, 5, dtype=torch.float64), torch.randn(2, 4, 6, 5, dtype=torch.float64)
VISIBLE = torch.rand(2, 1, 3, 6, generator=torch.Generator().manual_seed(0)) < 0.7
VISIBLE[..., 0] = True
BIAS = torch.randn(3, 6, dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"scale": 0.3}, {"is_causal": True}, {"is_causal": True, "scale": 2.0}),
        *({"attn_mask": VISIBLE}, {"attn_mask": BIAS}, {"attn_mask": VISIBLE, "scale": 0.3}),
    ],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("turned", [False, True], ids=["more keys than queries", "more queries than keys"])
def test_attention_in_which_all_is_kept_is_torchs_times_a_factor(options: dict[str, Any], turned: bool) -> None:
    query, key = (KEY, QUERY) if turned else (QUERY, KEY)
    if turned and "attn_mask" in options:
        mask = options["attn_mask"].transpose(-1, -2)
        options = {**options, "attn_mask": mask if mask.is_floating_point() else mask | ~mask.any(-1, keepdim=True)}
    value = torch.randn_like(key)
    expected = F.scaled_dot_product_attention(query, key, value, **options) / (1 - 0.25)
    actual = scaled_dot_product_attention(keeping, query, key, value, dropout_p=0.25, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_shared_heads_of_keys_are_torchs(heads: int) -> None:
    key, value = KEY[:, :heads], torch.randn_like(KEY[:, :heads])
    expected = F.scaled_dot_product_attention(QUERY, key, value, enable_gqa=True) / 0.5
    actual = scaled_dot_product_attention(keeping, QUERY, key, value, dropout_p=0.5, enable_gqa=True)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_changes_its_input_where_that_is_asked_for_alone(inplace: bool) -> None:
    images = torch.ones(2, 3)
    result = KEYED[F.dropout](keeping, images, 0.25, True, inplace)
    assert torch.equal(result, torch.full((2, 3), 1 / 0.75))
    assert (result is images) == inplace
    assert torch.equal(images, result if inplace else torch.ones(2, 3))


def layer(size: int, **options: Any) -> Any:
    usual = {"gamma_scale": 1.0, "drop_prob": 0.1, "couple_channels": False, "with_noise": False}
    return SimpleNamespace(**usual | {"scale_by_keep": False} | options, block_size=size)


@pytest.mark.parametrize("sides", [(7, 9), (9, 7), (4, 11), (5, 5)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 100])
def test_a_block_has_its_size_on_oblong_images_and_is_cut_at_the_border(size: int, sides: tuple[int, int]) -> None:
    height, width = sides
    tall, wide = min(size, height), min(size, width)
    for row, column in itertools.product((0, 2, height - 1), (0, 2, width - 1)):

        def one(shape: torch.Size, like: Tensor, place: tuple[int, int] = (row, column)) -> Tensor:
            bits = torch.full(shape, HIGHEST, dtype=torch.int32)
            bits[0, 1, place[0], place[1]] = LOWEST
            return bits

        dropped = drop_block(one, layer(size), torch.ones(2, 3, height, width)) == 0
        expected = torch.zeros(2, 3, height, width, dtype=torch.bool)
        top, left = row - tall // 2, column - wide // 2
        expected[0, 1, max(0, top) : top + tall, max(0, left) : left + wide] = True
        assert torch.equal(dropped, expected), (row, column)


@pytest.mark.parametrize("sides", [(7, 9), (9, 7), (4, 11)])
@pytest.mark.parametrize("size", [1, 3, 6, 100])
def test_a_centre_is_as_likely_as_the_paper_says(
    size: int, sides: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    height, width = sides
    tall, wide = min(size, height), min(size, width)
    probabilities: list[float] = []

    def below(bits: Tensor, probability: float) -> Tensor:
        probabilities.append(probability)
        return bits < LOWEST

    monkeypatch.setattr(functions, "below", below)
    drop_block(keeping, layer(size, gamma_scale=0.5, drop_prob=0.2), torch.ones(1, 2, height, width))
    dropped, centres = 0.5 * 0.2 * height * width / (tall * wide), (height - tall + 1) * (width - wide + 1)
    assert probabilities == [pytest.approx(dropped / centres, rel=1e-12)]


def test_an_example_is_scaled_by_what_is_left_of_itself() -> None:
    def first(shape: torch.Size, like: Tensor) -> Tensor:
        bits = torch.full(shape, HIGHEST, dtype=torch.int32)
        bits[0, 0, 1, 1] = LOWEST
        return bits

    images = torch.ones(2, 3, 4, 5)
    one, other = drop_block(first, layer(3, scale_by_keep=True), images)
    assert torch.equal(other, images[1])
    assert (one == 0).sum((1, 2)).tolist() == [9, 0, 0]
    assert one[one != 0].tolist() == [pytest.approx(60 / 51, rel=1e-6)] * 51
    assert one.mean().item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-2.0, 3.0), (5.0, 5.5)])
def test_uniform_and_normal_numbers_have_the_ends_and_the_mean_that_are_asked_for(low: float, high: float) -> None:
    def number(draw: Any, bits: int, first: float, second: float) -> float:
        constant = partial(torch.full, fill_value=bits, dtype=torch.int32)
        blank = torch.empty(1, dtype=torch.float64)
        return KEYED[draw](lambda shape, like: constant(shape), blank, first, second).item()

    span = high - low
    ends = [number(torch.Tensor.uniform_, bits, low, high) for bits in (0, LOWEST, -1)]
    assert ends == pytest.approx([low, (low + high) / 2, high], abs=1e-6 * span)
    assert low == ends[0] <= max(ends) < high
    means = [number(torch.Tensor.normal_, bits, low, span) for bits in (LOWEST, 0, HIGHEST)]
    assert means[1] == pytest.approx(low, abs=1e-8 * span)
    assert [mean - low for mean in means] == pytest.approx([-6.33 * span, 0, 6.33 * span], abs=0.02 * span)


def halves(shape: torch.Size, like: Tensor) -> Tensor:
    """Bits of which the first half is below every probability, and the second half above."""
    number = shape.numel()
    return torch.where(torch.arange(number) < number // 2, LOWEST, HIGHEST).to(torch.int32).view(shape)


def test_every_dropout_of_torch_has_the_mask_and_the_place_of_its_result() -> None:
    blank = torch.ones(2, 4, 3, 5)
    for whole in (F.dropout, torch.dropout):
        assert torch.equal(KEYED[whole](halves, blank, 0.75, True), torch.cat([4 * blank[:1], 0 * blank[:1]]))
    for function in (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout):
        shapes: list[torch.Size] = []
        KEYED[function](lambda shape, like, seen=shapes: seen.append(shape) or keeping(shape, like), blank, 0.5, True)
        assert shapes == [torch.Size([2, 4, 1, 1])]
    images = torch.ones(2, 3)
    assert KEYED[torch.dropout_](keeping, images, 0.5, True) is images
    assert torch.equal(images, 2 * torch.ones(2, 3))
    for p, training in ((0.5, False), (0.0, True)):
        assert KEYED[F.dropout](None, images, p, training) is images, "nothing is drawn"
    nothing = KEYED[F.dropout](lambda shape, like: torch.full(shape, HIGHEST, dtype=torch.int32), blank, 1.0, True)
    assert torch.equal(nothing, 0 * blank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_coin_is_fair_unless_a_probability_is_asked_for(dtype: torch.dtype) -> None:
    def bits(shape: torch.Size, like: Tensor) -> Tensor:
        return torch.tensor([LOWEST, -(2**30), -1, 0, 2**22, 2**30, HIGHEST], dtype=torch.int32)

    def below(share: float, numbers: tuple[float, ...]) -> list[float]:
        return [float(number < share) for number in numbers]

    ascending = (0, 0.25, 0.5 - 2**-32, 0.5, 0.5 + 2**-10, 0.75, 1 - 2**-32)
    # The numbers where each has its own probability.
    unsigned = (0.5, 0.75, 1 - 2**-24, 0, 2**-10, 0.25, 0.5 - 2**-24)
    blank = torch.empty(7, dtype=dtype)
    assert KEYED[torch.Tensor.bernoulli_](bits, blank).tolist() == below(0.5, ascending)
    for share in (0.0, 0.0005, 0.25, 0.7, 1.0):
        of_each = torch.full((7,), share)
        assert KEYED[torch.Tensor.bernoulli_](bits, blank, share).tolist() == below(share, ascending)
        assert KEYED[torch.Tensor.bernoulli_](bits, blank, of_each).tolist() == below(share, unsigned)
        for function in (torch.bernoulli, torch.Tensor.bernoulli):
            assert KEYED[function](bits, of_each).tolist() == below(share, unsigned), "its input has the shares"
            assert KEYED[function](bits, torch.full((7,), 0.9), share).tolist() == below(share, ascending)


def test_a_part_of_a_tensor_is_filled_in_place() -> None:
    def bits(shape: torch.Size, like: Tensor) -> Tensor:
        return torch.full(shape, 2**30, dtype=torch.int32)

    for name in ("uniform_", "normal_", "bernoulli_"):
        whole = torch.full((3, 2), 7.0)
        part = KEYED[getattr(torch.Tensor, name)](bits, whole[1:])
        assert torch.equal(whole[1:], part), name
        assert (whole[0] == 7).all()
        assert (whole[1:] != 7).all()


def test_numbers_of_a_generator_of_the_callers_own_are_torchs() -> None:
    def own() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    def refused(shape: torch.Size, like: Tensor) -> Tensor:
        raise AssertionError("a keyed draw")

    expected = torch.rand(4, generator=own()), torch.empty(4).normal_(generator=own())
    with functions.KeyedFunctions(refused):
        assert torch.equal(torch.rand(4, generator=own()), expected[0])
        assert torch.equal(torch.empty(4).normal_(generator=own()), expected[1])
        draws = (torch.rand, torch.randn, lambda *_, **how: torch.empty(4).uniform_(**how))
        for draw in (*draws, lambda *_, **how: torch.bernoulli(torch.full((4,), 0.5), **how)):
            with pytest.raises(AssertionError, match="a keyed draw"):
                draw(4, generator=None)  # as of a caller that has none


def test_a_parameter_is_filled_in_place_without_a_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    for function in (torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.bernoulli_):
        assert KEYED[function](keeping, parameter) is parameter
        assert parameter.grad_fn is None
    assert KEYED[torch.rand_like](keeping, torch.ones(3)).tolist() == [0.5] * 3
    assert KEYED[torch.rand](keeping, 3).tolist() == [0.5] * 3, "the bits of -2**31 are the middle"
    assert KEYED[torch.randn_like](keeping, torch.ones(3)).tolist() == KEYED[torch.randn](keeping, 3).tolist()
    assert (KEYED[torch.randn](keeping, 3) < -5).all()


@pytest.mark.parametrize("draw", [torch.rand, torch.randn, torch.rand_like, torch.randn_like])
def test_new_numbers_have_the_dtype_and_the_device_that_are_asked_for(draw: Any) -> None:
    of = torch.ones(2, 3) if draw in (torch.rand_like, torch.randn_like) else (2, 3)
    assert KEYED[draw](keeping, of).dtype is torch.float32
    numbers = KEYED[draw](keeping, of, dtype=torch.float64, device="meta")
    assert (numbers.shape, numbers.dtype, numbers.device.type) == ((2, 3), torch.float64, "meta")
