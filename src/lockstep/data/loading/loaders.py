"""How images reach the device: all of them at once (`resident`), or batch by batch (`streaming`)."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from lockstep.config.options import option
from lockstep.core.data_protocols import (
    Broken,
    ImageLoader,
    ImageReader,
    LoaderContext,
    ReadRequest,
    ReadResult,
    Split,
)
from lockstep.core.errors import InputError
from lockstep.core.fields import ranged
from lockstep.core.world import World
from lockstep.runtime.host import GB, cores, format_bytes, free_memory

# The most values (pixels times channels) that are gathered and augmented in one call. On a CPU, as many as fit in its
# cache: as float32 they are 4 MB. On a GPU a call costs more than many values, so they may take a small share of the
# free memory, with their temporary copies (per value a float32, an offset of 8 bytes, and a few bytes more).
STRIDE_VALUES, STRIDE_VALUES_GPU = 2**20, 2**28
BYTES_OF_A_VALUE, STRIDE_SHARE = 24, 1 / 16
# One stream for all copies to a GPU: its allocator keeps freed memory for the stream that it was allocated on.
copy_stream_of = cache(lambda device: torch.cuda.Stream(device))
# Batches on a GPU that wait for their steps. CUDA has the host wait after about a thousand launches, and a replayed
# graph is a single one; the images of each batch stay in memory until its step is done.
BATCHES_AHEAD = 8


@option("loader")
class Resident(ImageLoader):
    """Keeps each split as uint8 on the device, where one gather makes a batch."""

    decodes_once: ClassVar[bool] = True

    def __str__(self) -> str:
        return "all images in memory"

    def held_gb(self, context: LoaderContext) -> float:
        if context.world.device.type != "cpu":
            return context.gigabytes + STRIDE_SHARE * free_memory(context.world)
        return context.gigabytes / context.world.local_size if context.splits[0].images is None else 0.0

    def order_device(self, world: World) -> torch.device:
        return world.device

    def stride(self, shard: int, values: int, world: World) -> int:
        room = STRIDE_VALUES
        if world.device.type != "cpu":
            room = min(STRIDE_VALUES_GPU, int(STRIDE_SHARE * free_memory(world) * GB / BYTES_OF_A_VALUE))
        return max(1, room // max(1, shard * values))

    def feed(self, split: Split, world: World) -> ImageReader:
        stored = split.images
        broken: Broken = {}
        if stored is None:
            from lockstep.data.loading import reading  # images in memory need no threads

            stored, broken = reading.decode_all(split, world, threads=max(1, cores() // world.local_size))
        images = stored.to(world.device)

        def read(requests: Iterable[ReadRequest]) -> Iterator[ReadResult]:
            for _, indices in requests:
                # index_select copies whole images; indexing goes byte by byte, which takes 8 times as long on a CPU.
                yield images.index_select(0, indices.to(world.device, non_blocking=True)), broken

        return read


@option("loader")
class Streaming(ImageLoader):
    """Threads read batches while the device works on earlier ones.

    The decoders release Python's lock. Processes are faster for tiny files (docs/evidence/benchmarks.md compares
    both), but take time to start and can die.
    """

    # threads per rank; `auto`: as many as the model needs. With `loader=auto`, a number chooses `streaming`
    workers: int | str = ranged("auto", least=0, most=256, words=("auto",))
    # batches that each worker keeps ready. With `loader=auto`, a number other than the default chooses `streaming`
    prefetch: int = ranged(2, least=1, most=1024)

    def check(self) -> None:
        if self.workers == 0 and self.prefetch != Streaming.prefetch:
            raise InputError(
                f"loader.prefetch is {self.prefetch}, but loader.workers is 0, and only workers read ahead; use "
                "loader.workers=1, or remove loader.prefetch"
            )

    def __str__(self) -> str:
        return f"images read as they are needed, {self.workers} worker{'s' * (self.workers != 1)}"

    def choose(self, context: LoaderContext) -> tuple[ImageLoader, str]:
        """The loader to use, and why. `workers=auto` is decided by a measurement."""
        if self.workers != "auto":
            return self, "as configured"
        if context.splits[0].images is not None and not getattr(context.splits[0], "mapped", False):
            # Only a worker can read ahead, so setting `prefetch` gets one.
            return replace(self, workers=int(self.prefetch != Streaming.prefetch)), "images in memory"
        from lockstep.data.loading import reading  # as above

        reader, model = reading.reading_rate(context.splits[0]), context.training_rate()
        most = max(1, cores() // context.world.local_size)
        if context.splits[0].images is None:  # copying mapped rows, and waiting for the disk, releases Python's lock
            most = most if 1 / reader > reading.LIGHT_S else 1
        if model is None:
            return replace(self, workers=most), f"model not tried, one worker {reader:,.0f} img/s"
        needed = reading.workers_needed(model, reader, most, own_cores=context.world.device.type != "cpu")
        return replace(self, workers=needed), f"model {model:,.0f} img/s, one worker {reader:,.0f} img/s"

    def feed(self, split: Split, world: World) -> ImageReader:
        from lockstep.data.loading import reading  # as above

        def fetch(request: ReadRequest) -> ReadResult:
            epoch, indices = request
            images, broken = reading.read_images(split, indices.tolist(), epoch)
            return images.pin_memory() if world.device.type == "cuda" else images, broken

        def read(requests: Iterable[ReadRequest]) -> Iterator[ReadResult]:
            assert isinstance(self.workers, int), "auto has to be chosen first"
            results = reading.map_in_order(fetch, requests, workers=self.workers, prefetch=self.prefetch)
            return _on_device(results, world.device)

        return read


@option("loader")
class Auto(Streaming):
    """`resident` if both splits fit into memory and are read more than once, else `streaming`."""

    resident_gb: float = ranged(4.0, least=0, most=1e6)  # most memory, in GB, that resident images may take

    def choose(self, context: LoaderContext) -> tuple[ImageLoader, str]:
        objection = self._against_resident(context)
        if not objection:
            size, room = (format_bytes(GB * gigabytes) for gigabytes in (context.gigabytes, self._room(context)))
            return Resident(), f"{size} fit in {room}"
        streaming, rates = Streaming(workers=self.workers, prefetch=self.prefetch).choose(context)
        return streaming, f"{objection}; {rates}"

    def held_gb(self, context: LoaderContext) -> float:
        return 0.0 if self._against_resident(context) else Resident().held_gb(context)

    def _room(self, context: LoaderContext) -> float:
        return min(self.resident_gb, free_memory(context.world) / 2)

    def _against_resident(self, context: LoaderContext) -> str:
        """Why the images should not become resident; empty if they should."""
        room, stored = self._room(context), sum(map(len, context.splits))
        if (self.workers, self.prefetch) != (Streaming.workers, Streaming.prefetch):
            return "loader.workers or loader.prefetch is given"
        if context.changes:
            return "each epoch reads other pixels"
        if context.gigabytes > room:
            return f"{context.gigabytes:.1f} GB do not fit in {room:.1f} GB"
        if context.splits[0].images is None and context.reads <= stored:
            return f"{context.reads:,} images to read, {stored:,} to decode in advance"
        return ""


def read_once(split: Split, world: World) -> ImageReader:
    """The reader of a split that is evaluated once: no image stays in memory."""
    workers = max(1, cores() // world.local_size) if split.images is None else 0
    return Streaming(workers=workers).feed(split, world)


def _on_device(results: Iterator[ReadResult], device: torch.device) -> Iterator[ReadResult]:
    """Move images to a GPU on a separate stream, one batch ahead: the next while the step works on this one.

    The host waits before it copies a batch while `BATCHES_AHEAD` earlier ones wait for their steps.
    """
    if device.type != "cuda":
        yield from results
        return
    copy_stream = copy_stream_of(device)
    pending: deque[tuple[Tensor, torch.cuda.Event, Broken]] = deque()
    begun: deque[torch.cuda.Event] = deque()  # for each batch, when the steps before it are done

    def oldest() -> ReadResult:
        images, copied, broken = pending.popleft()
        step_stream = torch.cuda.current_stream(device)
        begun.append(torch.cuda.Event(blocking=True))  # who waits for it sleeps, and leaves the core to the workers
        begun[-1].record(step_stream)
        step_stream.wait_event(copied)
        images.record_stream(step_stream)  # do not reuse the memory before the step is done with it
        return images, broken

    for pinned, broken in results:
        if len(begun) == BATCHES_AHEAD:
            begun.popleft().synchronize()
        with torch.cuda.stream(copy_stream):
            images = pinned.to(device, non_blocking=True)
        pending.append((images, copy_stream.record_event(), broken))
        if len(pending) > 1:
            yield oldest()
    while pending:
        yield oldest()
