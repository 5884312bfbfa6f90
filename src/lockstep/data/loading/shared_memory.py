"""What the ranks of a machine have one copy of: the list of a split's files, and its decoded images.

One rank makes the list; of the images each decodes its share. The memory is a file without a name (`memfd_create`),
which the ranks open through the process that made it: it goes with the last of them however they end, and no limit on
/dev/shm applies. Where that cannot be (another system than Linux, ranks that do not see each other's processes) each
rank lists, and decodes, for itself.
"""

from __future__ import annotations

import math
import os
import secrets
import sys
import time
import traceback
from pathlib import Path

import torch
from torch import Tensor

from lockstep.core.data_protocols import Broken, ReadResult, Source, Split
from lockstep.core.errors import BrokenImage, InputError
from lockstep.core.world import World
from lockstep.data.datasets.folder import Folder
from lockstep.data.datasets.listing import KNOWN, Listing, class_names
from lockstep.data.loading.prefetch import in_order, read_images, worthwhile
from lockstep.data.loading.sampler import share

TRIED, CHUNK = 64, 256


def share_listings(source: Source, world: World) -> None:
    """Have the ranks of a machine know the list of files that one of them made of a source. Collective."""
    if isinstance(source, Folder) and world.size > 1:
        for name in (source.train_folder, source.val_folder):
            _share_listing(Path(source.path, name), Path(source.path, source.train_folder), world)


def _share_listing(folder: Path, train: Path, world: World) -> None:
    """Map the list of the files in `folder` that one rank of this machine has made. Collective."""
    own = KNOWN.get((folder, train))
    leader = min([world.rank, *world.local_peer_pids])
    everyone = world.gather((leader, None if own is None else (own.files, len(own.table))))
    if all(size is not None for _, size in everyone):
        return  # forked from a process that had made it, whose memory they share
    if any(everyone[each][1] is None for each, _ in everyone):
        return  # machines of one name: each rank lists for itself when it is asked for the files
    files, size = everyone[leader][1] or (0, 0)
    table = _mapped((size,), world, leader=leader)
    if table is None:
        return
    if world.rank == leader and own is not None:
        table.copy_(own.table)
    world.barrier()
    KNOWN[folder, train] = Listing(folder, class_names(train), table, files)


def decode_all(split: Split, world: World, *, threads: int) -> ReadResult:
    """Every image of a split that is not in memory, uint8 (N, C, H, W), and the broken ones. Collective.

    Args:
        split: the images.
        world: its ranks of one machine get the same memory.
        threads: of this rank, as far as they help (`worthwhile`).

    Raises:
        InputError: an image cannot be read. The same on every rank.
    """
    if world.control is None:  # a process for itself
        world = World.solo()
    shape = (len(split), *split.fetch([]).shape[1:])
    together = sorted({world.rank, *world.local_peer_pids})
    images = _mapped(shape, world, leader=together[0]) if world.size > 1 else None
    if images is None:
        together, images = [world.rank], torch.empty(shape, dtype=torch.uint8)
    mine = range(len(split))[share(len(split), len(together), together.index(world.rank))]

    def decode(chunk: range) -> Broken:
        images[chunk.start : chunk.stop], broken = read_images(split, list(chunk))
        return broken

    broken: dict[int, BrokenImage] = {}
    failure: InputError | None = None
    try:
        for few in (mine[:TRIED], mine[TRIED : 2 * TRIED]):  # the decoders are imported at the first
            began = time.perf_counter()
            broken |= decode(few)
            seconds = (time.perf_counter() - began) / TRIED
        rest = mine[2 * TRIED :]
        chunks = (rest[at : at + CHUNK] for at in range(0, len(rest), CHUNK))
        for found in in_order(decode, chunks, workers=worthwhile(threads, seconds), prefetch=2):
            broken |= found
    except InputError as error:
        error.add_note("".join(traceback.format_tb(error.__traceback__)))  # which is lost on its way to others
        failure = error
    for theirs, failed in world.gather((broken, failure)):
        if failed is not None:
            raise failed
        broken |= theirs
    return images, broken


def _mapped(shape: tuple[int, ...], world: World, *, leader: int) -> Tensor | None:
    """Memory that all ranks of this machine have mapped, or None, on every rank, if one could not. Collective."""
    name, file = f"lockstep-{secrets.token_hex(8)}", None
    if world.rank == leader and sys.platform == "linux":
        file = os.memfd_create(name)
        os.ftruncate(file, math.prod(shape))
    try:
        pid, number, expected = world.gather((os.getpid(), file, name))[leader]
        place = Path(f"/proc/{pid}/fd/{number}")
        images = None
        # On a machine of the same name, or in another container, that is another process, and another file.
        if number is not None and _target(place).startswith(f"/memfd:{expected}"):
            images = torch.from_file(str(place), shared=True, size=math.prod(shape), dtype=torch.uint8).view(shape)
        everywhere = all(world.gather(images is not None))
    finally:
        if file is not None:
            os.close(file)
    return images if everywhere else None


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""
