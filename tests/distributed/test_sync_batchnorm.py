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
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
Case = tuple[str, tuple[int, ...], tuple[float | None, bool], torch.dtype]


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
    """What a rank does: its share of the batches of all layers."""
    with worker.join(device="cpu", backend="gloo", timeout=240, threads=1) as here:
        torch.save([passed_and_evaluated(case, here.rank) for case in cases(here.size)], folder / f"{here.rank}.pt")
    sys.exit(0)


def cases(ranks: int) -> Iterator[Case]:
    return itertools.product(LAYERS, UNEVEN[ranks], ((0.3, True), (None, False)), DTYPES)


def passed_and_evaluated(case: Case, rank: int | None = None) -> dict[str, Tensor]:
    """Two training passes and an evaluation of a layer: of torch's on all examples, or of ours on those of a rank."""
    name, shares, (momentum, affine), dtype = case
    kind, shape = LAYERS[name]
    norm: nn.Module = kind(3, momentum=momentum, affine=affine)
    norm.load_state_dict(
        {key: value + 0.5 if value.is_floating_point() else value for key, value in norm.state_dict().items()}
    )
    generator = torch.Generator().manual_seed(sum(shares))
    batches = [2 + 3 * torch.randn((sum(shares), 3, *shape), generator=generator).to(dtype) for _ in range(2)]
    if rank is None:
        norm, batches = norm.double(), [batch.double() for batch in batches]
    else:  # of 16-bit activations, the layer is in float32
        norm = convert_sync_batchnorm(norm.to(torch.promote_types(dtype, torch.float32)))
        batches = [batch.split(shares)[rank] for batch in batches]
    results = [passed(norm, batch) for batch in batches][1] | norm.state_dict()
    return {**results, "evaluated": norm.eval()(batches[0]).detach()}


@pytest.mark.slow
@pytest.mark.parametrize("size", UNEVEN)
def test_every_layer_on_ranks_with_uneven_shares_is_torchs_layer_over_all_examples(tmp_path: Path, size: int) -> None:
    launch(exit_as_rank, tmp_path, size)
    of_ranks = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(size)), strict=True)
    for case, results in zip(cases(size), of_ranks, strict=True):
        dtype, values = case[-1], sum(case[1]) * 12
        # Each of n values is rounded once in every sum. The gradients have the largest numbers, below 100.
        bound = 1e-12 if dtype is torch.float64 else 100 * values * torch.finfo(torch.float32).eps
        for name, tensor in passed_and_evaluated(case).items():
            parts = [result[name].double() for result in results]
            if of_examples := name in ("output", "gradient", "evaluated"):
                assert {result[name].dtype for result in results} == {dtype}
                parts = [torch.cat(parts)]
            elif name.startswith("gradient of"):
                parts = [torch.stack(parts).sum(0)]
            else:
                assert all(torch.equal(part, parts[0]) for part in parts), (
                    "statistics have the same bits on every rank"
                )
            rounded = 100 * torch.finfo(dtype).eps if of_examples or name.startswith("gradient of") else 0
            assert all((part - tensor).abs().max() <= max(bound, rounded) for part in parts), (case, name)


@pytest.mark.parametrize(
    "overrides",
    [
        ("strategy=ddp",),
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
