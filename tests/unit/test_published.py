"""timm's published weights: read from the caches of the libraries, or refused with one sentence."""

import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from timm.models import adapt_input_conv

import lockstep
from helpers import records, train_here
from lockstep.core.errors import InputError
from lockstep.core.fields import INTERPOLATIONS
from lockstep.models import Timm, zoo

NAME = "resnet18.a1_in1k"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty caches of both libraries, and an address on which nothing listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "torch"))
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield tmp_path


def put_in_hub(cache: Path, name: str) -> dict[str, torch.Tensor]:
    """Put weights into the cache of the hub: a blob, a snapshot that links to it, and a reference to the snapshot."""
    torch.manual_seed(3)
    weights = timm.create_model(name).state_dict()
    repository = cache / "hub" / f"models--{timm.get_pretrained_cfg(name).hf_hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abcd"
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    save_file(weights, repository / "blobs" / "f00d")
    (repository / "refs" / "main").write_text("0123abcd")
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00d")
    return weights


def test_weights_in_the_cache_of_the_hub_need_no_network(cache: Path) -> None:
    weights = put_in_hub(cache, NAME)
    option = Timm(name=NAME, pretrained=True)
    option.prepare()
    model = option.build(7, (1, 32, 32)).state_dict()
    assert torch.equal(model["layer4.1.conv2.weight"], weights["layer4.1.conv2.weight"])
    assert torch.equal(model["conv1.weight"], weights["conv1.weight"].sum(1, keepdim=True))
    assert model["fc.weight"].shape == (7, 512)
    bands = option.build(7, (5, 32, 32)).state_dict()["conv1.weight"]
    assert torch.equal(bands, adapt_input_conv(5, weights["conv1.weight"]))


@pytest.mark.parametrize(("offline", "says"), [(True, "HF_HUB_OFFLINE is set"), (False, "127.0.0.1: ")])
def test_unavailable_weights_are_one_sentence_at_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, offline: bool, says: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    began = time.monotonic()
    with pytest.raises(InputError, match=f"are not in the cache of this machine.*{says}.*init_from=FILE.safetensors"):
        Timm(name=NAME, pretrained=True).prepare()
    assert time.monotonic() - began < 20  # with its retries the hub takes 50 s


@pytest.mark.slow
def test_a_resume_and_inference_need_no_published_weights(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(cache)  # `outputs/latest` is written there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    name = "test_resnet.r160_in1k"
    data = ("dataset=fake", "dataset.classes=3", "dataset.size=32", "dataset.examples=8", "batch=4")
    start = (*data, f"model={name}", "model.pretrained=true", "input.interpolation=bilinear")
    put_in_hub(cache, name)
    run = train_here(cache / "run", *start, "steps=1")
    tuned = train_here(cache / "tuned", *data, f"model={name}", f"init_from={run.path}", "steps=1")
    shutil.rmtree(cache / "hub")
    for again, gone in ((run, ()), (tuned, (run.path,))):
        for folder in gone:
            shutil.rmtree(folder)
        lockstep.train([f"resume={again.path}", "steps=2"])
        assert [line["step"] for line in records(again) if "loss/train" in line] == [1, 2]
        assert len(lockstep.load(again.path, device="cpu").names) == 3


def test_weights_of_an_address_are_found_in_the_cache_of_torch(cache: Path) -> None:
    name = next(candidate for candidate in timm.list_pretrained() if not timm.get_pretrained_cfg(candidate).hf_hub_id)
    facts = timm.get_pretrained_cfg(name)
    file = cache / "torch" / "checkpoints" / facts.url.rpartition("/")[2]
    file.parent.mkdir(parents=True)
    file.touch()
    assert zoo.published_weights(name) == {"file": str(file), "custom_load": bool(facts.custom_load)}


@pytest.mark.parametrize(
    ("name", "shape", "size"),
    [("vit_tiny_patch16_224", (3, 8, 8), 224), ("inception_v3", (3, 32, 32), 299), ("levit_128s", (1, 8, 8), 224)],
)
def test_a_model_that_cannot_take_images_says_which_it_can(name: str, shape: tuple[int, int, int], size: int) -> None:
    with pytest.raises(
        InputError, match=rf"model={name} cannot be built for images .*use dataset\.input_size={size}"
    ):
        Timm(name=name).build(10, shape)


def test_all_weights_of_timm_are_evaluated_on_a_part_of_a_stored_image() -> None:
    inputs = {name: Timm(name=name).trained_input() for name in timm.list_pretrained()}
    crops = {name: trained.eval_crop for name, trained in inputs.items() if trained is not None}
    assert len(crops) > 1000
    assert {name: crop for name, crop in crops.items() if not 0.5 < crop <= 1} == {}
    assert crops["volo_d5_512.sail_in1k"] == 1, "of 1.15"
    assert {trained.interpolation for trained in inputs.values() if trained is not None} == {*INTERPOLATIONS}


def test_weights_of_a_revision_are_not_those_of_another(cache: Path) -> None:
    repository = cache / "hub" / "models--mine--net"
    for revision in ("main", "v2"):
        (snapshot := repository / "snapshots" / f"of_{revision}").mkdir(parents=True)
        (snapshot / "model.safetensors").touch()
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(f"of_{revision}")
    for name, revision in (("mine/net", "main"), ("mine/net@v2", "v2"), ("mine/net@main", "main")):
        facts = SimpleNamespace(hf_hub_id=name, hf_hub_filename=None, url="")
        assert zoo._of_hub(facts, cached=True)["file"].endswith(f"of_{revision}/model.safetensors")
