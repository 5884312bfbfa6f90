"""How images reach the device: all of them at once (`resident`), or batch by batch (`streaming`).

Both give the same shards (`lockstep.data.loading.shards`): a loader only moves bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.core.data_protocols import (
    Broken,
    ImageLoader,
    ImageReader,
    LoaderContext,
    ReadRequest,
    ReadResult,
    Split,
)
from lockstep.core.fields import ranged
from lockstep.core.world import World
from lockstep.data.datasets.packed import MappedSplit
from lockstep.data.loading.prefetch import in_order, read_images, worthwhile
from lockstep.data.loading.shared_memory import decode_all
from lockstep.data.loading.worker_tuning import reading_rate, workers_needed
from lockstep.runtime.host import GB, cores, free_memory

# Values of the images that are gathered and augmented together, at most. On a CPU as many as stay in its cache: as
# float32 they are 4 MB. On a GPU a call costs more than many values do; there they take, with what is made of them on
# the way (a float32, a place of eight bytes and a few bytes), a small part of the memory.
STRIDE_VALUES, STRIDE_VALUES_GPU = 2**20, 2**28
BYTES_OF_A_VALUE, STRIDE_SHARE = 24, 1 / 16


@dataclass(frozen=True, kw_only=True)
class Resident:
    """The whole split as uint8 on the device; a batch is one gather there."""

    def __str__(self) -> str:
        return "resident"

    def choose(self, context: LoaderContext) -> tuple[ImageLoader, str]:
        """The loader to use, and why."""
        return self, "as asked"

    def held_gb(self, context: LoaderContext) -> float:
        """The device memory (in GB) that images will take from a rank for good, beyond what they have already."""
        if context.world.device.type != "cpu":
            return context.gigabytes + STRIDE_SHARE * free_memory(context.world)
        return context.gigabytes / context.world.local_size if context.splits[0].images is None else 0.0

    def order_device(self, world: World) -> torch.device:
        """Where indices are wanted."""
        return world.device

    def stride(self, shard: int, values: int, world: World) -> int:
        """The steps to read together, for shards of so many images of so many values (pixels times channels)."""
        room = STRIDE_VALUES
        if world.device.type != "cpu":
            room = min(STRIDE_VALUES_GPU, int(STRIDE_SHARE * free_memory(world) * GB / BYTES_OF_A_VALUE))
        return max(1, room // max(1, shard * values))

    def feed(self, split: Split, world: World) -> ImageReader:
        threads = max(1, cores() // world.local_size)
        decoded = (split.images, {}) if split.images is not None else decode_all(split, world, threads=threads)
        images, broken = decoded[0].to(world.device), decoded[1]

        def read(wanted: Iterable[ReadRequest]) -> Iterator[ReadResult]:
            for _, indices in wanted:
                # Copies whole images, where indexing goes byte by byte: an eighth of its time on a CPU.
                yield images.index_select(0, indices.to(world.device, non_blocking=True)), broken

        return read


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Batches read by threads while the device works on earlier ones.

    Threads, because the decoders release Python's lock. Processes are faster where files are tiny (both are in
    docs/performance.md), but such data becomes resident or is packed; they have to be started, and can be lost.

    Fields:
        workers: threads per rank; `auto` is as many as the model needs (`workers_needed`) where images are decoded,
            or read from a packed data set, and none where they are in memory.
        prefetch: batches that each worker keeps ready.
    """

    workers: int | str = ranged("auto", least=0, most=256, words=("auto",))
    prefetch: int = ranged(2, least=1, most=1024)

    def held_gb(self, context: LoaderContext) -> float:
        """As for `Resident`: none."""
        return 0.0

    def order_device(self, world: World) -> torch.device:
        """Where indices are wanted."""
        return torch.device("cpu")

    def stride(self, shard: int, values: int, world: World) -> int:
        """The steps to read together: workers read ahead as it is."""
        return 1

    def __str__(self) -> str:
        return f"streaming, {self.workers} worker{'s' * (self.workers != 1)}"

    def choose(self, context: LoaderContext) -> tuple[ImageLoader, str]:
        """The loader to use, and why: `workers=auto` by measurement."""
        if self.workers != "auto":
            return self, "as asked"
        if context.splits[0].images is not None and not isinstance(context.splits[0], MappedSplit):
            # Only a worker reads ahead: one does where that is asked for.
            return replace(self, workers=int(self.prefetch != Streaming.prefetch)), "images in memory"
        reader, model = reading_rate(context.splits[0]), context.training_rate()
        most = max(1, cores() // context.world.local_size)
        if (
            context.splits[0].images is None
        ):  # mapped rows are copied, and awaited from the disk, without Python's lock
            most = worthwhile(most, 1 / reader)
        if model is None:
            return replace(self, workers=most), f"model not tried, one worker {reader:,.0f} img/s"
        needed = workers_needed(model, reader, most, own_cores=context.world.device.type != "cpu")
        return replace(self, workers=needed), f"model {model:,.0f} img/s, one worker {reader:,.0f} img/s"

    def feed(self, split: Split, world: World) -> ImageReader:
        def fetched(each: ReadRequest) -> ReadResult:
            epoch, indices = each
            images, broken = read_images(split, indices.tolist(), epoch)
            return images.pin_memory() if world.device.type == "cuda" else images, broken

        def read(wanted: Iterable[ReadRequest]) -> Iterator[ReadResult]:
            assert isinstance(self.workers, int), "auto has to be chosen first"
            found = in_order(fetched, wanted, workers=self.workers, prefetch=self.prefetch)
            return _on_device(found, world.device)

        return read


@dataclass(frozen=True, kw_only=True)
class Auto(Streaming):
    """`resident` where both splits fit and are read more than once, else `streaming`.

    `workers` or `prefetch` ask for `streaming`, which alone has them.

    Fields:
        resident_gb: the most (in GB) that may become resident; half of the device's free memory is a further
            bound.
    """

    resident_gb: float = ranged(4.0, least=0, most=1e6)

    def choose(self, context: LoaderContext) -> tuple[ImageLoader, str]:
        against = self._against_resident(context)
        if not against:
            return Resident(), f"{context.gigabytes:.2f} GB fit in {self._room(context):.1f} GB"
        streaming, rates = Streaming(workers=self.workers, prefetch=self.prefetch).choose(context)
        return streaming, f"{against}; {rates}"

    def held_gb(self, context: LoaderContext) -> float:
        return 0.0 if self._against_resident(context) else Resident().held_gb(context)

    def _room(self, context: LoaderContext) -> float:
        return min(self.resident_gb, free_memory(context.world) / 2)

    def _against_resident(self, context: LoaderContext) -> str:
        """Why the images are not to become resident; empty where they are."""
        room, stored = self._room(context), sum(map(len, context.splits))
        if (self.workers, self.prefetch) != (Streaming.workers, Streaming.prefetch):
            return "loader.workers or loader.prefetch is given"
        if context.boxes:
            return "other boxes of the files in each epoch"
        if context.gigabytes > room:
            return f"{context.gigabytes:.1f} GB do not fit in {room:.1f} GB"
        if context.splits[0].images is None and context.reads <= stored:
            return f"{context.reads:,} images to read, {stored:,} to decode in advance"
        return ""


def _on_device(found: Iterator[ReadResult], device: torch.device) -> Iterator[ReadResult]:
    """The same with the images on `device`. To a GPU they go on a stream of its own, one batch ahead: while the
    step works on one, the next is copied."""
    if device.type != "cuda":
        yield from found
        return
    copies = torch.cuda.Stream(device)
    ahead: deque[tuple[Tensor, torch.cuda.Event, Broken]] = deque()

    def oldest() -> ReadResult:
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
