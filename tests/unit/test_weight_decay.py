"""What a model says must not decay does not: position embeddings, class tokens, tables of relative positions."""

from __future__ import annotations

import importlib
import itertools
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from helpers import created, run_until, train_here, weights
from lockstep.core.run import read_overrides
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.optim.muon import Muon
from lockstep.optim.optimizers import SGD, AdamW, OptimizerOption, Timm

QUICK = ("test_vit", "test_vit_relpos", "levit_128s", "efficientvit_m0", "resnet18")
SMALL = ("test", "nano", "atto", "tiny", "mini", "small", "_s", "_t", "0")
VIT = (
    *("model=test_vit", "dataset=fake", "dataset.size=160", "dataset.examples=8", "dataset.classes=3", "batch=4"),
    *("optimizer.weight_decay=0.5", "optimizer.lr=0.1", "schedule=constant", "device=cpu", "augment=none"),
)
OLD = "optimizer.decay_embeddings=true"


def families() -> list[str]:
    """The smallest model, by its name, of each module of timm with a network that has `no_weight_decay`."""
    names = []
    for module in sorted({timm.model_entrypoint(name).__module__ for name in timm.list_models()}):
        classes = [value for value in vars(importlib.import_module(module)).values() if isinstance(value, type)]
        if any(cls.__module__ == module and hasattr(cls, "no_weight_decay") for cls in classes):
            models = timm.list_models(module=module.rpartition(".")[2])
            names.append(min(models, key=lambda name: (not any(word in name for word in SMALL), len(name))))
    return names


def of_timm(model: nn.Module, option: OptimizerOption, spared: Any) -> list[dict[str, Any]]:
    """timm's groups, in which the patterns `spared` do not decay."""
    options = {"no_weight_decay_list": spared, "weight_decay_exclude_1d": not option.decay_all}
    if option.layer_decay is None:
        groups: list[dict[str, Any]] = param_groups_weight_decay(model, option.weight_decay, **options)
    else:
        groups = param_groups_layer_decay(model, option.weight_decay, layer_decay=option.layer_decay, **options)
    return groups


def decays(groups: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    """The weight decay of each parameter, and the scale of its rate."""
    scaled = [(group, group.get("scale", group.get("lr_scale", 1))) for group in groups]
    return {id(weight): (group["weight_decay"], scale) for group, scale in scaled for weight in group["params"]}


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in families())])
def test_the_parameters_of_each_family_decay_as_in_timm(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=3)
    spared = getattr(model, "no_weight_decay", set)()
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, spared),
        ({"decay_embeddings": True}, ()),
        ({"decay_all": True}, ()),
        ({"decay_all": True, "decay_embeddings": False}, spared),
    ]
    for layer_decay, decay, (options, patterns) in itertools.product((None, 0.5), (0.1, 0.0), cases):
        option = AdamW(weight_decay=decay, layer_decay=layer_decay, **options)
        assert decays(option.groups(model)) == decays(of_timm(model, option, patterns)), option


@pytest.mark.parametrize("layer_decay", [None, 0.5])
@pytest.mark.parametrize("make", [SGD, AdamW, Muon, Timm, partial(Timm, opt="muon")], ids=str)
def test_a_step_without_gradients_moves_only_what_decays(make: Any, layer_decay: float | None) -> None:
    for embeddings in (None, True):
        model = timm.create_model("test_vit", num_classes=3)
        nn.init.ones_(model.cls_token)  # zero cannot decay
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        matrices = {name for name, weight in before.items() if weight.dim() > 1}
        option = make(lr=0.1, weight_decay=0.5, layer_decay=layer_decay, head_lr=0.2, decay_embeddings=embeddings)
        optimizer = option.build(model)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
        assert moved == matrices - (set() if embeddings else {"pos_embed", "cls_token"})


class Own(nn.Module):
    """A network that names a pattern, a parameter that it has not, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(torch.ones(2, 2)) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(1))
        self.layer = nn.Linear(2, 2)

    @torch.jit.ignore
    def no_weight_decay(self) -> list[str]:
        return ["tables.*", "gone", "scale"]


def test_a_network_of_a_user_is_asked_too() -> None:
    decayed, spared = AdamW().groups(model := Own())
    assert [*map(id, decayed["params"])] == [id(model.layer.weight)]
    assert (len(spared["params"]), spared["weight_decay"]) == (4, 0)


def as_of_before(run: RunDir) -> Path:
    """The folder of a run as it was written when embeddings decayed and no key said so."""
    for file in (run.config, run.composed):
        values = yaml.safe_load(file.read_text())
        del values["optimizer"]["decay_embeddings"]
        file.write_text(yaml.safe_dump(values))
    run.overrides.write_text(yaml.safe_dump([word for word in read_overrides(run.overrides) if word != OLD]))
    return run.path


def test_a_resumed_run_decays_what_it_decayed_before(tmp_path: Path) -> None:
    whole = train_here(tmp_path / "whole", *VIT, OLD, "steps=3")
    old = as_of_before(train_here(tmp_path / "old", *VIT, OLD, "steps=1"))
    copy = Path(shutil.copytree(old, tmp_path / "copy"))
    for steps in (2, 3):  # also when the folder has been written again
        run, job = created(f"resume={old}", f"steps={steps}")
        assert getattr(job.optimizer, "decay_embeddings", None) is True
        run_until(World.solo(), run, None)
    assert all(torch.equal(*pair) for pair in zip(weights(run).values(), weights(whole).values(), strict=True))
    new = train_here(tmp_path / "new", *VIT, "steps=1").path
    for words, decay in (
        ([f"resume={copy}/checkpoints/step-00000001", *VIT, f"output_root={tmp_path}"], True),
        ([f"resume={copy}", "optimizer.decay_embeddings=false"], False),
        ([f"resume={new}"], None),
    ):
        _, job = created(*words, "steps=2")
        assert getattr(job.optimizer, "decay_embeddings", "") is decay, words
