"""Runs of the strategies that cut or copy the state of a run: they stop, go on and change places like any other."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers import NARROW, Case, built, gang, losses, records, train_here, weights
from lockstep import checkpoint
from lockstep.data.loading.sampler import share
from lockstep.job import resolve
from lockstep.training.parts import build_parts

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

COMMON = (
    "batch=240",
    "steps=6",
    "train.clip_norm=5",
    "train.ema=0.9",
    "train.micro_batches=2",
    "checkpoint.every=3",
    "precision=fp64",
    NARROW,
    "model.dropout=0.3",
)
RESUMED = ("fsdp", "zero", "accelerate", "pipeline")
LOCAL = (
    "batch=240",
    "steps=8",
    "optimizer=sgd",
    "optimizer.lr=0.05",
    "precision=fp64",
    "augment=none",
    NARROW,
    "model.dropout=0",
    "train.ema=0.9",
)
LOCAL_STEPS = 4
LOCALLY = (*LOCAL, "strategy=local_sgd", f"strategy.local_steps={LOCAL_STEPS}", "telemetry.interval=1")
VIT = (
    "model=test_vit",
    "dataset.input_size=32",
    "batch=24",
    "steps=2",
    "train.eval_every=2",
    "train.eval_batch=355",
    "model.drop_path_rate=0.1",
)
FORMATS = {
    "fp64": ("strategy=fsdp", "precision=fp64"),
    "bf16": ("strategy=fsdp", "precision=bf16"),
    "low": ("strategy=fsdp", "precision=bf16", "strategy.low_precision=true"),
    "pure": ("strategy=fsdp", "precision=bf16_pure", "optimizer=sgd"),
    "staged": ("strategy=pipeline", "precision=bf16", "train.micro_batches=3"),
    "staged-muon": ("strategy=pipeline", "precision=fp64", "optimizer=muon"),
    "muon": ("strategy=zero", "precision=fp64", "optimizer=muon"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on two ranks; those named `stopped` end behind step 3, and the whole ones at step 6."""
    root = tmp_path_factory.mktemp("strategies")
    train_here(root / "one", *COMMON)
    whole = [Case(root / name, (*COMMON, f"strategy={name}")) for name in RESUMED]
    stopped = [Case(root / f"{name}-stopped", (*COMMON, f"strategy={name}"), stop_at=3) for name in (*RESUMED, "ddp")]
    local = [
        Case(root / "local", LOCALLY),
        Case(root / "local-stopped", LOCALLY, stop_at=2),
        *(Case(root / f"vit-{name}", (*VIT, *words)) for name, words in FORMATS.items()),
    ]
    gang(root / "gang", 2, [*whole, *stopped, *local])
    shutil.copytree(root / "local-stopped", root / "local-resumed")
    for name in (*RESUMED, "ddp"):
        for copy_name in ("same", "three", "single"):
            shutil.copytree(root / f"{name}-stopped", root / f"{name}-{copy_name}")
    again = [Case(root / f"{name}-same", (*COMMON, f"strategy={name}")) for name in RESUMED]
    gang(root / "again", 2, [*again, Case(root / "local-resumed", LOCALLY)])
    next_strategy = {
        "fsdp": "zero",
        "zero": "pipeline",
        "accelerate": "zero",
        "pipeline": "fsdp",
        "ddp": "accelerate",
    }
    gang(root / "three", 3, [Case(root / f"{a}-three", (*COMMON, f"strategy={b}")) for a, b in next_strategy.items()])
    for name in (*RESUMED, "ddp"):
        train_here(root / f"{name}-single", *COMMON, "strategy=single")
    return root


def state(run: Path) -> dict[str, Tensor]:
    """Weights, averages and the optimizer's state of the newest checkpoint."""
    newest = checkpoint.latest_valid(run / "checkpoints")
    assert newest is not None
    loaded = checkpoint.load(newest)
    assert loaded.ema is not None
    of_optimizer = {
        f"{name}.{key}": value
        for name, entries in loaded.state["optimizer"]["state"].items()
        for key, value in entries.items()
    }
    return {**loaded.model, **{f"ema.{name}": tensor for name, tensor in loaded.ema.items()}, **of_optimizer}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resume_on_the_same_ranks_is_exact_to_the_bit(root: Path, name: str) -> None:
    expected, actual = state(root / name), state(root / f"{name}-same")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[key], tensor) for key, tensor in expected.items())
    assert losses(root / f"{name}-same") == losses(root / name)


