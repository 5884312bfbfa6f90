"""Reads a rank's shard of each global batch, for many small steps at once. `sampler` decides the samples."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.core import log
from lockstep.core.data_protocols import Broken, ImageReader, ReadRequest, Shard
from lockstep.core.errors import InputError
from lockstep.core.plan import Plan, at_step
from lockstep.core.world import World
from lockstep.data.loading.sampler import ShardIndices, batch_groups, eval_blocks, shard_indices

# The label of a broken image: cross_entropy ignores it by default, and no prediction equals it. Of floats it is NaN.
IGNORE_INDEX = -100


@dataclass(frozen=True)
class BatchGroup:
    """A rank's shards of consecutive steps of one epoch, read together, as they are stored.

    For small batches a call costs more than the work on the pixels. `images` are uint8 (n, C, H, W), `known_labels`
    as `Split.labels` and `indices` int64 (n,), on the device, in the order of the steps.
    """

    steps: list[ShardIndices]
    images: Tensor
    known_labels: Tensor
    indices: Tensor
    rank: int
    ranks: int
    mix_partners: bool

    @property
    def epoch(self) -> int:
        return self.steps[0].epoch

    def shards(self, images: Tensor) -> Iterator[Shard]:
        """The shard of each step, with its rows of `images` (n, ...), which were made from the stored images."""
        sizes = [step.indices.shape[0] for step in self.steps]
        parts = (torch.split_with_sizes(tensor, sizes) for tensor in (images, self.known_labels, self.indices))
        for step, size, own_images, labels, indices in zip(self.steps, sizes, *parts, strict=True):
            partner = self.mix_partners and size > 0
            yield Shard(
                step.step, step.epoch, own_images, labels, indices, step.count, self.rank, self.ranks, partner
            )


@dataclass(frozen=True, kw_only=True)
class EvalLoader:
    """A split that is evaluated, in blocks of `eval_batch` images, on its way to one rank's device.

    `eval_labels` are as `Split.labels`, on the device, overwritten for broken images, of which at most `skip` are
    skipped. `broken_seen` has those so far, as (whether of this split, index).
    """

    world: World
    eval_batch: int
    eval_labels: Tensor
    eval_feed: ImageReader
    skip: int = 0
    broken_seen: set[tuple[bool, int]] = field(default_factory=set)

    def eval(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's blocks of the evaluation split: uint8 images and labels."""
        own_blocks = self._eval_blocks(self.world.rank)
        requests = [(0, torch.arange(block.start, block.stop)) for block in own_blocks]
        for block, (images, broken) in zip(own_blocks, self.eval_feed(requests), strict=True):
            self._mark_broken(broken, self.eval_labels)
            yield images, self.eval_labels[block.start : block.stop]

    def eval_image(self) -> Tensor:
        """The first image of the evaluation split, uint8 (1, C, H, W), for a pass that discards its result."""
        images, _ = next(iter(self.eval_feed([(0, torch.arange(1))])))
        return images

    @property
    def eval_rounds(self) -> int:
        """The number of blocks that the first rank evaluates; other ranks have the same number, or one less."""
        return len(self._eval_blocks(0))

    def _eval_blocks(self, rank: int) -> list[range]:
        return eval_blocks(len(self.eval_labels), self.eval_batch, rank=rank, ranks=self.world.size)

    def _mark_broken(self, broken: Broken, labels: Tensor) -> None:
        """Exclude broken images from the loss and the scores for the rest of the run, and warn of each once."""
        for index, error in broken.items():
            example = (labels is self.eval_labels, index)
            if example not in self.broken_seen:
                self.broken_seen.add(example)
                labels[index] = torch.nan if labels.is_floating_point() else IGNORE_INDEX
                if len(self.broken_seen) > self.skip:
                    raise self._too_many(f"{error.failure} too")
                log.warn(f"{error.failure}: skipped, {len(self.broken_seen)} of at most {self.skip}")

    def count_skipped(self) -> int:
        """The broken images that all ranks have read. Collective. Raises InputError above `skip`."""
        if not self.skip:
            return 0
        number = len(set().union(*self.world.gather(self.broken_seen)))
        if number > self.skip:
            raise self._too_many(f"{number} images cannot be decoded")
        return number

    def _too_many(self, reason: str) -> InputError:
        return InputError(
            f"dataset.skip is {self.skip}, but {reason}; repair or remove the corrupt images (see the warnings), or "
            f"skip more of them with dataset.skip={2 * self.skip}"
        )


