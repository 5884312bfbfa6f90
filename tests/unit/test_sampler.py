"""Which samples each rank gets, for any data set, batch, number of ranks and step to resume from."""

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from timm.data.distributed_sampler import RepeatAugSampler

from helpers import NARROW, losses, resolved, train_here
from lockstep.core.plan import Plan, share
from lockstep.core.rng import permutation
from lockstep.core.world import World
from lockstep.data.loading.sampler import (
    ShardIndices,
    balanced_order,
    batch_groups,
    eval_blocks,
    repeated_order,
    shard_indices,
)
from lockstep.training.build_data import build_data, build_loader


@dataclass(frozen=True)
class Case:
    """The plan of a run, its seed and its number of ranks."""

    plan: Plan
    seed: int
    ranks: int

    def shards(self, rank: int, after: int = 0, *, mix_partners: bool = False) -> list[ShardIndices]:
        place: dict[str, int] = {"rank": rank, "ranks": self.ranks, "after": after}
        return list(shard_indices(self.plan, self.seed, mix_partners=mix_partners, **place))

    def steps(self, after: int = 0) -> list[list[ShardIndices]]:
        """For each step, the shards of all ranks."""
        return [list(step) for step in zip(*(self.shards(rank, after) for rank in range(self.ranks)), strict=True)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    examples = draw(st.integers(1, 60))
    batch, steps = draw(st.integers(1, examples)), draw(st.integers(1, 40))
    every = {"log_every": 1, "eval_every": 1, "save_every": 1}
    plan = Plan(examples=examples, batch=batch, total_steps=steps, micro_batches=1, **every)
    return Case(plan, draw(st.integers(0, 5)), draw(st.integers(1, 7)))


def joined(shards: list[ShardIndices]) -> list[int]:
    return torch.cat([shard.indices for shard in shards]).tolist()


@given(st.integers(0, 200), st.integers(1, 20))
def test_shares_are_contiguous_and_differ_by_one_at_most(n: int, parts: int) -> None:
    shares = [range(n)[share(n, parts, part)] for part in range(parts)]
    assert [index for share in shares for index in share] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(cases())
def test_the_shards_of_all_ranks_are_the_global_batch(case: Case) -> None:
    alone = Case(case.plan, case.seed, 1).shards(0)
    for whole, shards in zip(alone, case.steps(), strict=True):
        assert joined(shards) == whole.indices.tolist()
        assert {shard.count for shard in shards} == {len(whole.indices)}
        assert {(shard.step, shard.epoch) for shard in shards} == {(whole.step, whole.epoch)}


@given(cases())
def test_an_epoch_is_its_permutation_with_every_sample_once(case: Case) -> None:
    seen: dict[int, list[int]] = {}
    for shards in case.steps():
        seen.setdefault(shards[0].epoch, []).extend(joined(shards))
    for epoch, indices in seen.items():
        order = permutation(case.seed, epoch, case.plan.examples).tolist()
        assert indices == order[: len(indices)]
        complete = case.plan.total_steps >= (epoch + 1) * case.plan.steps_per_epoch
        assert len(indices) == case.plan.examples or not complete


@given(cases(), st.data())
def test_going_on_behind_a_step_gives_the_rest_of_the_sequence(case: Case, data: st.DataObject) -> None:
    after = data.draw(st.integers(0, case.plan.total_steps))
    for rank in range(case.ranks):
        resumed, whole = case.shards(rank, after), case.shards(rank)[after:]
        places = [[(shard.step, shard.epoch, shard.count) for shard in shards] for shards in (resumed, whole)]
        assert places[0] == places[1]
        assert all(torch.equal(a.indices, b.indices) for a, b in zip(resumed, whole, strict=True))


@given(cases())
def test_a_partner_is_the_next_sample_of_the_global_batch_and_the_first_for_the_last(case: Case) -> None:
    alone = Case(case.plan, case.seed, 1).shards(0)
    for rank in range(case.ranks):
        pairs = zip(case.shards(rank), case.shards(rank, mix_partners=True), alone, strict=True)
        for own, with_partner, whole in pairs:
            together = whole.indices.tolist()
            following = dict(zip(together, [*together[1:], together[0]], strict=True))
            indices = with_partner.indices.tolist()
            assert indices[: len(own.indices)] == own.indices.tolist()
            assert indices[1:] == [following[index] for index in own.indices.tolist()]
            assert with_partner.count == own.count


@given(st.integers(0, 200), st.integers(1, 30), st.integers(1, 9))
def test_evaluation_covers_each_example_once_in_blocks_that_no_number_of_ranks_changes(
    n: int, size: int, ranks: int
) -> None:
    alone = eval_blocks(n, size, rank=0, ranks=1)
    dealt = [eval_blocks(n, size, rank=rank, ranks=ranks) for rank in range(ranks)]
    together = [block for mine in dealt for block in mine]
    assert len(dealt[0]) - len(dealt[-1]) in (0, 1), "the first rank has the most, by one"
    assert [index for block in alone for index in block] == list(range(n))
    assert sorted(together, key=lambda block: block.start) == alone


@given(cases(), st.integers(1, 5))
def test_a_global_batch_holds_each_of_its_examples_equally_often(case: Case, repeats: int) -> None:
    n, batch = case.plan.examples, case.plan.batch // repeats * repeats
    assume(batch)
    order = repeated_order(case.seed, 1, replace(case.plan, batch=batch), repeats)
    assert len(order.unique()) == n
    seen: list[int] = []
    for part in order.split(batch):
        times = (part % n).bincount()
        times = times[times > 0]
        assert len(part) < batch or set(times.tolist()) == {repeats}
        assert repeats >= times.max() >= times.max() - 1 <= times.min()
        different = math.ceil(len(part) / repeats)
        seen += (part % n)[:different].tolist()
        assert len(times) == different
    assert seen == permutation(case.seed, 1, n)[: len(seen)].tolist()


@pytest.mark.parametrize(("ranks", "repeats"), [(1, 3), (3, 3), (4, 2)])
def test_a_step_holds_the_examples_that_timm_repeats_in_it(ranks: int, repeats: int) -> None:
    plan = Plan(examples=480, batch=48, total_steps=10, micro_batches=1, log_every=1, eval_every=1, save_every=1)
    expected, order = permutation(7, 2, plan.examples), repeated_order(7, 2, plan, repeats) % plan.examples
    options = {"num_replicas": ranks, "shuffle": False, "num_repeats": repeats, "selected_round": 0}
    samplers = [RepeatAugSampler(expected, rank=rank, **options) for rank in range(ranks)]
    by_rank = torch.stack([torch.tensor(list(sampler)).view(10, plan.batch // ranks) for sampler in samplers], 1)
    for ours, theirs in zip(order.split(plan.batch), by_rank, strict=True):
        assert ours.sort().values.tolist() == expected[theirs.flatten()].sort().values.tolist()
        if ranks == repeats:
            assert all(
                len(ours[share(plan.batch, ranks, rank)].unique()) == plan.batch // ranks for rank in range(ranks)
            )


COUNTS = (3, 50, 0, 7, 11)
LABELS = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))[torch.randperm(sum(COUNTS))]


@pytest.mark.parametrize("epoch", [0, 5])
def test_every_class_comes_equally_often_and_no_example_twice_before_all_of_its_class(epoch: int) -> None:
    n = len(LABELS)
    order = balanced_order(1, epoch, LABELS)
    assert len(order) == n
    assert len(order.unique()) == n
    examples = order % n
    assert sorted(torch.bincount(LABELS[examples], minlength=len(COUNTS)).tolist()) == [0, 17, 18, 18, 18]
    for label, count in enumerate(COUNTS):
        comes = torch.bincount(examples, minlength=n)[label == LABELS]
        assert count == 0 or int(comes.max() - comes.min()) <= 1


def test_classes_come_mixed_and_take_turns_in_coming_once_more() -> None:
    n, more, halves = len(LABELS), torch.zeros(len(COUNTS)), torch.zeros(len(COUNTS))
    for epoch in range(60):
        labels = LABELS[balanced_order(1, epoch, LABELS) % n]
        more += torch.bincount(labels, minlength=len(COUNTS)) == 18
        halves += torch.bincount(labels[: n // 2], minlength=len(COUNTS))
    # Three of the four classes with examples come 18 times, the fourth 17 times.
    assert ((more - 45).abs() < 15)[torch.tensor(COUNTS) > 0].all()
    assert ((halves / 60 - n / 8).abs() < 1.5)[torch.tensor(COUNTS) > 0].all()


def test_the_order_is_that_of_the_seed_and_the_epoch() -> None:
    orders = [balanced_order(*place, LABELS) for place in ((1, 0), (1, 1), (2, 0), (1, 0))]
    assert torch.equal(orders[0], orders[3])
    assert not any(torch.equal(orders[0], order) for order in orders[1:3])
    large = [set((order % len(LABELS))[LABELS[order % len(LABELS)] == 1].tolist()) for order in orders[:2]]
    assert large[0] != large[1]


def test_a_resume_goes_on_in_the_balanced_order(tmp_path: Path) -> None:
    words = (NARROW, "batch=600", "steps=4", "train.sampling=balanced", "precision=fp64", "augment=crop_flip")
    words += ("train.eval_every=100%",)
    whole = train_here(tmp_path / "whole", *words)
    train_here(tmp_path / "stopped", *words, stop_at=2)
    resumed = train_here(tmp_path / "stopped", *words, "loader=streaming", "loader.workers=0")
    assert losses(resumed) == losses(whole)
    assert losses(whole) != losses(train_here(tmp_path / "other", *words, "train.sampling=shuffled"))


def test_class_weights_on_balanced_classes_are_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=linear", "steps=1", "train.sampling=balanced")
    for name, more, notes in (("a", (), 0), ("b", (f"loss.class_weights={[1.0] * 10}",), 1)):
        train_here(tmp_path / name, *words, *more)
        captured = capsys.readouterr()
        assert (captured.out + captured.err).count("loss.class_weights apply on top") == notes


@pytest.mark.parametrize(
    "subset", ["folds=3 dataset.fold=1", "limit=0.4", "limit=0.4 dataset.folds=3 dataset.fold=2"]
)
@pytest.mark.parametrize("sampling", ["sampling=balanced", "repeats=2"])
def test_a_sampling_repeats_the_examples_of_its_subset_alone(tmp_path: Path, sampling: str, subset: str) -> None:
    for number, name in enumerate("a" * 19 + "b" * 7 + "c" * 40):
        (tmp_path / "train" / name).mkdir(parents=True, exist_ok=True)
        Image.new("L", (6, 4), 3 * number).save(tmp_path / "train" / name / f"{number}.png")
    words = ("dataset=folder", f"dataset.path={tmp_path}", "dataset.decode_size=[4,6]", "model=linear", "batch=5")
    shares = () if "folds" in subset else ("dataset.val_share=0.2",)
    words += (
        "loader=streaming",
        "loader.workers=0",
        f"train.{sampling}",
        *f"dataset.{subset}".split(),
        "epochs=2",
        *shares,
    )
    job, data = build_data(resolved(*words), World.solo())
    n, held_out = len(data.train), {data.val.name(index) for index in range(len(data.val))}
    assert held_out.isdisjoint(map(data.train.name, range(n)))
    epochs: dict[int, list[int]] = {0: [], 1: []}
    for group in build_loader(job, data, World.solo()).train(0):
        examples = group.indices % n
        assert torch.equal(group.images, data.train.fetch(examples.tolist()))
        assert torch.equal(group.known_labels, data.train.labels[examples])
        for step in group.steps:
            shown = (step.indices % n).tolist()
            epochs[step.epoch] += shown
            if sampling == "repeats=2":
                assert sorted(Counter(shown).values()) == [1] * (len(shown) % 2) + [2] * (len(shown) // 2)
    for shown in epochs.values():
        assert len(shown) == n
        if sampling == "sampling=balanced":
            counts = data.train.labels[shown].bincount().tolist()
            assert sorted(counts) == sorted(n // 3 + (turn < n % 3) for turn in range(3))


@pytest.mark.parametrize(("steps", "sizes"), [(1, [1] * 11), (3, [1, 3, 3, 3, 1]), (9, [1, 6, 4])])
def test_steps_of_one_epoch_are_read_together_and_the_first_one_alone(steps: int, sizes: list[int]) -> None:
    shards = [ShardIndices(step + 1, step // 7, torch.tensor([step]), 1) for step in range(11)]
    groups = [*batch_groups(iter(shards), steps)]
    assert [len(group) for group in groups] == sizes
    assert [shard for group in groups for shard in group] == shards
    assert all(len({shard.epoch for shard in group}) == 1 for group in groups)


@pytest.mark.parametrize("order_of", [None, lambda epoch: torch.arange(20)])
def test_the_indices_of_a_shard_are_on_the_device_that_is_asked_for(order_of: Any) -> None:
    plan = Plan(examples=20, batch=5, total_steps=6, micro_batches=1, log_every=1, eval_every=1, save_every=1)
    place = {"rank": 0, "ranks": 1, "after": 0, "order_of": order_of}
    for device in ("cpu", "meta"):
        shards = [*shard_indices(plan, 0, device=torch.device(device), **place)]
        assert [shard.indices.device.type for shard in shards] == [device] * 6


def test_classes_of_one_size_come_in_another_order_in_each_epoch_and_for_each_seed() -> None:
    labels = torch.arange(40) % 4
    orders = [balanced_order(*place, labels).tolist() for place in ((1, 0), (1, 1), (2, 0), (1, 0))]
    assert [sorted(order) for order in orders] == [[*range(40)]] * 4
    assert orders[0] == orders[3]
    assert len({*map(tuple, orders)}) == 3


def test_every_example_of_a_large_class_comes_in_some_epoch() -> None:
    n, large = len(LABELS), (COUNTS.index(50) == LABELS).nonzero().flatten().tolist()
    seen = {number for epoch in range(60) for number in (balanced_order(1, epoch, LABELS) % n).tolist()}
    assert seen.issuperset(large)
