"""Families of timm go the whole way: train, resume to the bit, export, predict. `timm_coverage.py` has them all."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from helpers import ROOT

pytestmark = pytest.mark.slow


# Its buffers are infinite, until published weights replace them. An average of the weights must keep them.
GEMMA = ("+model.options={depth:1,embed_dim:32,num_heads:2,head_dim:16,intermediate_size:64}", "train.ema=0.9")


@pytest.mark.parametrize(
    ("model", "size", "words"),
    [
        *((model, 32, ()) for model in ("test_vit", "test_convnext")),
        ("rexnet_100", 32, ()),  # after two steps it amplifies the roundings of float32
        ("gemma4_vit_167m", 96, GEMMA),
    ],
)
def test_the_smallest_of_a_family_goes_the_whole_way(
    model: str, size: int, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    stages = importlib.import_module("timm_coverage").stages
    assert [(name, stage()) for name, stage in stages(model, size, tmp_path, *words)] == [
        (name, None) for name in ("train", "resume", "export", "predict")
    ]