@dataclass(frozen=True, kw_only=True)
class Loader(EvalLoader):
    """The two splits of a run on their way to one rank's device.

    Fields:
        train_labels: as `Split.labels`, on the device; the labels of broken images are overwritten.
        train_feeds: the readers of the images, by the steps after which they begin (0 for the first), in their order.
            Steps of two readers are not read together, and nothing is read ahead of the change.
        partners: whether a shard also has the mix partner of its last example.
        stride: the most steps that are read together.
        order_device: computes the order of the examples; the images' device, so that no step waits for the order.
        order_of: gives the order of an epoch; None is a permutation of the examples.
        crops: whether `train_feeds` cut boxes, another one for each repetition of an example.
    """

    plan: Plan
    seed: int
    train_labels: Tensor
    train_feeds: Mapping[int, ImageReader]
    partners: bool = False
    stride: int = 1
    order_device: torch.device | None = None
    order_of: Callable[[int], Tensor] | None = None
    crops: bool = False

    def train(self, after: int) -> Iterator[BatchGroup]:
        """This rank's shards for every step after step `after`."""
        ends = [*self.train_feeds, self.plan.total_steps][1:]
        for (start, feed), end in zip(self.train_feeds.items(), ends, strict=True):
            yield from self._train(feed, max(after, start), min(end, self.plan.total_steps))

    def _train(self, feed: ImageReader, after: int, end: int) -> Iterator[BatchGroup]:
        requested: deque[list[ShardIndices]] = deque()

        def requests() -> Iterator[ReadRequest]:
            plan = replace(self.plan, total_steps=end)
            own = self._steps(after, self.world, plan, mix_partners=self.partners, device=self.order_device)
            for steps in batch_groups(own, self.stride):
                requested.append(steps)
                yield self._request(steps)

        for images, broken in feed(requests()) if after < end else ():
            self._mark_broken(broken, self.train_labels)
            yield self._group(requested.popleft(), images, self.world.rank, self.world.size, self.partners)

    def global_batch(self, step: int) -> BatchGroup:
        """All examples of a step, of all ranks. Reads them again: for looking at them, not for training."""
        whole = next(self._steps(step - 1, World.solo()))
        images, _ = next(iter(at_step(self.train_feeds, step)([self._request([whole])])))
        return self._group([whole], images, rank=0, ranks=1, mix_partners=False)

    def one_by_one(self, examples: Tensor, epoch: int) -> Iterator[tuple[int, BatchGroup]]:
        """Some examples as an epoch has them, each alone with its mix partner, in the order of the epoch."""
        remaining = {int(example) for example in examples}
        steps = self._steps(epoch * self.plan.steps_per_epoch, World.solo(), mix_partners=self.partners)
        for step in itertools.takewhile(lambda step: step.epoch == epoch and remaining, steps):
            own = self._examples(step.indices[: step.count])
            for place in torch.isin(own, examples).nonzero().flatten().tolist():
                if (example := int(own[place])) in remaining:
                    remaining.remove(example)
                    piece = replace(step, indices=step.indices[place : place + 1 + self.partners])
                    images, _ = next(iter(at_step(self.train_feeds, step.step)([self._request([piece])])))
                    yield example, self._group([piece], images, place, step.count, self.partners)

    def blocks_of_epoch(self, epoch: int, number: int) -> Iterator[BatchGroup]:
        """This rank's share of the first `number` blocks of `eval_batch` examples of an epoch.

        Each rank has as many, so the last ones may be blocks from the beginning again.
        """
        as_one = replace(self.plan, batch=self.plan.examples, total_steps=epoch + 1)
        order = next(self._steps(epoch, World.solo(), plan=as_one)).indices
        rounds = -(-number // self.world.size)
        turns = ((round * self.world.size + self.world.rank) % number for round in range(rounds))
        parts = [order[turn * self.eval_batch : (turn + 1) * self.eval_batch] for turn in turns]
        last = min((epoch + 1) * self.plan.steps_per_epoch, self.plan.total_steps)
        steps = [ShardIndices(last, epoch, part, len(part)) for part in parts]
        feed = at_step(self.train_feeds, last)
        for step, (images, broken) in zip(steps, feed(self._request([step]) for step in steps), strict=True):
            self._mark_broken(broken, self.train_labels)
            yield self._group([step], images, rank=0, ranks=1, mix_partners=False)

    def _steps(self, after: int, world: World, plan: Plan | None = None, **options: Any) -> Iterator[ShardIndices]:
        options |= {"rank": world.rank, "ranks": world.size, "order_of": self.order_of}
        return shard_indices(plan or self.plan, self.seed, after=after, **options)

    def _request(self, steps: list[ShardIndices]) -> ReadRequest:
        indices = torch.cat([step.indices for step in steps])
        return steps[0].epoch, indices if self.crops else self._examples(indices)

    def _examples(self, indices: Tensor) -> Tensor:
        """The examples of `indices`, without their repetition (see `balanced_order`)."""
        return indices if self.order_of is None else indices % self.plan.examples

    def _group(
        self, steps: list[ShardIndices], images: Tensor, rank: int, ranks: int, mix_partners: bool
    ) -> BatchGroup:
        indices = torch.cat([step.indices for step in steps]).to(self.world.device, non_blocking=True)
        labels = self.train_labels[self._examples(indices)]
        return BatchGroup(steps, images, labels, indices, rank, ranks, mix_partners)
