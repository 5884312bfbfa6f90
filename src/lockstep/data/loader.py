"""How images reach the device: all of them at once (`resident`), or batch by batch (`streaming`).

Both give the same shards: which samples, in which order, is decided by `lockstep.data.order`, and what happens
to them by the pipeline. A loader only moves bytes.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep import log
from lockstep.data.order import Batch, batches, blocks, share, strides
from lockstep.data.packed import MappedSplit
from lockstep.data.shared import decode_all
from lockstep.data.splits import BrokenImage
from lockstep.errors import InputError
from lockstep.plan import Plan
from lockstep.protocols import Split
from lockstep.world import World

GB = 1e9
# How fast a worker is, is tried on so many images, some at a time, and for so many seconds at most.
TRIED, TRIED_AT_ONCE, TRIAL_S = 256, 16, 0.3
# Workers are to be so much faster than what they feed: images differ.
HEADROOM = 1.25
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
# The images that are wanted together: an epoch, and indices (int64, on the CPU). What is read: uint8 images.
Wanted = tuple[int, Tensor]
Read = tuple[Tensor, Broken]
W = TypeVar("W")
R = TypeVar("R")
# Reads many batches, in order, onto the device.
Feed = Callable[[Iterable[Wanted]], Iterator[Read]]


@dataclass(frozen=True, kw_only=True)
class Loader:
    """The two splits of a run on their way to one rank's device.

    Fields:
        eval_batch: images per block of the evaluation split.
        train_labels, eval_labels: int64 (N,) on the device; those of broken images are overwritten.
        partners: whether a shard brings the partner of its last example along.
        stride: the most steps whose shards are read together.
        order_device: where the order of the examples is made: where the images are, so that no step waits for it.
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
    order_device: torch.device | None = None
    skip: int = 0
    met: set[tuple[bool, int]] = field(default_factory=set)

    def train(self, after: int) -> Iterator[Stride]:
        """This rank's shards for every step behind `after`."""
        ahead: list[list[Batch]] = []

        def wanted() -> Iterator[Wanted]:
            world = self.world
            one_by_one = batches(
                self.plan,
                self.seed,
                rank=world.rank,
                ranks=world.size,
                after=after,
                partners=self.partners,
                device=self.order_device,
            )
            for together in strides(one_by_one, self.stride):
                ahead.append(together)
                yield together[0].epoch, torch.cat([batch.indices for batch in together])

        for images, broken in self.train_feed(wanted()):
            self._leave_out(broken, self.train_labels)
            yield self._stride(ahead.pop(0), images, self.world.rank, self.world.size, self.partners)

    def global_batch(self, step: int) -> Shard:
        """All examples of a step, whatever the ranks. Reads them anew: for looking at them, not for training."""
        batch = next(batches(self.plan, self.seed, rank=0, ranks=1, after=step - 1))
        images, _ = next(iter(self.train_feed([(batch.epoch, batch.indices)])))
        return next(self._stride([batch], images, rank=0, ranks=1, partners=False).shards(images))

    def _stride(self, together: list[Batch], images: Tensor, rank: int, ranks: int, partners: bool) -> Stride:
        indices = torch.cat([batch.indices for batch in together]).to(self.world.device, non_blocking=True)
        return Stride(together, images, self.train_labels[indices], indices, rank, ranks, partners)

    def eval(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's blocks of the evaluation split: uint8 images and labels."""
        world = self.world
        mine = blocks(len(self.eval_labels), self.eval_batch, rank=world.rank, ranks=world.size)
        wanted = [(0, torch.arange(block.start, block.stop)) for block in mine]
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
class Task:
    """What a loader that chooses is told of a run, for one rank.

    Fields:
        splits: to train on and to evaluate.
        gigabytes: that both need as uint8.
        reads: images that this machine's ranks read in the whole run, those of evaluation too.
        boxes: whether others are cut from the files in each epoch.
        training_rate: tries how many images per second the model trains on; None where that takes too long.
    """

    world: World
    splits: tuple[Split, Split]
    gigabytes: float
    reads: int
    boxes: bool
    training_rate: Callable[[], float | None]


@dataclass(frozen=True, kw_only=True)
class Resident:
    """The whole split as uint8 on the device; a batch is one gather there."""

    def __str__(self) -> str:
        return "resident"

    def choose(self, task: Task) -> tuple[Any, str]:
        """The loader to use, and why."""
        return self, "as asked"

    def order_device(self, world: World) -> torch.device:
        """Where indices are wanted."""
        return world.device

    def stride(self, shard: int, pixels: int) -> int:
        """The steps to read together, for shards of so many images of so many pixels."""
        return max(1, STRIDE_PIXELS // max(1, shard * pixels))

    def feed(self, split: Split, world: World, *, once: bool) -> Feed:
        threads = max(1, cores() // world.local_size)
        decoded = (split.images, {}) if split.images is not None else decode_all(split, world, _read, threads=threads)
        images, broken = decoded[0].to(world.device), decoded[1]

        def read(wanted: Iterable[Wanted]) -> Iterator[Read]:
            for _, indices in wanted:
                # Copies whole images, where indexing goes byte by byte: an eighth of its time on a CPU.
                yield images.index_select(0, indices.to(world.device, non_blocking=True)), broken

        return read


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Batches read by threads while the device works on earlier ones.

    Threads, because the decoders release Python's lock: processes are no faster (docs/performance.md), have to be
    started, and hand each batch over through shared memory.

    Fields:
        workers: threads per rank; `auto` is as many as the model needs (`workers_needed`) where images are decoded,
            or read from a packed data set, and none where they are in memory.
        prefetch: batches that each worker keeps ready.
    """

    workers: int | str = "auto"
    prefetch: int = 2

    def __post_init__(self) -> None:
        if self.workers != "auto" and (not isinstance(self.workers, int) or self.workers < 0):
            raise InputError(f"loader.workers is {self.workers!r}, expected auto or a number from 0")
        if self.prefetch < 1:
            raise InputError(f"loader.prefetch is {self.prefetch}, expected at least 1")

    def order_device(self, world: World) -> torch.device:
        """Where indices are wanted."""
        return torch.device("cpu")

    def stride(self, shard: int, pixels: int) -> int:
        """The steps to read together: workers read ahead as it is."""
        return 1

    def __str__(self) -> str:
        return f"streaming, {self.workers} worker{'s' * (self.workers != 1)}"

    def choose(self, task: Task) -> tuple[Any, str]:
        """The loader to use, and why: `workers=auto` by measurement."""
        if self.workers != "auto":
            return self, "as asked"
        if task.splits[0].images is not None and not isinstance(task.splits[0], MappedSplit):
            return replace(self, workers=0), "images in memory"
        most = max(1, cores() // task.world.local_size)
        reader, model = reading_rate(task.splits[0]), task.training_rate()
        if model is None:
            return replace(self, workers=most), f"model not tried, one worker {reader:,.0f} img/s"
        needed = workers_needed(model, reader, most, own_cores=task.world.device.type != "cpu")
        return replace(self, workers=needed), f"model {model:,.0f} img/s, one worker {reader:,.0f} img/s"

    def feed(self, split: Split, world: World, *, once: bool) -> Feed:
        def fetched(each: Wanted) -> Read:
            epoch, indices = each
            images, broken = _read(split, indices.tolist(), epoch)
            return images.pin_memory() if world.device.type == "cuda" else images, broken

        def read(wanted: Iterable[Wanted]) -> Iterator[Read]:
            assert isinstance(self.workers, int), "auto has to be chosen first"
            found = _in_order(fetched, wanted, workers=self.workers, prefetch=self.prefetch)
            return _on_device(found, world.device)

        return read


@dataclass(frozen=True, kw_only=True)
class Auto(Streaming):
    """`resident` where both splits fit and are read more than once, else `streaming`.

    Fields:
        resident_gb: the most (in GB) that may become resident; half of the device's free memory is a further
            bound.
    """

    resident_gb: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resident_gb < 0:
            raise InputError(f"loader.resident_gb is {self.resident_gb}, expected 0 or more")

    def choose(self, task: Task) -> tuple[Any, str]:
        room, stored = min(self.resident_gb, free_memory(task.world) / 2), sum(map(len, task.splits))
        if task.boxes:
            against = "other boxes of the files in each epoch"
        elif task.gigabytes > room:
            against = f"{task.gigabytes:.1f} GB do not fit in {room:.1f} GB"
        elif task.splits[0].images is None and task.reads <= stored:
            against = f"{task.reads:,} images to read, {stored:,} to decode in advance"
        else:
            return Resident(), f"{task.gigabytes:.2f} GB fit in {room:.1f} GB"
        streaming, rates = Streaming(workers=self.workers, prefetch=self.prefetch).choose(task)
        return streaming, f"{against}; {rates}"


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
    _read(split, [0])  # the decoders are imported here
    began, read = time.perf_counter(), 0
    while read < len(indices) and time.perf_counter() < began + TRIAL_S:
        _read(split, list(indices[read : read + TRIED_AT_ONCE]))
        read += TRIED_AT_ONCE
    return min(read, len(indices)) / (time.perf_counter() - began)


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


def _read(split: Split, indices: list[int], epoch: int = 0) -> Read:
    """Images of a split, uint8 (len(indices), C, H, W), and the broken ones: blank, where the split lets them be."""
    try:
        return split.fetch(indices, epoch), {}
    except BrokenImage as error:
        if not split.skip:
            raise
        if len(indices) == 1:
            return split.fetch([]).new_zeros((1, *split.fetch([]).shape[1:])), {indices[0]: error}
    return _joined([_read(split, [index], epoch) for index in indices])


def sample(split: Split, number: int) -> Tensor:
    """Up to `number` images spread evenly over a split, uint8 (n, C, H, W), broken ones left out."""
    number = min(number, len(split))
    indices = [place * len(split) // number for place in range(number)]
    images, broken = _read(split, indices)
    return images[[index not in broken for index in indices]]


def _joined(parts: list[Read]) -> Read:
    broken = {index: error for _, found in parts for index, error in found.items()}
    return torch.cat([images for images, _ in parts]), broken


def _in_order(read: Callable[[W], R], wanted: Iterable[W], *, workers: int, prefetch: int) -> Iterator[R]:
    """What `read` makes of each of `wanted`, in order, by threads that are `prefetch` results each ahead."""
    if workers == 0:
        yield from map(read, wanted)
        return
    ahead: deque[Future[R]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="loader") as pool:
        try:
            for each in wanted:
                ahead.append(pool.submit(read, each))
                if len(ahead) > workers * prefetch:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _on_device(found: Iterator[Read], device: torch.device) -> Iterator[Read]:
    """The same with the images on `device`. To a GPU they go on a stream of its own, one batch ahead: while the
    step works on one, the next is copied."""
    if device.type != "cuda":
        yield from found
        return
    copies = torch.cuda.Stream(device)
    ahead: deque[tuple[Tensor, torch.cuda.Event, Broken]] = deque()

    def oldest() -> Read:
        images, copied, broken = ahead.popleft()
        steps = torch.cuda.current_stream(device)
        steps.wait_event(copied)
        images.record_stream(steps)  # its memory is not to be used again before the step is done with it
        return images, broken

    for pinned, broken in found:
        with torch.cuda.stream(copies):
            images = pinned.to(device, non_blocking=True)
        ahead.append((images, copies.record_event(), broken))
        if len(ahead) > 1:
            yield oldest()
    while ahead:
        yield oldest()
