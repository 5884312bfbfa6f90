"""Records which examples a rank trained on, step by step, with a hash of the image that the network got."""

import torch
from torch import Tensor

from lockstep.core.data_protocols import MicroBatch
from lockstep.telemetry.sinks import JsonLines


class NoSamples:
    """Records nothing."""

    def record(self, micro: MicroBatch, images: Tensor) -> None: ...

    def close(self) -> None: ...


class Samples(NoSamples):
    """Writes a line per example: step, epoch, index and hash. Waits for the device at each micro-batch."""

    def __init__(self, sink: JsonLines) -> None:
        self.sink = sink

    def record(self, micro: MicroBatch, images: Tensor) -> None:
        for index, digest in zip(micro.indices.tolist(), fingerprints(images).tolist(), strict=False):
            self.sink.write(micro.step, {"epoch": micro.epoch, "index": index, "hash": digest})

    def close(self) -> None:
        self.sink.close()


def fingerprints(images: Tensor) -> Tensor:
    """Hashes int64 (b,) of the rows of floats (b, ...).

    A hash is the sum of the row's bits as integers, weighted by position, modulo 2^64. The sum of integers does not
    depend on their order, so the hash is the same on every device and in every batch.
    """
    words = images.contiguous().flatten(1).view(torch.int64 if images.dtype == torch.float64 else torch.int32)
    odd = 2 * torch.arange(words.shape[1], device=words.device) + 1
    return (words * odd).sum(1)
