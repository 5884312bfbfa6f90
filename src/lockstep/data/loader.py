"""How images reach the device: all of them at once (`resident`), or batch by batch (`streaming`).

Both give the same shards: which samples, in which order, is decided by `lockstep.data.order`, and what happens
to them by the pipeline. A loader only moves bytes.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.data.order import Batch, batches, blocks, share
from lockstep.errors import InputError
from lockstep.plan import Plan
from lockstep.protocols import Split
from lockstep.signals import die_with_parent
from lockstep.world import World

GB = 1e9
DECODE_CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's part of a global batch, on the device: uint8 images (b, C, H, W), labels and indices (b,).

    Fields:
        partners: labels (b,) of each example's partner, the next one of the global batch; null where examples have
            none. The images and indices are then b + 1: the partner of the last is not of the shard.
        count: examples of the global batch over all ranks.
        rank, ranks: whose shard it is; a micro-batch of it has the number `number` among those of all ranks.
    """

    step: int
    epoch: int
    images: Tensor
    labels: Tensor
    indices: Tensor
    count: int
    rank: int = 0
    ranks: int = 1
    partners: Tensor | None = None
    number: int = 0

    def micro_batches(self, parts: int) -> Iterator[tuple[Shard, bool]]:
        """The shard in `parts` pieces, and whether a piece is the last; a piece may be empty.

        The cuts are those of the global batch into `ranks * parts`: two ranks of one piece have those of one
        rank of two.
        """
        first = share(self.count, self.ranks, self.rank).start
        for part in range(parts):
            number = self.rank * parts + part
            cut = share(self.count, self.ranks * parts, number)
            own = slice(cut.start - first, cut.stop - first)
            extra = self.partners is not None and own.start < own.stop
            read = slice(own.start, own.stop + extra)
            piece = replace(
                self,
                images=self.images[read],
                labels=self.labels[own],
                indices=self.indices[read],
                partners=None if self.partners is None else self.partners[own],
                number=number,
            )
            yield piece, part == parts - 1


