"""How many threads have to read images so that the model does not wait for them."""

from __future__ import annotations

import math
import time

from lockstep.core.data_protocols import Split
from lockstep.data.loading.prefetch import (
    read_images,
)

# How fast a worker is, is tried on so many images, some at a time, and for so many seconds at most.
TRIED, TRIED_AT_ONCE, TRIAL_S = 256, 16, 0.3


# Workers get 25 % headroom: decoding time varies from image to image.
HEADROOM = 1.25


def workers_needed(model: float, reader: float, most: int, *, own_cores: bool) -> int:
    """The workers that keep up with a model, at most `most`; both rates are in images per second.

    Without cores of its own for reading, training slows down while images are read: the seconds that an image
    needs in both add up, spread over all cores.
    """
    need = model if own_cores else 1 / (1 / model + 1 / (reader * most))
    return min(most, max(1, math.ceil(HEADROOM * need / reader)))


def reading_rate(split: Split) -> float:
    """The images of a split that one thread reads per second, tried on some of them, for a moment."""
    indices = range(0, len(split), max(1, len(split) // TRIED))
    read_images(split, [0])  # the decoders are imported here
    began, read = time.perf_counter(), 0
    while read < len(indices) and time.perf_counter() < began + TRIAL_S:
        read_images(split, list(indices[read : read + TRIED_AT_ONCE]))
        read += TRIED_AT_ONCE
    return min(read, len(indices)) / (time.perf_counter() - began)
