"""Random numbers that are derived, never stored: each is a pure function of a key and a counter.

The generator is splitmix64 (Steele, Lea and Flood 2014) used by position: `draw(key, n)` is output n+1 of
splitmix64 seeded with `key`. Integer arithmetic wraps alike on every device, so the CPU and a GPU agree.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(word: int) -> int:
    """A 64-bit word as the int64 that has its bits."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)

# What a stream of numbers is for; streams of one seed are independent.
ORDER, AUGMENT, DROPOUT, MIX = 1, 2, 3, 4


def _shifted(z: Tensor, bits: int) -> Tensor:
    """`z >> bits` filled with zeros; torch's own shift of int64 copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def draw(key: Tensor, n: Tensor | int) -> Tensor:
    """The number at position `n` (from 0) of the stream `key`: int64, all 64 bits random."""
    z = key + (n + 1) * _GOLDEN if isinstance(n, Tensor) else key + _signed((n + 1) * _GOLDEN)
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def key(seed: int, *words: int) -> Tensor:
    """The key of the stream (seed, *words), as an int64 scalar on the CPU."""
    state = torch.tensor(_signed(seed))
    for word in words:
        state = draw(state, word)
    return state


def uniform(keys: Tensor, n: int) -> Tensor:
    """Number `n` of each key's stream as float32 in [0, 1), from the upper 24 bits."""
    return _shifted(draw(keys, n), 40).to(torch.float32) * 2.0**-24


def permutation(seed: int, epoch: int, n: int) -> Tensor:
    """The order of an epoch: int64 of shape (n,), a function of (seed, epoch) alone."""
    return torch.argsort(draw(key(seed, ORDER, epoch), torch.arange(n)), stable=True)


def sample_keys(seed: int, epoch: int, indices: Tensor, purpose: int = AUGMENT) -> Tensor:
    """One key for each sample index, on the device of `indices`."""
    return draw(key(seed, purpose, epoch).to(indices.device), indices)


def dropout_seed(seed: int, step: int, micro_batch: int) -> int:
    """The seed of the device's generator for the forward pass of one micro-batch of a global batch."""
    return int(_shifted(key(seed, DROPOUT, step, micro_batch), 1))
