"""Random numbers: the published generator, and the numbers derived from it."""

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.core import rng

# The first outputs of splitmix64, as published with its reference implementation (prng.di.unimi.it) and used
# as known answers by other libraries.
KNOWN = {
    1234567: [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431],
    0: [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F],
}
SEEDS = st.integers(-(2**63), 2**64 - 1)


def unsigned(words: torch.Tensor) -> list[int]:
    """int64 words read as unsigned numbers, from 0 to 2^64 - 1."""
    return [word % 2**64 for word in words.tolist()]


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Pearson's correlation of two samples."""
    return float(torch.corrcoef(torch.stack([one, other]).double())[0, 1])


@pytest.mark.parametrize("seed", KNOWN)
def test_the_published_numbers_of_splitmix64_come_out(seed: int) -> None:
    expected = KNOWN[seed]
    assert unsigned(rng.draw(torch.tensor(seed), torch.arange(len(expected)))) == expected
    assert unsigned(torch.stack([rng.draw(torch.tensor(seed), n) for n in range(len(expected))])) == expected


@given(SEEDS, st.lists(st.integers(0, 2**40), max_size=4))
@example(2**63 - 1, [])
@example(2**63, [])
@example(2**64 - 1, [])
def test_a_key_is_a_pure_function_of_its_words(seed: int, words: list[int]) -> None:
    assert rng.key(seed, *words) == rng.key(seed % 2**64, *words)
    assert -(2**63) <= rng.key(seed, *words) < 2**63


@given(SEEDS, st.integers(0, 1000))
def test_words_wrap_as_unsigned_numbers_of_64_bits_do(seed: int, n: int) -> None:
    z = (seed + (n + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    assert rng.key(seed, n) % 2**64 == z ^ z >> 31
    assert unsigned(rng.draw(rng.key(seed), torch.tensor([n]))) == [z ^ z >> 31]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50), st.integers(0, 20))
def test_a_uniform_number_is_the_upper_24_bits_exactly(keys: list[int], n: int) -> None:
    words = unsigned(rng.draw(torch.tensor(keys), n))
    assert rng.uniform(torch.tensor(keys), n).double().mul(2**24).tolist() == [word >> 40 for word in words]


@given(SEEDS, st.integers(0, 10**6), st.integers(0, 300))
def test_a_permutation_holds_each_index_once(seed: int, epoch: int, n: int) -> None:
    assert sorted(rng.permutation(seed, epoch, n).tolist()) == list(range(n))


