"""Random numbers of elements: balanced, uncorrelated, and of torch's distributions."""

import math

import pytest
import torch
from torch import Tensor

from lockstep.core import rng
from lockstep.core.data_protocols import Shard
from lockstep.stochastic import numbers
from lockstep.stochastic.numbers import (
    ForwardKeys,
    Site,
    below,
    forward_keys,
    normal,
    random_bits,
    uniform_from_bits,
)

EXAMPLES, ELEMENTS = 4096, 1024


def words(examples: int = EXAMPLES, draw: int = 0) -> Tensor:
    """The random words (examples, 2) of one draw, int32, as a run derives them."""
    keys = rng.sample_keys(5, 0, torch.arange(examples), rng.FORWARD)
    return rng.draw(keys[:, None], torch.tensor([draw])).view(torch.int32).view(examples, 2)


def standardised(bits: Tensor, probability: float) -> Tensor:
    """Masks with mean 0 and variance 1, if each element is kept with `probability`."""
    return (below(bits, probability).double() - probability) / math.sqrt(probability * (1 - probability))


@pytest.mark.parametrize("probability", [0.5, 0.1, 0.9, 0.75])
def test_masks_are_balanced_by_element_by_example_and_in_all(probability: float) -> None:
    mask = standardised(random_bits(words(), ELEMENTS), probability)
    # The scores of independent masks are normal: the largest of n exceeds 5.5 sigma in 1 of 5,000 tries.
    assert abs(mask.mean()) * math.sqrt(mask.numel()) < 4
    for dim, count in ((0, EXAMPLES), (1, ELEMENTS)):
        scores = mask.mean(dim) * math.sqrt(count)
        assert scores.abs().max() < 5.5
        assert scores.std().item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("probability", [0.5, 0.1])
def test_masks_are_uncorrelated_between_elements_and_between_examples(probability: float) -> None:
    mask = standardised(random_bits(words(), ELEMENTS), probability)
    for one, count in ((mask.T, EXAMPLES), (mask[:ELEMENTS], ELEMENTS)):
        scores = (one @ one.T) / math.sqrt(count)
        scores.fill_diagonal_(0)
        # Half a million pairs: a correlated pair would have far more than 8 sigma.
        assert scores.abs().max() < 8
        assert scores.std().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("equal", [0, 1])
def test_examples_that_share_one_of_their_words_are_uncorrelated_too(equal: int) -> None:
    shared = words(256)
    shared[:, equal] = shared[0, equal]
    mask = standardised(random_bits(shared, ELEMENTS), 0.5)
    scores = mask @ mask.T / math.sqrt(ELEMENTS)
    scores.fill_diagonal_(0)
    assert scores.abs().max() < 8


def test_masks_are_uncorrelated_between_layers() -> None:
    layers = torch.stack([standardised(random_bits(words(64, draw), ELEMENTS), 0.5).flatten() for draw in range(64)])
    scores = layers @ layers.T / math.sqrt(layers.shape[1])
    scores.fill_diagonal_(0)
    assert scores.abs().max() < 5.5


def test_single_numbers_of_examples_are_balanced_and_uncorrelated_between_layers() -> None:
    layers = torch.stack([standardised(random_bits(words(EXAMPLES, draw), 1), 0.9).flatten() for draw in range(200)])
    scores = layers @ layers.T / math.sqrt(EXAMPLES)
    scores.fill_diagonal_(0)
    assert scores.abs().max() < 7
    assert (layers.mean(1) * math.sqrt(EXAMPLES)).abs().max() < 5


def test_uniform_numbers_fill_their_cells_evenly_and_never_reach_one() -> None:
    bits = random_bits(words(), ELEMENTS)
    drawn = uniform_from_bits(bits, torch.float32)
    counts = torch.histc(drawn, 256, 0, 1)
    expected = drawn.numel() / 256
    # Chi-squared of 255 degrees of freedom: 255 +- 22.6.
    assert ((counts - expected) ** 2 / expected).sum().item() == pytest.approx(255, abs=5 * 22.6)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert uniform_from_bits(torch.tensor([-1, -(2**31), 2**31 - 1], dtype=torch.int32), dtype).max() < 1
        assert uniform_from_bits(bits, dtype).min() >= 0


