"""`model=NAME` for every name of timm, without a file and without importing timm."""

from __future__ import annotations

import sys

import pytest
import timm
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError

from helpers import ROOT, command, composed
from hydra_plugins.lockstep.named_options import NamedOptions
from lockstep.config import components
from lockstep.config.options import model_of, timm_models
from lockstep.models import Timm


@pytest.fixture
def source() -> NamedOptions:
    return NamedOptions(provider="lockstep", path="lockstep://")


@pytest.mark.parametrize("words", ["model=resnet50d", "model=resnet50d.ra2_in1k", "model=timm model.name=resnet50d"])
def test_a_name_of_timm_composes_to_every_field_of_its_class(words: str) -> None:
    node = composed(*words.split(), "model.drop_rate=0.1")["model"]
    assert node == components.node(Timm(name=words.rpartition("=")[2], drop_rate=0.1))


def test_a_file_of_the_project_wins_over_a_name_of_timm() -> None:
    assert composed("model=resnet34")["model"]["_target_"] == "lockstep.models.ResNet34"


def test_files_and_names_are_listed_together_for_completion() -> None:
    with initialize_config_dir(str(ROOT / "conf")):
        options = GlobalHydra.instance().config_loader().get_group_options("model")
    assert {"digitnet", "resnet34", "resnet50d", "vit_tiny_patch16_224"} <= set(options)
    assert len(options) == len(set(options))


def test_the_source_lists_names_for_the_model_group_only(source: NamedOptions) -> None:
    assert "resnet50d" in source.list("model", ObjectType.CONFIG)
    assert source.list("model", ObjectType.GROUP) == []
    assert source.list("dataset", None) == source.list("nosuch", None) == []
    assert source.is_group("model")
    assert not source.is_group("nosuch")


def test_the_source_answers_for_models_only(source: NamedOptions) -> None:
    assert source.is_config("model/resnet50d")
    assert source.is_config("model/resnet50d.yaml")
    assert not source.is_config("dataset/resnet50d")
    assert not source.is_config("model/no_such")
    with pytest.raises(ConfigLoadError, match="model/no_such"):
        source.load_config("model/no_such")


def test_the_catalog_is_the_list_that_timm_gives() -> None:
    assert set(timm_models()) == set(timm.list_models())
    assert list(timm_models()) == sorted(timm_models())


def test_a_name_counts_alone_and_with_a_tag() -> None:
    assert model_of("resnet50d") == ("timm", "resnet50d")
    assert model_of("resnet50d.ra2_in1k") == ("timm", "resnet50d.ra2_in1k")
    assert model_of("resnet50e") is None
    assert model_of("") is None


def test_reading_the_catalog_imports_neither_timm_nor_torch() -> None:
    loaded = "bool({'timm', 'torch'} & sys.modules.keys())"
    code = f"import sys, lockstep.config.options as c; c.timm_models(); sys.exit({loaded})"
    assert command(sys.executable, "-c", code).code == 0
