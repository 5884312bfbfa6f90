"""Fine-tuning: a new head on trained weights, frozen layers and their batch norms, learning rates by layer."""

from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from helpers import FAKE, losses, train_here, weights
from lockstep.core.errors import InputError
from lockstep.core.model import head_parameters
from lockstep.optim import SGD, AdamW
from lockstep.training.network import MOST_LAYERS, Freezing, freeze_for_good, frozen_names

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
    model.layer1[0].conv2.requires_grad_(False)  # by the model itself
    freeze_for_good(model, frozen_names(model, patterns))
    assert not model.layer1[0].conv2.weight.requires_grad
    training = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {name.partition(".")[0] for name in training} == trained
    for optimizer in (SGD(weight_decay=0.1), AdamW(layer_decay=0.5)):
        groups = optimizer.build(model).param_groups
        assert all(parameter.requires_grad for group in groups for parameter in group["params"])


def test_a_layer_whose_name_begins_like_that_of_the_head_is_of_the_backbone() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("fc_norm", "fc1", "fc")})
    backbone = {"fc_norm.weight", "fc_norm.bias", "fc1.weight", "fc1.bias"}
    assert frozen_names(model, ["backbone"]) == backbone
    assert head_parameters(model) == ("fc.weight", "fc.bias")


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


def test_layers_that_are_frozen_for_good_are_counted_and_switched_by_no_step() -> None:
    model = nn.Sequential(nn.Linear(100, 20), nn.BatchNorm1d(20), nn.Linear(20, 2))
    names = frozen_names(model, ["0", "1"])
    freeze_for_good(model, names)
    freezing = Freezing.of(model, names, None)
    assert (freezing.switched, freezing.norms, freezing.until) == ((), (model[1],), None)
    assert str(freezing) == "2,060 of them frozen"
    assert str(replace(freezing, until=1234)) == "2,060 of them frozen until step 1,234"
    assert str(Freezing()) == str(Freezing(until=3)) == ""
    for step in (1, 1000):
        assert freezing.frozen(step)
        freezing.freeze_for(step)
        assert (model[1].training, model.training) == (False, True)
        model.train()
    assert [parameter.requires_grad for parameter in model.parameters()] == [False] * 4 + [True] * 2


@pytest.mark.parametrize(("until", "frozen"), [(None, [1, 2, 3]), (0, []), (1, [1]), (2, [1, 2])])
def test_a_share_of_a_short_run_freezes_no_step_and_no_last_step_is_the_end(
    until: int | None, frozen: list[int]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    freezing = Freezing.of(model, frozen_names(model, ["0"]), until=until)
    for step in (1, 2, 3):
        freezing.freeze_for(step)
        assert freezing.frozen(step) == (not model[0].weight.requires_grad) == (step in frozen)


def test_a_layer_that_is_thawed_counts_as_frozen_though_it_never_was_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    freezing = Freezing.of(model, frozen_names(model, ["0", "1"]), until=2)
    assert (len(freezing.switched), freezing.numbers) == (2, 12)
    freezing.freeze_for(3)
    assert [layer.weight.requires_grad for layer in model] == [False, True, True]


@pytest.mark.parametrize("model", [nn.Flatten(), nn.Linear(2, 2).requires_grad_(False)], ids=["none", "frozen"])
def test_a_model_with_nothing_to_train_is_refused(model: nn.Module) -> None:
    with pytest.raises(InputError, match=f"^the model {type(model).__name__} has no parameter that requires a grad"):
        frozen_names(model, [])


@pytest.mark.parametrize("layers", [1, MOST_LAYERS - 1, MOST_LAYERS, MOST_LAYERS + 1])
def test_a_pattern_that_fits_nothing_is_told_what_there_is(layers: int) -> None:
    model = nn.Sequential(*(nn.Conv2d(1, 1, 1) for _ in range(layers - 1)), nn.Sequential(nn.Linear(2, 2)))
    model.append(nn.ReLU())  # has nothing to freeze
    shown = [*(f"{at} (Conv2d)" for at in range(layers - 1)), f"{layers - 1} (Sequential)"][:MOST_LAYERS]
    more = ", ..." * (layers > MOST_LAYERS)
    with pytest.raises(InputError) as refused:
        frozen_names(model, ["nothing*"])
    assert str(refused.value) == (
        "train.freeze: 'nothing*' matches no layer of the model, expected backbone (all but the head, "
        f"{layers - 1}.0), or layers by name, with * for any text: {', '.join(shown)}{more}."
    )


def test_a_pattern_is_for_names_and_a_model_without_a_head_has_none() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    with pytest.raises(InputError, match=r"\(all but the head, which it does not have\).*Did you mean 'backbone'"):
        frozen_names(model, ["backbon"])
    named = nn.ModuleDict({"a": nn.Linear(1, 1), "ab": nn.Linear(1, 1), "A": nn.Linear(1, 1)})
    assert frozen_names(named, ["a"]) == {"a.weight", "a.bias"}
    assert frozen_names(named, ["?"]) == {"a.weight", "a.bias", "A.weight", "A.bias"}
    assert frozen_names(named, ["*.bias", "ab"]) == {"a.bias", "ab.bias", "A.bias", "ab.weight"}


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
