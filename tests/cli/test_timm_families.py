"""Families of timm go the whole way: train, resume to the bit, export, predict. `timm_coverage.py` has them all."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from helpers import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("model", ["test_vit", "test_convnext", "test_nfnet", "test_byobnet"])
def test_the_smallest_of_a_family_goes_the_whole_way(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    stages = importlib.import_module("timm_coverage").stages
    assert [(name, stage()) for name, stage in stages(model, 32, tmp_path)] == [
        (name, None) for name in ("train", "resume", "export", "predict")
    ]
