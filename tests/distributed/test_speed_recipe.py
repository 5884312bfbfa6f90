"""The speed recipe, small: frozen filters, Muon, averages and views on several ranks, stopped and strict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers import Case, gang, losses, records, train_here, weights

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

RECIPE = (
    "experiment=cifar10_speedrun",
    "dataset=digits",
    "dataset.input_size=16",
    "model.widths=[8,16,16]",
    "model.compile=false",
    "train.cudnn_benchmark=false",
    "train.ema=0.9",
    "batch=300",
    "steps=6",
    "optimizer.bias_lr=5",
    "optimizer.head_lr=1",
)
# In float64: half precision rounds another way on another number of ranks, and 5 steps at these rates show it.
EXACT = (*RECIPE, "precision=fp64")
STRICT = (*RECIPE, "repro=strict", "precision=fp32")
DDP = (*EXACT, "strategy=ddp")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The recipe on one rank and on two, stopped and resumed on two, and under `repro=strict` on both."""
    root = tmp_path_factory.mktemp("recipe")
    names = ("one", "two", "moved", "strict 1", "strict 2")
    runs = {name: root / name for name in names}
    stopped = [Case(runs["moved"], DDP, stop_at=4), Case(runs["moved"], DDP)]
    gang(root / "gang", 2, [Case(runs["two"], DDP), *stopped, Case(runs["strict 2"], STRICT)])
    train_here(runs["one"], *EXACT)
    train_here(runs["strict 1"], *STRICT)
    return runs


def test_two_ranks_train_as_one_does(runs: dict[str, Path]) -> None:
    assert losses(runs["two"]) == pytest.approx(losses(runs["one"]), rel=1e-9)
    assert losses(runs["one"])[-1] < losses(runs["one"])[0]
    scores = [[line["acc/val_top1"] for line in records(runs[name]) if "acc/val_top1" in line] for name in runs]
    assert scores[0] == scores[1]


def test_a_resume_does_not_change_a_bit(runs: dict[str, Path]) -> None:
    whole, moved = weights(runs["two"]), weights(runs["moved"])
    assert all(torch.equal(whole[name], moved[name]) for name in whole)


def test_under_strict_one_and_two_ranks_have_the_same_bits(runs: dict[str, Path]) -> None:
    one, two = weights(runs["strict 1"]), weights(runs["strict 2"])
    assert all(torch.equal(one[name], two[name]) for name in one if "running" not in name)


def test_the_whitening_is_that_of_the_training_images_from_beginning_to_end(runs: dict[str, Path]) -> None:
    filters = {name: weights(run)["0.weight"] for name, run in runs.items()}
    assert all(torch.equal(filters[name], filters["one"]) for name in ("two", "moved"))
    # Those of `strict` are made from float32 images. That may turn filters, but not change what they undo together,
    # the inverse of the covariance, by more than the roundings of the images times its condition.
    flat = (filters[name].double().flatten(1) for name in ("one", "strict 1"))
    exact, strict = (value.T @ value for value in flat)
    bound = 4 * torch.finfo(torch.float32).eps * torch.linalg.cond(exact) * torch.linalg.matrix_norm(exact, 2)
    torch.testing.assert_close(strict, exact, rtol=0, atol=float(bound))
    assert not torch.equal(weights(runs["one"])["2.0.weight"][0, 0], torch.eye(3, dtype=torch.float64))
