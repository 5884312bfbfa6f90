"""A head whose rows are taken by name is the same on every rank, and under every strategy that cuts or copies it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import Case, gang, losses, train_here, weights

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

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