@pytest.mark.parametrize("other", ["three", "single"])
@pytest.mark.parametrize("name", [*RESUMED, "ddp"])
def test_a_checkpoint_goes_on_under_another_strategy_and_on_other_ranks(root: Path, name: str, other: str) -> None:
    expected, actual = state(root / "one"), state(root / f"{name}-{other}")
    assert expected.keys() == actual.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, rtol=1e-9, atol=1e-9)
    assert losses(root / f"{name}-{other}") == pytest.approx(losses(root / "one"), rel=1e-12)


def plain_local_sgd(ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    """Local SGD with averaged momenta, as its papers write it, and the loss of each step."""
    torch.manual_seed(0)
    parts = build_parts(resolve.resolve(built(*LOCAL, "name=test", "device=cpu"), sweep=False))
    models = [copy.deepcopy(parts.model) for _ in range(ranks)]
    momenta = [[torch.zeros_like(weight) for weight in model.parameters()] for model in models]
    step_losses = []
    for step, images, labels in parts.batches():
        if step > parts.plan.total_steps:
            break
        parts.set_learning_rate(step)
        rate, total = parts.optimizer.param_groups[0]["lr"], 0.0
        for rank, model in enumerate(models):
            own = share(len(images), ranks, rank)
            loss = nn.functional.cross_entropy(model(images[own]), labels[own], reduction="sum")
            total += loss.item()
            gradients = torch.autograd.grad(loss * ranks / len(images), list(model.parameters()))
            with torch.no_grad():
                for weight, momentum, gradient in zip(model.parameters(), momenta[rank], gradients, strict=True):
                    momentum.mul_(0.9).add_(gradient)
                    weight.sub_(rate * momentum)
        step_losses.append(total / len(images))
        if step % LOCAL_STEPS == 0:
            for tensors in (
                *zip(*(model.parameters() for model in models), strict=True),
                *zip(*momenta, strict=True),
            ):
                mean = torch.stack([tensor.detach() for tensor in tensors]).mean(0)
                for tensor in tensors:
                    tensor.data.copy_(mean)
    return models[0].state_dict(), step_losses


def test_local_steps_are_a_plain_computation_of_local_sgd(root: Path) -> None:
    expected, expected_losses = plain_local_sgd(ranks=2)
    assert losses(root / "local") != pytest.approx(losses(root / "one"), rel=1e-3)
    for name, tensor in weights(root / "local").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-12)
    # Log points wait for an average, and have the mean since the one before.
    assert [record["step"] for record in records(root / "local") if "loss/train" in record] == [4, 8]
    assert losses(root / "local")[0] == pytest.approx(sum(expected_losses[:4]) / 4, rel=1e-12)


def test_a_stop_waits_for_an_average_and_the_resume_is_exact(root: Path) -> None:
    (newest, *_) = checkpoint.candidates(root / "local-stopped" / "checkpoints")
    assert checkpoint.read_facts(newest)["progress"]["step"] == LOCAL_STEPS
    expected, actual = state(root / "local"), state(root / "local-resumed")
    assert all(torch.equal(actual[key], tensor) for key, tensor in expected.items())


def test_blocks_of_timm_are_gathered_one_by_one_in_every_precision(root: Path) -> None:
    for name, words in FORMATS.items():
        here = [word for word in words if "strategy" not in word]
        one = train_here(root / f"one-{name}", *VIT, *here)
        digits = 1e-12 if "precision=fp64" in words else 2**-7
        assert losses(root / f"vit-{name}") == pytest.approx(losses(one), rel=digits)
        dtypes = {tensor.dtype for tensor in weights(root / f"vit-{name}").values()}
        assert dtypes == {tensor.dtype for tensor in weights(one).values()}
