"""Synchronised batch norm over real ranks is the layer of one process over all their examples."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers import launch
from lockstep.core import process_group
from lockstep.strategy.sync_batchnorm import convert_sync_batchnorm

pytestmark = pytest.mark.numerics

Results = list[dict[tuple[torch.dtype, int], dict[str, Tensor]]]
RANKS = 3
# The examples of each rank: all have some, one has none, one alone has any, nobody has.
SHARES = ((3, 4, 1), (5, 0, 2), (0, 0, 6), (0, 0, 0))


def layer() -> nn.Module:
    norm = nn.BatchNorm2d(3, momentum=0.3).double()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, 1.5, 2.0]))
        norm.bias.copy_(torch.tensor([-1.0, 0.0, 1.0]))
    return norm


def batch(number: int) -> Tensor:
    """The examples of all ranks, in float64."""
    generator = torch.Generator().manual_seed(number)
    return 2 + 3 * torch.randn((sum(SHARES[number]), 3, 4, 5), dtype=torch.float64, generator=generator)


def passed(norm: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of the sum of its sines."""
    entering = x.clone().requires_grad_()
    norm.zero_grad()
    output = norm(entering)
    output.double().sin().sum().backward()
    assert entering.grad is not None
    return {"output": output.detach(), "gradient": entering.grad} | {
        f"gradient of {name}": parameter.grad
        for name, parameter in norm.named_parameters()
        if parameter.grad is not None
    }


def exit_as_rank(folder: Path) -> None:
    """What a rank does: its share of every batch, in float64 and in bfloat16."""
    with process_group.join(device="cpu", backend="gloo", timeout=240, threads=1) as here:
        results = {}
        for dtype in (torch.float64, torch.bfloat16):
            norm = convert_sync_batchnorm(layer() if dtype is torch.float64 else layer().float())
            for number, shares in enumerate(SHARES):
                own = batch(number).split(shares)[here.rank].to(dtype)
                results[dtype, number] = passed(norm, own) | norm.state_dict()
                results[dtype, number] = {name: tensor.clone() for name, tensor in results[dtype, number].items()}
        torch.save(results, folder / f"{here.rank}.pt")
    sys.exit(0)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("batchnorm")
    launch(exit_as_rank, folder, RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def test_ranks_with_any_shares_are_one_layer_over_all_examples(ranks: Results) -> None:
    whole = layer()
    for number, shares in enumerate(SHARES[:3]):
        expected = passed(whole, batch(number)) | whole.state_dict()
        actual = [rank[torch.float64, number] for rank in ranks]
        for name in ("output", "gradient"):
            assert [len(rank_results[name]) for rank_results in actual] == list(shares)
            torch.testing.assert_close(
                torch.cat([rank_results[name] for rank_results in actual]), expected[name], rtol=1e-12, atol=1e-12
            )
        for name in ("gradient of weight", "gradient of bias"):
            total = sum(rank_results[name] for rank_results in actual)
            torch.testing.assert_close(total, expected[name], rtol=1e-12, atol=1e-12, msg=name)
        for name in ("running_mean", "running_var"):
            for rank_results in actual:
                torch.testing.assert_close(rank_results[name], expected[name], rtol=1e-12, atol=1e-12, msg=name)


def test_a_batch_of_nobody_changes_no_statistics(ranks: Results) -> None:
    for rank in ranks:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(rank[torch.float64, 3][name], rank[torch.float64, 2][name])


def test_ranks_without_examples_send_numbers_of_the_same_width_in_bfloat16(ranks: Results) -> None:
    for number, shares in enumerate(SHARES[:3]):
        rounded = batch(number).bfloat16()
        for rank, share in zip(ranks, shares, strict=True):
            actual = rank[torch.bfloat16, number]
            assert actual["output"].dtype == actual["gradient"].dtype == torch.bfloat16
            assert len(actual["output"]) == share
        # The same bits on every rank, and those of the numbers that went in.
        means = [rank[torch.bfloat16, number]["running_mean"] for rank in ranks]
        assert all(torch.equal(mean, means[0]) for mean in means)
        before = ranks[0][torch.bfloat16, number - 1]["running_mean"] if number else torch.zeros(3)
        expected = 0.7 * before.double() + 0.3 * rounded.double().mean((0, 2, 3))
        bound = 8 * 3 * 20 * sum(shares) * torch.finfo(torch.float32).eps
        torch.testing.assert_close(means[0].double(), expected, rtol=0, atol=bound)
