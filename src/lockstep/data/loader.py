"""How images reach the device: all of them at once (`resident`), or batch by batch (`streaming`).

Both give the same shards: which samples, in which order, is decided by `lockstep.data.order`, and what happens
to them by the pipeline. A loader only moves bytes.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep import log
from lockstep.data.order import Batch, batches, blocks, share, strides
from lockstep.data.shared import decode_all
from lockstep.data.splits import BrokenImage
from lockstep.errors import InputError
from lockstep.plan import Plan
from lockstep.protocols import Split
from lockstep.signals import die_with_parent
from lockstep.world import World

GB = 1e9
# Of the images that are gathered and augmented together, at most: as float32 they are 4 MB.
STRIDE_PIXELS = 2**20
# The label of a broken image: what cross_entropy leaves out by default, and no prediction hits.
LEFT_OUT = -100


@dataclass(frozen=True)
class Shard:
    """Piece `number` of the `pieces` that a global batch of `count` examples is cut into, on the device.

    `images` (b, C, H, W) are as stored (uint8) or as the model takes them, `indices` and `known_labels` int64 (b,).
    With a `partner`, because samples are mixed, the three hold one more: that of the piece's last example. A piece
    without examples has none.
    """

    step: int
    epoch: int
    images: Tensor
    known_labels: Tensor
    indices: Tensor
    count: int
    number: int
    pieces: int
    partner: bool = False

    @property
    def labels(self) -> Tensor:
        """The labels of the piece's own examples."""
        return self.known_labels[:-1] if self.partner else self.known_labels

    @property
    def _place(self) -> slice:
        return share(self.count, self.pieces, self.number)

    def micro_batches(self, parts: int) -> Iterator[tuple[Shard, bool]]:
        """The shard in `parts` pieces, and whether a piece is the last; a piece may be empty.

        The global batch is what is cut: two ranks with two pieces each have the four pieces of one rank.
        """
        if parts == 1:
            yield self, True
            return
        for part in range(parts):
            piece = replace(self, number=self.number * parts + part, pieces=self.pieces * parts)
            start, stop = (at - self._place.start for at in (piece._place.start, piece._place.stop))
            partner = self.partner and start < stop
            tensors = {
                name: getattr(self, name)[start : stop + partner] for name in ("images", "known_labels", "indices")
            }
            yield replace(piece, **tensors, partner=partner), part == parts - 1


@dataclass(frozen=True)
class Stride:
    """A rank's shards of consecutive steps of one epoch, read together: for small batches a call costs more than
    its pixels.

    `images` are uint8 (n, C, H, W), `known_labels` and `indices` int64 (n,), on the device, step after step.
    """

    batches: list[Batch]
    images: Tensor
    known_labels: Tensor
    indices: Tensor
    rank: int
    ranks: int
    partners: bool

    @property
    def epoch(self) -> int:
        return self.batches[0].epoch

    def shards(self, images: Tensor) -> Iterator[Shard]:
        """The shard of each step, with its part of `images` (n, ...): what was made of the stored ones."""
        sizes = [batch.indices.shape[0] for batch in self.batches]
        cuts = (torch.split_with_sizes(tensor, sizes) for tensor in (images, self.known_labels, self.indices))
        for batch, size, seen, labels, indices in zip(self.batches, sizes, *cuts, strict=True):
            partner = self.partners and size > 0
            yield Shard(batch.step, batch.epoch, seen, labels, indices, batch.count, self.rank, self.ranks, partner)


