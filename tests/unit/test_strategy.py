"""What the strategies refuse, note and wrap. Tests on real ranks show that they train alike."""

import copy
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from helpers import ROOT
from lockstep.checkpoint.state import optimizer_state
from lockstep.config import components
from lockstep.core.errors import InputError
from lockstep.core.plan import Plan
from lockstep.core.protocols import Strategy
from lockstep.core.world import World
from lockstep.optim import SGD, Adam, AdamW, Muon, Timm
from lockstep.precision import BF16, FP16, FP32, FP64, BF16Pure
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
)
from lockstep.strategy.base import Autocasting, ThreadedReplica, share_weights
from lockstep.strategy.ddp import LARGE_GRADIENT, LAUNCH_SETTINGS, HookedReplica
from lockstep.strategy.strict import TreeReplica
from lockstep.strategy.zero import ZeROOptimizer, assign, blocks
from thread_ranks import ThreadRanks


def plan(micro_batches: int = 1) -> Plan:
    every: dict[str, Any] = {"log_every": 1, "eval_every": 1, "save_every": 1}
    return Plan(examples=100, batch=10, total_steps=10, micro_batches=micro_batches, **every)


def world(size: int) -> World:
    return World(rank=0, local_rank=0, size=size, local_size=size, device=torch.device("cpu"))


@pytest.fixture
def _group() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        (Single(), [1, 1, 1, 1]),
        (Auto(), [1, 1, 3, 8]),
        (DDP(), [2, 1, 3, 8]),
        (AllReduceHooks(), [2, 1, 3, 8]),
        (Strict(), [1, 1, 2, 4]),
        (Pipeline(), [2, 1, 3, 8]),
        (Pipeline(stages=3), [3, 3, 3, 3]),
    ],
    ids=repr,
)
def test_a_strategy_takes_the_gpus_that_it_can_use_or_some_ranks(strategy: Single, ranks: list[int]) -> None:
    assert [strategy.ranks(gpus) for gpus in (0, 1, 3, 8)] == ranks
    for number in ranks:
        strategy.check(number, "cpu")
    for number in (1, 4):
        FSDP(replicas=2).check(number, "cpu")  # the same job must run on any machine


@pytest.mark.parametrize(
    ("strategy", "ranks", "says"),
    [
        (Single(), 2, r"launcher\.ranks is 2, but this strategy has one rank; use strategy=ddp"),
        (DataParallel(), 2, r"launcher\.ranks is 2, but this strategy has one rank; use strategy=ddp"),
        (Strict(), 3, r"launcher\.ranks is 3, but repro=strict cuts"),
        (Strict(), 8, r"launcher\.ranks is 8, but repro=strict cuts"),
        (Pipeline(stages=2), 4, "a pipeline is not data parallel as well; remove strategy"),
        (Pipeline(cuts=["a"]), 3, r"strategy\.cuts is \[a\], which makes 2 stages, .* use launcher\.ranks=2"),
        (FSDP(replicas=2), 3, r"replicas is 2, which does not divide the 3 ranks .*replicas=3"),
    ],
    ids=repr,
)
def test_a_strategy_refuses_ranks_on_which_it_does_not_work(strategy: Single, ranks: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        strategy.check(ranks, "cpu")


def table_of_compositions() -> dict[str, list[str]]:
    """The table of docs/distributed.md: the cells of each strategy."""
    text = (ROOT / "docs" / "distributed.md").read_text()
    lines = text.partition("| strategy | equal to")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in rows}


OPTIMIZERS = {"sgd": SGD(), "adam": Adam(), "adamw": AdamW(), "muon": Muon(), "timm": Timm()}


@pytest.mark.parametrize("name", table_of_compositions())
def test_the_table_of_the_documentation_says_which_parts_a_strategy_takes(name: str) -> None:
    *_, accumulation, optimizers, precisions, _ = table_of_compositions()[name]
    strategy: Strategy = components.build_option("strategy", name)

    def accepts(**parts: object) -> bool:
        try:
            strategy.check_parts(**{"optimizer": AdamW(), "precision": FP32(), "micro_batches": 1, **parts})
        except InputError:
            return False
        return True

    documented = set(OPTIMIZERS) if optimizers == "all" else set(re.findall(r"`(\w+)`", optimizers))
    assert {key for key, optimizer in OPTIMIZERS.items() if accepts(optimizer=optimizer)} == documented
    assert accepts(precision=FP16()) == ("`fp16`" not in precisions)
    assert all(accepts(precision=precision) for precision in (FP64(), BF16(), FP32(), BF16Pure()))
    assert accepts(micro_batches="auto") == ("auto" not in accumulation)


