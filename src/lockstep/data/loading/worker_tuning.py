"""The number of threads that read images fast enough for the model."""

from __future__ import annotations

import math
import time

from lockstep.core.data_protocols import Split
from lockstep.data.loading.prefetch import read_images

# A worker's speed is measured on at most this many images, in chunks of this size, for at most this many seconds.
TRIAL_IMAGES, TRIAL_CHUNK, TRIAL_S = 256, 16, 0.3
# Workers get 25 % headroom: decoding time varies from image to image.
HEADROOM = 1.25


def workers_needed(model: float, reader: float, most: int, *, own_cores: bool) -> int:
    """The number of workers that keep up with a model, at most `most`.

    Args:
        model: images per second that the model trains on.
        reader: images per second that one worker reads.
        most: the upper limit.
        own_cores: whether training leaves the cores to the workers. Otherwise reading slows training down: the
            seconds that an image needs in both add up, spread over all cores.
    """
    need = model if own_cores else 1 / (1 / model + 1 / (reader * most))
    return min(most, max(1, math.ceil(HEADROOM * need / reader)))


def reading_rate(split: Split) -> float:
    """The images of a split that one thread reads per second, measured on a few of them."""
    indices = range(0, len(split), max(1, len(split) // TRIAL_IMAGES))
    read_images(split, [0])  # imports the decoders
    began, read = time.perf_counter(), 0
    while read < len(indices) and time.perf_counter() < began + TRIAL_S:
        read_images(split, list(indices[read : read + TRIAL_CHUNK]))
        read += TRIAL_CHUNK
    return min(read, len(indices)) / (time.perf_counter() - began)