# The broken images among those that were read (blank there), by their indices.
Broken = Mapping[int, BrokenImage]
# Reads the images of many batches of indices (int64, on the CPU), in order, onto the device.
Feed = Callable[[Iterable[Tensor]], Iterator[tuple[Tensor, Broken]]]


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The two splits of a run on their way to one rank's device.

    Fields:
        eval_batch: images per block of the evaluation split.
        train_labels, eval_labels: int64 (N,) on the device; those of broken images are overwritten.
        partners: whether a shard brings the partner of its last example along.
        stride: the most steps whose shards are read together.
        skip: the most broken images that are left out.
    """

    world: World
    plan: Plan
    seed: int
    eval_batch: int
    train_labels: Tensor
    eval_labels: Tensor
    train_feed: Feed
    eval_feed: Feed
    partners: bool = False
    stride: int = 1
    skip: int = 0
    met: set[tuple[bool, int]] = field(default_factory=set)

    def train(self, after: int) -> Iterator[Stride]:
        """This rank's shards for every step behind `after`."""
        ahead: list[list[Batch]] = []

        def wanted() -> Iterator[Tensor]:
            world = self.world
            for together in strides(
                batches(self.plan, self.seed, rank=world.rank, ranks=world.size, after=after, partners=self.partners),
                self.stride,
            ):
                ahead.append(together)
                yield torch.cat([batch.indices for batch in together])

        for images, broken in self.train_feed(wanted()):
            self._leave_out(broken, self.train_labels)
            yield self._stride(ahead.pop(0), images, self.world.rank, self.world.size, self.partners)

    def global_batch(self, step: int) -> Shard:
        """All examples of a step, whatever the ranks. Reads them anew: for looking at them, not for training."""
        batch = next(batches(self.plan, self.seed, rank=0, ranks=1, after=step - 1))
        images, _ = next(iter(self.train_feed([batch.indices])))
        return next(self._stride([batch], images, rank=0, ranks=1, partners=False).shards(images))

    def _stride(self, together: list[Batch], images: Tensor, rank: int, ranks: int, partners: bool) -> Stride:
        indices = torch.cat([batch.indices for batch in together]).to(self.world.device, non_blocking=True)
        return Stride(together, images, self.train_labels[indices], indices, rank, ranks, partners)

    def eval(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's blocks of the evaluation split: uint8 images and labels."""
        world = self.world
        mine = blocks(len(self.eval_labels), self.eval_batch, rank=world.rank, ranks=world.size)
        wanted = [torch.arange(block.start, block.stop) for block in mine]
        for block, (images, broken) in zip(mine, self.eval_feed(wanted), strict=True):
            self._leave_out(broken, self.eval_labels)
            yield images, self.eval_labels[block.start : block.stop]

    def _leave_out(self, broken: Broken, labels: Tensor) -> None:
        """Take broken images out of the loss and of the scores, for good, and warn of each once."""
        for index, error in broken.items():
            example = (labels is self.train_labels, index)
            if example not in self.met:
                self.met.add(example)
                labels[index] = LEFT_OUT
                if len(self.met) > self.skip:
                    raise self._too_many(f"{error.what} too")
                log.warn(f"{error.what}: left out, {len(self.met)} of at most {self.skip}")

    def left_out(self) -> int:
        """The number of different broken images that all ranks together have met so far. Collective.

        Raises:
            InputError: they are more than `skip`.
        """
        if not self.skip:
            return 0
        met = (torch.cat([self.train_labels, self.eval_labels]) == LEFT_OUT).int()
        number = int((self.world.sum(met) > 0).sum())
        if number > self.skip:
            raise self._too_many(f"{number} images cannot be decoded")
        return number

    def _too_many(self, found: str) -> InputError:
        return InputError(
            f"dataset.skip is {self.skip}, but {found}; repair or remove the broken images (see the warnings), or "
            f"leave out more of them with dataset.skip={2 * self.skip}"
        )


@dataclass(frozen=True, kw_only=True)
class Resident:
    """The whole split as uint8 on the device; a batch is one gather there."""

    def stride(self, shard: int, pixels: int) -> int:
        """The steps to read together, for shards of so many images of so many pixels."""
        return max(1, STRIDE_PIXELS // max(1, shard * pixels))

    def feed(self, split: Split, world: World, *, once: bool) -> Feed:
        threads = max(1, cores() // world.local_size)
        decoded = (split.images, {}) if split.images is not None else decode_all(split, world, _read, threads=threads)
        images, broken = decoded[0].to(world.device), decoded[1]

        def read(wanted: Iterable[Tensor]) -> Iterator[tuple[Tensor, Broken]]:
            for indices in wanted:
                # Copies whole images, where indexing goes byte by byte: an eighth of its time on a CPU.
                yield images.index_select(0, indices.to(world.device, non_blocking=True)), broken

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

    def stride(self, shard: int, pixels: int) -> int:
        """The steps to read together: workers read ahead as it is."""
        return 1

    def count(self, split: Split, world: World) -> int:
        """The number of workers that `workers` means for this split on this machine."""
        if isinstance(self.workers, int):
            return self.workers
        return 0 if split.images is not None else max(1, cores() // world.local_size)

    def feed(self, split: Split, world: World, *, once: bool) -> Feed:
        workers = self.count(split, world)
        queue = _Queue()
        loader: DataLoader[Any] = DataLoader(
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

        def read(wanted: Iterable[Tensor]) -> Iterator[tuple[Tensor, Broken]]:
            # Lists, because a tensor on its way to a worker costs a shared-memory file each.
            queue.wanted = (indices.tolist() for indices in wanted)
            for found in loader:
                if isinstance(found, InputError):
                    raise found
                images, broken = found
                yield images.to(world.device, non_blocking=True), broken

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


def _read(split: Split, indices: list[int]) -> tuple[Tensor, Broken]:
    """Images of a split, uint8 (len(indices), C, H, W), and the broken ones: blank, where the split lets them be."""
    try:
        return split.fetch(indices), {}
    except BrokenImage as error:
        if not split.skip:
            raise
        if len(indices) == 1:
            return split.fetch([]).new_zeros((1, *split.fetch([]).shape[1:])), {indices[0]: error}
    return _joined([_read(split, [index]) for index in indices])


def sample(split: Split, number: int) -> Tensor:
    """Up to `number` images spread evenly over a split, uint8 (n, C, H, W), broken ones left out."""
    number = min(number, len(split))
    indices = [place * len(split) // number for place in range(number)]
    images, broken = _read(split, indices)
    return images[[index not in broken for index in indices]]


def _joined(parts: list[tuple[Tensor, Broken]]) -> tuple[Tensor, Broken]:
    broken = {index: error for _, found in parts for index, error in found.items()}
    return torch.cat([images for images, _ in parts]), broken


class _Images(Dataset[Any]):
    """A split as DataLoader wants it; an unreadable image comes back as a value, with its sentence whole."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Broken] | InputError:
        try:
            return _read(self.split, indices)
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
