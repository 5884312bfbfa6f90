"""The names of timm's models, read without importing it."""

from __future__ import annotations

import sys

import timm

from helpers import command
from lockstep.config.options import is_timm_model, timm_models


def test_the_catalog_is_the_list_that_timm_gives() -> None:
    assert set(timm_models()) == set(timm.list_models())
    assert list(timm_models()) == sorted(timm_models())


def test_a_name_counts_alone_and_with_a_tag() -> None:
    assert is_timm_model("resnet50d")
    assert is_timm_model("resnet50d.ra2_in1k")
    assert not is_timm_model("resnet50e")
    assert not is_timm_model("")


def test_reading_the_catalog_imports_neither_timm_nor_torch() -> None:
    loaded = "bool({'timm', 'torch'} & sys.modules.keys())"
    code = f"import sys, lockstep.config.options as c; c.timm_models(); sys.exit({loaded})"
    assert command(sys.executable, "-c", code).code == 0
