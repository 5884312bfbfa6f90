"""Reads the images of a split: in order and ahead of time, with as many threads as help, or all of them at once.

For the latter the ranks of a machine map an anonymous file (`memfd_create`), which they open through /proc. The
kernel frees it with the last rank, however it ends, and no limit on /dev/shm applies.
"""

import math
import os
import secrets
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.core.data_protocols import Broken, ReadResult, Split
from lockstep.core.errors import BrokenImage, InputError
from lockstep.core.plan import share
from lockstep.core.world import World

LIGHT_S = 40e-6  # reading an image in less time is mostly Python code: a second thread only costs time
# A worker's speed is measured on at most this many images, in chunks of this size, for at most this many seconds.
TRIAL_IMAGES, TRIAL_CHUNK, TRIAL_S = 256, 16, 0.3
# Workers get 25 % headroom: decoding time varies from image to image.
HEADROOM = 1.25
TIMED, READ_CHUNK = 64, 256  # images of a whole split: decoded to measure the speed, and decoded at a time
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def read_images(split: Split, indices: list[int], epoch: int = 0) -> ReadResult:
    """The images of a split, uint8 (n, C, H, W), and the errors of broken ones, which are blank.

    Raises InputError if an image is broken and the split allows none.
    """
    try:
        return split.fetch(indices, epoch), {}
    except BrokenImage as error:
        if not split.skip:
            raise
        if len(indices) == 1:
            return split.fetch([]).new_zeros((1, *split.fetch([]).shape[1:])), {error.args[0]: error}
    parts = [read_images(split, [index], epoch) for index in indices]
    broken = {index: error for _, part in parts for index, error in part.items()}
    return torch.cat([images for images, _ in parts]), broken


def sample(split: Split, number: int) -> Tensor:
    """Up to `number` images spread evenly over a split, uint8 (n, C, H, W), without broken ones."""
    number = min(number, len(split))
    indices = [n * len(split) // number for n in range(number)]
    images, broken = read_images(split, indices)
    return images[[index not in broken for index in indices]]


def map_in_order(
    function: Callable[[ItemT], ResultT], items: Iterable[ItemT], *, workers: int, prefetch: int
) -> Iterator[ResultT]:
    """`map(function, items)` by `workers` threads, each working `prefetch` items ahead; with 0 there is no thread."""
    if workers == 0:
        yield from map(function, items)
        return
    pending: deque[Future[ResultT]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="loader")
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > workers * prefetch:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:  # do not wait for a read under way: it may never end
        pool.shutdown(wait=False, cancel_futures=True)


def workers_needed(model: float, reader: float, most: int, *, own_cores: bool) -> int:
    """The workers, at most `most`, that keep up with a model; `model` and `reader` are images per second.

    Without `own_cores` reading slows training down: the seconds of an image in both add up, spread over all cores.
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


def decode_all(split: Split, world: World, *, threads: int) -> ReadResult:
    """Decode every image of a split, uint8 (N, C, H, W); also returns the broken ones. Collective.

    The ranks of a machine share the memory. All ranks raise the same InputError for an image that cannot be read.
    """
    if world.control is None:  # no process group
        world = World.solo()
    shape = (len(split), *split.fetch([]).shape[1:])
    local_ranks = sorted({world.rank, *world.local_peer_pids})
    images = _map_shared(shape, world, leader=local_ranks[0]) if world.size > 1 else None
    if images is None:
        local_ranks, images = [world.rank], torch.empty(shape, dtype=torch.uint8)
    own_indices = range(len(split))[share(len(split), len(local_ranks), local_ranks.index(world.rank))]

    def decode(chunk: range) -> Broken:
        images[chunk.start : chunk.stop], broken = read_images(split, list(chunk))
        return broken

    broken: dict[int, BrokenImage] = {}
    failure: InputError | None = None
    try:
        for start in (0, TIMED):  # the first chunk imports the decoders: time the second
            began = time.perf_counter()
            broken |= decode(own_indices[start : start + TIMED])
            seconds = (time.perf_counter() - began) / TIMED
        remaining = own_indices[2 * TIMED :]
        chunks = (remaining[start : start + READ_CHUNK] for start in range(0, len(remaining), READ_CHUNK))
        for chunk_broken in map_in_order(decode, chunks, workers=threads if seconds > LIGHT_S else 1, prefetch=2):
            broken |= chunk_broken
    except InputError as error:
        error.add_note("".join(traceback.format_tb(error.__traceback__)))  # pickling loses the traceback
        failure = error
    for rank_broken, rank_failure in world.gather((broken, failure)):
        if rank_failure is not None:
            raise rank_failure
        broken |= rank_broken
    return images, broken


def _map_shared(shape: tuple[int, ...], world: World, *, leader: int) -> Tensor | None:
    """uint8 memory that all ranks of this machine map; None on every rank if one of them cannot. Collective."""
    name, file = f"lockstep-{secrets.token_hex(8)}", None
    if world.rank == leader and hasattr(os, "memfd_create"):
        file = os.memfd_create(name)
        os.ftruncate(file, math.prod(shape))
    try:
        pid, descriptor, expected = world.gather((os.getpid(), file, name))[leader]
        path = Path(f"/proc/{pid}/fd/{descriptor}")
        memory = None
        # On another machine of the same name, or in another container, the path leads to another file, or to none.
        with suppress(OSError):
            if descriptor is not None and str(path.readlink()).startswith(f"/memfd:{expected}"):
                memory = torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=torch.uint8).view(shape)
        all_mapped = all(world.gather(memory is not None))
    finally:
        if file is not None:
            os.close(file)
    return memory if all_mapped else None
