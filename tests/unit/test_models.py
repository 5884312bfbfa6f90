"""The networks: our own by their published sizes, timm's by name."""

import inspect
import itertools
import re
from contextlib import nullcontext
from io import BytesIO
from types import SimpleNamespace
from typing import Any
from urllib.request import Request

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.config.options import TIMM, models_of
from lockstep.core import fields
from lockstep.core.errors import InputError
from lockstep.models import BasicNet, DigitNet, Linear, ResNet34, Timm, WhiteNet, WideResNet
from lockstep.models.nets import MaxPoolTo, check_model_size, sketch, without_weights
from lockstep.models.wide_resnet import Block
from lockstep.models.zoo import built, network_options, unreachable
from lockstep.training.resolved_job import named


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def logits(model: nn.Module, *shape: int) -> torch.Tensor:
    return model.eval()(torch.zeros(2, *shape))


def test_basicnet_is_the_network_of_the_tutorials_for_large_enough_images() -> None:
    model = BasicNet().build(10, (1, 28, 28))
    linear = next(layer for layer in model.modules() if isinstance(layer, nn.Linear))
    assert parameters(model) == 1_199_882
    assert linear.in_features == 9216
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [0.25, 0.5]
    assert logits(model, 1, 28, 28).shape == (2, 10)
    assert logits(BasicNet().build(10, (1, 6, 6)), 1, 6, 6).shape == (2, 10)
    with pytest.raises(InputError, match=r"the data set gives 5x5; use dataset\.input_size=28"):
        BasicNet().build(10, (1, 5, 5))


def test_digitnet_takes_images_down_to_4x4_and_is_as_wide_as_asked_for() -> None:
    for side in (4, 28):
        assert logits(DigitNet().build(10, (1, side, side)), 1, side, side).shape == (2, 10)
    model = DigitNet(width=16).build(10, (1, 8, 8))
    assert [layer.out_channels for layer in model.modules() if isinstance(layer, nn.Conv2d)] == [16, 32, 64]


@pytest.mark.parametrize(("cells", "shape"), [(1, (4, 6)), (2, (4, 6)), (2, (7, 5)), (2, (2, 3)), (2, (14, 14))])
def test_a_map_is_pooled_as_by_an_adaptive_pool_to_the_bit(cells: int, shape: tuple[int, int]) -> None:
    # With few levels a window has its maximum in several places: the gradient must go to the same place in both.
    features = torch.randint(5, (3, 4, *shape), generator=torch.Generator().manual_seed(0)).float()
    weights = torch.rand(3, 4, cells, cells, generator=torch.Generator().manual_seed(1))
    results = []
    for pool in (nn.AdaptiveMaxPool2d(cells), MaxPoolTo(cells)):
        inputs = features.clone().requires_grad_()
        pooled = pool(inputs)
        (pooled * weights).sum().backward()
        results.append((pooled, inputs.grad))
    (expected, expected_gradient), (pooled, gradient) = results
    assert torch.equal(pooled, expected)
    assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DigitNet(width=12), "model.width is 12, expected a multiple of 8"),
        (lambda: DigitNet().build(10, (1, 1, 1)), "the data set gives 1x1; use dataset.input_size=8"),
    ],
)
def test_digitnet_refuses_what_it_cannot_be(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


@pytest.mark.parametrize("option", [DigitNet, WideResNet])
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_network_drops_as_much_as_asked_for(option: Any, rate: float) -> None:
    layers = sketch(option(dropout=rate), 10, (3, 32, 32)).modules()
    assert {layer.p for layer in layers if isinstance(layer, nn.Dropout)} == {rate}


def test_resnet34_enters_with_a_large_or_a_small_stem() -> None:
    large = ResNet34().build(10, (3, 64, 64))
    small = ResNet34(stem="cifar").build(10, (3, 32, 32))
    assert large.conv1.weight.shape == (64, 3, 7, 7)
    assert isinstance(large.maxpool, nn.MaxPool2d)
    assert small.conv1.weight.shape == (64, 3, 3, 3)
    assert isinstance(small.maxpool, nn.Identity)
    assert small.forward_features(torch.zeros(1, 3, 32, 32)).shape == (1, 512, 4, 4)
    assert small.conv1.weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.1), "He et al. 2015"
    assert parameters(large) == 21_289_802
    assert logits(small, 3, 32, 32).shape == (2, 10)
    for stem, channels in itertools.product(("imagenet", "cifar"), (1, 5)):
        assert sketch(ResNet34(stem=stem), 10, (channels, 32, 32)).conv1.in_channels == channels


