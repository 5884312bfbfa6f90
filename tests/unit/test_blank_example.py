"""Empty micro-batches, for networks that take no empty input."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.errors import InputError
from lockstep.core.plan import Plan, make_plan, share
from lockstep.core.protocols import Strategy
from lockstep.core.world import World
from lockstep.strategy import DDP, FSDP, AllReduce, DataParallel, Pipeline, Single, Strict, ZeRO
from lockstep.strategy.sync_batchnorm import convert_sync_batchnorm
from lockstep.training.network import (
    BlankExample,
    Freezing,
    batch_norm_counts,
    batches_without_single,
    check_single_examples,
    for_empty_micro_batches,
)

IMAGES = torch.rand(2, 3, 4, 4)


class Attention(nn.Module):
    """Asks for the size of its heads as attention does, which torch cannot infer for no example."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        heads: Tensor = self.layers(images).view(len(images), 2, -1, 16)
        return self.head(heads.mean(3).flatten(1))


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plan(micro_batches: int) -> Plan:
    """Its last global batch has two examples."""
    every: dict[str, int] = {"log_every": 1, "eval_every": 1, "save_every": 1}
    return make_plan(examples=14, batch=6, epochs=1, total_steps=None, micro_batches=micro_batches, **every)


@pytest.mark.parametrize("synchronised", [False, True])
def test_no_example_gives_zero_gradients_and_counts_in_no_batch_norm(synchronised: bool) -> None:
    network: nn.Module = Attention()
    wrapped = for_empty_micro_batches(network, (IMAGES,), plan(3), World.solo())
    if synchronised:
        convert_sync_batchnorm(network)
    buffers = [buffer.clone() for buffer in network.buffers()]
    logits = wrapped(IMAGES[:0])
    logits.sum().backward()
    assert logits.shape == (0, 5)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in network.parameters())
    assert all(map(torch.equal, network.buffers(), buffers))
    assert wrapped(IMAGES).shape == (2, 5)
    assert not all(map(torch.equal, network.buffers(), buffers))


@pytest.mark.parametrize("error", [AssertionError, IndexError, RuntimeError, TypeError, ZeroDivisionError])
def test_a_network_that_fails_in_any_way_on_no_example_gets_a_blank_one(error: type[Exception]) -> None:
    class Fails(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            if not len(images):
                raise error("no example")
            return images.mean((1, 2, 3))

    wrapped = for_empty_micro_batches(Fails(), (IMAGES,), plan(3), World.solo())
    assert wrapped(IMAGES[:0]).shape == (0,)


class Contrast(nn.Module):
    """Keeps what it gets, and divides by the deviation of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.seen: list[tuple[Tensor, ...]] = []

    def forward(self, images: Tensor, keys: Tensor) -> Tensor:
        self.seen.append((images, keys))
        return self.norm(images / images.std((1, 2, 3), keepdim=True)).mean((2, 3))


def test_the_blank_example_is_like_the_others_and_the_network_trains_on_behind_it() -> None:
    network = Contrast()
    wrapped = BlankExample(network)
    for images in (IMAGES[:0], IMAGES.bfloat16()[:0]):
        assert wrapped(images, torch.ones(0, 2, dtype=torch.int64)).isfinite().all()
        seen, keys = network.seen.pop()
        assert (seen.shape, seen.dtype) == ((1, 3, 4, 4), images.dtype)
        assert seen.float().std() > 0.1, "a network may divide by it"
        assert torch.equal(keys, torch.zeros(1, 2, dtype=torch.int64))
        assert (network.norm.training, network.norm.blank, network.norm.num_batches_tracked) == (True, False, 0)
    one = torch.ones(1, 2, dtype=torch.int64)
    assert wrapped(IMAGES[:1], one).shape == (1, 3)
    assert all(map(torch.equal, network.seen.pop(), (IMAGES[:1], one))), "one example is not none"
    assert network.norm.num_batches_tracked == 1
    network.norm.eval()  # frozen
    wrapped(IMAGES[:0], torch.ones(0, 2, dtype=torch.int64))
    assert not network.norm.training


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "wraps"), [(2, 1, False), (3, 1, True), (1, 3, True), (2, 2, True)]
)
def test_a_network_is_wrapped_where_the_last_batch_has_fewer_examples_than_all_ranks_have_pieces(
    ranks: int, micro_batches: int, wraps: bool
) -> None:
    network, world = Attention(), replace(World.solo(), size=ranks)
    wrapped = for_empty_micro_batches(network, (IMAGES,), plan(micro_batches), world)
    assert isinstance(wrapped, BlankExample) == wraps
    whole = replace(plan(micro_batches), examples=12)  # no batch is short
    assert for_empty_micro_batches(network, (IMAGES,), whole, world) is network


def test_a_network_is_wrapped_only_where_it_can_fail() -> None:
    network, convolution = Attention(), nn.Conv2d(3, 8, 1)
    assert for_empty_micro_batches(network, (IMAGES,), plan(2), World.solo()) is network
    assert for_empty_micro_batches(convolution, (IMAGES,), plan(3), World.solo()) is convolution


def takes(count: int) -> bool:
    """Whether torch's batch norm takes so many examples of one value per channel."""
    try:
        nn.BatchNorm1d(1)(torch.zeros(count, 1))
    except ValueError:
        return False
    return True


def fails(strategy: Strategy, count: int, ranks: int, micro_batches: int) -> bool:
    """Whether torch refuses a micro-batch of a global batch of `count` examples, cut as the ranks cut it."""
    pieces = [torch.arange(count)[share(count, ranks * micro_batches, part)] for part in range(ranks * micro_batches)]
    if getattr(strategy, "sync_batchnorm", False):
        pieces = [torch.cat(pieces[part::micro_batches]) for part in range(micro_batches)]
    return any(len(piece) and not takes(len(piece)) for piece in pieces)


def plan_of(examples: int, micro_batches: int, steps: int) -> Plan:
    return replace(plan(1), examples=examples, batch=1, micro_batches=micro_batches, total_steps=steps)


@pytest.mark.parametrize(
    "strategy", [Single(), Strict(), Pipeline(), DDP(), DDP(sync_batchnorm=False), ZeRO(sync_batchnorm=False)]
)
def test_the_batches_without_a_single_example_are_those_whose_micro_batches_torch_takes(strategy: Strategy) -> None:
    for examples, ranks, micro_batches in itertools.product((2, 9, 13), range(1, 4), range(1, 4)):
        whole = [size for size in range(1, examples + 1) if not fails(strategy, size, ranks, micro_batches)]
        ended = [size for size in whole if not fails(strategy, examples % size, ranks, micro_batches)]
        for steps, expected in ((examples, ended), (1, whole)):
            usable = batches_without_single(plan_of(examples, micro_batches, steps), strategy, ranks)
            assert [*usable] == expected, (examples, ranks, micro_batches, steps)
        # Where a batch fits, so does a batch twice as large, which the verdict and batch=auto propose.
        assert {2 * size for size in ended if 2 * size <= examples} <= {*ended}


def test_data_parallel_cuts_a_micro_batch_over_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert batch_norm_counts(DataParallel(), 5, 1, 1) == {5}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert batch_norm_counts(DataParallel(), 5, 1, 1) == {2, 1}
    assert batch_norm_counts(DataParallel(), 6, 1, 1) == {2}, "a fourth GPU would have none"
    assert batch_norm_counts(DataParallel(), 16, 1, 2) == {2}


POOLED = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3))