def test_the_order_changes_with_the_epoch_and_with_the_seed() -> None:
    orders = {tuple(rng.permutation(seed, epoch, 50).tolist()) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@pytest.mark.parametrize(("seed", "epoch"), [(1, 0), (0, 1)])
def test_the_next_seed_and_the_next_epoch_change_every_sample(seed: int, epoch: int) -> None:
    indices = torch.arange(50_000)
    here, there = rng.sample_keys(0, 0, indices), rng.sample_keys(seed, epoch, indices)
    assert not bool((here == there).any())
    assert abs(correlation(rng.uniform(here, 0), rng.uniform(there, 0))) < 0.02


def test_each_purpose_of_a_seed_and_each_step_of_dropout_has_a_stream() -> None:
    lasting = (rng.LASTING, rng.CUTOUT, rng.FORWARD, rng.FORWARD_BATCH, rng.BALANCED)
    keys = {rng.key(7, purpose, 0) for purpose in (rng.ORDER, rng.AUGMENT, rng.GENERATOR, rng.MIX, *lasting)}
    assert len(keys) == 9
    ordering = rng.draw(rng.key(7, rng.ORDER, 0), torch.arange(100))
    assert not bool((ordering == rng.sample_keys(7, 0, torch.arange(100))).any())
    seeds = {rng.generator_seed(0, step, number) for step in range(100) for number in range(10)}
    assert len(seeds) == 1000
    assert min(seeds) >= 0


def test_each_purpose_has_keys_of_its_own_for_the_samples() -> None:
    purposes = [rng.AUGMENT, rng.MIX, rng.LASTING, rng.CUTOUT, rng.FORWARD, rng.BALANCED, rng.ERASE]
    keys = torch.cat([rng.sample_keys(7, 3, torch.arange(100), purpose) for purpose in purposes])
    assert len({*keys.tolist()}) == 100 * len(purposes)


def test_some_numbers_of_an_example_are_the_same_in_all_epochs_and_the_others_are_not() -> None:
    first, second = (rng.SampleRNG(3, epoch, torch.arange(100)) for epoch in (0, 1))
    assert torch.equal(first.epoch_invariant(2), second.epoch_invariant(2))
    assert not bool((first.epoch_invariant(2) == first.epoch_invariant(3)).any())
    assert not bool((first.uniform(2) == second.uniform(2)).any())


def test_a_resume_with_a_later_version_draws_the_same_numbers() -> None:
    names = ("ORDER", "AUGMENT", "GENERATOR", "MIX", "LASTING", "CUTOUT", "FORWARD", "FORWARD_BATCH", "BALANCED")
    assert [getattr(rng, name) for name in (*names, "ERASE", "MIX_BATCH")] == [*range(1, 12)]
    for seed, step, micro_batch in ((0, 1, 0), (7, 3, 1), (7, 1, 3), (2**63, 10**6, 0)):
        word = rng.key(seed, 3, step, micro_batch) % 2**64
        assert rng.generator_seed(seed, step, micro_batch) == word >> 1
    indices = torch.arange(5)
    draws = rng.SampleRNG(3, 2, indices)
    assert torch.equal(draws.keys, rng.draw(rng.key(3, 2, 2), indices))
    assert torch.equal(draws.epoch_invariant(4), rng.uniform(rng.draw(rng.key(3, 5), indices), 4))
    assert torch.equal(rng.permutation(3, 2, 9), rng.draw(rng.key(3, 1, 2), torch.arange(9)).argsort())


@pytest.mark.parametrize(("examples", "numbers"), [(5, 4), (5, 1), (5, 5), (1, 4), (1, 1), (5, 0), (0, 4)])
def test_several_numbers_of_an_example_are_those_that_it_has_one_by_one(examples: int, numbers: int) -> None:
    draws = rng.SampleRNG(3, 1, torch.arange(examples))
    several = draws.uniform(torch.arange(numbers))
    assert several.shape == (examples, numbers)
    for number in range(numbers):
        assert torch.equal(several[:, number], draws.uniform(number))


def test_a_seed_of_a_forward_pass_is_that_of_torchs_generator() -> None:
    torch.manual_seed(12)
    expected = torch.rand(3)
    torch.rand(7)
    rng.reseed(torch.device("cpu"), 12)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(("device", "seeds"), [("cpu", []), ("cuda", [12])])
def test_the_generators_of_all_gpus_are_seeded_where_the_pass_is_on_one(
    device: str, seeds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    state = torch.get_rng_state()
    rng.reseed(torch.device(device), 12)
    assert (seeded, torch.initial_seed()) == (seeds, 12), "the host draws too"
    torch.set_rng_state(state)


def test_numbers_are_drawn_on_the_device_that_needs_them() -> None:
    indices = torch.arange(3, device="meta")
    draws = rng.SampleRNG(3, 1, indices)
    drawn = [draws.keys, draws.uniform(1), draws.uniform(indices), draws.epoch_invariant(2)]
    drawn += [rng.permutation(3, 1, 3, torch.device("meta")), rng.sample_keys(3, 1, indices, rng.MIX)]
    assert [(numbers.device.type, numbers.dtype) for numbers in drawn] == [
        ("meta", dtype) for dtype in (torch.int64, *[torch.float32] * 3, torch.int64, torch.int64)
    ]


def test_the_key_of_an_example_has_the_purpose_before_the_epoch_as_the_order_of_an_epoch_has() -> None:
    indices = torch.tensor([0, 5, 2**40])
    for purpose, epoch in itertools.product((rng.AUGMENT, rng.MIX, rng.CUTOUT), (0, 1, 2, 9)):
        keys = rng.sample_keys(3, epoch, indices, purpose)
        assert torch.equal(keys, rng.draw(rng.key(3, purpose, epoch), indices))
    order = torch.argsort(rng.draw(rng.key(3, rng.ORDER, 2), torch.arange(50)), stable=True)
    assert torch.equal(rng.permutation(3, 2, 50), order)