def test_timm_builds_for_the_data_set_with_its_options() -> None:
    model = Timm(name="resnet18").build(7, (1, 32, 32))
    assert model.conv1.in_channels == 1
    assert logits(model, 1, 32, 32).shape == (2, 7)
    model = Timm(name="vit_tiny_patch16_224").build(10, (3, 32, 48))
    assert model.patch_embed.img_size == (32, 48)
    assert logits(model, 3, 32, 48).shape == (2, 10)
    options = {"img_size": 64, "patch_size": 8}
    model = Timm(name="vit_tiny_patch16_224", drop_path_rate=0.1, options=options).build(10, (3, 64, 64))
    assert model.patch_embed.grid_size == (8, 8)
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("resnet5d", r"model.name is 'resnet5d', which timm does not have\. Did you mean '"),
        ("resnet18.no_such", "timm has no such weights of resnet18. It has .*resnet18.a1_in1k"),
        ("", "which timm does not have"),
    ],
)
def test_a_name_or_an_option_that_builds_nothing_is_refused(name: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Timm(name=name).check()
    with pytest.raises(InputError, match=r"model=vit_tiny_patch16_224 cannot be built for images of 1x8x8 \("):
        Timm(name="vit_tiny_patch16_224", options={"depth": "many"}).build(10, (1, 8, 8))


FACTORIES = (timm.create_model, timm.models.build_model_with_cfg)
LOADING = {name for factory in FACTORIES for name in inspect.signature(factory).parameters}


@pytest.mark.parametrize("option", sorted(LOADING | {"features_only", "pruned", "no_such", "device", "url"}))
def test_an_option_that_does_not_shape_the_network_is_refused(option: str) -> None:
    for name in ("resnet18", "resnet18.a1_in1k"):
        with pytest.raises(InputError, match=f"model.options.{option} does not shape the network of resnet18"):
            Timm(name=name, options={option: "/tmp/x"}).check()
        with pytest.raises(InputError, match=f"model.options.{option} does not shape the network of resnet18"):
            Timm(name=name, options={option: "/tmp/x", "zero_init_last": True}).check()


@pytest.mark.parametrize("name", ["resnet18", "resnet18.a1_in1k"])
def test_a_model_of_timm_has_its_whole_name_in_messages(name: str) -> None:
    assert named(Timm(name=name)) == name
    assert named(Timm(name=name, drop_rate=0.5)).startswith(f"{name}(drop_rate=0.5")
    with pytest.raises(InputError, match=f"^model={re.escape(name)} cannot be built for images of 3x8x8"):
        Timm(name=name, options={"block_args": 3}).build(2, (3, 8, 8))


def test_no_network_of_timm_has_an_option_that_loads_something() -> None:
    one_of_each = {timm.model_entrypoint(name).__module__: name for name in models_of(TIMM)}
    for name in one_of_each.values():
        options = network_options(name)
        assert len(options) > 3, name
        assert not options & LOADING
        assert not [option for option in options if re.search("_path$(?<!drop_path)|file|url|hub|cache|dir$", option)]


@pytest.mark.parametrize(
    "name", ["hf-hub:timm/resnet18", "local-dir:/tmp/x", "/tmp/x", "hf_hub:resnet18", "./resnet18"]
)
def test_a_model_from_elsewhere_is_refused_where_it_would_be_built(name: str) -> None:
    with pytest.raises(InputError, match="which timm does not have"):
        Timm(name=name).build(10, (3, 32, 32))


MOST, SIDE = 16_384, (3, 224, 224)
HUGE_MODELS = [
    ("vit_tiny_patch16_224", {"embed_dim": MOST, "num_heads": 4, "mlp_ratio": MOST}, SIDE),
    ("vit_tiny_patch16_224", {"img_size": MOST, "patch_size": 1, "embed_dim": MOST, "num_heads": MOST}, SIDE),
    ("swinv2_tiny_window8_256", {"window_size": MOST, "img_size": MOST}, SIDE),
    ("convnext_atto", {"dims": [MOST] * 4}, (1024, MOST, MOST)),
]


@pytest.mark.parametrize(("name", "options", "shape"), HUGE_MODELS)
def test_a_model_of_any_width_and_image_is_refused_before_it_is_built(
    name: str, options: dict[str, Any], shape: tuple[int, int, int]
) -> None:
    with pytest.raises(InputError, match=r"parameters and the buffers need .* GB"):
        check_model_size(sketch(Timm(name=name, options=options), 1000, shape))


def test_a_model_that_just_fits_into_memory_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    room = 3 * 8 * 4 + 2 * 4 * 4 + 8  # bytes: three times a weight and a bias of four channels; buffers once
    for size in (room, room - 1):
        monkeypatch.setattr("lockstep.runtime.host.available_memory", lambda size=size: size)
        with nullcontext() if size == room else pytest.raises(InputError, match="3 x 8 parameters and the buffers"):
            check_model_size(nn.BatchNorm1d(4), copies=3)


class OfOneSize(nn.Sequential):
    """A network for images of 8 x 8 pixels alone."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 2, 8), nn.Flatten(), nn.Linear(2, 5))


@pytest.mark.parametrize("sides", [(8, 9), (9, 8), (9, 9), (8, 7)])
def test_an_image_of_another_height_or_width_is_tried_before_training(sides: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=r"use dataset\.input_size=8, the size that it was made for"):
        built(OfOneSize, (3, *sides), name="mine", usual=8, pretrained=False)


def test_an_image_of_the_usual_size_is_not_tried_and_a_network_that_fails_names_no_other() -> None:
    assert isinstance(built(nn.Identity, (3, 8, 8), name="mine", usual=8, pretrained=False), nn.Identity)
    with pytest.raises(InputError, match="cannot be built for images of 3x8x8") as caught:
        built(lambda: 1 / 0, (3, 8, 8), name="mine", usual=8, pretrained=False)  # type: ignore[arg-type, return-value]
    assert "input_size" not in str(caught.value)


@pytest.mark.parametrize(("depth", "width", "size"), [(16, 4, 2_748_890), (40, 2, 2_243_546), (28, 10, 36_479_194)])
def test_a_wide_resnet_has_the_parameters_of_its_authors_code(depth: int, width: int, size: int) -> None:
    with torch.device("meta"):
        assert parameters(WideResNet(depth=depth, width=width).build(10, (3, 32, 32))) == size


def test_a_block_of_a_wide_resnet_is_the_formula_and_another_depth_is_refused() -> None:
    with pytest.raises(InputError, match=r"model.depth is 30, expected 6 n \+ 4, .* model.depth=28"):
        WideResNet(depth=30)
    block = Block(4, 8, 2, 0.0).double().eval()
    block.dropout = nn.Threshold(0.3, 0.0)  # draws no numbers
    features = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    norm = (1 + 1e-5) ** -0.5  # of batch norm with its initial statistics
    active = (features * norm).relu()
    middle = (F.conv2d(active, block.conv1.weight, stride=2, padding=1) * norm).relu()
    assert 0 < (middle * (middle > 0.3)).count_nonzero() < middle.count_nonzero()
    inner = F.conv2d(middle * (middle > 0.3), block.conv2.weight, padding=1)
    torch.testing.assert_close(block(features), inner + F.conv2d(active, block.shortcut.weight, stride=2))


CONV_BLOCK = "Conv2d MaxPool2d BatchNorm2d GELU Conv2d BatchNorm2d GELU"
LAYERS: dict[str, tuple[Any, str]] = {
    "linear": (Linear(), "Flatten Linear"),
    "basicnet": (
        BasicNet(),
        "Conv2d ReLU Conv2d ReLU MaxPool2d Dropout Flatten Linear ReLU Dropout Linear",
    ),
    "digitnet": (
        DigitNet(),
        f"{'Conv2d GroupNorm ReLU ' * 2}MaxPool2d Conv2d GroupNorm ReLU MaxPoolTo Flatten Dropout Linear",
    ),
    "whitenet": (WhiteNet(), f"Conv2d GELU {CONV_BLOCK} {CONV_BLOCK} {CONV_BLOCK} MaxPoolTo Flatten Linear _Scaled"),
    "whitenet with shortcuts": (
        WhiteNet(depth=3),
        f"Conv2d GELU {f'{CONV_BLOCK} Conv2d BatchNorm2d ' * 3}MaxPoolTo Flatten Linear _Scaled",
    ),
    "wide_resnet": (
        WideResNet(depth=10, width=1),
        # The first block has as many channels as the first convolution, so its shortcut has none.
        "Conv2d BatchNorm2d Conv2d BatchNorm2d Conv2d Dropout "
        + 2 * "BatchNorm2d Conv2d BatchNorm2d Conv2d Dropout Conv2d "
        + "BatchNorm2d ReLU AdaptiveAvgPool2d Flatten Linear",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_network_of_our_own_has_its_layers_in_this_order(name: str) -> None:
    option, layers = LAYERS[name]
    modules = [module for module in sketch(option, 10, (3, 32, 32)).modules() if not [*module.children()]]
    assert " ".join(type(module).__name__ for module in modules) == layers
    assert {module.num_groups for module in modules if isinstance(module, nn.GroupNorm)} <= {8}


def test_networks_of_our_own_take_oblong_images_and_begin_with_these_weights() -> None:
    for option in (Linear(), BasicNet(), DigitNet(), WhiteNet(widths=[8, 8, 8]), WideResNet(depth=10, width=1)):
        for shape in ((3, 9, 14), (1, 14, 9)):
            assert logits(option.build(7, shape), *shape).shape == (2, 7)
    white = WhiteNet(widths=[8, 8, 8]).build(7, (3, 12, 12))
    assert not white[0].bias.any()
    assert white[-2].bias is None
    wide = WideResNet(depth=10, width=4).build(7, (3, 32, 32))
    assert not wide[-1].bias.any()
    convolutions = [layer for layer in wide.modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.stride[0] for layer in convolutions] == [1, 1, 1, 1, 2, 1, 2, 2, 1, 2]
    for layer in convolutions:
        fan_out = layer.out_channels * layer.kernel_size[0] ** 2
        assert layer.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.2), "He et al. 2015"
    assert (DigitNet().dropout, WideResNet().dropout, WideResNet().depth, WideResNet().width) == (0.1, 0.0, 28, 10)


@pytest.mark.parametrize(("depth", "near"), [(9, None), (10, None), (11, 10), (15, 10), (17, 16), (18, 16)])
def test_a_depth_of_a_wide_resnet_is_told_with_the_one_below(depth: int, near: int | None) -> None:
    if depth == 10:
        assert WideResNet(depth=depth).depth == 10
    else:
        with pytest.raises(InputError, match=f"model.depth={near or 4}$"):
            WideResNet(depth=depth)


@pytest.mark.parametrize("widths", [[], [8], [8, 8], [8, 8, 8, 8]])
def test_whitenet_has_three_widths(widths: list[int]) -> None:
    with pytest.raises(InputError, match=r"expected three numbers, a block each: model\.widths=\[64,256,256\]"):
        WhiteNet(widths=widths)


@pytest.mark.parametrize("pretrained", [True, "auto"])
def test_a_sketch_takes_no_weights_no_memory_and_no_random_numbers(pretrained: bool | str) -> None:
    option = Timm(name="resnet18.a1_in1k", pretrained=pretrained)
    before = torch.get_rng_state()
    assert {parameter.device.type for parameter in sketch(option, 3, (3, 32, 32)).parameters()} == {"meta"}
    drawing: Any = SimpleNamespace(pretrained=False, build=lambda *_: torch.rand(3, device="cpu"))
    assert sketch(drawing, 3, (3, 32, 32)).shape == (3,)
    assert torch.equal(torch.get_rng_state(), before)
    assert without_weights(option).pretrained is False
    assert option.pretrained == pretrained
    for plain in (BasicNet(), Timm(name="resnet18")):
        assert without_weights(plain) is plain


def test_options_of_a_model_of_timm_reach_it_and_those_that_are_not_chosen_do_not() -> None:
    assert Timm(name="resnet18", drop_rate=0.3).build(2, (3, 32, 32)).drop_rate == 0.3
    assert sketch(Timm(name="vgg11"), 2, (3, 32, 32)), "it takes no rate of stochastic depth"
    assert Timm(name="resnet18").has_usual_size
    changed = Timm(name="vit_tiny_patch16_224", options={"img_size": 32})
    for options in (
        changed.options,
        {"embed_dim": 4096},
        {"mlp_ratio": 99.5},
        {"norm_layer": "a"},
        {"class_token": False},
    ):
        assert not Timm(name=changed.name, options=options).has_usual_size
    with pytest.raises(InputError, match="cannot be built for images of 3x64x64"):
        changed.build(2, (3, 64, 64))
    assert [fields.rule_of(Timm, "pretrained").fits(value) for value in (True, False, "auto", "best")] == [
        *[True] * 3,
        False,
    ]


def test_an_option_or_a_tag_that_is_misspelt_is_told_with_those_that_there_are() -> None:
    with pytest.raises(InputError, match=r"model\.options\.aa does not .*; remove it\.$"):
        Timm(name="resnet18", options={"zero_init": 1, "aa": 1}).check()
    with pytest.raises(
        InputError, match=r"model\.options\.block_arg does not .*; remove it\. Did you mean 'block_args"
    ):
        Timm(name="resnet18", options={"block_arg": 1}).check()
    none = next(name for name in models_of(TIMM) if not timm.list_pretrained(f"{name}.*"))
    with pytest.raises(InputError, match=rf"but timm has no such weights of {none}\.$"):
        Timm(name=f"{none}.mine").check()
    with pytest.raises(InputError, match=r"which timm does not have\. Did you mean 'resnet50d', "):
        Timm(name="resnet50dd.a1_in1k").check()
    Timm(name="resnet18.a1_in1k").check()
    published = {name: Timm(name=name).has_published() for name in ("resnet18", "resnet18.a1_in1k", none)}
    assert published == {"resnet18": True, "resnet18.a1_in1k": True, none: False}


def test_the_options_of_networks_are_those_of_classes_of_classifiers_without_our_own_keys() -> None:
    own = {"num_classes", "in_chans", "drop_rate", "drop_path_rate", "device", "dtype", "self", "kwargs", "args"}
    for name in ("resnet18", "efficientnet_b0", "vit_tiny_patch16_224"):
        options = network_options(name)
        assert not options & own, name
        assert {"bn_eps", "bn_momentum", "bn_tf"} <= options
    assert "block_args" in network_options("resnet18")
    assert "inplanes" not in network_options("resnet18"), "an argument of its blocks"


def test_a_library_that_fails_is_told_with_the_remedies_the_size_first() -> None:
    def fails() -> nn.Module:
        raise ValueError("odd\nand long")

    def refuses() -> nn.Module:
        raise InputError("of ours")

    begin = "model=mine with its published weights cannot be built for images of 3x9x8 (ValueError: odd); "
    size, weights = "use dataset.input_size=8, the size that it was made for", "model.pretrained=false starts from"
    for usual, pretrained, says in (
        (8, True, f"{begin}{size}; {weights} random weights"),
        (None, True, f"{begin}{weights} random weights"),
        (8, False, begin.replace(" with its published weights", "") + size),
        (None, False, begin.replace(" with its published weights", "").removesuffix("; ")),
    ):
        with pytest.raises(InputError) as caught:
            built(fails, (3, 9, 8), name="mine", usual=usual, pretrained=pretrained)
        assert str(caught.value) == says
    with pytest.raises(InputError, match=r"^of ours$"):
        built(refuses, (3, 8, 8), name="mine", usual=8, pretrained=False)
    with torch.device("meta"):
        assert built(OfOneSize, (3, 9, 9), name="mine", usual=8, pretrained=False), "a sketch is not tried"


@pytest.mark.parametrize(
    ("option", "least", "usual"), [(BasicNet(), 6, 28), (DigitNet(), 4, 8), (WhiteNet(widths=[8, 8, 8]), 9, 32)]
)
def test_a_network_takes_images_of_its_least_side_and_no_smaller_ones(option: Any, least: int, usual: int) -> None:
    for sides in ((least, least), (least, 2 * least), (2 * least, least)):
        assert logits(option.build(3, (1, *sides)), 1, *sides).shape == (2, 3)
    name = type(option).__name__.lower()
    for height, width in ((least - 1, least), (least, least - 1)):
        with pytest.raises(InputError) as caught:
            option.build(3, (1, height, width))
        assert str(caught.value) == (
            f"model={name} needs images of {least}x{least} pixels or more, the data set gives {height}x{width}; "
            f"use dataset.input_size={usual}"
        )


def test_a_width_that_norms_cannot_divide_is_told_with_one_that_they_can() -> None:
    for width in (9, 12, 31, 33):
        with pytest.raises(InputError, match=f"^model.width is {width}, expected a multiple of 8: model.width=32$"):
            DigitNet(width=width)
    assert [DigitNet(width=width).width for width in (8, 16, 40)] == [8, 16, 40]


def test_the_first_network_is_softmax_regression_on_all_pixels() -> None:
    model = Linear().build(3, (2, 4, 5))
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(3, 40), (3,)]


def test_a_model_that_is_too_large_is_told_with_its_parameters_and_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[tuple[str, int, str]] = []
    monkeypatch.setattr("lockstep.models.nets.check_room", lambda *words: checks.append(words))
    model = nn.Sequential(nn.Linear(1000, 2, bias=False).double().requires_grad_(False), nn.BatchNorm1d(2))
    for copies in (1, 4):
        check_model_size(model, *([copies] * (copies > 1)))
    size = 2000 * 8 + 4 * 4, 2 * 2 * 4 + 8
    assert checks == [
        (f"{copies} x 2,004 parameters and the buffers", copies * size[0] + size[1], "a smaller model or input")
        for copies in (1, 4)
    ]


def test_published_weights_are_asked_for_by_their_name_and_only_where_they_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def create(name: str, **options: Any) -> nn.Module:
        calls.append((name, options))
        return nn.Identity()

    monkeypatch.setattr(timm, "create_model", create)
    monkeypatch.setattr("lockstep.models.zoo.published_weights", lambda name: {"file": f"of {name}"})
    usual = {"num_classes": 7, "in_chans": 3, "drop_rate": 0.0}
    for option, more in (
        (Timm(name="resnet18"), {"pretrained": False}),
        (Timm(name="resnet18", drop_path_rate=0.25, drop_rate=0.5), {"drop_path_rate": 0.25, "drop_rate": 0.5}),
        (Timm(name="resnet18.a1_in1k", pretrained=True), {"pretrained_cfg_overlay": {"file": "of resnet18.a1_in1k"}}),
        (Timm(name="resnet18", options={"block_args": {"a": 1}}), {"block_args": {"a": 1}}),
    ):
        option.build(7, (3, 160, 96))
        name, options = calls.pop()
        assert name == option.name
        assert options == {**usual, "pretrained": bool(option.pretrained), **more}
    own: dict[str, Any] = {"block_args": {}}
    assert Timm(name="resnet18.a1_in1k", pretrained=True, drop_path_rate=0.5, options=own).build(7, (3, 8, 8))
    assert own == {"block_args": {}}


def test_a_network_that_fits_its_images_is_tried_once_and_one_of_an_unknown_size_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[int, ...]] = []
    monkeypatch.setattr("lockstep.models.zoo.forward_on_meta", lambda model, shape: tried.append(shape))
    for usual, shape in ((8, (3, 8, 8)), (None, (3, 8, 8)), (8, (1, 8, 9)), (8, (1, 9, 8))):
        built(lambda: nn.Linear(2, 2), shape, name="mine", usual=usual, pretrained=False)
    assert tried == [(3, 8, 8), (1, 8, 9), (1, 9, 8)]


FACTS: dict[str, Any] = {"fixed_input_size": False, "input_size": (3, 40, 56), "hf_hub_id": None, "url": ""}
FACTS |= {"crop_pct": 0.5, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bicubic"}


@pytest.mark.parametrize(
    ("changed", "options", "img_size", "usual"),
    [
        ({}, {}, None, 56),
        ({"fixed_input_size": True}, {}, (32, 48), 56),
        ({"fixed_input_size": True}, {"img_size": 24}, 24, 56),
        ({"input_size": (3, 60, 20)}, {}, None, 60),
        ({"input_size": None}, {}, None, None),
        (None, {}, None, None),
    ],
)
def test_a_network_of_a_fixed_size_is_built_for_the_images_and_names_its_usual_longer_side(
    changed: dict[str, Any] | None,
    options: dict[str, Any],
    img_size: Any,
    usual: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(name: str, **named: Any) -> nn.Module:
        sizes.append(named.get("img_size"))
        raise ValueError("odd")

    sizes: list[Any] = []
    cfg = None if changed is None else SimpleNamespace(**{**FACTS, **changed})
    monkeypatch.setattr(timm, "get_pretrained_cfg", {"vit_tiny_patch16_224.augreg_in21k": cfg}.get)
    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(InputError) as caught:
        Timm(name="vit_tiny_patch16_224.augreg_in21k", options=options).build(3, (3, 32, 48))
    assert sizes == [img_size]
    remedy = f"; use dataset.input_size={usual}, the size that it was made for" if usual else ""
    assert str(caught.value).endswith(f"cannot be built for images of 3x32x48 (ValueError: odd){remedy}")


@pytest.mark.parametrize(
    ("changed", "crop", "interpolation"),
    [
        ({"url": "https://h/a"}, 0.5, "bicubic"),
        ({"hf_hub_id": "mine/net"}, 0.5, "bicubic"),
        ({"url": "x", "crop_pct": None}, 1.0, "bicubic"),
        ({"url": "x", "crop_pct": 1.15}, 1.0, "bicubic"),
        ({"url": "x", "interpolation": "random"}, 0.5, "bilinear"),
        ({}, None, ""),
        (None, None, ""),
    ],
)
def test_the_images_of_published_weights_are_those_that_timm_knows_of(
    changed: dict[str, Any] | None, crop: float | None, interpolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = None if changed is None else SimpleNamespace(**{**FACTS, **changed})
    monkeypatch.setattr(timm, "get_pretrained_cfg", {"resnet18.a1_in1k": cfg}.get)
    trained = Timm(name="resnet18.a1_in1k").trained_input()
    if crop is None:
        assert trained is None
    else:
        assert trained is not None
        assert (trained.eval_crop, trained.interpolation) == (crop, interpolation)
        assert (trained.input_shape, trained.mean, trained.std) == ((3, 40, 56), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


def test_whether_an_address_answers_is_asked_without_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = list[Request]()

    def answer(request: Request, timeout: float) -> BytesIO:
        requests.append(request)
        return BytesIO()

    monkeypatch.setattr("lockstep.models.zoo.urlopen", answer)
    assert unreachable("https://host/weights.bin") == ""
    assert [(request.get_method(), request.full_url) for request in requests] == [
        ("HEAD", "https://host/weights.bin")
    ]
