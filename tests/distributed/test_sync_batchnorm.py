"""Synchronised batch norm over real ranks is the layer of one process over all their examples."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers import launch, train
from lockstep.job import worker
from lockstep.strategy.sync_batchnorm import convert_sync_batchnorm

pytestmark = pytest.mark.numerics

Results = list[dict[tuple[torch.dtype, int], dict[str, Tensor]]]
RANKS = 3
# The examples of each rank: all have some, one has none, one alone has any, nobody has.
SHARES = ((3, 4, 1), (5, 0, 2), (0, 0, 6), (0, 0, 0))


# Each kind of layer with the shape of what it has of an example.
LAYERS = {
    "vectors": (nn.BatchNorm1d, ()),
    "sequences": (nn.BatchNorm1d, (5,)),
    "images": (nn.BatchNorm2d, (3, 2)),
    "pooled": (nn.BatchNorm2d, (1, 1)),
    "volumes": (nn.BatchNorm3d, (2, 2, 3)),
}
# By world size. Without one example in all, which torch refuses for vectors, and so does `check_single_examples`.
UNEVEN = {2: ((3, 4), (1, 1), (0, 2), (5, 0)), 3: ((3, 4, 1), (1, 1, 0), (0, 0, 6), (1, 2, 2))}
Case = tuple[str, tuple[int, ...], float | None, bool, torch.dtype]


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
    """What a rank does: its share of every batch, in float64 and in bfloat16, and of those of all layers."""
    with worker.join(device="cpu", backend="gloo", timeout=240, threads=1) as here:
        layers = [passed_and_evaluated(case, here.rank) for case in cases(here.size)]
        torch.save(layers, folder / f"{here.rank}.layers.pt")
        if here.size != RANKS:
            sys.exit(0)
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
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """What the ranks of each world size have saved."""
    saved = {size: tmp_path_factory.mktemp("batchnorm") for size in UNEVEN}
    for size, folder in saved.items():
        launch(exit_as_rank, folder, size)
    return saved


@pytest.fixture(scope="module")
def ranks(folders: dict[int, Path]) -> Results:
    return [torch.load(folders[RANKS] / f"{rank}.pt") for rank in range(RANKS)]


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


def cases(ranks: int) -> Iterator[Case]:
    return itertools.product(LAYERS, UNEVEN[ranks], (0.3, None), (True, False), (torch.float64, torch.float32))


def passed_and_evaluated(case: Case, rank: int | None = None) -> dict[str, Tensor]:
    """Two training passes and an evaluation of a layer: of torch's on all examples, or of ours on those of a rank."""
    name, shares, momentum, affine, dtype = case
    kind, shape = LAYERS[name]
    norm: nn.Module = kind(3, momentum=momentum, affine=affine)
    norm.load_state_dict(
        {key: value + 0.5 if value.is_floating_point() else value for key, value in norm.state_dict().items()}
    )
    generator = torch.Generator().manual_seed(sum(shares))
    batches = [2 + 3 * torch.randn((sum(shares), 3, *shape), generator=generator).to(dtype) for _ in range(2)]
    if rank is None:
        norm, batches = norm.double(), [batch.double() for batch in batches]
    else:
        norm, batches = convert_sync_batchnorm(norm.to(dtype)), [batch.split(shares)[rank] for batch in batches]
    results = [passed(norm, batch) for batch in batches][1] | norm.state_dict()
    return {**results, "evaluated": norm.eval()(batches[0]).detach()}


@pytest.mark.parametrize("size", UNEVEN)
def test_every_layer_on_ranks_with_uneven_shares_is_torchs_layer_over_all_examples(
    folders: dict[int, Path], size: int
) -> None:
    of_ranks = zip(*(torch.load(folders[size] / f"{rank}.layers.pt") for rank in range(size)), strict=True)
    for case, results in zip(cases(size), of_ranks, strict=True):
        # Each of n values is rounded once in every sum. The gradients have the largest numbers, below 100.
        values = sum(case[1]) * 12
        bound = 1e-12 if case[-1] is torch.float64 else 100 * values * torch.finfo(torch.float32).eps
        for name, tensor in passed_and_evaluated(case).items():
            parts = [result[name].double() for result in results]
            if name in ("output", "gradient", "evaluated"):
                parts = [torch.cat(parts)]
            elif name.startswith("gradient of"):
                parts = [torch.stack(parts).sum(0)]
            assert all((part - tensor).abs().max() <= bound for part in parts), (case, name)


@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy=ddp",),
        ("strategy=ddp", "strategy.sync_batchnorm=false"),
        ("strategy=allreduce_hooks", "strategy.sync_batchnorm=false"),
        ("strategy=pipeline",),
        ("repro=strict",),
    ],
    ids=" ".join,
)
def test_a_step_that_leaves_one_example_is_refused_before_the_first(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    data = ("dataset=fake", "dataset.examples=9", "dataset.classes=2", "dataset.size=16", "model=test_resnet")
    done = train(*data, "batch=4", "epochs=1", "device=cpu", "launcher.ranks=2", *overrides, cwd=tmp_path)
    assert done.code == 2
    assert "too few for the batch norm of this model; use batch=" in done.err
    assert "Traceback" not in done.out + done.err
    assert not [*tmp_path.glob("outputs/*fake*")]
