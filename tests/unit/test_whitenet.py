"""The network of the speed recipe: its whitening layer, its frozen parameters and its blocks."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.core.errors import InputError
from lockstep.models import WhiteNet
from lockstep.models.nets import whitening_filters

pytestmark = pytest.mark.numerics


def photographs(count: int = 600, side: int = 12) -> torch.Tensor:
    """Smooth random images: neighbouring pixels and the three channels are correlated, as in photographs."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn(count, 1, 4, 4, generator=generator) + 0.2 * torch.randn(count, 3, 4, 4, generator=generator)
    fine = 0.3 * torch.randn(count, 3, side, side, generator=generator)
    return F.interpolate(coarse, (side, side), mode="bilinear") + fine


def test_whitened_patches_are_uncorrelated_and_of_variance_one() -> None:
    images = photographs()
    filters = whitening_filters(images)
    outputs = F.conv2d(images.double(), filters[:12]).transpose(0, 1).flatten(1)
    # VARIANCE_EPS is added to variances of 0.09 and more, so it changes the result by less than a hundredth.
    covariance = outputs @ outputs.T / outputs.shape[1]
    torch.testing.assert_close(covariance, torch.eye(12, dtype=torch.float64), atol=0.01, rtol=0)
    patches = F.unfold(images.double(), 2).transpose(0, 1).flatten(1)
    variances = torch.from_numpy(np.linalg.eigvalsh((patches @ patches.T / patches.shape[1]).numpy()))
    exact = torch.diag(variances / (variances + 5e-4))
    torch.testing.assert_close(covariance, exact, atol=1e-10, rtol=0)
    assert torch.equal(filters[12:], -filters[:12])


def test_directions_of_no_variance_are_scaled_by_a_finite_number() -> None:
    filters = whitening_filters(torch.zeros(3, 1, 4, 4))
    torch.testing.assert_close(filters.flatten(1).norm(dim=1), torch.full((8,), 5e-4**-0.5, dtype=torch.float64))


@pytest.mark.parametrize(("side", "sampled"), [(12, 5000), (64, 1250), (4096, 1)])
def test_the_network_starts_with_the_whitening_of_its_training_images(side: int, sampled: int) -> None:
    images = photographs()
    counts: list[int] = []
    larger = images[:, :, :1, :1].expand(-1, -1, side, side)  # only its size is used
    network = WhiteNet(widths=[8, 8, 8])
    model = network.build(10, (3, 12, 12))

    def first_images(number: int) -> torch.Tensor:
        counts.append(number)
        return larger if len(counts) == 1 else images

    network.initialise(model, first_images)
    assert torch.equal(model[0].weight, whitening_filters(images).float())
    assert counts == [1, sampled]


def test_filters_of_the_first_layer_and_factors_of_the_norms_are_frozen() -> None:
    model = WhiteNet(widths=[8, 8, 8]).build(10, (3, 32, 32))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    norms = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert len(norms) == 6
    assert frozen == {"0.weight", *norms}


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("side", [9, 32, 33])
def test_a_block_has_as_many_convolutions_as_the_depth_says(depth: int, side: int) -> None:
    model = WhiteNet(widths=[8, 16, 24], depth=depth).build(7, (1, side, side))
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 1 + 3 * depth
    assert model.eval()(torch.zeros(2, 1, side, side)).shape == (2, 7)


def test_from_three_convolutions_on_a_shortcut_leads_around_those_behind_the_first() -> None:
    model = WhiteNet(widths=[8, 8, 8], depth=3).build(10, (3, 32, 32)).double().eval()
    residual = model[2][-1]
    for module in residual.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.zeros_(module.weight)
    features = torch.randn(2, 8, 15, 15, dtype=torch.float64)
    torch.testing.assert_close(residual(features), F.gelu(features), rtol=1e-12, atol=1e-12)
    residual.layers = nn.Identity()
    torch.testing.assert_close(residual(features), F.gelu(2 * features), rtol=1e-12, atol=1e-12)


def test_it_starts_as_the_identity_with_small_logits_and_norms_that_follow_the_last_batches() -> None:
    model, features = WhiteNet(widths=[24, 24, 24]).build(10, (3, 32, 32)), 5 + torch.randn(2, 24, 6, 6)
    for module in model[1:].modules():
        if isinstance(module, nn.Conv2d):
            torch.testing.assert_close(module(features), features)
        if isinstance(module, nn.BatchNorm2d):
            module(features)
            torch.testing.assert_close(module.running_mean, 0.4 * features.mean((0, 2, 3)))
    pixels = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(9 * model.eval()(pixels), model[:-1](pixels))


@pytest.mark.parametrize("sides", [(8, 8), (32, 8), (8, 32)])
def test_images_that_cannot_be_halved_three_times_are_refused(sides: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=rf"the data set gives {sides[0]}x{sides[1]}; use dataset\.input_size=32"):
        WhiteNet().build(10, (1, *sides))


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (40, 24)])
def test_a_convolution_begins_as_the_identity_on_as_many_channels_as_there_are(inputs: int, outputs: int) -> None:
    model = WhiteNet(widths=[inputs, outputs, 8]).build(3, (3, 16, 16))
    convolution = next(
        module
        for module in model.modules()
        if isinstance(module, nn.Conv2d) and module.in_channels == inputs and module.out_channels == outputs
    )
    features = torch.randn(2, inputs, 6, 6)
    passed, both = convolution(features), min(inputs, outputs)
    torch.testing.assert_close(passed[:, :both], features[:, :both])
    assert all(channel.std() > 0.01 for channel in passed[:, both:].unbind(1)), "others begin with random weights"
