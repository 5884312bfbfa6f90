"""Each option of a strategy reaches what it is for: DDP, Accelerate, the mesh of FSDP, and the sentences on them."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_strategy import plan, world
from torch import Tensor, nn

from lockstep.core.errors import InputError
from lockstep.optim import SGD
from lockstep.precision import FP32
from lockstep.strategy import DDP, FSDP, Accelerate, Pipeline, Single, Strict, ddp
from lockstep.strategy.strict import TreeReplica
from lockstep.strategy.sync_batchnorm import SyncBatchNorm
from lockstep.strategy.zero import ZeROOptimizer, blocks
from thread_ranks import ThreadRanks

EXAMPLE = (torch.ones(2, 3),)
Options = dict[str, Any]


@pytest.fixture
def given_to_ddp(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """The options that DDP was made with."""
    options: list[Options] = []

    def replica(model: nn.Module, **named: Any) -> nn.Module:
        options.append(named)
        return model

    monkeypatch.setattr(ddp, "DistributedDataParallel", replica)
    monkeypatch.setattr(ddp, "rehearse", lambda *_, **__: None)
    return options


@pytest.mark.parametrize(
    ("strategy", "micro_batches", "differs"),
    [
        (DDP(), 1, {}),
        (DDP(), 2, {"static_graph": False}),
        (DDP(static_graph=True), 1, {}),
        (DDP(static_graph=False), 1, {"static_graph": False}),
        (DDP(gradient_as_bucket_view=False), 1, {"gradient_as_bucket_view": False}),
        (DDP(find_unused_parameters=True), 1, {"find_unused_parameters": True}),
        (DDP(bucket_mb=0.5), 1, {"bucket_cap_mb": 0.5}),
        (DDP().with_changing_graph(), 1, {"static_graph": False, "find_unused_parameters": True}),
        (DDP(bucket_mb=2.0).with_changing_graph(), 2, {"static_graph": False, "find_unused_parameters": True}),
    ],
)
def test_each_option_of_ddp_reaches_torch(
    strategy: DDP, micro_batches: int, differs: Options, given_to_ddp: list[Options]
) -> None:
    usual: Options = {"gradient_as_bucket_view": True, "static_graph": True, "find_unused_parameters": False}
    usual |= {"bucket_cap_mb": strategy.bucket_mb, **ddp.NO_BUFFERS}
    strategy.replicate(nn.Linear(3, 2), plan(micro_batches), EXAMPLE)
    assert given_to_ddp == [{**usual, **differs}]
    assert [*ddp.NO_BUFFERS.values()] == [False]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("thaws", [False, True])
def test_accelerate_looks_for_gradients_that_never_come_where_somebody_asks_or_layers_thaw(
    own: bool, thaws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    prepared = SimpleNamespace(
        prepare_model=lambda model, **named: (calls.append(named), model)[1],
        prepare_optimizer=lambda optimizer, **named: (calls.append(named), "prepared")[1],
    )

    def accelerator(device: torch.device, **named: bool) -> Any:
        calls.append(named)
        return prepared

    monkeypatch.setattr(ddp, "accelerator", accelerator)
    monkeypatch.setattr(ddp, "rehearse", lambda *_, **__: None)
    strategy = Accelerate(find_unused_parameters=own)
    strategy = strategy.with_changing_graph() if thaws else strategy
    strategy.replicate(model := nn.Linear(3, 2), plan(), EXAMPLE)
    assert calls == [{"find_unused_parameters": own or thaws}, {"device_placement": False}]
    calls.clear()
    assert strategy.build_optimizer(SGD(), model, world(2)) == "prepared"
    assert calls == [{}, {"device_placement": False}]
    calls.clear()
    assert isinstance(strategy.build_optimizer(SGD(), model, world(1)), torch.optim.SGD)
    assert calls == []


def test_batch_norm_is_synchronised_with_others_alone(
    monkeypatch: pytest.MonkeyPatch, given_to_ddp: list[Options]
) -> None:
    monkeypatch.setattr("lockstep.strategy.base.share_weights", lambda model: None)
    for size, synchronised, expected in ((1, True, False), (2, True, True), (2, False, False)):
        model = nn.Sequential(nn.BatchNorm1d(3))
        place = replace(world(size), control=object())  # a lone rank of a launcher has a group, too
        DDP(sync_batchnorm=synchronised).wrap(model, place, plan(), EXAMPLE)
        assert isinstance(model[0], SyncBatchNorm) == expected, (size, synchronised)


@pytest.mark.parametrize(
    ("ranks", "replicas", "groups"), [(6, 1, (6,)), (6, 2, (2, 3)), (6, 3, (3, 2)), (6, 6, (6, 1)), (4, 2, (2, 2))]
)
def test_fsdp_has_so_many_replicas_of_ranks_that_follow_each_other(
    ranks: int, replicas: int, groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    meshes: list[Any] = []
    shards: list[Options] = []
    monkeypatch.setattr(
        "torch.distributed.device_mesh.init_device_mesh",
        lambda device, shape, *, mesh_dim_names: meshes.append((device, shape, mesh_dim_names)),
    )
    monkeypatch.setattr("torch.distributed.fsdp.fully_shard", lambda block, **named: shards.append(named))
    FSDP(replicas=replicas).shard(nn.Linear(2, 2), world(ranks), FP32(), EXAMPLE[0])
    assert meshes == [("cpu", groups, ("replicate", "shard")[-len(groups) :])]
    assert [named["reshard_after_forward"] for named in shards] == [True] * len(shards) != []
    FSDP(replicas=replicas).check(ranks, "cpu")
    FSDP(replicas=replicas).check(1, "cpu")
    with pytest.raises(InputError, match=r"strategy\.replicas is 4, .* divide the 6 ranks .* strategy\.replicas=2,"):
        FSDP(replicas=4).check(6, "cpu")


def test_a_layer_of_exactly_the_large_size_is_gathered_on_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert [*blocks(model, large=12)] == [*model]
    assert [*blocks(model, large=13)] == [model[1]], "several layers are one block, however small"


@pytest.mark.parametrize(
    ("size", "micro_batches", "says"),
    [
        (2, 3, "waits 25 % of a step for the others; train.micro_batches=8 leaves 11 %"),
        (2, 4, ""),
        (3, 5, "waits 29 % of a step for the others; train.micro_batches=12 leaves 14 %"),
        (3, 6, ""),
    ],
)
def test_stages_are_called_idle_with_fewer_than_twice_as_many_micro_batches(
    size: int, micro_batches: int, says: str
) -> None:
    notes = Pipeline().notes(nn.Linear(2, 2), world(size), plan(micro_batches))
    assert [re.sub(".*stages ", "", note) for note in notes] == [says] * bool(says)


def test_accelerate_leaves_a_rank_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(**options: Any) -> SimpleNamespace:
        torch.set_num_threads(1)
        return SimpleNamespace(**options)

    monkeypatch.setattr(pytest.importorskip("accelerate"), "Accelerator", make)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        built = ddp.accelerator(torch.device("cpu"), find_unused_parameters=True)
        assert (torch.get_num_threads(), built.cpu, built.mixed_precision) == (3, True, "no")
        assert built.kwargs_handlers[0].to_kwargs() == {
            "find_unused_parameters": True,
            "gradient_as_bucket_view": True,
        }
    finally:
        torch.set_num_threads(before)


def test_batch_norm_per_rank_is_noted_where_there_are_several_and_a_batch_norm() -> None:
    networks = {True: nn.BatchNorm1d(2), False: nn.Linear(2, 2)}
    cases = itertools.product((1, 2), (True, False), networks)
    notes = {case: DDP(sync_batchnorm=case[1]).notes(networks[case[2]], world(case[0]), plan(1)) for case in cases}
    assert [case for case in notes if notes[case]] == [(2, False, True)]
    assert notes[2, False, True][0].startswith("batch norm counts per rank: this run differs")


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_strict_takes_the_largest_power_of_two_of_ranks_and_advises_twice_the_shards(shards: int) -> None:
    expected = {1: 1, 2: 2, 3: 2, 4: 4, 7: 4, 8: 8, 9: 8, 100: 8}
    strategy = Strict(shards=shards)
    assert [strategy.ranks(gpus) for gpus in expected] == [min(ranks, shards) for ranks in expected.values()]
    with pytest.raises(InputError, match=f"and strategy=strict strategy.shards={2 * shards} for smaller ones$"):
        strategy.micro_batches(2, 1)
    assert [strategy.micro_batches(1, ranks) for ranks in (1, shards)] == [shards, 1]


def test_a_weight_without_a_gradient_in_some_shards_gets_the_sum_of_the_others() -> None:
    layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
    layers[1].weight.requires_grad_(False)
    replica = TreeReplica(layers)
    for gradients in ((1.0, None), (None, 2.0), (3.0, 4.0), (None, None)):
        for layer, gradient in zip((layers[0], layers[2]), gradients, strict=True):
            layer.weight.grad = None if gradient is None else torch.full((2, 2), gradient)
        replica.add_shard()
    replica.finish()
    sums = [None if layer.weight.grad is None else layer.weight.grad[0, 0].item() for layer in layers]
    assert sums == [4.0, None, 6.0]


def test_each_rank_clears_all_gradients_and_keeps_the_state_of_its_own_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stepped(rank: Any) -> tuple[list[Tensor | None], list[int], float]:
        model = nn.Sequential(*(nn.Linear(2, size, bias=False) for size in (2, 3, 4)))
        weights = [*model.parameters()]
        optimizer = ZeROOptimizer(SGD(lr=1.0, momentum=0.5).build(model), rank)
        for group in optimizer.param_groups:  # as a schedule does
            group["lr"] = 0.25
        with torch.no_grad():
            for weight in weights:
                weight.fill_(1.0)
                weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        own = [number for number, weight in enumerate(weights) if weight in optimizer.state]
        return [weight.grad for weight in weights], own, sum(weight.sum().item() for weight in weights)

    results = ThreadRanks(2, monkeypatch).run(stepped)
    assert [gradients for gradients, *_ in results] == [[None] * 3] * 2
    assert sorted(number for _, own, _ in results for number in own) == [0, 1, 2], "each at one rank"
    assert [total for *_, total in results] == [0.75 * 2 * 9] * 2


@pytest.mark.parametrize("strategy", [Single(), DDP(), FSDP()], ids=repr)
@pytest.mark.parametrize("number", [1, 3])
def test_ranks_may_stop_between_two_micro_batches_and_not_behind_the_last(strategy: Single, number: int) -> None:
    calls: list[str] = []
    strategy.run_micro_batches(
        nn.Identity(),
        [(str(at), at == number - 1) for at in range(number)],
        world(1),
        forward=lambda micro: calls.append(f"forward {micro}"),
        backward=lambda loss: calls.append("backward"),
        between=lambda: calls.append("between"),
    )
    expected = [call for at in range(number) for call in (f"forward {at}", "backward", "between")]
    assert calls == expected[:-1]


def test_fsdp_counts_the_formats_of_frozen_parameters_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2).half().requires_grad_(False), nn.Linear(2, 2))
    says = r"this model has 2 formats \(float16, float32\); use precision=bf16 or precision=fp32$"
    with pytest.raises(InputError, match=says):
        FSDP().shard(model, world(2), FP32(), EXAMPLE[0])