def test_low_precision_needs_16_bits_and_strict_shards_that_make_a_tree() -> None:
    FSDP(low_precision=True).check_parts(AdamW(), BF16(), 1)
    with pytest.raises(InputError, match=r"computes in float32, .* use precision=bf16, or remove strategy\.low_"):
        FSDP(low_precision=True).check_parts(AdamW(), FP32(), 1)
    with pytest.raises(
        InputError, match=r"computes in bfloat16, in which the parameters are stored; use precision=bf"
    ):
        FSDP(low_precision=True).check_parts(AdamW(), BF16Pure(), 1)
    for shards in (3, 6, 12):
        with pytest.raises(InputError, match=rf"is {shards}, expected a power of two: strategy.shards=4"):
            Strict(shards=shards)
    assert [Strict(shards=shards).shards for shards in (1, 2, 8, 64)] == [1, 2, 8, 64]


NORMED, PLAIN = nn.Sequential(nn.BatchNorm2d(2)), nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("strategy", "model", "size", "micro_batches", "says"),
    [
        (Single(), NORMED, 1, 1, []),
        (DDP(), NORMED, 2, 1, []),
        (DDP(), NORMED, 2, 2, ["batch norm counts per micro-batch: .* so does the number of ranks"]),
        (DDP(sync_batchnorm=False), NORMED, 2, 1, ["batch norm counts per rank"]),
        (DDP(sync_batchnorm=False), NORMED, 2, 2, ["per micro-batch: ", "per rank: "]),
        (DDP(sync_batchnorm=False), PLAIN, 2, 2, []),
        (DDP(sync_batchnorm=False), NORMED, 1, 1, []),
        (DDP(comm_hook="bf16"), PLAIN, 2, 1, ["comm_hook=bf16 rounds the gradients"]),
        (DDP(comm_hook="bf16"), NORMED, 2, 2, ["per micro-batch: ", "comm_hook=bf16 rounds"]),
        (DDP(comm_hook="bf16"), PLAIN, 1, 1, []),
        (FSDP(low_precision=True), PLAIN, 2, 1, ["norms and residuals in 16 bits"]),
        (FSDP(low_precision=True), NORMED, 2, 2, ["per micro-batch: ", "residuals in 16 bits"]),
        (FSDP(low_precision=True), PLAIN, 1, 1, []),
        (Strict(), NORMED, 2, 2, ["one of 4 of the global batch"]),
        (Strict(), PLAIN, 2, 2, []),
        (Pipeline(), PLAIN, 2, 1, ["each of 2 stages waits 50 % of a step.* train.micro_batches=8 leaves 11 %"]),
        (Pipeline(), PLAIN, 2, 8, []),
        (Pipeline(), PLAIN, 3, 5, ["each of 3 stages waits 29 % of a step.* train.micro_batches=12 leaves 14 %"]),
        (Pipeline(), PLAIN, 3, 6, []),
        (Pipeline(), PLAIN, 1, 1, []),
    ],
)
def test_what_makes_a_run_differ_or_slow_is_noted(
    strategy: Single, model: nn.Module, size: int, micro_batches: int, says: list[str]
) -> None:
    notes = strategy.notes(model, world(size), plan(micro_batches))
    assert len(notes) == len(says)
    assert all(re.search(pattern, note) for pattern, note in zip(says, notes, strict=True))


@pytest.mark.parametrize(
    ("name", "value", "override"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "precision=bf16"),
        ("ACCELERATE_USE_FSDP", "true", "strategy=fsdp"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "train.micro_batches=N"),
        ("ACCELERATE_DYNAMO_BACKEND", "Inductor", "model.compile=true"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "strategy=zero"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "strategy=fsdp"),
    ],
)
def test_other_options_of_accelerate_launch_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, override: str
) -> None:
    Accelerate().check(2, "cpu")
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"requests {name}={value}, but .* use {override}, and remove it of `acc"):
        Accelerate().check(2, "cpu")


