"""Which samples each rank gets, for any data set, batch, number of ranks and step to resume from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.plan import Plan, share
from lockstep.core.rng import permutation
from lockstep.data.loading.sampler import ShardIndices, blocks, shard_indices


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
    plan = Plan(
        examples=examples,
        batch=draw(st.integers(1, examples)),
        total_steps=draw(st.integers(1, 40)),
        micro_batches=1,
        log_every=1,
        eval_every=1,
        save_every=1,
    )
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
        assert [(shard.step, shard.epoch, shard.count) for shard in resumed] == [
            (shard.step, shard.epoch, shard.count) for shard in whole
        ]
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
    alone = blocks(n, size, rank=0, ranks=1)
    dealt = [blocks(n, size, rank=rank, ranks=ranks) for rank in range(ranks)]
    together = [block for mine in dealt for block in mine]
    assert len(dealt[0]) - len(dealt[-1]) in (0, 1), "the first rank has the most, by one"
    assert [index for block in alone for index in block] == list(range(n))
    assert sorted(together, key=lambda block: block.start) == alone
