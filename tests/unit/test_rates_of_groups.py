"""The rate and the decay of each parameter with all options of an optimizer at a time, by a rule written anew."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import timm
import torch
from torch import nn

from lockstep.core.errors import InputError
from lockstep.optim.muon import Muon
from lockstep.optim.optimizers import SGD, AdamW, OptimizerOption, Timm

LR, HEAD, BIAS, DECAY = 0.5, 0.2, 0.07, 0.3
EMBEDDINGS = ("cls_token", "pos_embed")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.device("meta"):
        return timm.create_model("test_vit", num_classes=3)


def layer_of(name: str, blocks: int) -> int:
    """The number of a parameter's layer: 0 before the blocks, then each block (the last has the norm), the head."""
    if name.startswith("blocks."):
        return 1 + int(name.split(".")[1])
    return {"norm": blocks, "fc_norm": blocks, "head": blocks + 1}.get(name.partition(".")[0], 0)


def expected(name: str, parameter: nn.Parameter, option: OptimizerOption, blocks: int) -> tuple[float, float]:
    """The share of the base rate, and the decay of one step at the base rate over it."""
    scale = 1.0 if option.layer_decay is None else option.layer_decay ** (blocks + 1 - layer_of(name, blocks))
    decays = option.decay_all or parameter.dim() > 1
    spares = not (option.decay_all if option.decay_embeddings is None else option.decay_embeddings)
    decay = DECAY if decays and not (spares and name in EMBEDDINGS) else 0.0
    is_head = name.startswith("head.")
    if isinstance(option, Muon):
        layer_scale = scale
        if name == "head.weight":
            scale *= (LR if option.head_lr is None else option.head_lr) / LR
        elif parameter.dim() == 1 or name in EMBEDDINGS:
            scale *= BIAS / LR
        return scale, decay * layer_scale  # all decay at the rate of their layer
    if is_head and option.head_lr is not None:
        scale = option.head_lr / LR
    return scale, decay * scale


@pytest.mark.parametrize("make", [SGD, AdamW, Timm, Muon])
@pytest.mark.parametrize("layer_decay", [None, 0.5, 1.0])
@pytest.mark.parametrize("head_lr", [None, HEAD])
def test_each_parameter_has_the_rate_and_the_decay_of_all_options_together(
    model: nn.Module, make: Any, layer_decay: float | None, head_lr: float | None
) -> None:
    blocks = len(model.blocks)
    for decay_all, embeddings in itertools.product((False, True), (None, False, True)):
        options = {"lr": LR, "weight_decay": DECAY, "layer_decay": layer_decay, "head_lr": head_lr}
        options |= {"decay_all": decay_all, "decay_embeddings": embeddings}
        option = make(**options, **({"bias_lr": BIAS} if make is Muon else {}))
        groups = option.groups(model)
        actual = {id(weight): group for group in groups for weight in group["params"]}
        assert len(actual) == sum(len(group["params"]) for group in groups), "each in one group"
        for name, parameter in model.named_parameters():
            group = actual[id(parameter)]
            ours = group["scale"], group["weight_decay"] * group["scale"]
            assert ours == pytest.approx(expected(name, parameter, option, blocks), rel=1e-12), (name, option)


def test_a_layer_decay_of_one_changes_nothing_and_needs_no_layers_that_are_known() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    assert [group["scale"] for group in AdamW(layer_decay=1.0).groups(network)] == [1.0, 1.0]
    for decay in (0.999, 0.5):
        with pytest.raises(InputError, match="the layers of this model are not known"):
            AdamW(layer_decay=decay).groups(network)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_head_of_which_a_part_is_frozen_has_its_rate_and_a_frozen_one_is_refused(frozen: str) -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    network[1].get_parameter(frozen).requires_grad_(False)
    groups = SGD(lr=LR, head_lr=HEAD).groups(network)
    scales = {id(weight): group["scale"] for group in groups for weight in group["params"]}
    trained = {"weight": network[1].bias, "bias": network[1].weight}[frozen]
    assert scales == {id(trained): HEAD / LR, **{id(weight): 1.0 for weight in network[0].parameters()}}
    network[1].requires_grad_(False)
    with pytest.raises(InputError, match="no layer that gives the logits is trained; remove it"):
        SGD(lr=LR, head_lr=HEAD).groups(network)
