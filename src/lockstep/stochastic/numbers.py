"""Random numbers of a forward pass: the keys of its examples, and a number for every element from two words of a key.

The rest of Lockstep draws from splitmix64, which needs 64-bit products, and CPUs have no vector instruction for them.
A dropout mask needs a number for each element of each layer, so this is a 32-bit hash: `lowbias32` of the element's
position (Wellons 2018, "Prospecting for hash functions"), then its last rounds with the two words of the example.
int32 arithmetic wraps in the same way on every device, so the CPU and a GPU agree to the bit.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.core.data_protocols import Shard
from lockstep.core.rng import FORWARD, FORWARD_BATCH, draw, key, sample_keys

# The multipliers of lowbias32, as the int32 with the same bits.
_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
_LOWEST = -(1 << 31)
# The binary digits of a uniform number: as many as the dtype's significand has, so that none is rounded up to 1.
_DIGITS = {torch.bfloat16: 8, torch.float16: 11}


def _folded(x: Tensor, bits: int) -> Tensor:
    """`x ^ (x >> bits)` in place, with a shift that fills in zeros; torch's shift copies the sign."""
    shifted = x >> bits
    shifted &= (1 << (32 - bits)) - 1
    x ^= shifted
    return x


def _positions(elements: int, device: torch.device) -> Tensor:
    """`lowbias32` of 0, 1, ...: int32 (elements,), all different."""
    x = _folded(torch.arange(elements, dtype=torch.int32, device=device), 16) * _FIRST
    return _folded(_folded(x, 15) * _SECOND, 16)


_cached_positions = functools.lru_cache(maxsize=256)(_positions)


def random_bits(words: Tensor, elements: int) -> Tensor:
    """Random bits for `elements` elements of each example, int32 (b, elements). The upper bits are the best ones.

    `words` is int32 (b, 2), random and independent. Masks made from these bits pass the tests of
    tests/unit/test_stochastic_numbers.py: balance, and correlation between elements, examples and layers.
    """
    if elements == 1:
        return words[:, 1:]
    positions = _positions if torch.compiler.is_compiling() else _cached_positions
    x = positions(elements, words.device) ^ words[:, :1]
    x = torch.add(words[:, 1:], x, alpha=_FIRST)
    x = _folded(x, 15)
    x *= _SECOND
    return x


def below(bits: Tensor, probability: float) -> Tensor:
    """Whether each number is below `probability`, to 2**-32: bool, of the shape of `bits`."""
    threshold = round(probability * 2.0**32) + _LOWEST
    return bits < threshold if threshold < -_LOWEST else torch.ones_like(bits, dtype=torch.bool)


def uniform_from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1) with as many digits as `dtype` holds, at most 24."""
    digits = _DIGITS.get(dtype, 24)
    return (bits.bitwise_right_shift(32 - digits) & ((1 << digits) - 1)).to(dtype) * 2.0**-digits


def normal(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers, by the inverse distribution function; devices may differ in the last digit."""
    centred = (bits.to(torch.float64) + 0.5) * 2.0**-31  # in (-1, 1)
    return (torch.erfinv(centred) * math.sqrt(2)).to(dtype)


def forward_keys(seed: int, micro: Shard) -> Tensor:
    """The keys of a forward pass, int64 (b, 2): the key of each example in this epoch, and the key of the step."""
    examples = sample_keys(seed, micro.epoch, micro.indices[: len(micro.labels)], FORWARD)
    return torch.stack([examples, torch.full_like(examples, key(seed, FORWARD_BATCH, micro.step))], dim=1)


class ForwardKeys:
    """The two 32-bit words of each of the `draws` draws of the current forward pass, for each device that has one."""

    def __init__(self) -> None:
        self.draws = 0
        # By device number, because the replicas of DataParallel run at the same time.
        self._examples: dict[int, Tensor] = {}
        self._batch: dict[int, Tensor] = {}

    def set(self, keys: Tensor) -> None:
        """Start a forward pass over the examples with these keys, int64 (b, 2)."""
        numbers = torch.arange(self.draws, device=keys.device)
        shared = keys[:1, 1:] if len(keys) else keys.new_zeros((1, 1))
        self._examples[keys.get_device()] = _words(draw(keys[:, :1], numbers))
        self._batch[keys.get_device()] = _words(draw(shared, numbers))

    def words(self, number: int, device: int, *, of_batch: bool) -> Tensor:
        """The words of draw `number`: int32 (b, 2), one for each example, or (1, 2) for the whole global batch."""
        return (self._batch if of_batch else self._examples)[device][:, number]


def _words(drawn: Tensor) -> Tensor:
    """int64 (b, draws) as int32 (b, draws, 2)."""
    return drawn.view(torch.int32).view(*drawn.shape, 2)


@dataclass(frozen=True)
class Site:
    """A place in a model that draws random numbers once per forward pass.

    Fields:
        number: the number of the draw, from 0, in the order of the forward pass.
        batch_dim: the batch dimension of the numbers, in which each example has one or more consecutive rows; None
            for numbers that the whole global batch shares.
        keys: the keys of the model's current forward pass.
    """

    number: int
    batch_dim: int | None
    keys: ForwardKeys

    def bits(self, shape: torch.Size, like: Tensor) -> Tensor:
        """Random bits, int32, for a tensor of `shape` on the device of `like`.

        They depend only on an example's key and the element's position in the example, not on the rest of the batch.
        """
        if like.is_meta:  # this layer belongs to another rank
            return torch.empty(shape, dtype=torch.int32, device=like.device)
        words = self.keys.words(self.number, like.get_device(), of_batch=self.batch_dim is None)
        if self.batch_dim is None:
            return random_bits(words, math.prod(shape)).view(shape)
        rows, examples = shape[self.batch_dim], words.shape[0]
        other_sizes = [size for dim, size in enumerate(shape) if dim != self.batch_dim]
        if examples == 0 or rows == 0:
            return torch.empty(shape, dtype=torch.int32, device=like.device)
        assert rows % examples == 0, f"{rows} rows are drawn for, in a batch of {examples} examples"
        bits = random_bits(words, math.prod(other_sizes) * (rows // examples))
        return bits.view(rows, *other_sizes).movedim(0, self.batch_dim)