@pytest.mark.parametrize("name", LAUNCH_SETTINGS)
def test_a_setting_of_accelerate_launch_that_changes_nothing_is_taken_in_any_case(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    neutral, _ = LAUNCH_SETTINGS[name]
    for value in (*neutral, *map(str.upper, neutral), *map(str.title, neutral)):
        monkeypatch.setenv(name, value)
        Accelerate().check(2, "cpu")


@pytest.mark.parametrize(
    ("model", "blocks_of_it"),
    [
        ("test_vit", [f"blocks.{number}" for number in range(6)]),
        ("test_resnet", ["conv1", *(f"layer{number}" for number in range(1, 5))]),
    ],
)
def test_the_blocks_of_a_timm_model_are_its_groups(model: str, blocks_of_it: list[str]) -> None:
    built = timm.create_model(model, num_classes=10)
    names = {module: name for name, module in built.named_modules()}
    assert [names[block] for block in blocks(built)] == blocks_of_it


def test_without_groups_blocks_are_children_and_large_layers() -> None:
    block, large = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(512, 256, bias=False)
    model = nn.Sequential(nn.ModuleList([block]), nn.Linear(2**17 - 1, 1, bias=False), large)
    assert list(blocks(model)) == [block, large]


def test_each_process_gives_a_parameter_to_the_same_rank() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(40)][::-1]
    two_machines = replace(world(4), local_size=2)
    optimizer = ZeROOptimizer(torch.optim.SGD(parameters, lr=0.1), two_machines)
    assert [optimizer.owners[parameter] for parameter in parameters] == [0, 1, 2, 3] * 10, "in the order of the model"


def test_parameters_go_to_the_rank_that_has_least() -> None:
    parameters = [torch.zeros(size) for size in (1, 5, 3, 4)]
    assert list(assign(parameters, 2).values()) == [0, 0, 1, 1]


def take_two_micro_batches(strategy: Single, replica: nn.Module) -> None:
    """Forward and backward of two micro-batches of one example each, and then the reduction."""
    for last in (False, True):
        with strategy.accumulate(replica, last):
            replica(torch.ones(1, 2)).sum().backward()
    strategy.reduce(replica)


@pytest.mark.parametrize("strategy", [Single(), DDP(), AllReduce(), AllReduceHooks(), Pipeline()], ids=repr)
def test_in_a_world_of_one_the_replica_is_the_model(strategy: Single) -> None:
    model = nn.Linear(2, 2)
    replica = strategy.wrap(model, World.solo(), plan(), (torch.zeros(2, 2),))
    assert replica is model
    take_two_micro_batches(strategy, replica)
    assert model.bias.grad.tolist() == [2, 2]


def test_the_norm_of_the_gradient_is_over_the_parameters_that_have_one() -> None:
    model = nn.Linear(2, 2)
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    model.bias.grad = None  # as of a frozen layer
    assert Single().gradient_norm([*model.parameters()]).item() == pytest.approx(50**0.5)


@pytest.mark.usefixtures("_group")
def test_ddp_communicates_for_the_last_micro_batch_only() -> None:
    replica = DDP().replicate(nn.Linear(2, 2), plan(micro_batches=3), (torch.zeros(2, 2),))
    assert isinstance(replica, DistributedDataParallel)
    sent: list[bool] = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        sent.append(last)
        return default_hooks.allreduce_hook(None, bucket)

    replica.register_comm_hook(None, hook)
    for last in (False, False, True):
        with DDP().accumulate(replica, last):
            replica(torch.ones(1, 2)).sum().backward()
    assert sent == [True]


@pytest.mark.usefixtures("_group")
def test_hooks_communicate_for_the_last_micro_batch_only() -> None:
    replica = AllReduceHooks().replicate(nn.Linear(2, 2), plan(micro_batches=2), (torch.zeros(2, 2),))
    assert isinstance(replica, HookedReplica)
    pending = []
    for last in (False, True):
        with AllReduceHooks().accumulate(replica, last):
            replica(torch.ones(1, 2)).sum().backward()
        pending.append(len(replica.pending))
    AllReduceHooks().reduce(replica)
    assert pending == [0, 2]
    assert replica.pending == []


