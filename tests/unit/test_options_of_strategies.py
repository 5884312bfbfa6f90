"""Each option of a strategy reaches what it is for: DDP, Accelerate, the mesh of FSDP, and the sentences on them."""

from __future__ import annotations

import itertools
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_strategy import plan, world
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import CPUOffloadPolicy

from lockstep.core.errors import InputError
from lockstep.core.model import UpdateScope
from lockstep.core.protocols import Strategy
from lockstep.core.world import World
from lockstep.optim import SAM, SGD, AdamW, Muon
from lockstep.precision import BF16, FP16, FP32
from lockstep.strategy import (
    DDP,
    FSDP,
    Accelerate,
    AllReduce,
    AllReduceHooks,
    Auto,
    DataParallel,
    Pipeline,
    Single,
    Strict,
    ZeRO,
    ddp,
)
from lockstep.strategy.ddp import LARGE_GRADIENT
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
    for alone in (world(1), replace(world(1), control=object())):
        assert isinstance(strategy.build_optimizer(SGD(), model, alone), torch.optim.SGD)
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


def test_fsdp_cuts_a_model_over_ranks_of_which_each_machine_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[nn.Module] = []
    monkeypatch.setattr(FSDP, "cut", lambda own, model, world, precision: cut.append(model))
    models = [nn.Linear(2, 2) for _ in range(3)]
    for model, place in zip(models, (world(1), world(2), replace(world(2), local_size=1)), strict=True):
        FSDP().shard(model, place, FP32(), EXAMPLE[0])
    assert cut == models[1:]


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
    for number in (2, "auto"):
        says = f"micro_batches is {number}, .* and strategy=strict strategy.shards={2 * shards} for smaller ones$"
        with pytest.raises(InputError, match=says):
            strategy.micro_batches(number, 1)
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
    def stepped(rank: Any) -> tuple[list[Tensor | None], list[int], list[float]]:
        model = nn.Sequential(*(nn.Linear(2, size, bias=False) for size in (2, 3, 4)))
        weights = [*model.parameters()]
        optimizer = ZeROOptimizer(SGD(lr=1.0, momentum=0.5).build(model), rank)
        for group in optimizer.param_groups:  # as a schedule does
            group |= {"lr": 0.25, "weight_decay": 1.0}
        with torch.no_grad():
            for weight in weights:
                weight.fill_(1.0)
                weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        own = [number for number, weight in enumerate(weights) if weight in optimizer.state]
        gradients, total = [weight.grad for weight in weights], sum(weight.sum().item() for weight in weights)
        for number in own:  # as who sets a state
            optimizer.state[weights[number]] = {"momentum_buffer": torch.full_like(weights[number], 4.0)}
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        return gradients, own, [total, sum(weight.sum().item() for weight in weights)]

    results = ThreadRanks(2, monkeypatch).run(stepped)
    assert [gradients for gradients, *_ in results] == [[None] * 3] * 2
    assert sorted(number for _, own, _ in results for number in own) == [0, 1, 2], "each at one rank"
    second = 0.5 - 0.25 * (0.5 * 4.0 + 0.5)
    assert [totals for *_, totals in results] == [[0.5 * 2 * 9, second * 2 * 9]] * 2


@pytest.mark.parametrize(("ranks", "shares"), [(2, [14, 14]), (3, [8, 10, 10])])
def test_main_gathers_the_state_that_an_optimizer_of_the_whole_model_has(
    ranks: int, shares: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def model_with_gradients() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(2, size, bias=False) for size in (2, 5, 3, 4)))
        model[2].double()
        for number, weight in enumerate(model.parameters()):
            weight.grad = torch.full_like(weight, 1 / (3 + number))
            nn.init.constant_(weight, 1 / 7)
        return model

    def stepped(rank: World) -> tuple[Any, ...]:
        model = model_with_gradients()
        optimizer = ZeRO().build_optimizer(AdamW(lr=0.1), model, rank)
        optimizer.step()
        own = sum(weight.numel() for weight in optimizer.state)
        return optimizer.state_dict(), [*model.parameters()], optimizer.defaults, own

    model = model_with_gradients()
    whole = AdamW(lr=0.1).build(model)
    whole.step()
    results = ThreadRanks(ranks, monkeypatch).run(stepped)
    (saved, *_), expected = results[0], whole.state_dict()
    torch.testing.assert_close(saved["state"], expected["state"])
    assert [group["params"] for group in saved["param_groups"]] == [
        group["params"] for group in expected["param_groups"]
    ]
    for _, weights, defaults, _ in results:
        torch.testing.assert_close(weights, [*model.parameters()])
        assert defaults == whole.defaults
    assert sorted(own for *_, own in results) == shares, "cut over the ranks"


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


