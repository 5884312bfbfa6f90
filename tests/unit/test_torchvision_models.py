"""torchvision's classifiers by name: its networks, its weights, and what does not fit."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchvision import models

from helpers import FAKE, refusal, resolved, train_here
from lockstep.config.options import TORCHVISION, model_of, models_of, tagged_names
from lockstep.core.errors import InputError
from lockstep.models import Torchvision
from lockstep.models.nets import sketch
from lockstep.training.resolved_job import named


def test_the_names_are_those_of_torchvision() -> None:
    assert list(models_of(TORCHVISION)) == sorted(models.list_models(module=models))
    for name in models_of(TORCHVISION):
        weights = [entry.name for entry in models.get_model_weights(name)]
        assert [tagged.rpartition(".")[2] for tagged in tagged_names(f"torchvision.{name}")] == sorted(weights)
    assert model_of("torchvision.resnet50.IMAGENET1K_V1") == ("torchvision", "resnet50.IMAGENET1K_V1")
    assert model_of("resnet50d.ra2_in1k") == ("timm", "resnet50d.ra2_in1k")
    assert model_of("torchvision") is model_of("torchvision.resnet50d") is None


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "mobilenet_v3_small", "googlenet"])
def test_the_network_is_torchvisions_to_the_bit(name: str) -> None:
    options = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
    torch.manual_seed(0)
    ours = Torchvision(name=name).build(7, (3, 64, 64)).eval()
    torch.manual_seed(0)
    theirs = models.get_model(name, num_classes=7, **options).eval()
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours(images), theirs(images))


def test_a_model_of_each_family_can_be_built_at_the_size_that_it_was_made_for() -> None:
    families = {models.get_model_builder(name).__module__: name for name in reversed(models_of(TORCHVISION))}
    assert len(families) > 12
    for name in families.values():
        option = Torchvision(name=name)
        assert sketch(option, 7, option.trained_input().input_shape)


@pytest.mark.parametrize(
    ("name", "head"), [("resnet18", "fc"), ("squeezenet1_1", "classifier.1"), ("densenet121", "classifier")]
)
def test_weights_fill_all_but_the_head(name: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    published = models.get_model(name).state_dict()
    file = tmp_path / "hub" / "checkpoints" / models.get_model_weights(name).DEFAULT.url.rpartition("/")[2]
    file.parent.mkdir(parents=True)
    torch.save(published, file)
    option = Torchvision(name=name, pretrained=True)
    option.prepare()
    models_of_it = [option.build(classes, (3, 64, 64)) for classes in (1000, 5)]
    old, changed = (model.get_submodule(head) for model in models_of_it)
    assert len(option.build(1001, (3, 64, 64)).get_submodule(head).bias) == 1001
    for fact in ("kernel_size", "stride", "padding", "in_features"):
        assert getattr(changed, fact, None) == getattr(old, fact, None), fact
    whole, part = (model.state_dict() for model in models_of_it)
    assert all(torch.equal(whole[key], tensor) for key, tensor in published.items())
    new = {key for key, tensor in published.items() if part[key].shape != tensor.shape}
    assert new == {f"{head}.weight", f"{head}.bias"}
    assert all(torch.equal(part[key], tensor) for key, tensor in published.items() if key not in new)


def test_images_are_those_of_the_weights() -> None:
    trained = Torchvision(name="efficientnet_v2_s").trained_input()
    usual = models.EfficientNet_V2_S_Weights.DEFAULT.transforms()
    share = usual.crop_size[0] / usual.resize_size[0]
    assert (trained.input_shape, trained.eval_crop) == ((3, *2 * tuple(usual.crop_size)), share)
    assert (trained.mean, trained.std) == (tuple(usual.mean), tuple(usual.std))
    assert trained.interpolation == usual.interpolation.value


def test_all_weights_were_evaluated_on_a_part_of_a_stored_image() -> None:
    tagged = [name for model in models_of(TORCHVISION) for name in tagged_names(f"{TORCHVISION}.{model}")]
    options = {name: Torchvision(name=name.partition(".")[2]) for name in tagged}
    for pretrained in (False, True, "auto"):
        chosen = [replace(option, pretrained=pretrained) for option in options.values()]
        assert all(option.name == f"{option.architecture}.{option._weights.name}" for option in chosen)
        for option in chosen:
            best = models.get_model_weights(option.architecture).DEFAULT
            assert replace(option, name=option.architecture)._weights == best
    for option in options.values():
        trained, usual = option.trained_input(), option._weights.transforms()
        assert trained.interpolation == usual.interpolation.value
        assert (trained.mean, trained.std) == (tuple(usual.mean), tuple(usual.std))
    crops = {name: option.trained_input().eval_crop for name, option in options.items()}
    assert len(crops) > 100
    assert {name: crop for name, crop in crops.items() if not 0.8 < crop <= 1} == {}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model=torchvision.resnet50d"], "resnet50"),
        (["model=torchvision.resnet50.V3"], "torchvision has no such weights"),
        (["model=torchvision.resnet18", "+model.options.weights=DEFAULT"], "model.options.weights"),
    ],
)
def test_what_does_not_fit_is_refused(words: list[str], sentence: str, tmp_path: Path) -> None:
    assert sentence in refusal(tmp_path / "outputs", *FAKE, "dataset.channels=3", *words, "steps=1")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model=torchvision.resnet18", "dataset.channels=1"], "takes images of 3 channels"),
        (["model=torchvision.vit_b_16", "dataset.size=30"], "use dataset.input_size=224"),
        (["model=torchvision.vit_b_16", "dataset.size=[224,112]"], "use dataset.input_size=224"),
    ],
)
def test_images_that_do_not_fit_are_refused(words: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=sentence):
        train_here(tmp_path / "run", *FAKE, "dataset.channels=3", *words, "steps=1")


@pytest.mark.parametrize("pretrained", [True, "auto"])
def test_weights_that_cannot_be_fetched_name_the_file(
    pretrained: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("lockstep.models.of_torchvision.unreachable", lambda url: "no network")
    with pytest.raises(InputError, match=r"put https://download.pytorch.org/models/resnet50-11ad3fa6.pth into"):
        Torchvision(name="resnet50", pretrained=pretrained).prepare()


SMALL = ("dataset.examples=8", "batch=4")


def test_a_run_trains_one_and_names_it(tmp_path: Path) -> None:
    words = (*FAKE, "dataset.channels=3", "dataset.size=32", "model=torchvision.resnet18", "steps=1", *SMALL)
    assert named(resolved(*words).model) == "torchvision.resnet18"
    train_here(tmp_path / "run", *words)


@pytest.mark.parametrize("name", ["weights", "progress", "num_classes"])
def test_an_argument_that_another_key_chooses_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"^model\.options\.{name} is chosen by other keys; remove it$"):
        Torchvision(name="resnet18", options={name: 1, "zero_init_residual": True}).check()
    if name != "num_classes":
        with pytest.raises(InputError, match=r"^model\.options\.num_classes is chosen"):
            Torchvision(name="resnet18", options={name: 1, "num_classes": 1}).check()


def test_options_of_the_user_reach_the_network_but_for_second_heads() -> None:
    assert sketch(Torchvision(name="vit_b_16"), 2, (3, 64, 48)).image_size == 64
    changed = Torchvision(name="vit_b_16", options={"image_size": 96})
    assert sketch(changed, 2, (3, 64, 64)).image_size == 96
    for pretrained in (False, True, "auto"):
        plain, other = (replace(option, pretrained=pretrained) for option in (Torchvision(name="vit_b_16"), changed))
        assert (plain.has_usual_size, other.has_usual_size) == (True, False)
        assert (plain.has_published(), other.has_published()) == (True, True)
    assert changed.options == {"image_size": 96}, "they stay what they are"
    assert not Torchvision(name="resnet50", options={"width_per_group": 1024}).has_usual_size
    for options in ({}, {"aux_logits": True}):
        assert sketch(Torchvision(name="inception_v3", options=options), 2, (3, 299, 299)).AuxLogits is None
        assert sketch(Torchvision(name="googlenet", options=options), 2, (3, 224, 224)).aux1 is None
    for name in ("resnet18", "regnet_y_400mf"):
        before = torch.get_rng_state()
        model = sketch(Torchvision(name=name), 2, (3, 224, 224))
        assert torch.equal(torch.get_rng_state(), before), "though a RegNet is built with numbers"
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    for channels in (1, 2, 4):
        with pytest.raises(InputError, match=f"takes images of 3 channels, and the data set has {channels}"):
            sketch(Torchvision(name="resnet18"), 2, (channels, 224, 224))


def test_weights_are_fetched_once_with_their_hash_and_without_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(weights: object, **options: Any) -> None:
        fetched.append(options)
        if far[0]:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / url.rpartition("/")[2]).touch()  # what is left is no reason to go on
            raise RuntimeError("invalid hash value\nof a file")

    fetched, far = list[dict[str, Any]](), [""]
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(models.ResNet18_Weights, "get_state_dict", fetch)
    monkeypatch.setattr("lockstep.models.of_torchvision.unreachable", lambda url: far[0] if far[0] == "far" else "")
    option = Torchvision(name="resnet18", pretrained=True)
    Torchvision(name="resnet18").prepare()
    assert (fetched, option.missing_weights(), option.has_published()) == ([], "", True)
    for pretrained in (True, "auto"):
        replace(option, pretrained=pretrained).prepare()
    assert fetched == [{"progress": False, "check_hash": True, "weights_only": True}] * 2
    folder, url = tmp_path / "hub" / "checkpoints", models.ResNet18_Weights.DEFAULT.url
    for far[0], reason in (("broken", "invalid hash value"), ("far", "far")):
        with pytest.raises(InputError) as caught:
            option.prepare()
        (folder / url.rpartition("/")[2]).unlink(missing_ok=True)
        begin = f"model.pretrained: the weights of torchvision.resnet18 cannot be fetched ({reason}); put {url} into"
        assert str(caught.value) == f"{begin} {folder}, or use model.pretrained=false"
    assert option.missing_weights() == "the weights of torchvision.resnet18 cannot be fetched (far)"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / url.rpartition("/")[2]).touch()
    option.prepare()
    assert (len(fetched), option.missing_weights()) == (3, "")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("resnet5", r"^model\.name is 'resnet5', which torchvision does not have\. Did you mean 'resnet50'"),
        ("resnt18.IMAGENET1K_V1", r"^model\.name is 'resnt18\.IMAGENET1K_V1', which .*\. Did you mean 'resnet18'"),
        ("zzzz", r"^model\.name is 'zzzz', which torchvision does not have\.$"),
        (
            "resnet18.IMAGENET1K_V9",
            r"^model\.name is 'resnet18\.IMAGENET1K_V9', but torchvision has no such weights, expected one of "
            r"torchvision\.resnet18\.IMAGENET1K_V1$",
        ),
        ("resnet18.", r"^model\.name is 'resnet18\.', but torchvision has no such weights"),
    ],
)
def test_a_name_that_torchvision_does_not_have_is_told_with_those_that_it_has(name: str, says: str) -> None:
    for refuse in (Torchvision(name=name).check, lambda: Torchvision(name=name).build(2, (3, 224, 224))):
        with pytest.raises(InputError, match=says):
            refuse()
    for known in ("resnet18", "resnet18.IMAGENET1K_V1", "resnet50.IMAGENET1K_V2"):
        Torchvision(name=known).check()


def test_other_images_than_those_of_the_weights_are_refused_with_the_size_of_these() -> None:
    for name, usual in (("vit_b_16", 224), ("vit_h_14.IMAGENET1K_SWAG_E2E_V1", 518)):
        option = Torchvision(name=name)
        with (
            pytest.raises(InputError, match=rf"^model=torchvision\.{name} cannot be .* dataset\.input_size={usual},"),
            torch.device("meta"),
        ):
            option.build(2, (3, 225, 225))


@pytest.mark.parametrize(("interpolation", "ours"), [("bicubic", "bicubic"), ("nearest-exact", "bilinear")])
def test_images_are_resized_in_a_way_that_there_is(
    interpolation: str, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = SimpleNamespace(crop_size=[24], resize_size=[32], mean=[0.1] * 3, std=[0.2] * 3)
    usual.interpolation = SimpleNamespace(value=interpolation)
    weights = SimpleNamespace(transforms=lambda: usual)
    monkeypatch.setattr(Torchvision, "_weights", weights)
    trained = Torchvision(name="resnet18").trained_input()
    assert (trained.input_shape, trained.eval_crop, trained.interpolation) == ((3, 24, 24), 0.75, ours)
    assert (trained.mean, trained.std) == ((0.1,) * 3, (0.2,) * 3)
