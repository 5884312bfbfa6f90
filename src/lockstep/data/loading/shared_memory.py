"""The ranks of a machine share one copy of a split's list of files and of its decoded images.

One rank makes the list; each rank decodes its share of the images. The memory is an anonymous file (`memfd_create`)
that the ranks open through /proc of the process that made it. The kernel frees it with the last rank, however the
ranks end, and no limit on /dev/shm applies. Without Linux, or if the ranks do not see each other's processes, each
rank lists and decodes for itself.
"""

import math
import os
import secrets
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lockstep.core.data_protocols import Broken, ReadResult, Source, Split
from lockstep.core.errors import BrokenImage, InputError
from lockstep.core.world import World
from lockstep.data.datasets.files import FileSource
from lockstep.data.datasets.listing import LISTINGS, Listing
from lockstep.data.loading.prefetch import in_order, read_images, useful_threads
from lockstep.data.loading.sampler import share

TIMED, CHUNK = 64, 256  # images: decoded to measure the speed, and decoded at a time


def share_listings(source: Source, world: World) -> None:
    """Give all ranks of a machine the lists of a source's files, which one of them has made. Collective."""
    if not isinstance(source, FileSource) or world.size == 1:
        return
    own_listings = LISTINGS.get(source.place)
    leader = min([world.rank, *world.local_peer_pids])
    outlines = [
        (replace(listing, names=listing.names[:0]), len(listing))
        for listing in own_listings or ()
        if isinstance(listing, Listing)
    ]
    gathered = world.gather((leader, outlines))
    if all(rank_outlines for _, rank_outlines in gathered):
        return  # forked from a process that had listed the files: the ranks share its memory
    if not all(gathered[rank_leader][1] for rank_leader, _ in gathered):
        return  # several machines have one name: each rank lists the files itself when it needs them
    shared = []
    for number, (outline, files) in enumerate(gathered[leader][1]):
        memory = _map_shared((files, outline.names.itemsize), world, leader=leader)
        if memory is None:
            return
        names = memory.numpy().view(outline.names.dtype)[:, 0]
        if world.rank == leader and own_listings is not None:
            names[:] = own_listings[number].names
        shared.append(replace(outline, names=names))
    world.barrier()
    LISTINGS[source.place] = (shared[0], shared[1])


def decode_all(split: Split, world: World, *, threads: int) -> ReadResult:
    """Decode every image of a split, uint8 (N, C, H, W); also returns the broken ones. Collective.

    Args:
        world: the ranks of each machine share the memory.
        threads: the most threads of this rank; it uses fewer if more do not help (`useful_threads`).

    Raises:
        InputError: an image cannot be read. All ranks raise the same error.
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
        chunks = (remaining[start : start + CHUNK] for start in range(0, len(remaining), CHUNK))
        for chunk_broken in in_order(decode, chunks, workers=useful_threads(threads, seconds), prefetch=2):
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
        # On another machine of the same name, or in another container, the path is that of another file.
        if descriptor is not None and _link_target(path).startswith(f"/memfd:{expected}"):
            memory = torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=torch.uint8).view(shape)
        all_mapped = all(world.gather(memory is not None))
    finally:
        if file is not None:
            os.close(file)
    return memory if all_mapped else None


def _link_target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""
