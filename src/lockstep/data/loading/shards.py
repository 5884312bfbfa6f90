"""What a rank trains on: its shard of each global batch, read for many small steps at once.

`lockstep.data.loading.sampler` decides which samples, in which order, and the pipeline what happens to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lockstep.core import log
from lockstep.core.data_protocols import Broken, ImageReader, ReadRequest
from lockstep.core.errors import InputError
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.data.loading.sampler import Batch, batches, blocks, share, strides

# The label of a broken image: what cross_entropy leaves out by default, and no prediction hits.
IGNORE_INDEX = -100


@dataclass(frozen=True)
class Shard:
    """Piece `number` of the `pieces` that a global batch of `count` examples is cut into, on the device.

    `images` (b, C, H, W) are as stored (uint8) or as the model takes them, `indices` and `known_labels` int64 (b,).
    With `partner`, because samples are mixed, each of the three has one more row: the partner of the piece's last
    example. A piece without examples has none.
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
class BatchGroup:
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
    train_feed: ImageReader
    eval_feed: ImageReader
    partners: bool = False
    stride: int = 1
    order_device: torch.device | None = None
    skip: int = 0
    broken_seen: set[tuple[bool, int]] = field(default_factory=set)

    def train(self, after: int) -> Iterator[BatchGroup]:
        """This rank's shards for every step behind `after`."""
        ahead: list[list[Batch]] = []

        def wanted() -> Iterator[ReadRequest]:
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

    def _stride(self, together: list[Batch], images: Tensor, rank: int, ranks: int, partners: bool) -> BatchGroup:
        indices = torch.cat([batch.indices for batch in together]).to(self.world.device, non_blocking=True)
        return BatchGroup(together, images, self.train_labels[indices], indices, rank, ranks, partners)

    def eval(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's blocks of the evaluation split: uint8 images and labels."""
        world = self.world
        mine = self._eval_blocks(world.rank)
        wanted = [(0, torch.arange(block.start, block.stop)) for block in mine]
        for block, (images, broken) in zip(mine, self.eval_feed(wanted), strict=True):
            self._leave_out(broken, self.eval_labels)
            yield images, self.eval_labels[block.start : block.stop]

    @property
    def eval_rounds_without(self) -> int:
        """How many blocks the first rank has more than this one: 0 or 1."""
        return len(self._eval_blocks(0)) - len(self._eval_blocks(self.world.rank))

    def _eval_blocks(self, rank: int) -> list[range]:
        return blocks(len(self.eval_labels), self.eval_batch, rank=rank, ranks=self.world.size)

    def _leave_out(self, broken: Broken, labels: Tensor) -> None:
        """Take broken images out of the loss and of the scores, for good, and warn of each once."""
        for index, error in broken.items():
            example = (labels is self.train_labels, index)
            if example not in self.broken_seen:
                self.broken_seen.add(example)
                labels[index] = IGNORE_INDEX
                if len(self.broken_seen) > self.skip:
                    raise self._too_many(f"{error.what} too")
                log.warn(f"{error.what}: left out, {len(self.broken_seen)} of at most {self.skip}")

    def count_skipped(self) -> int:
        """The number of different broken images that all ranks together have met so far. Collective.

        Raises:
            InputError: they are more than `skip`.
        """
        if not self.skip:
            return 0
        broken_seen = (torch.cat([self.train_labels, self.eval_labels]) == IGNORE_INDEX).int()
        number = int((self.world.sum(broken_seen) > 0).sum())
        if number > self.skip:
            raise self._too_many(f"{number} images cannot be decoded")
        return number

    def _too_many(self, found: str) -> InputError:
        return InputError(
            f"dataset.skip is {self.skip}, but {found}; repair or remove the broken images (see the warnings), or "
            f"leave out more of them with dataset.skip={2 * self.skip}"
        )
