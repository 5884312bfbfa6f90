"""Checks of the weights, on one rank and between ranks."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from lockstep.core.errors import LockstepError, NumericalError
from lockstep.core.model import infinite_buffers
from lockstep.core.world import World
from lockstep.training.agreement import check_finite, check_replicas, checksum, checksums, compare_weights
from thread_ranks import ThreadRanks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_flipped_bit_changes_the_fingerprint(dtype: torch.dtype) -> None:
    model = nn.Linear(50, 20, dtype=dtype)
    before = int(checksum(model))
    octets = model.weight.data.view(-1).view(torch.uint8)
    for place, bit in itertools.product(range(8), range(8)):
        octets[136 + place] ^= 1 << bit
        assert int(checksum(model)) != before
        octets[136 + place] ^= 1 << bit


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_or_a_buffer_that_is_not_finite_is_found(value: float) -> None:
    model = nn.BatchNorm1d(3)
    check_finite(model, World.solo(), 7)
    for tensor in (model.weight.data, model.running_var):
        before = tensor[1].clone()
        tensor[1] = value
        with pytest.raises(NumericalError, match="not finite after step 7") as caught:
            check_finite(model, World.solo(), 7)
        assert caught.value.step == 7
        tensor[1] = before


def test_a_buffer_that_is_infinite_by_design_must_still_be_a_number() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("bound", torch.tensor(float("inf")))
    model.register_buffer("bounds", torch.tensor([1.0, -float("inf")]))
    infinite = infinite_buffers(model)
    assert infinite == {"bound", "bounds"}
    check_finite(model, World.solo(), 7, infinite)
    for name, value in (("bound", float("nan")), ("running_var", float("inf")), ("weight", float("inf"))):
        broken = copy.deepcopy(model)
        broken.state_dict()[name].fill_(value)
        with pytest.raises(NumericalError, match="not finite after step 7"):
            check_finite(broken, World.solo(), 7, infinite)


def replica() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for number, parameter in enumerate(model.parameters(), start=1):
        nn.init.constant_(parameter, number / 7)
    return model


def compared(world: World, broken: int | None, name: str, element: int, bit: int) -> str:
    """What a rank says of its weights, after one bit of one rank was flipped."""
    model = replica()
    if world.rank == broken:
        model.get_parameter(name).data.view(torch.int32).view(-1)[element] ^= 1 << bit
    try:
        check_replicas(model, world, 5)
    except LockstepError as error:
        return str(error).partition(":")[0]
    return "alike"


@pytest.mark.parametrize(("element", "bit"), [(0, 0), (-1, 30)])
@pytest.mark.parametrize("name", dict(replica().named_parameters()))
@pytest.mark.parametrize("broken", range(3))
def test_a_flipped_bit_of_one_rank_is_noticed_on_every_rank(
    broken: int, name: str, element: int, bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ThreadRanks(3, monkeypatch).run(lambda world: compared(world, broken, name, element, bit))
    assert answers == [f"the weights of rank {broken} differ from the others' at step 5"] * 3


def test_neither_statistics_nor_parameters_that_exist_once_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(world: World) -> None:
        stages = [nn.Linear(2, 2, device="cpu" if world.rank == stage else "meta") for stage in range(3)]
        check_replicas(nn.ModuleList(stages), world, 1)
        model = replica()
        model[1].running_mean.fill_(world.rank)
        check_replicas(model, world, 5)

    ThreadRanks(3, monkeypatch).run(check)


@pytest.mark.parametrize(
    ("sums", "blamed"),
    [([4, 4, 5], "rank 2"), ([5, 4, 4], "rank 0"), ([4, 5], "rank 1"), ([1, 2, 3], "ranks 1, 2")],
)
def test_the_majority_is_right_and_main_where_there_is_none(sums: list[int], blamed: str) -> None:
    with pytest.raises(LockstepError, match=f"^the weights of {blamed} differ from the others' at step 9:"):
        compare_weights(sums, 9)


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize("name", ["0.bias", "1.running_var"])
def test_all_find_a_number_not_finite_on_one_rank(name: str, broken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(world: World) -> bool:
        model = replica()
        if world.rank == broken:
            model.state_dict()[name][2] = float("nan")
        with pytest.raises(NumericalError, match="not finite after step 3"):
            check_finite(model, world, 3)
        return True

    assert all(ThreadRanks(3, monkeypatch).run(check))


def test_weights_that_differ_or_are_not_finite_have_their_cause_and_a_remedy() -> None:
    with pytest.raises(LockstepError) as differ:
        compare_weights([3, 4, 4, 3, 3], 1200)
    assert str(differ.value) == (
        "the weights of ranks 1, 2 differ from the others' at step 1200: memory or a device failed, or code changed "
        "one replica alone; resume=latest continues from the last checkpoint, which is older"
    )
    compare_weights([], 1)
    compare_weights([4, 4], 1)
    model = nn.Linear(2, 2)
    nn.init.constant_(model.bias, float("nan"))
    with pytest.raises(NumericalError) as broken:
        check_finite(model, World.solo(), 7)
    assert str(broken.value) == (
        "the weights are not finite after step 7; a smaller optimizer.lr, train.clip_norm=1 or schedule.warmup=5% "
        "are the usual remedies"
    )


def test_weights_that_exist_once_have_no_sums_and_replicas_one_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checksums(replica(), World.solo()) is None
    away = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    assert checksums(away, replace(World.solo(), size=2)) is None

    def sums(world: World) -> list[int]:
        model = replica()
        model[0].bias.data += world.rank
        of_ranks = checksums(model, world)
        assert of_ranks is not None
        assert (of_ranks.dtype, int(of_ranks[world.rank])) == (torch.int64, int(checksum(model)))
        return of_ranks.tolist()

    first, *further = ThreadRanks(3, monkeypatch).run(sums)
    assert further == [first] * 2
    assert len({*first}) == 3


def test_whole_numbers_are_neither_averaged_nor_broken() -> None:
    model = nn.BatchNorm1d(2)
    model.num_batches_tracked.fill_(2**62)
    check_finite(model, World.solo(), 7)