@pytest.mark.usefixtures("_group")
def test_a_static_graph_is_refused_with_accumulation() -> None:
    with pytest.raises(InputError, match=r"use strategy\.static_graph=null"):
        DDP(static_graph=True).replicate(nn.Linear(2, 2), plan(micro_batches=2), (torch.zeros(2, 2),))


def test_threads_of_dp_compute_in_the_number_format_of_their_caller() -> None:
    """DataParallel's threads need GPUs. Any other thread does not inherit its caller's autocast either."""
    replica = DataParallel().wrap(nn.Linear(2, 2), World.solo(), plan(), ())

    def dtypes() -> list[torch.dtype]:
        first = replica(torch.ones(1, 2)).dtype
        with ThreadPoolExecutor(1) as threads:
            return [first, threads.submit(lambda: replica.module(torch.ones(1, 2)).dtype).result()]

    with torch.autocast("cpu", torch.bfloat16):
        assert dtypes() == [torch.bfloat16] * 2
    assert dtypes() == [torch.float32] * 2


class Overwriting(nn.Module):
    """A layer whose operation has no deterministic kernel on the CPU either."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.layer(x.clone().put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0])))


@pytest.fixture
def _deterministic() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.usefixtures("_deterministic")
def test_strict_tries_a_model_and_names_what_has_no_deterministic_kernel() -> None:
    with pytest.raises(InputError, match=r"but put_, which the model uses, has no .* on cpu; use repro=exact, or a"):
        Strict().wrap(Overwriting(), World.solo(), plan(micro_batches=4), (torch.zeros(2, 3),))
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    Strict().wrap(model, World.solo(), plan(micro_batches=4), (torch.ones(2, 3),))
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory, "a kernel for each torch.empty"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("_deterministic")
def test_an_error_of_the_model_itself_is_none_of_determinism() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        Strict().wrap(nn.Linear(3, 2), World.solo(), plan(micro_batches=4), (torch.zeros(2, 5),))


@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("strategy", [AllReduce(), AllReduceHooks(), FSDP(), Strict(), Pipeline()], ids=repr)
def test_every_replica_begins_with_mains_weights_and_buffers(
    strategy: Single, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(world: World) -> list[float]:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(world.rank + 5)
        strategy.wrap(model, world, plan(micro_batches=2), (torch.ones(2, 3),))
        return [number for tensor in model.state_dict().values() for number in tensor.unique().tolist()]

    assert ThreadRanks(2, monkeypatch).run(begun) == [[5.0] * 7] * 2


def test_only_ranks_with_a_process_group_have_replicas_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.strategy.base.share_weights", lambda model: None)
    model, alone = nn.Linear(2, 2), World.solo()
    assert AllReduceHooks().wrap(model, alone, plan(), ()) is model
    for place in (replace(alone, control=object()), world(2)):
        assert isinstance(AllReduceHooks().wrap(nn.Linear(2, 2), place, plan(), ()), HookedReplica)


def test_strict_keeps_the_running_statistics_of_the_first_shard() -> None:
    norm = nn.BatchNorm1d(1, momentum=None)
    replica = TreeReplica(norm)
    for value in (2.0, 6.0):
        replica(torch.full((2, 1), value)).sum().backward()
        replica.add_shard()
    Strict().reduce(replica)
    assert (norm.running_mean.item(), int(norm.num_batches_tracked)) == (2, 1)


def test_a_pass_of_strict_that_fails_adds_nothing() -> None:
    replica = TreeReplica(nn.Linear(3, 1))
    with pytest.raises(RuntimeError, match="no memory"), Strict().accumulate(replica, last=False):
        raise RuntimeError("no memory")
    assert replica.subtrees == []


def test_all_ranks_begin_with_mains_weights_and_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def begun(world: World) -> list[float]:
        model = nn.BatchNorm1d(1)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(world.rank + 5)
        share_weights(model)
        return [tensor.item() for tensor in (*model.parameters(), *model.buffers())]

    assert ThreadRanks(3, monkeypatch).run(begun) == [[5.0] * 5] * 3


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_strict_adds_each_gradient_once_in_one_order_on_every_number_of_ranks(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    pairs = shards.view(4, 2, 3).sum(1)
    expected = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])

    def summed(world: World) -> list[float]:
        replica = TreeReplica(nn.Linear(3, 1, bias=False))
        for shard in shards.chunk(ranks)[world.rank]:
            with Strict(shards=8).accumulate(replica, last=False):
                replica.module.weight.grad = shard[None].clone()
        Strict(shards=8).reduce(replica)
        return replica.module.weight.grad[0].tolist()

    assert ThreadRanks(ranks, monkeypatch).run(summed) == [expected.tolist()] * ranks


def test_each_gradient_is_summed_once_large_or_small_in_any_order_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randn(LARGE_GRADIENT // 4, 4, generator=torch.Generator().manual_seed(0))
    sent: list[Tensor] = []

    def reduced(world: World) -> bool:
        model = nn.Sequential(nn.Linear(LARGE_GRADIENT // 4, 4), nn.Linear(4, LARGE_GRADIENT // 4, bias=False))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, world.rank + 1.0)
        model[1].weight.grad = whole.t().contiguous().t()
        AllReduce().reduce(model)
        sums = [parameter.grad.unique().tolist() for parameter in model[0].parameters()]
        return sums == [[6.0], [6.0]] and torch.allclose(model[1].weight.grad, 3 * whole)

    ranks = ThreadRanks(3, monkeypatch)
    all_reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: (sent.append(tensor), all_reduce(tensor)))
    assert ranks.run(reduced) == [True] * 3
    assert all(tensor.is_contiguous() for tensor in sent), "NCCL and gloo send memory as it lies"


def test_the_state_of_each_parameter_is_saved_by_its_name_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    models = [copy.deepcopy(alone), copy.deepcopy(alone)]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        optimizer.step()

    expected = AdamW(lr=0.1).build(alone)
    step(alone, expected)

    def saved(world: World) -> tuple[dict[str, torch.Tensor], list[float]]:
        model = models[world.rank]
        optimizer = ZeROOptimizer(AdamW(lr=0.1).build(model), world)
        step(model, optimizer)
        state = optimizer_state(optimizer, model)["state"]
        return {name: entries["exp_avg"] for name, entries in state.items()}, model[1].bias.tolist()

    (main, weights), (_, weights_elsewhere) = ThreadRanks(2, monkeypatch).run(saved)
    for name, entries in optimizer_state(expected, alone)["state"].items():
        assert torch.equal(main[name], entries["exp_avg"]), name
    assert weights == weights_elsewhere == alone[1].bias.tolist()


@pytest.mark.usefixtures("_group")
def test_ddp_has_its_buckets_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    model = nn.BatchNorm1d(2)
    model.register_forward_hook(lambda *_: passes.append(1))
    replica = DDP(sync_batchnorm=False).replicate(model, plan(), (torch.randn(4, 2),))
    assert len(passes) == 2, "DDP orders its buckets anew after the first backward pass"
    assert [parameter.grad for parameter in replica.parameters()] == [None, None]
    assert model.num_batches_tracked == 0


def test_fsdp_adds_gradients_in_the_format_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[Any] = []
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", lambda *_, **__: None)
    fully_shard = "torch.distributed.fsdp.fully_shard"
    monkeypatch.setattr(fully_shard, lambda block, *, mp_policy, **_: policies.append(mp_policy))
    for low_precision, format_ in ((False, None), (True, torch.bfloat16)):
        FSDP(low_precision=low_precision).cut(nn.Linear(2, 2), world(2), BF16())
        assert (policies[-1].param_dtype, policies[-1].reduce_dtype) == (format_, torch.float32)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_replica_computes_in_the_format_of_the_precision(dtype: torch.dtype | None) -> None:
    replica = Autocasting(nn.Linear(2, 3))
    replica.dtype = dtype
    for training in (True, False):
        assert replica.train(training)(torch.ones(1, 2)).dtype == (dtype or torch.float32)


@pytest.mark.parametrize("replica", [Autocasting, ThreadedReplica, HookedReplica, TreeReplica])
@pytest.mark.parametrize("casts", [False, True])
def test_a_replica_passes_the_keys_of_an_example_on_beside_its_image(replica: Any, casts: bool) -> None:
    own = replica(nn.Bilinear(2, 3, 4))
    if replica is Autocasting and casts:
        own.dtype = torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        assert own(torch.ones(5, 2), torch.ones(5, 3)).shape == (5, 4)