@pytest.mark.parametrize(
    ("strategy", "parts", "says"),
    [
        (
            FSDP(),
            {"optimizer": Muon()},
            "optimizer=muon looks at whole parameters, but under strategy=fsdp a rank has a part of each parameter; "
            "use optimizer=adamw, adam or sgd, or strategy=ddp",
        ),
        (
            ZeRO(),
            {"optimizer": SAM()},
            "optimizer=sam looks at all parameters together, but under strategy=zero a rank has some of the "
            "parameters; use optimizer=adamw, adam, sgd or muon, or strategy=ddp",
        ),
        (
            Pipeline(),
            {"precision": FP16()},
            "precision=fp16 has a loss scaler, and under strategy=pipeline each stage would skip other steps; "
            "use precision=bf16, or strategy=ddp",
        ),
        (
            FSDP(),
            {"precision": FP16()},
            "precision=fp16 has a loss scaler, which looks for overflows in whole gradients, but strategy=fsdp cuts "
            "them over the ranks; use precision=bf16, or strategy=ddp",
        ),
        (
            FSDP(),
            {"micro_batches": "auto"},
            "train.micro_batches=auto tries the whole model on each rank, and strategy=fsdp is for models that need "
            "not fit there; use a number, such as train.micro_batches=8",
        ),
    ],
)
def test_a_part_that_does_not_fit_is_told_with_what_a_rank_has_and_what_fits(
    strategy: Strategy, parts: dict[str, Any], says: str
) -> None:
    fitting: dict[str, Any] = {"optimizer": AdamW(), "precision": BF16(), "micro_batches": 1}
    for one in (strategy, *([replace(strategy, low_precision=True)] if isinstance(strategy, FSDP) else [])):
        one.check_parts(**fitting)
        with pytest.raises(InputError, match=f"^{re.escape(says)}$"):
            one.check_parts(**{**fitting, **parts})


def test_a_replica_of_dp_is_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    alike = SimpleNamespace(total_memory=1, multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: alike)
    replica: Any = DataParallel().wrap(nn.Linear(3, 2), world(1), plan(1), EXAMPLE)
    assert replica.device_ids == [0, 1, 2]


