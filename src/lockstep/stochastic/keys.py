"""The keys of a forward pass (one per example), and the sites in the model that draw random numbers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.core.data_protocols import MicroBatch
from lockstep.core.rng import FORWARD, FORWARD_BATCH, draw, key, sample_keys
from lockstep.stochastic.numbers import random_bits


def forward_keys(seed: int, micro: MicroBatch) -> Tensor:
    """The keys of a forward pass, int64 (b, 2): the key of each example in this epoch, and the key of the step."""
    examples = sample_keys(seed, micro.epoch, micro.indices[: len(micro.labels)], FORWARD)
    return torch.stack([examples, torch.full_like(examples, key(seed, FORWARD_BATCH, micro.step))], dim=1)


class ForwardKeys:
    """The two 32-bit words of every draw of the current forward pass, for each device that runs one.

    `draws` is the number of draws of a pass.
    """

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
