"""Empty micro-batches, for networks that take no empty input."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.errors import InputError
from lockstep.core.plan import Plan, make_plan
from lockstep.core.world import World
from lockstep.strategy.sync_batchnorm import convert_sync_batchnorm
from lockstep.training.blank_example import check_single_examples, for_empty_micro_batches

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
    return make_plan(
        examples=14,
        batch=6,
        epochs=1,
        total_steps=None,
        micro_batches=micro_batches,
        log_every=1,
        eval_every=1,
        save_every=1,
    )


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


def test_a_network_is_wrapped_only_where_it_can_fail() -> None:
    network, convolution = Attention(), nn.Conv2d(3, 8, 1)
    assert for_empty_micro_batches(network, (IMAGES,), plan(2), World.solo()) is network
    assert for_empty_micro_batches(convolution, (IMAGES,), plan(3), World.solo()) is convolution


@pytest.mark.parametrize(("micro_batches", "remedy"), [(2, "batch=5$"), (6, r"train\.micro_batches=1$")])
def test_a_batch_norm_that_cannot_take_a_single_example_is_refused_before_the_first_step(
    micro_batches: int, remedy: str
) -> None:
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3))
    with pytest.raises(InputError, match=remedy):
        check_single_examples(pooled, (IMAGES,), plan(micro_batches))
    check_single_examples(pooled, (IMAGES,), plan(1))
    norm = nn.BatchNorm2d(3)
    check_single_examples(norm, (IMAGES,), plan(micro_batches))
    assert norm.num_batches_tracked == 0