@pytest.mark.parametrize("gpus", [0, 1, 2, 3])
def test_dp_drives_all_gpus_and_several_of_them_run_no_compiled_model(
    gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    strategy = DataParallel()
    assert (strategy.devices(1, gpus), strategy.ranks(gpus)) == (gpus, 1)
    (note,) = strategy.notes(nn.BatchNorm1d(2), world(1), plan(1))
    says = f"splits each batch over {gpus} GPUs" if gpus > 1 else "has no second GPU to split a batch over"
    assert note.startswith(f"strategy=dp {says}")
    first, second = strategy.notes(nn.BatchNorm1d(2), world(1), plan(2))
    assert first == note
    assert second.startswith("batch norm counts per micro-batch")
    strategy.check_compile(1, "cpu")
    if gpus > 1:
        with pytest.raises(InputError, match=f"on each of {gpus} GPUs, .* use strategy=ddp or model.compile=false"):
            strategy.check_compile(1, "cuda")
    else:
        strategy.check_compile(1, "cuda")


def test_a_part_of_a_model_is_not_compiled() -> None:
    Pipeline().check_compile(1, "cuda")
    DDP().check_compile(2, "cuda")
    with pytest.raises(InputError, match=r"under strategy=pipeline .* use model.compile=false, or strategy=fsdp$"):
        Pipeline().check_compile(2, "cpu")


def test_every_stage_reads_the_whole_global_batch_on_its_own_device() -> None:
    rank = World(rank=2, local_rank=1, size=4, local_size=2, device=torch.device("cuda", 1))
    assert Pipeline().data_world(rank) == replace(rank, rank=0, size=1)
    assert DDP().data_world(rank) is rank


@pytest.mark.parametrize(
    ("strategy", "ranks", "says"),
    [
        (Pipeline(stages=2), 2, ""),
        (
            Pipeline(stages=2),
            3,
            r"strategy\.stages is 2, but launcher\.ranks makes 3 ranks, .*; remove strategy.stages",
        ),
        (Pipeline(cuts=[]), 1, ""),
        (
            Pipeline(cuts=[]),
            2,
            r"strategy\.cuts is \[\], which makes 1 stages, but there are 2 ranks .*ranks=1, or rem",
        ),
        (Pipeline(cuts=["a", "b"]), 3, ""),
        (
            Pipeline(cuts=["a", "b"]),
            2,
            r"is \[a,b\], which makes 3 stages, but there are 2 ranks .*ranks=3, or remove",
        ),
        (Strict(shards=1), 2, r"into 1 virtual shards .* use launcher\.ranks=1$"),
        (Strict(shards=2), 4, r"launcher\.ranks is 4, .* into 2 virtual shards .* use launcher\.ranks=2$"),
        (Strict(shards=8), 3, r"into 8 virtual shards .* use launcher\.ranks=2$"),
        (Strict(shards=8), 8, ""),
        (Single(), 1, ""),
        (Single(), 3, r"^launcher\.ranks is 3, but this strategy has one rank; use strategy=ddp for several$"),
    ],
    ids=repr,
)
def test_ranks_that_do_not_fit_are_told_with_those_that_do(strategy: Single, ranks: int, says: str) -> None:
    if not says:
        strategy.check(ranks, "cpu")
    else:
        with pytest.raises(InputError, match=says):
            strategy.check(ranks, "cpu")


@pytest.mark.parametrize("strategy", [DDP, ZeRO])
def test_a_graph_that_was_chosen_to_be_static_does_not_change(strategy: type[DDP]) -> None:
    for unused in (False, True):
        with pytest.raises(
            InputError, match=r"but train\.freeze_until changes the graph; remove strategy\.static_graph$"
        ):
            strategy(static_graph=True, find_unused_parameters=unused).with_changing_graph()
    accelerated = Accelerate(sync_batchnorm=False).with_changing_graph()
    assert accelerated == Accelerate(sync_batchnorm=False, find_unused_parameters=True)
    changing = strategy(static_graph=False, bucket_mb=3.0).with_changing_graph()
    assert changing == strategy(static_graph=False, find_unused_parameters=True, bucket_mb=3.0)


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_a_hook_of_ddp_is_registered_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[Any] = []
    passes: list[Tensor] = []

    class Replica(nn.Linear):
        def register_comm_hook(self, state: object, hook: Any) -> None:
            hooks.append((state, hook, len(passes)))

        def forward(self, images: Tensor) -> Tensor:
            passes.append(images)
            warnings.warn("Grad strides do not match bucket view strides. This may ...", stacklevel=1)
            return super().forward(images)

    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda model, **_: model)
    assert DDP(comm_hook=name).replicate(model := Replica(3, 2), plan(), EXAMPLE) is model
    expected = {"fp16": [default_hooks.fp16_compress_hook], "bf16": [default_hooks.bf16_compress_hook]}
    assert hooks == [(None, hook, 2) for hook in expected.get(name, [])], "it is no part of the rehearsal"