def lowbias32(x: int) -> int:
    """The hash of Chris Wellons (2018): https://nullprogram.com/blog/2018/07/31/."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 16


def as_int32(x: int) -> int:
    return x - 2**32 * (x >= 2**31)


def test_the_bits_of_an_element_are_those_of_published_hashes_of_its_place_and_its_example() -> None:
    words = torch.tensor([[3, -5], [-(2**31), 2**31 - 1]], dtype=torch.int32)
    positions = [lowbias32(number) for number in range(5)]
    assert numbers._positions(5, torch.device("cpu")).tolist() == [*map(as_int32, positions)]
    assert numbers._positions(70_000, torch.device("cpu"))[-3:].tolist() == [
        as_int32(lowbias32(number)) for number in (69_997, 69_998, 69_999)
    ]
    for (first, second), row in zip(words.tolist(), random_bits(words, 5).tolist(), strict=True):
        mixed = [(second + (place ^ first % 2**32) * 0x7FEB352D) % 2**32 for place in positions]
        assert row == [as_int32((x ^ x >> 15) * 0x846CA68B % 2**32) for x in mixed]


def test_normal_numbers_have_the_moments_of_normal_numbers() -> None:
    drawn = normal(random_bits(words(), ELEMENTS), torch.float64)
    assert drawn.isfinite().all()
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert (drawn**power).mean().item() == pytest.approx(moment, abs=0.03)


def test_a_probability_is_exact_to_2_to_the_minus_32() -> None:
    lowest, highest = torch.tensor([-(2**31)], dtype=torch.int32), torch.tensor([2**31 - 1], dtype=torch.int32)
    assert below(lowest, 2.0**-32).item()
    assert not below(lowest, 0.0).item()
    assert not below(highest, 1 - 2.0**-32).item()
    assert below(highest, 1.0).item()
    place = torch.tensor([2_576_980_377, 2_576_980_378]) - 2**31  # 0.6 is 2,576,980,377.6 of 2**32
    assert below(place.int(), 0.6).tolist() == [True, False], "the nearest one"


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_mix_partner_has_no_key_and_changes_no_other(number: int) -> None:
    rows = torch.arange(30, 30 + number + 1)
    mixed = Shard(7, 2, rows, rows, rows, 8, 0, 1, mix_partner=True)
    assert torch.equal(forward_keys(3, mixed), forward_keys(3, Shard(7, 2, *[rows[:number]] * 3, 8, 0, 1)))
    assert forward_keys(3, mixed).shape == (number, 2)


@pytest.mark.parametrize("examples", [0, 1, 3])
def test_a_draw_has_two_words_for_each_example_or_two_for_the_whole_batch(examples: int) -> None:
    shard = Shard(2, 1, torch.empty(examples, 1), *2 * (torch.arange(examples),), 8, 0, 1)
    keys, own = forward_keys(5, shard), ForwardKeys()
    own.draws = 2
    own.set(keys)
    for number in range(2):
        expected = rng.draw(keys, torch.tensor([number])).view(torch.int32).view(examples, 2, 2)
        assert torch.equal(own.words(number, -1, of_batch=False), expected[:, 0])
        assert own.words(number, -1, of_batch=True).shape == (1, 2)
        if examples:
            assert torch.equal(own.words(number, -1, of_batch=True), expected[:1, 1])


@pytest.mark.parametrize("mix_partner", [False, True])
@pytest.mark.parametrize("examples", [0, 1, 2, 3])
def test_the_first_examples_of_a_piece_are_its_own_ones(examples: int, mix_partner: bool) -> None:
    rows = torch.arange(3 + mix_partner)
    piece = Shard(7, 2, rows[:, None], 10 + rows, 20 + rows, 8, 0, 1, mix_partner=mix_partner)
    first = piece.first(examples)
    assert (first is piece) == (examples == 3)
    assert first.labels.tolist() == [10, 11, 12][:examples]
    if first is not piece:
        assert first.images.flatten().tolist() == [0, 1, 2][:examples]
        assert (first.indices.tolist(), first.mix_partner) == ([20, 21, 22][:examples], False)


def site_of(examples: int, batch_dim: int | None) -> Site:
    keys = ForwardKeys()
    keys.draws = 3
    keys.set(torch.arange(2 * examples).view(examples, 2))
    return Site(1, batch_dim, keys)


@pytest.mark.parametrize(("shape", "batch_dim"), [((4, 5), 0), ((5, 4), 1), ((8, 5), 0), ((3, 4, 5), 1), ((3, 8), 1)])
def test_an_example_has_the_bits_of_its_own_rows_wherever_the_batch_is(
    shape: tuple[int, ...], batch_dim: int
) -> None:
    site = site_of(4, batch_dim)
    bits = site.bits(torch.Size(shape), torch.zeros(1))
    assert (bits.shape, bits.dtype) == (shape, torch.int32)
    rows = bits.movedim(batch_dim, 0).reshape(4, -1)
    words = site.keys.words(1, -1, of_batch=False)
    assert torch.equal(rows, random_bits(words, rows.shape[1]))


def test_numbers_of_the_batch_have_the_words_of_the_step() -> None:
    site = site_of(4, None)
    bits = site.bits(torch.Size([2, 3]), torch.zeros(1))
    assert torch.equal(bits.view(1, 6), random_bits(site.keys.words(1, -1, of_batch=True), 6))


def test_a_layer_of_another_rank_draws_shapes_alone_and_none_are_drawn_of_no_example() -> None:
    meta = site_of(4, 0).bits(torch.Size([8, 5]), torch.empty(1, device="meta"))
    assert (meta.shape, meta.dtype, meta.is_meta) == ((8, 5), torch.int32, True)
    for examples, shape in ((0, (0, 5)), (4, (0, 5))):
        assert site_of(examples, 0).bits(torch.Size(shape), torch.zeros(1)).shape == shape
    with pytest.raises(AssertionError, match=r"^6 rows are drawn for, in a batch of 4 examples$"):
        site_of(4, 0).bits(torch.Size([6, 5]), torch.zeros(1))


def test_one_number_of_an_example_is_its_second_word() -> None:
    assert torch.equal(random_bits(own := words(5), 1), own[:, 1:])


@pytest.mark.parametrize(
    ("dtype", "digits"), [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24), (torch.float64, 24)]
)
def test_a_uniform_number_has_the_upper_bits_as_its_digits(dtype: torch.dtype, digits: int) -> None:
    bits = torch.tensor([0, 2**31 - 1, -(2**31), -1, 1 << (32 - digits)], dtype=torch.int32)
    step = 2.0**-digits
    expected = [0.0, 0.5 - step, 0.5, 1 - step, step]
    numbers = uniform_from_bits(bits, dtype)
    assert numbers.dtype is dtype
    assert numbers.double().tolist() == expected


def test_a_normal_number_is_the_inverse_of_its_share() -> None:
    bits = torch.tensor([-(2**30), 0, 2**30], dtype=torch.int32)
    expected = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    torch.testing.assert_close(normal(bits, torch.float64), expected, rtol=1e-6, atol=1e-8)
    assert normal(bits, torch.bfloat16).dtype is torch.bfloat16
