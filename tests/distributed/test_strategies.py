"""Runs of the strategies that cut or copy the state of a run: they stop, go on and change places like any other."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from helpers import FAKE, NARROW, Case, Gang, gang, losses, train_here, weights
from lockstep.checkpoint import reading
from lockstep.checkpoint.reading import latest_valid

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

COMMON = (
    *FAKE,
    "dataset.examples=182",
    "batch=60",
    "steps=6",
    "train.clip_norm=5",
    "train.ema=0.9",
    "train.micro_batches=2",
    "checkpoint.every=3",
    "precision=fp64",
    NARROW,
    "model.dropout=0.3",
    "optimizer.lookahead=2",
)
RESUMED = ("fsdp", "zero", "accelerate", "pipeline")
# The strategy under which a stopped run goes on: on three ranks, or on one.
MOVES = {"fsdp": "zero", "zero": "pipeline", "accelerate": "single", "pipeline": "fsdp", "ddp": "accelerate"}
VIT = (
    *FAKE,
    "model=test_vit",
    "dataset.examples=96",
    "dataset.size=32",
    "batch=24",
    "steps=2",
    "train.eval_every=2",
    "model.drop_path_rate=0.1",
)
FORMATS = {
    "fp64": ("strategy=fsdp", "precision=fp64"),
    "low": ("strategy=fsdp", "precision=bf16", "strategy.low_precision=true"),
    "pure": ("strategy=fsdp", "precision=bf16_pure", "optimizer=sgd"),
    "staged": ("strategy=pipeline", "precision=bf16", "train.micro_batches=3"),
    "staged-muon": ("strategy=pipeline", "precision=fp64", "optimizer=muon"),
    "muon": ("strategy=zero", "precision=fp64", "optimizer=muon"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of six steps on two ranks, whole and stopped after step 3; these go on there, and on other ranks."""
    root = tmp_path_factory.mktemp("strategies")
    train_here(root / "one", *COMMON)
    whole = [Case(root / name, (*COMMON, f"strategy={name}")) for name in RESUMED]
    stopped = [Case(root / f"{name}-stopped", (*COMMON, f"strategy={name}"), stop_at=3) for name in MOVES]
    formats = [Case(root / f"vit-{name}", (*VIT, *words)) for name, words in FORMATS.items()]
    with Gang(root / "gang", 2) as two:
        for case in (*whole, *stopped, *formats):
            two.train(case)
        for name in MOVES:
            shutil.copytree(root / f"{name}-stopped", root / f"{name}-moved")
        for name in RESUMED:
            two.train(Case(root / f"{name}-stopped", (*COMMON, f"strategy={name}")))
    groups = (*COMMON, "strategy=fsdp", "strategy.replicas=2")
    stops = (("groups", None), ("groups-stopped", 3), ("groups-stopped", None))
    gang(root / "four", 4, [Case(root / name, groups, stop_at=stop) for name, stop in stops])
    three = {name: to for name, to in MOVES.items() if to != "single"}
    gang(root / "three", 3, [Case(root / f"{name}-moved", (*COMMON, f"strategy={to}")) for name, to in three.items()])
    for name in MOVES.keys() - three:
        train_here(root / f"{name}-moved", *COMMON, "strategy=single")
    return root


def state(run: Path) -> dict[str, Tensor]:
    """Weights, averages and the optimizer's state of the newest checkpoint."""
    newest = latest_valid(run / "checkpoints")
    assert newest is not None
    loaded = reading.read_checkpoint(newest)
    assert loaded.ema is not None
    of_optimizer = {
        f"{name}.{key}": torch.as_tensor(value)
        for name, entries in loaded.state["optimizer"]["state"].items()
        for key, value in entries.items()
    }
    return {**loaded.model, **{f"ema.{name}": tensor for name, tensor in loaded.ema.items()}, **of_optimizer}


@pytest.mark.parametrize("name", [*RESUMED, "groups"])
def test_a_resume_on_the_same_ranks_is_exact_to_the_bit(root: Path, name: str) -> None:
    expected, actual = state(root / name), state(root / f"{name}-stopped")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[key], tensor) for key, tensor in expected.items())
    assert losses(root / f"{name}-stopped") == losses(root / name)


def test_groups_that_have_the_whole_state_each_train_like_one_rank(root: Path) -> None:
    assert losses(root / "groups") == pytest.approx(losses(root / "one"), rel=1e-12)
    for key, tensor in state(root / "one").items():
        torch.testing.assert_close(state(root / "groups")[key], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", MOVES)
def test_a_checkpoint_goes_on_under_another_strategy_and_on_other_ranks(root: Path, name: str) -> None:
    expected, actual = state(root / "one"), state(root / f"{name}-moved")
    assert expected.keys() == actual.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, rtol=1e-9, atol=1e-9)
    assert losses(root / f"{name}-moved") == pytest.approx(losses(root / "one"), rel=1e-12)


def test_blocks_of_timm_are_gathered_one_by_one_in_every_precision(root: Path) -> None:
    for name, words in FORMATS.items():
        here = [word for word in words if "strategy" not in word]
        one = train_here(root / f"one-{name}", *VIT, *here)
        digits = 1e-12 if "precision=fp64" in words else 2**-7
        assert losses(root / f"vit-{name}") == pytest.approx(losses(one), rel=digits)
        dtypes = {tensor.dtype for tensor in weights(root / f"vit-{name}").values()}
        assert dtypes == {tensor.dtype for tensor in weights(one).values()}


STRATEGIES = ("ddp", "fsdp", "zero", "allreduce", "pipeline")


def photos(root: Path, names: str) -> Path:
    generator = np.random.default_rng(0)
    for split, name, number in ((split, name, n) for split in ("train", "val") for name in names for n in range(6)):
        (root / split / name).mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


def test_every_strategy_starts_from_the_same_rows_by_name(tmp_path: Path) -> None:
    common = (
        "dataset=folder",
        "dataset.decode_size=8",
        "model.width=8",
        "precision=fp64",
        "optimizer=sgd",
        "batch=12",
    )
    common = (*common, "train.ema=0.5", "augment=none", "steps=3", "checkpoint.every=1")
    first = train_here(tmp_path / "first", *common, f"dataset.path={photos(tmp_path / 'bdf', 'bdf')}")
    words = (*common, f"dataset.path={photos(tmp_path / 'abcd', 'abcd')}", f"init_from={first.path}")
    alone = train_here(tmp_path / "alone", *words)
    cases = [Case(tmp_path / name, (*words, f"strategy={name}")) for name in STRATEGIES]
    gang(tmp_path / "ranks", 2, cases)
    fresh = train_here(tmp_path / "fresh", *words[:-1])
    assert losses(fresh)[0] != pytest.approx(losses(alone)[0], rel=1e-6)
    for case in cases:
        assert losses(case.path) == pytest.approx(losses(alone), rel=1e-12)
        for name, tensor in weights(case.path).items():
            assert torch.allclose(tensor, weights(alone)[name], rtol=1e-10, atol=1e-12)