def test_accelerate_rehearses_its_replica_twice_as_ddp_does(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[Tensor] = []
    prepared = SimpleNamespace(prepare_model=lambda model, **_: model)
    monkeypatch.setattr(ddp, "accelerator", lambda device, **_: prepared)
    model = nn.Linear(3, 2)
    model.register_forward_pre_hook(lambda _, args: passes.append(args[0]))
    assert Accelerate().replicate(model, plan(), EXAMPLE) is model
    assert [images is EXAMPLE[0] for images in passes] == [True, True]
    assert [parameter.grad for parameter in model.parameters()] == [None, None]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_accelerate_places_nothing_and_takes_the_cpu_where_a_rank_has_no_gpu(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pytest.importorskip("accelerate"), "Accelerator", lambda **options: SimpleNamespace(**options)
    )
    built = ddp.accelerator(torch.device(device))
    assert (built.cpu, built.device_placement, built.mixed_precision) == (device == "cpu", False, "no")


@pytest.mark.parametrize(("size", "messages"), [(LARGE_GRADIENT - 1, 1), (LARGE_GRADIENT, 2)])
def test_a_gradient_of_the_large_size_is_sent_alone_and_smaller_ones_together(
    size: int, messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: sent.append(tensor.numel()))
    model = nn.ParameterList([torch.zeros(3), torch.zeros(size), torch.zeros(4), torch.zeros(5)])
    for parameter in (*model,)[:3]:
        parameter.grad = torch.zeros_like(parameter)  # on this rank alone
    AllReduce().reduce(model)
    assert sent == {1: [size + 7], 2: [size, 7]}[messages]
    assert model[3].grad is None, "a frozen parameter gets none"
    sent.clear()
    for number, parameter in enumerate(model):
        parameter.grad = parameter.grad if number == 1 and messages == 2 else None
    AllReduce().reduce(model)
    assert sent == [size] * (messages == 2), "no message has nothing"
    sent.clear()
    for number, parameter in enumerate(model):
        parameter.grad = torch.ones_like(parameter) if number == 2 else None
    AllReduce().reduce(model)
    assert sent == [4], "a small one alone is sent too"


def test_hooks_divide_the_sum_over_the_ranks_at_every_step_and_leave_out_what_is_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stepped(rank: World) -> list[Any]:
        model = nn.Linear(2, 1)
        model.bias.requires_grad_(False)
        replica = AllReduceHooks().wrap(model, rank, plan(), EXAMPLE)
        gradients = []
        for step in (1, 2):
            model.zero_grad()
            for last in (False, True):
                with AllReduceHooks().accumulate(replica, last):
                    replica(torch.full((1, 2), float(step * 3 * rank.rank))).sum().backward()
            AllReduceHooks().reduce(replica)
            assert model.weight.grad is not None
            gradients += [model.weight.grad.tolist(), model.bias.grad]
        return gradients

    divisor = AllReduceHooks().grad_divisor(world(3))
    assert divisor == 3
    # Two micro-batches of 0, 3 and 6 on the ranks, over three; the second step has twice as much.
    assert ThreadRanks(3, monkeypatch).run(stepped) == [[[[6.0, 6.0]], None, [[12.0, 12.0]], None]] * 3


@pytest.mark.parametrize("strategy", [AllReduce(), AllReduceHooks()], ids=repr)
def test_each_gradient_is_added_up_whatever_its_shape(strategy: Single, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shapes = ((), (1,), (3,), (2, 3), (2, 1, 3))
            self.scales = nn.ParameterList([nn.Parameter(torch.full(shape, 2.0)) for shape in shapes])

        def forward(self, images: Tensor) -> Tensor:
            return torch.stack([(images * scale).sum() for scale in self.scales])

    def summed(rank: World) -> list[Tensor]:
        replica = strategy.wrap(model := Scaled(), rank, plan(), EXAMPLE)
        with strategy.accumulate(replica, True):
            replica(torch.full((2, 3), rank.rank + 1.0)).sum().backward()
        strategy.reduce(replica)
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    whole = Scaled()
    whole(torch.full((2, 3), 1.0 + 2.0 + 3.0)).sum().backward()
    expected = [parameter.grad / strategy.grad_divisor(world(3)) for parameter in whole.parameters()]
    for gradients in ThreadRanks(3, monkeypatch).run(summed):
        torch.testing.assert_close(gradients, expected)


def test_a_strict_replica_begins_each_step_with_no_gradients_of_the_one_before() -> None:
    layer = nn.Linear(2, 2, bias=False)
    replica = TreeReplica(layer)
    for gradients in ((1.0, 2.0), (5.0, 6.0), (3.0, 4.0, 5.0, 6.0)):
        for gradient in gradients:
            layer.weight.grad = torch.full((2, 2), gradient)
            replica.add_shard()
            assert layer.weight.grad is None
        replica.finish()
        assert layer.weight.grad is not None
        assert layer.weight.grad.unique().tolist() == [sum(gradients)]


@pytest.mark.parametrize("strategy", [AllReduce(), Strict(), Pipeline()], ids=repr)
def test_a_sum_over_the_ranks_is_divided_by_no_number_of_them(strategy: Single) -> None:
    assert [strategy.grad_divisor(world(size)) for size in (1, 2, 4)] == [1, 1, 1]
    assert [DDP().grad_divisor(world(size)) for size in (1, 2, 4)] == [1, 2, 4]


def test_only_several_ranks_divide_the_state_of_an_optimizer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for strategy in (ZeRO(), Pipeline(), DDP()):
        assert type(strategy.build_optimizer(SGD(), model, world(1))).__name__ == "SGD", strategy
    divided = ZeRO().build_optimizer(SGD(), model, world(2))
    assert isinstance(divided, ZeROOptimizer)
    assert divided.defaults == SGD().build(model).defaults
    assert type(DDP().build_optimizer(SGD(), model, world(2))).__name__ == "SGD"


def test_the_groups_of_a_divided_optimizer_are_saved_as_torch_saves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def saved(rank: World | None) -> dict[str, Any]:
        model = nn.Sequential(*(nn.Linear(size, 2) for size in (5, 3, 4)))
        whole = AdamW(lr=0.1, weight_decay=0.3).build(model)
        optimizer = whole if rank is None else ZeROOptimizer(whole, rank)
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        optimizer.step()
        return optimizer.state_dict()

    expected = saved(None)
    main, other = ThreadRanks(2, monkeypatch).run(saved)
    assert main["param_groups"] == other["param_groups"] == expected["param_groups"]
    assert [*main["state"]] == [*range(6)], "in the order of the parameters"
    assert 0 < len(other["state"]) < 6
    for number, entries in expected["state"].items():
        assert torch.equal(main["state"][number]["exp_avg"], entries["exp_avg"])


def test_the_state_of_a_divided_optimizer_is_gathered_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice(Tensor):
        """A tensor of a device, which only `cpu` copies from there."""

        def cpu(self, *_: Any) -> Tensor:
            return self.as_subclass(Tensor).clone()

    def saved(rank: World) -> tuple[dict[int, Any], dict[Tensor, Any]]:
        optimizer = ZeROOptimizer(AdamW(lr=0.1).build(nn.Linear(2, 2)), rank)
        for entries in optimizer.own.param_groups:
            for parameter in entries["params"]:
                average = torch.full((2,), rank.rank + 3.0).as_subclass(OnDevice)
                optimizer.own.state[parameter] = {"exp_avg": average, "name": "a"}
        return optimizer.state_dict()["state"], optimizer.own.state

    (gathered, own), *_ = ThreadRanks(2, monkeypatch).run(saved)
    for entries in own.values():
        entries["exp_avg"] += 1
    entries = [gathered[number] for number in (0, 1)]
    assert [(type(entry["exp_avg"]), entry["exp_avg"].tolist(), entry["name"]) for entry in entries] == [
        (Tensor, [3.0, 3.0], "a"),
        (Tensor, [4.0, 4.0], "a"),
    ]


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[nn.Module, Options]]:
    """What FSDP has cut, with the options."""
    blocks_and_options: list[tuple[nn.Module, Options]] = []
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", lambda device, *_, **__: device)
    monkeypatch.setattr(
        "torch.distributed.fsdp.fully_shard", lambda block, **named: blocks_and_options.append((block, named))
    )
    return blocks_and_options


def test_fsdp_cuts_the_blocks_before_the_model_and_one_rank_cuts_nothing(
    sharded: list[tuple[nn.Module, Options]],
) -> None:
    pairs = [nn.Sequential(nn.Conv2d(2, 2, 3), nn.Linear(2, 2)) for _ in range(2)]
    model = nn.Sequential(*pairs).to(memory_format=torch.channels_last)
    for options in ({}, {"cpu_offload": True}, {"replicas": 2}, {"low_precision": True}):
        FSDP(**options).shard(model, world(1), BF16(), EXAMPLE[0])
    assert sharded == []
    FSDP().shard(model, world(2), FP32(), EXAMPLE[0])
    assert [block for block, _ in sharded] == [*pairs, model]
    assert all(parameter.is_contiguous() for parameter in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("offload", [False, True])
def test_fsdp_keeps_the_state_of_a_gpu_in_pinned_memory_of_the_host_where_somebody_asks(
    device: str, offload: bool, sharded: list[tuple[nn.Module, Options]]
) -> None:
    place = replace(world(2), device=torch.device(device, 0))
    FSDP(cpu_offload=offload).cut(nn.Linear(2, 2), place, BF16())
    ((_, options),) = sharded
    assert options["mesh"] == device
    policy = options["offload_policy"]
    assert isinstance(policy, CPUOffloadPolicy) == (offload and device == "cuda")
    assert getattr(policy, "pin_memory", True) is True


def test_accelerate_needs_its_package_and_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    prepared = SimpleNamespace(
        prepare_optimizer=lambda optimizer, **_: optimizer, prepare_model=lambda model, **_: model
    )
    monkeypatch.setattr(ddp, "accelerator", lambda device, **_: devices.append(device) or prepared)
    monkeypatch.setattr(ddp, "rehearse", lambda *_, **__: None)
    place = replace(world(2), device=torch.device("cuda", 1))
    Accelerate().build_optimizer(SGD(), nn.Linear(2, 2), place)
    Accelerate().replicate(nn.Linear(2, 2), plan(), (torch.ones(2, 3, device="meta"),))
    assert devices == [torch.device("cuda", 1), torch.device("meta")]
    for size, local_size in ((1, 1), (2, 1), (2, 2)):  # one rank, two on two machines, two on one
        devices.clear()
        Accelerate().build_optimizer(SGD(), nn.Linear(2, 2), replace(place, size=size, local_size=local_size))
        assert len(devices) == (size > 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        InputError, match=r"^strategy=accelerate needs the package accelerate, .*lockstep\[accelerate\]"
    ):
        Accelerate().check(2, "cpu")


def test_a_lone_rank_with_a_process_group_rounds_its_gradients_too() -> None:
    model, alone = nn.Linear(2, 2), world(1)
    for place, number in ((alone, 0), (replace(alone, control=object()), 1), (world(2), 1)):
        assert len(DDP(comm_hook="fp16").notes(model, place, plan())) == number
        assert DDP().notes(model, place, plan()) == []


# What a strategy is beside one process with the whole model, whose steps are one pass and can be recorded.
DIFFERS: dict[type[Strategy], Options] = {
    Single: {"recordable": True},
    Auto: {"adapts": True},
    DataParallel: {},
    DDP: {"joins_alone": True},
    Accelerate: {},
    AllReduce: {},
    AllReduceHooks: {},
    ZeRO: {"joins_alone": True, "widest": UpdateScope.parameter},
    FSDP: {"whole_model": False, "widest": UpdateScope.element},
    Strict: {"fixed_order": True},
    Pipeline: {
        **dict.fromkeys(("whole_model", "one_pass", "same_work"), False),
        "widest": UpdateScope.parameter,
    },
}


@pytest.mark.parametrize("strategy", DIFFERS, ids=lambda strategy: strategy.__name__)
def test_a_strategy_says_what_it_is_to_those_who_do_not_know_it(strategy: type[Strategy]) -> None:
    usual: Options = {"recordable": False, "fixed_order": False, "adapts": False, "joins_alone": False}
    usual |= {"whole_model": True, "one_pass": True, "same_work": True, "widest": UpdateScope.model}
    assert {name: getattr(strategy, name) for name in usual} == {**usual, **DIFFERS[strategy]}
    assert strategy().sync_batchnorm is (None if strategy in (Single, DataParallel, Strict, Pipeline) else True)
