"""Gradient checkpointing: the same gradients and statistics, with the forward pass of each block done twice."""

import copy
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from helpers import FAKE, resolved, train
from lockstep.core.errors import InputError
from lockstep.core.model import BatchNorm, blocks
from lockstep.job.validate import check_job
from lockstep.models import Linear
from lockstep.stochastic import key_draws
from lockstep.training.network import recompute_blocks

# Families with batch norm, attention, depthwise convolutions and lists of features.
FAMILIES = {
    "resnet18": {"drop_path_rate": 0.3},
    "test_vit": {"drop_rate": 0.3, "img_size": 32},
    "test_convnext": {"drop_path_rate": 0.3},
    "test_efficientnet": {"drop_path_rate": 0.3},
    "densenet121": {"growth_rate": 4, "block_config": (2, 2), "drop_rate": 0.0},
}


def test_a_large_layer_alone_has_nothing_to_compute_again() -> None:
    pair = [nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 400), nn.Linear(400, 400), *pair)
    assert [*blocks(model)] == [*model[1:]], "but is gathered alone"
    recompute_blocks(model)
    assert [type(layer) in (nn.Linear, nn.Sequential) for layer in model] == [True, True, False, False]


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_and_statistics_are_the_same_to_the_bit(name: str, momentum: float | None) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **FAMILIES[name])
    for norm in (module for module in model.modules() if isinstance(module, BatchNorm)):
        norm.momentum = momentum
    images, keys = torch.randn(3, 3, 32, 32), torch.randint(2**60, (3, 2))
    draws = key_draws(model, images[:1], seed=0)
    again = copy.deepcopy(model)
    recompute_blocks(again)
    for network in (model, again.train()):
        for module in network.modules():
            for site in getattr(module, "_draw_sites", ()):
                site.keys.set(keys)
        network(images).square().sum().backward()
    assert not draws.unknown
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert all(map(torch.equal, model.buffers(), again.buffers()))
    assert model.state_dict().keys() == again.state_dict().keys()
    assert {norm.momentum for norm in again.modules() if isinstance(norm, BatchNorm)} <= {momentum}


def test_a_block_runs_twice_in_training_alone_with_its_own_weights() -> None:
    model = timm.create_model("test_vit", num_classes=5, img_size=32)
    recompute_blocks(model)
    runs: list[int] = []
    model.blocks[0].attn.register_forward_hook(lambda *_: runs.append(1))
    model(images := torch.randn(2, 3, 32, 32)).sum().backward()
    assert len(runs) == 2
    with torch.no_grad():
        model(images)
    model.eval()(images).sum().backward()
    assert len(runs) == 4
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.head.weight.zero_()
        other.head.bias.zero_()
    assert not other(torch.randn(2, 3, 32, 32)).any()


def test_what_a_block_counts_is_as_before_when_its_second_pass_fails() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.slow = nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=0.01)
            self.layer, self.passes = nn.Linear(4, 4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            if self.passes == 2:
                raise ZeroDivisionError
            return self.layer(self.slow(self.norm(x)))

    model = nn.Sequential(Counting(), Counting())
    recompute_blocks(model)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(3, 4)).sum().backward()
    for block in model:
        for norm, momentum in ((block.norm, 0.1), (block.slow, 0.01)):
            assert (norm.momentum, norm.num_batches_tracked) == (momentum, torch.tensor(1))


def test_a_block_gets_its_arguments_by_name_in_both_passes() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            return scale * self.two(self.one(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Scaled(), Scaled()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x, scale=3.0), scale=5.0)

    plain, images = Net(), torch.randn(2, 3)
    again = copy.deepcopy(plain)
    recompute_blocks(again)
    for model in (plain, again):
        model(images).square().sum().backward()
    assert torch.equal(plain(images), again(images))
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(plain.parameters(), again.parameters(), strict=True)
    )  # type: ignore[arg-type]


def test_two_blocks_of_several_layers_are_enough_and_one_is_not() -> None:
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)]
    recompute_blocks(model := nn.Sequential(*blocks))
    runs: list[int] = []
    for number, block in enumerate(model):
        block[0].register_forward_hook(lambda *_, number=number: runs.append(number))
    model(torch.ones(1, 4)).sum().backward()
    assert runs == [0, 1, 1, 0]
    with pytest.raises(InputError, match="no blocks of layers"):
        recompute_blocks(nn.Sequential(blocks[0], nn.Linear(4, 2)))


def test_models_without_blocks_are_refused(tmp_path: Path) -> None:
    for model in (Linear().build(10, (1, 8, 8)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))):
        with pytest.raises(InputError, match="no blocks of layers"):
            recompute_blocks(model)
    refused = train(*FAKE, "model=linear", "model.grad_checkpointing=true", cwd=tmp_path)
    assert refused.code == 2
    assert "model.grad_checkpointing is true, but" in refused.err


@pytest.mark.parametrize("override", ["model.compile=true", "train.cuda_graph=true", "strategy=pipeline"])
def test_what_cannot_compute_again_is_refused(override: str) -> None:
    job = resolved("dataset=fake", "model=resnet18", "model.grad_checkpointing=true", override)
    with pytest.raises(InputError, match=f"does not work with {override}"):
        check_job(job)
