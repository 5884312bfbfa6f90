"""The trainer is the textbook's loop: the same batches through a plain loop give the same losses.

In float64: twenty steps of float32 make a thousandth of the last bit of the first, on one CPU more than on another.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helpers import NARROW, built, losses, train_here, weights
from lockstep.core import rng
from lockstep.stochastic import KeyedModel, key_draws

pytestmark = pytest.mark.numerics

JOB = (
    "batch=100",
    "steps=20",
    NARROW,
    "precision=fp64",
    "augment=none",
    "schedule=constant",
    "schedule.warmup=0",
    "optimizer.lr=0.001",
    "optimizer.decay_all=true",
)


class Batch(NamedTuple):
    """What the masks of dropout depend on."""

    step: int
    epoch: int
    number: int
    labels: Tensor
    indices: Tensor


def test_a_run_is_the_plain_loop_over_the_same_batches(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", *JOB)

    job = built(*JOB)
    split = job.dataset.train()
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    model = job.model.build(10, (1, 8, 8)).double()
    draws = key_draws(model, torch.zeros(1, 1, 8, 8, dtype=torch.float64), job.seed)
    network = KeyedModel(model, draws)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    expected = []
    for step in range(1, 21):
        epoch, position = divmod(step - 1, 15)
        chosen = rng.permutation(job.seed, epoch, len(split))[position * 100 : (position + 1) * 100]
        images = (split.images[chosen].double() / 255 - job.dataset.mean[0]) / job.dataset.std[0]
        keys = draws.of(Batch(step, epoch, 0, split.labels[chosen], chosen))
        loss = F.cross_entropy(network(images, keys), split.labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    assert losses(run) == pytest.approx(expected, rel=1e-12)
    actual = weights(run)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-9, atol=1e-9)
