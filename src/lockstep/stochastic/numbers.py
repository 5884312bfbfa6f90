"""Random numbers for every element of a tensor, from two 32-bit words of each example.

The rest of Lockstep draws from splitmix64, which needs 64-bit products, and CPUs have no vector instruction for them.
A dropout mask needs a number for each element of each layer, so this is a 32-bit hash: `lowbias32` of the element's
position (Wellons 2018, "Prospecting for hash functions"), then its last rounds with the two words of the example.
int32 arithmetic wraps in the same way on every device, so the CPU and a GPU agree to the bit.
"""

import functools
import math

import torch
from torch import Tensor

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


def uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1) with as many digits as `dtype` holds, at most 24."""
    digits = _DIGITS.get(dtype, 24)
    return (bits.bitwise_right_shift(32 - digits) & ((1 << digits) - 1)).to(dtype) * 2.0**-digits


def normal(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers, by the inverse distribution function; devices may differ in the last digit."""
    centred = (bits.to(torch.float64) + 0.5) * 2.0**-31  # in (-1, 1)
    return (torch.erfinv(centred) * math.sqrt(2)).to(dtype)