@pytest.mark.parametrize(
    ("strategy", "ranks", "micro_batches", "remedy"),
    [
        (Single(), 1, 2, "batch=5$"),
        (Single(), 1, 6, "batch=14$"),
        (Strict(), 2, 2, "batch=14$"),
        (DDP(sync_batchnorm=False), 2, 1, "batch=5$"),
        (AllReduce(sync_batchnorm=False), 3, 1, "batch=7$"),
        (FSDP(sync_batchnorm=False), 8, 1, "use fewer ranks or micro-batches, or a model without batch norm$"),
        (DDP(), 3, 2, "batch=5$"),
    ],
)
def test_a_batch_norm_that_cannot_take_a_single_example_is_refused_before_the_first_step(
    strategy: Strategy, ranks: int, micro_batches: int, remedy: str
) -> None:
    norm = nn.BatchNorm2d(3)
    check_single_examples(norm, (IMAGES,), plan(micro_batches), strategy, ranks, Freezing())
    assert norm.num_batches_tracked == 0
    check_single_examples(POOLED, (IMAGES,), plan(1), Single(), 1, Freezing())
    with pytest.raises(InputError, match=remedy):
        check_single_examples(POOLED, (IMAGES,), plan(micro_batches), strategy, ranks, Freezing())


def test_another_error_of_a_network_on_one_example_is_left_to_a_full_batch() -> None:
    class Failing(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            raise ValueError("expected an even number of examples")

    check_single_examples(Failing(), (IMAGES,), plan(2), Single(), 1, Freezing())
    frozen = Freezing(norms=(POOLED[1],), until=None)
    check_single_examples(POOLED, (IMAGES,), plan(2), Single(), 1, frozen)
    assert POOLED[1].training


@pytest.mark.parametrize(("until", "refused"), [(None, False), (2, True), (3, False)])
def test_a_frozen_batch_norm_takes_a_single_example(until: int | None, refused: bool) -> None:
    freezing = Freezing(norms=(POOLED[1],), until=until)
    with pytest.raises(InputError) if refused else nullcontext():
        check_single_examples(POOLED, (IMAGES,), plan(2), Single(), 1, freezing)
