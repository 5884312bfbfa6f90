"""Fine-tuning: a new head on trained weights, frozen layers and their batch norms, learning rates by layer."""

from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from helpers import FAKE, losses, train_here, weights
from lockstep.core.errors import InputError
from lockstep.core.model import head_parameters
from lockstep.optim import SGD, AdamW
from lockstep.training.network import Freezing, freeze_for_good, frozen_names

RUN = (*FAKE, "model=test_resnet", "dataset.examples=60", "dataset.size=16", "batch=15", "precision=fp64")
RUN = (*RUN, "train.eval_every=100%", "checkpoint.every=100%")


@pytest.mark.parametrize(
    ("patterns", "trained"),
    [
        (["backbone"], {"fc"}),
        (["conv1", "bn1", "layer*"], {"fc"}),
        (["layer?.0", "fc"], {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4"}),
        (["*.conv1"], {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"}),
    ],
)
def test_a_pattern_freezes_layers_with_all_in_them(patterns: list[str], trained: set[str]) -> None:
    model = timm.create_model("resnet18")
    freeze_for_good(model, frozen_names(model, patterns))
    training = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {name.partition(".")[0] for name in training} == trained
    for optimizer in (SGD(weight_decay=0.1), AdamW(layer_decay=0.5)):
        groups = optimizer.build(model).param_groups
        assert all(parameter.requires_grad for group in groups for parameter in group["params"])


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["layr1"], r"'layr1' matches no layer of the model, expected backbone.*conv1 \(Conv2d\).*you mean 'layer1'"),
        (["*"], r"train\.freeze is \[\*\], which leaves nothing to train"),
        (["backbone", "fc"], "which leaves nothing to train"),
    ],
)
def test_an_invalid_pattern_is_refused(patterns: list[str], says: str) -> None:
    with pytest.raises(InputError, match=says):
        frozen_names(timm.create_model("resnet18"), patterns)


def test_a_layer_named_backbone_is_that_layer_and_what_never_trains_is_nothing_to_train() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("backbone", "neck", "head")})
    assert frozen_names(model, ["backbone"]) == {"backbone.weight", "backbone.bias"}
    model["neck"].requires_grad_(False)
    with pytest.raises(InputError, match="leaves nothing to train"):
        frozen_names(model, ["backbone", "head"])


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("pattern", "frozen"), [("stem", []), ("body", [0]), ("body.0", [0]), ("tail", [1])])
def test_the_batch_norms_that_a_pattern_fits_are_frozen_with_weights_or_without(
    affine: bool, pattern: str, frozen: list[int]
) -> None:
    norms = [nn.BatchNorm2d(2, affine=affine) for _ in range(2)]
    layers = {"stem": nn.Conv2d(2, 2, 1), "body": nn.Sequential(norms[0]), "tail": norms[1], "head": nn.Linear(2, 2)}
    model = nn.ModuleDict(layers)
    assert Freezing.of(model, frozen_names(model, [pattern]), None).norms == tuple(norms[at] for at in frozen)


def test_a_frozen_batch_norm_keeps_its_statistics_until_it_is_thawed() -> None:
    model = timm.create_model("resnet18")
    freezing = Freezing.of(model, frozen_names(model, ["bn1", "layer1.0.bn1", "layer2.0.bn1.weight"]), until=2)
    model.train()
    freezing.freeze_for(2)
    assert [model.bn1.training, model.layer1[0].bn1.training, model.layer2[0].bn1.training] == [False, False, True]
    assert not model.bn1.weight.requires_grad
    assert str(freezing) == "384 of them frozen until step 2", "single weights: 64 + 64, 64 + 64 and 128"
    freezing.freeze_for(3)
    assert model.bn1.training
    assert model.bn1.weight.requires_grad
    assert model.layer2[0].bn1.weight.requires_grad


def test_the_head_has_its_own_rate_also_under_layer_decay() -> None:
    model = timm.create_model("resnet18", num_classes=3)
    for optimizer in (SGD(lr=0.01, head_lr=0.1), AdamW(lr=0.01, head_lr=0.1, layer_decay=0.5, weight_decay=0.1)):
        groups = optimizer.build(model).param_groups
        scales = {id(parameter): group["scale"] for group in groups for parameter in group["params"]}
        assert len(scales) == len(list(model.parameters()))
        assert scales[id(model.fc.weight)] == scales[id(model.fc.bias)] == pytest.approx(10)
        assert max(scales[id(parameter)] for name, parameter in model.named_parameters() if "fc" not in name) <= 1


def test_a_rate_for_a_head_that_is_frozen_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    freeze_for_good(model, frozenset(head_parameters(model)))
    with pytest.raises(InputError, match=r"head_lr is 0\.1, but no layer that gives the logits is trained"):
        SGD(lr=0.01, head_lr=0.1).build(model)


def test_a_resume_thaws_when_the_run_would_have(tmp_path: Path) -> None:
    frozen = (*RUN, "train.freeze=[backbone]", "train.freeze_until=2", "steps=4", "optimizer=adamw", "train.ema=0.5")
    whole = train_here(tmp_path / "whole", *frozen)
    for stop in (1, 3):
        path = tmp_path / f"stopped{stop}"
        train_here(path, *frozen, stop_at=stop)
        resumed = train_here(path, *frozen)
        assert losses(resumed) == losses(whole)
        assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(resumed).items())
