"""Which samples a rank trained on, and what it saw of them: for proving that runs are alike, not for every day."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from lockstep.protocols import Examples
from lockstep.telemetry.sinks import reopened

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class NoSamples:
    """The null object: nothing is kept of the samples."""

    def write(self, micro: Examples, images: Tensor) -> None:
        """Note the examples of a micro-batch, and their images as the model gets them."""

    def close(self) -> None:
        """Training is over."""


class Samples(NoSamples):
    """A JSON line per example: `epoch`, `step`, `index`, and `pixels`, the sum of its pixels' bits as integers.

    Syncs the device at every micro-batch. Lines behind `after`, the step that a run goes on from, go.
    """

    def __init__(self, path: Path, after: int) -> None:
        self.file = reopened(path, after, lambda line: json.loads(line)["step"])

    def write(self, micro: Examples, images: Tensor) -> None:
        words = images.detach().contiguous().view(_WORDS[images.element_size()])
        pixels = words.flatten(1).sum(1, dtype=torch.int64).tolist() if len(images) else []
        for index, each in zip(micro.indices.tolist(), pixels, strict=False):  # the last may be a partner only
            line = {"epoch": micro.epoch, "step": micro.step, "index": index, "pixels": each}
            self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()