# Reads the images of many batches of indices (int64, on the CPU), in order, onto the device.
Feed = Callable[[Iterable[Tensor]], Iterator[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The two splits of a run on their way to one rank's device."""

    world: World
    plan: Plan
    seed: int
    eval_batch: int
    train_labels: Tensor
    eval_labels: Tensor
    train_feed: Feed
    eval_feed: Feed
    partners: bool = False

    def train(self, after: int) -> Iterator[Shard]:
        """This rank's shards for every step behind `after`."""
        ahead: list[Batch] = []

        def wanted() -> Iterator[Tensor]:
            rank, ranks = self.world.rank, self.world.size
            for batch in batches(self.plan, self.seed, rank=rank, ranks=ranks, after=after, partners=self.partners):
                ahead.append(batch)
                yield batch.indices

        for images in self.train_feed(wanted()):
            yield self._shard(ahead.pop(0), images, self.world.rank, self.world.size)

    def _shard(self, batch: Batch, images: Tensor, rank: int, ranks: int) -> Shard:
        indices = batch.indices.to(self.world.device, non_blocking=True)
        labels = self.train_labels[indices]
        return Shard(
            step=batch.step,
            epoch=batch.epoch,
            images=images,
            labels=labels[:-1] if self.partners else labels,
            indices=indices,
            count=batch.count,
            rank=rank,
            ranks=ranks,
            partners=labels[1:] if self.partners else None,
        )

    def global_batch(self, step: int) -> Shard:
        """All examples of a step, whatever the ranks. Reads them anew: for looking at them, not for training."""
        batch = next(batches(self.plan, self.seed, rank=0, ranks=1, after=step - 1))
        images = next(iter(self.train_feed([batch.indices])))
        return replace(self, partners=False)._shard(batch, images, 0, 1)

    def eval(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's blocks of the evaluation split: uint8 images and labels."""
        world = self.world
        mine = blocks(len(self.eval_labels), self.eval_batch, rank=world.rank, ranks=world.size)
        wanted = [torch.arange(block.start, block.stop) for block in mine]
        for block, images in zip(mine, self.eval_feed(wanted), strict=True):
            yield images, self.eval_labels[block.start : block.stop]


@dataclass(frozen=True, kw_only=True)
class Resident:
    """The whole split as uint8 on the device; a batch is one gather there."""

    def feed(self, split: Split, world: World, *, once: bool) -> Feed:
        images = (_decode_all(split) if split.images is None else split.images).to(world.device)

        def read(wanted: Iterable[Tensor]) -> Iterator[Tensor]:
            for indices in wanted:
                yield images[indices.to(world.device, non_blocking=True)]

        return read


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Batches read by worker processes while the device works on earlier ones.

    Fields:
        workers: processes per rank; `auto` is one per core of the rank's share where images are decoded,
            and none where they are in memory.
        prefetch: batches that each worker keeps ready.
    """

    workers: int | str = "auto"
    prefetch: int = 2

    def __post_init__(self) -> None:
        if self.workers != "auto" and (not isinstance(self.workers, int) or self.workers < 0):
            raise InputError(f"loader.workers is {self.workers!r}, expected auto or a number from 0")
        if self.prefetch < 1:
            raise InputError(f"loader.prefetch is {self.prefetch}, expected at least 1")

    def count(self, split: Split, world: World) -> int:
        """The number of workers that `workers` means for this split on this machine."""
        if isinstance(self.workers, int):
            return self.workers
        return 0 if split.images is not None else max(1, cores() // world.local_size)

    def feed(self, split: Split, world: World, *, once: bool) -> Feed:
        workers = self.count(split, world)
        queue = _Queue()
        loader: DataLoader[Tensor] = DataLoader(
            _Images(split),
            batch_sampler=queue,
            collate_fn=_as_is,
            num_workers=workers,
            prefetch_factor=self.prefetch if workers else None,
            # The training feed is read once, in one go over all epochs; the evaluation feed again and again.
            persistent_workers=bool(workers) and not once,
            pin_memory=world.device.type == "cuda",
            worker_init_fn=_worker_signals,
        )

        def read(wanted: Iterable[Tensor]) -> Iterator[Tensor]:
            # Lists, because a tensor on its way to a worker costs a shared-memory file each.
            queue.wanted = (indices.tolist() for indices in wanted)
            for images in loader:
                if isinstance(images, InputError):
                    raise images
                yield images.to(world.device, non_blocking=True)

        return read


@dataclass(frozen=True, kw_only=True)
class Auto(Streaming):
    """`resident` where both splits fit, else `streaming`.

    Fields:
        resident_gb: the most (in GB) that may become resident; half of the device's free memory is a further
            bound.
    """

    resident_gb: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resident_gb < 0:
            raise InputError(f"loader.resident_gb is {self.resident_gb}, expected 0 or more")

    def choose(self, splits: list[Split], shape: tuple[int, int, int], world: World) -> tuple[Any, str]:
        """The loader to use, and why."""
        need = sum(len(split) for split in splits) * shape[0] * shape[1] * shape[2] / GB
        room = min(self.resident_gb, free_memory(world) / 2)
        if need <= room:
            return Resident(), f"{need:.2f} GB fit in {room:.1f} GB"
        return Streaming(workers=self.workers, prefetch=self.prefetch), f"{need:.1f} GB do not fit in {room:.1f} GB"


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory(world: World) -> float:
    """Free memory of a rank's device in GB; of the host, a rank's share."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0] / GB
    return available_memory() / world.local_size / GB


def available_memory() -> float:
    """Bytes of host memory that can be had without swapping; half of the host's where the system does not tell."""
    try:
        # Not the free pages: on a machine that has run for a while those are few, the rest is file cache.
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return 1024.0 * int(found[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2


def _decode_all(split: Split) -> Tensor:
    """Every image of a split that is not in memory, decoded by all cores (the decoders release the lock)."""
    chunks = [list(range(at, min(at + DECODE_CHUNK, len(split)))) for at in range(0, len(split), DECODE_CHUNK)]
    with ThreadPoolExecutor(cores()) as pool:
        return torch.cat(list(pool.map(split.fetch, chunks)))


class _Images(Dataset[Tensor]):
    """A split as DataLoader wants it; an unreadable image comes back as a value, with its sentence whole."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __getitems__(self, indices: list[int]) -> Tensor | InputError:
        try:
            return self.split.fetch(indices)
        except InputError as error:
            return error


class _Queue:
    """The index lists that a DataLoader is to read next, as its batch sampler."""

    wanted: Iterable[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.wanted)


def _as_is(images: Any) -> Any:
    return images


def _worker_signals(worker: int) -> None:
    """A worker leaves when its rank says so: Ctrl-C reaches the whole terminal, and the rank saves first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()  # a stopped one would not hear
