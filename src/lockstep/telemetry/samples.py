"""Which examples a rank trained on, step by step, with a hash of what the network saw of each."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.core.data_protocols import MicroBatch
from lockstep.core.protocols import Sink


class NoSamples:
    """Keeps nothing."""

    def record(self, micro: MicroBatch, images: Tensor) -> None: ...

    def close(self) -> None: ...


class Samples(NoSamples):
    """A line per example: step, epoch, index and hash. Waits for the device at each micro-batch."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def record(self, micro: MicroBatch, images: Tensor) -> None:
        for index, seen in zip(micro.indices.tolist(), fingerprints(images).tolist(), strict=False):
            self.sink.write(micro.step, {"epoch": micro.epoch, "index": index, "hash": seen})

    def close(self) -> None:
        self.sink.close()


def fingerprints(images: Tensor) -> Tensor:
    """An int64 for each of (b, ...) floats: the bits of its numbers, weighed by their places, summed modulo 2^64.

    Sums of integers do not depend on their order, so every device and every batch gives the same.
    """
    words = images.contiguous().flatten(1).view(torch.int64 if images.dtype == torch.float64 else torch.int32)
    odd = 2 * torch.arange(words.shape[1], device=words.device) + 1
    return (words * odd).sum(1)
