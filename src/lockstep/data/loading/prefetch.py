"""Reading the images of a split, in order and ahead of time, with the broken ones among them known."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.core.data_protocols import ReadResult, Split
from lockstep.core.errors import BrokenImage

LIGHT_S = 40e-6
W = TypeVar("W")
R = TypeVar("R")


def read_images(split: Split, indices: list[int], epoch: int = 0) -> ReadResult:
    """Images of a split, uint8 (len(indices), C, H, W), and the broken ones: blank, where the split lets them be."""
    try:
        return split.fetch(indices, epoch), {}
    except BrokenImage as error:
        if not split.skip:
            raise
        if len(indices) == 1:
            return split.fetch([]).new_zeros((1, *split.fetch([]).shape[1:])), {indices[0]: error}
    parts = [read_images(split, [index], epoch) for index in indices]
    return torch.cat([images for images, _ in parts]), {
        at: error for _, broken in parts for at, error in broken.items()
    }


def worthwhile(threads: int, seconds: float) -> int:
    """How many of so many threads to read with, where an image takes one of them so many seconds.

    Reading a light image is mostly Python, of which one thread runs at a time: a second one would be in the way.
    """
    return threads if seconds > LIGHT_S else 1


def sample(split: Split, number: int) -> Tensor:
    """Up to `number` images spread evenly over a split, uint8 (n, C, H, W), broken ones left out."""
    number = min(number, len(split))
    indices = [place * len(split) // number for place in range(number)]
    images, broken = read_images(split, indices)
    return images[[index not in broken for index in indices]]


def in_order(make: Callable[[W], R], wanted: Iterable[W], *, workers: int, prefetch: int) -> Iterator[R]:
    """What `make` gives for each of `wanted`, in order, by threads that are `prefetch` results each ahead."""
    if workers == 0:
        yield from map(make, wanted)
        return
    ahead: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="loader")
    try:
        for each in wanted:
            ahead.append(pool.submit(make, each))
            if len(ahead) > workers * prefetch:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:  # nor is a read under way waited for: it may not come to its end
        pool.shutdown(wait=False, cancel_futures=True)
